"""A row of the parity table put to the gRPC door: OpenAI's request as our client's arguments, and both answers in the same words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from disagg.client_types import Answer
from disagg.types import Token

SAME = """
    max_tokens temperature seed top_p top_k min_p presence_penalty frequency_penalty repetition_penalty bad_words allowed_token_ids
    min_tokens ignore_eos skip_special_tokens stop stop_token_ids include_stop_str_in_output prompt_logprobs n truncate_prompt_tokens
    cache_salt
"""
# How OpenAI's answer is to look: nothing to ask a gRPC server for, whose answers have all of it.
LOOKS = ("model", "stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids")
FORMS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
LEAST_LOGPROB = -9999.0  # JSON has no infinity: vLLM writes this


@dataclass(frozen=True)
class Said:
    """What both doors say of one answer. `tops`: per token, the logprobs that were given, the token's own among them."""

    text: str
    token_ids: tuple[int, ...]
    finish: str
    logprobs: tuple[float, ...]
    tops: tuple[frozenset[float], ...]


def as_grpc(body: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Prompt and options of `AsyncClient.generate_n`; None for what only OpenAI's API can be asked (echo, beam search, several prompts)."""
    rest = {name: value for name, value in body.items() if name not in LOOKS}
    prompt = rest.pop("prompt") if "prompt" in rest else rest.pop("messages")
    options = {name: rest.pop(name) for name in SAME.split() if name in rest}
    options["logprobs"] = rest.pop("top_logprobs") if rest.pop("logprobs", None) is True else body.get("logprobs")
    if "logit_bias" in rest:
        options["logit_bias"] = {int(token): bias for token, bias in rest.pop("logit_bias").items()}
    options |= {FORMS[kind]: value for kind, value in rest.pop("structured_outputs", {}).items()}
    match rest.pop("response_format", None):
        case {"type": "json_object"}:
            options["json_object"] = True
        case {"json_schema": wrapped}:
            options["json_schema"] = wrapped["schema"]
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str)
    return None if rest or several else (prompt, options)


def said_by_grpc(answers: Sequence[Answer]) -> list[Said]:
    return [
        Said(a.text, a.token_ids, a.finish.value, tuple([t.logprob for t in a.tokens if t.logprob is not None]), tuple(map(_top, a.tokens)))
        for a in answers
    ]


def _top(token: Token) -> frozenset[float]:
    own = () if token.logprob is None else (token.logprob,)
    return frozenset(max(p, LEAST_LOGPROB) for p in (*own, *(t.logprob for t in token.top)))


def said_by_openai(body: dict[str, Any]) -> list[Said]:
    """Of a body that was asked for with `return_token_ids`."""
    return [_choice(choice) for choice in body["choices"]]


def _choice(choice: dict[str, Any]) -> Said:
    ids = tuple(choice["token_ids"])
    text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
    given = choice["logprobs"]
    if given is None:
        own, tops = (), (frozenset(),) * len(ids)
    elif "content" in given:
        own = tuple([token["logprob"] for token in given["content"]])
        tops = tuple([frozenset([t["logprob"], *(top["logprob"] for top in t["top_logprobs"])]) for t in given["content"]])
    else:
        own = tuple(given["token_logprobs"])
        tops = tuple([frozenset([p, *top.values()]) for p, top in zip(own, given["top_logprobs"], strict=True)])
    return Said(text, ids, choice["finish_reason"], own, tops)


def same_table(openai: list[dict[str, Any] | None], ours: Sequence[Token]) -> bool:
    """Whether OpenAI's `prompt_logprobs` and ours say the same of each token of the prompt."""
    if len(openai) != len(ours) or openai[0] is not None:
        return False
    for theirs, token in zip(openai[1:], ours[1:], strict=True):
        mine = {str(token.token_id): token.logprob} | {str(t.token_id): t.logprob for t in token.top}
        if {k: v["logprob"] for k, v in (theirs or {}).items()} != {k: max(p, LEAST_LOGPROB) for k, p in mine.items()}:
            return False
    return True
