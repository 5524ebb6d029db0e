"""One request in vLLM's terms, leg by leg, and vLLM's outputs in ours.

A leg sees only its part of the answer, so what counts over the whole answer is adapted: max_tokens, min_tokens, penalties on output
tokens, the position in a seeded random sequence. Text does not exist here: stop strings are applied where text is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from disagg.engine.vllm_patches import SKIP_DRAWS
from disagg.errors import EngineError, InvalidRequestError
from disagg.types import Chunk, FinishReason, PromptLogprobs, Request, Sampling, Structure, StructureKind, Token, TopLogprob

# As in vllm_penalties, vllm_bad_words and vllm_structure, of which the first two need torch.
PENALTIES = "disagg_penalties"
BAD_WORDS = "disagg_bad_words"
EARLIER_TOKENS = "disagg_earlier_tokens"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can run: context length and vocabulary in tokens, the model's end tokens, and whether its runner is V1."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_v1_runner: bool
    max_logprobs: int


def check(request: Request, limits: Limits) -> None:
    """Raises InvalidRequestError for what this engine cannot run; a front door has usually checked it already."""
    sampling = request.sampling
    if not request.prompt_token_ids:
        raise InvalidRequestError(field="prompt", value="", expected="at least one token")
    context = (*request.prompt_token_ids, *request.prior_output)
    low, top = min(context), max(context)
    if low < 0 or top >= limits.vocab_size:
        raise InvalidRequestError(
            field="prompt_token_ids", value=low if low < 0 else top, expected=f"token ids from 0 to {limits.vocab_size - 1}"
        )
    if sampling.max_tokens < 1 or request.remaining_tokens < 1:
        raise InvalidRequestError(field="max_tokens", value=sampling.max_tokens, expected="at least one token still to produce")
    room = limits.max_model_len - request.num_prompt_tokens
    if room < 1:
        raise InvalidRequestError(
            field="prompt", value=f"{request.num_prompt_tokens} tokens", expected=f"at most {limits.max_model_len - 1} tokens"
        )
    if sampling.max_tokens > room:
        raise InvalidRequestError(
            field="max_tokens",
            value=sampling.max_tokens,
            expected=f"at most {room}: the context of {limits.max_model_len} tokens less {request.num_prompt_tokens} of the prompt",
        )
    _check_alternatives("logprobs", sampling.logprobs, limits)
    _check_alternatives("prompt_logprobs", sampling.prompt_logprobs, limits)


def _check_alternatives(field: str, wanted: int | None, limits: Limits) -> None:
    if wanted is None or limits.max_logprobs == -1:
        return
    if not 0 <= wanted <= limits.max_logprobs:
        raise InvalidRequestError(field=field, value=wanted, expected=f"0 to {limits.max_logprobs} alternatives")


def sampling_params(
    request: Request, limits: Limits, *, max_tokens: int, num_earlier: int, transfer: dict[str, list[Any]] | None
) -> SamplingParams:
    """vLLM's parameters of one leg that may produce `max_tokens`, after `num_earlier` output tokens that lie in its prompt.

    `transfer`: what the connector is told. Raises InvalidRequestError for values that vLLM refuses.
    """
    s = request.sampling
    extra: dict[str, Any] = {}
    if transfer is not None:
        extra["kv_transfer_params"] = transfer
    if s.seed is not None and num_earlier and limits.has_v1_runner:
        extra[SKIP_DRAWS] = num_earlier
    presence, frequency, repetition = s.presence_penalty, s.frequency_penalty, s.repetition_penalty
    if num_earlier and (presence or frequency):
        if not limits.has_v1_runner:
            raise InvalidRequestError(
                "presence and frequency penalties are not carried over between workers by vLLM's V2 model runner yet; "
                "serve this model colocated, or set VLLM_USE_V2_MODEL_RUNNER=0",
                field="presence_penalty" if presence else "frequency_penalty",
                value=presence or frequency,
                expected="0",
            )
        extra[PENALTIES] = [presence, frequency, repetition, num_earlier]
        presence, frequency, repetition = 0.0, 0.0, 1.0
    _carry_bad_words(s, extra, num_earlier, limits)
    if s.structure is not None and num_earlier:
        extra[EARLIER_TOKENS] = num_earlier
    stop_ids = list(dict.fromkeys([*s.stop_token_ids, *(() if s.ignore_eos else limits.eos_token_ids)]))
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(max_tokens, max(0, s.min_tokens - num_earlier)),
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            min_p=s.min_p,
            seed=s.seed,
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
            stop_token_ids=stop_ids,
            ignore_eos=s.ignore_eos,
            logprobs=s.logprobs,
            logprob_token_ids=list(s.logprob_token_ids) or None,
            # They come with the first token; a continued request has given them out already.
            prompt_logprobs=None if num_earlier else s.prompt_logprobs,
            logit_bias=dict(s.logit_bias) or None,
            allowed_token_ids=list(s.allowed_token_ids) or None,
            structured_outputs=_structured_outputs(s.structure) if s.structure is not None else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra or None,
        )
    except (VLLMClientError, ValueError) as error:
        raise refused(s, error) from error
    if s.bad_words:
        params._bad_words_token_ids = [list(word) for word in s.bad_words]
    return params


def _carry_bad_words(s: Sampling, extra: dict[str, Any], num_earlier: int, limits: Limits) -> None:
    """A word of several tokens may have begun in the earlier output, which vLLM takes for prompt: our own processor looks there."""
    words = [list(word) for word in s.bad_words if len(word) > 1] if num_earlier else []
    if not words:
        return
    if not limits.has_v1_runner:
        raise InvalidRequestError(
            "bad_words of several tokens are not carried over between workers by vLLM's V2 model runner yet; "
            "serve this model colocated, or set VLLM_USE_V2_MODEL_RUNNER=0",
            field="bad_words",
            value=s.bad_words,
            expected="words of one token each",
        )
    extra[BAD_WORDS] = [words, num_earlier]


def _structured_outputs(structure: Structure) -> StructuredOutputsParams:
    kind: str = structure.kind
    value: Any = structure.spec
    if structure.kind is StructureKind.JSON_OBJECT:
        value = True
    elif structure.kind is StructureKind.CHOICE:
        value = json.loads(structure.spec)
    return StructuredOutputsParams(
        **{kind: value},
        disable_any_whitespace=not structure.any_whitespace,
        disable_additional_properties=not structure.additional_properties,
        whitespace_pattern=structure.whitespace_pattern,
    )


def reasoning_arguments(structure: Structure | None) -> dict[str, Any]:
    """What vLLM's `add_request` is told of the model's reasoning, which comes before the structured part of an answer."""
    if structure is None:
        return {}
    arguments = json.loads(structure.reasoning_json) if structure.reasoning_json else None
    return {"reasoning_ended": structure.reasoning_ended, "reasoning_parser_kwargs": arguments}


def refused(sampling: Sampling, error: Exception) -> InvalidRequestError:
    """vLLM's refusal, with the field that it or its message names."""
    message = str(error).partition(" (parameter=")[0]
    named = getattr(error, "parameter", None) or next((name for name in Sampling.__dataclass_fields__ if name in message), "request")
    return InvalidRequestError(message, field=named, value=getattr(sampling, named, None), expected="a value that vLLM accepts")


def tokens_of(output: CompletionOutput, sampling: Sampling) -> tuple[Token, ...]:
    """The new tokens of one delta; with logprobs and alternatives when the request asked for them."""
    ids = output.token_ids
    if sampling.num_top is None or output.logprobs is None:
        return tuple([Token(token_id) for token_id in ids])
    tokens = []
    for token_id, entries in zip(ids, output.logprobs, strict=True):
        own = entries[token_id]
        if sampling.logprob_token_ids:
            top = tuple([TopLogprob(i, entries[i].logprob) for i in sampling.logprob_token_ids])
        else:
            top = tuple([TopLogprob(i, entry.logprob) for i, entry in _likeliest(entries, sampling.num_top)])
        tokens.append(Token(token_id, own.logprob, top, own.rank or 0))
    return tuple(tokens)


def _likeliest(entries: Mapping[int, Logprob], num: int) -> list[tuple[int, Logprob]]:
    """The `num` likeliest entries (-1: all). vLLM adds the token's own entry to them; where it is none of them its rank sorts it last."""
    ranked = sorted(entries.items(), key=lambda item: item[1].rank)
    return ranked if num < 0 else ranked[:num]


def prompt_logprobs_of(output: RequestOutput, sampling: Sampling) -> PromptLogprobs | None:
    """The prompt's logprobs as one table; None when not asked for, or not in this output."""
    rows = output.prompt_logprobs
    if sampling.prompt_logprobs is None or not rows:
        return None
    ids, logprobs, ranks, width = [], [], [], 0
    for token_id, entries in zip(output.prompt_token_ids[1:], rows[1:], strict=True):
        own = entries[token_id]
        row = [(token_id, own), *_likeliest(entries, sampling.prompt_logprobs)]
        ids += [i for i, _ in row]
        logprobs += [entry.logprob for _, entry in row]
        ranks.append(own.rank or 0)
        width = len(row)
    return PromptLogprobs(width, tuple(ids), tuple(logprobs), tuple(ranks))


def finish_of(output: CompletionOutput, request: Request, *, is_continued: bool = False) -> FinishReason | None:
    """Why this leg ended, or None while it goes on. Raises EngineError when vLLM gave the request up.

    What is wrong with a form may show only in the engine: InvalidRequestError. One that does not compile ends the request before its first
    token. One that leads nowhere (`root ::= root`) leaves no token to choose; the engine samples one all the same, and the form refuses it.
    """
    if output.finish_reason is None:
        return None
    if output.finish_reason in ("stop", "length"):
        return FinishReason(output.finish_reason)
    structure = request.sampling.structure
    # Without a token, a request that continues another may have lost its KV.
    if structure is not None and output.finish_reason == "error" and (output.token_ids or not (is_continued or request.prior_output)):
        expected = "a form that the engine's grammar compiler takes, and that some text fulfils"
        raise InvalidRequestError(field=f"structured_outputs.{structure.kind}", value=structure.spec, expected=expected)
    raise EngineError(f"vLLM ended request {request.request_id} with {output.finish_reason!r}")


def chunk_of(output: RequestOutput, request: Request, *, is_continued: bool) -> Chunk:
    """One delta as a chunk. `cached_tokens` is right on the first one. `is_continued`: tokens of this request came before this one."""
    completion = output.outputs[0]
    return Chunk(
        tokens_of(completion, request.sampling),
        finish_of(completion, request, is_continued=is_continued),
        prompt_logprobs_of(output, request.sampling),
        output.num_cached_tokens or 0,
        output.num_cache_creation_tokens or 0,
    )
