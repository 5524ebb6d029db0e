"""From a wire request to a `Request`, or an InvalidRequestError that names the field, the value and what would be right.

Pure. Checked in the order of what each check costs: `check_head` and `check_text_size` need no tokens, `to_request` needs the
prompt's. Bounds are such that no value that passes can make an engine's arithmetic in 32 bits overflow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from disagg.config import SloClass
from disagg.errors import InvalidRequestError, nearest
from disagg.front.checks import between, number
from disagg.front.validate_shape import Encode, check_unshaped, shape
from disagg.pb import inference_pb2 as pb
from disagg.tracing import TraceContext, trace_context
from disagg.types import ModelInfo, Request, Sampling

NEUTRAL = Sampling()
DEFAULT_MAX_TOKENS = NEUTRAL.max_tokens
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_PRIORITY = 1000
MAX_REQUEST_ID_CHARS = 128
MAX_SALT_CHARS = 256
MAX_MESSAGES = 1024
MAX_N = 128
MAX_REMEMBERED, MAX_REMEMBERED_BYTES = 256, 256


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are checked against.

    `max_token_bytes`: most bytes of text that one token can stand for; None: no text served. `encode`: a word to token ids.
    `has_logits`: False for simulated engines.
    """

    model: ModelInfo
    slo_classes: tuple[SloClass, ...]
    max_token_bytes: int | None
    encode: Encode | None = None
    has_logits: bool = True
    remembered: dict[bytes, Sampling] = field(default_factory=dict, compare=False, repr=False)  # by the message that was found right

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for one output token."""
        return self.model.max_model_len - 1


@dataclass(frozen=True, slots=True)
class Head:
    """What a request says beside its prompt, checked. `max_tokens` is None when the client left it to us. `n`: answers wanted."""

    sampling: Sampling
    max_tokens: int | None
    slo_class: str
    priority: int
    n: int = 1
    truncate_prompt_tokens: int | None = None
    cache_salt: str = ""


def check_head(message: pb.GenerateRequest, limits: Limits) -> Head:
    """Everything but the prompt. Raises InvalidRequestError."""
    _check_request_id(message.request_id)
    chosen = _slo_class(message.slo_class, limits.slo_classes)
    priority = chosen.priority
    if message.HasField("priority"):
        priority = between("priority", message.priority, -MAX_PRIORITY, MAX_PRIORITY)
    given = message.sampling
    max_tokens = given.max_tokens if given.HasField("max_tokens") else None
    if max_tokens is not None:
        between("max_tokens", max_tokens, 1, limits.max_prompt_tokens)
    sampling = _remembered_sampling(given, max_tokens, limits)
    truncate = None
    if message.HasField("truncate_prompt_tokens"):
        truncate = between("truncate_prompt_tokens", message.truncate_prompt_tokens, 1, limits.max_prompt_tokens)
    if len(message.cache_salt) > MAX_SALT_CHARS:
        raise InvalidRequestError(field="cache_salt", value=message.cache_salt, expected=f"at most {MAX_SALT_CHARS} characters")
    return Head(
        sampling=sampling,
        max_tokens=max_tokens,
        slo_class=chosen.name,
        priority=priority,
        n=_n(given, sampling),
        truncate_prompt_tokens=truncate,
        cache_salt=message.cache_salt,
    )


def _n(given: pb.SamplingParams, sampling: Sampling) -> int:
    n = between("n", given.n, 1, MAX_N) if given.HasField("n") else 1
    if n > 1 and sampling.temperature == 0.0:
        raise InvalidRequestError(field="n", value=n, expected="1 with temperature 0, where all answers would be the same")
    return n


def check_messages(chat: pb.Chat, limits: Limits) -> tuple[list[Mapping[str, str]], dict[str, Any]]:
    """The messages, and the template's further arguments. Raises InvalidRequestError for a conversation that cannot become a prompt."""
    if limits.max_token_bytes is None:
        raise InvalidRequestError(
            field="chat", value="messages", expected="token ids: the served model has no tokenizer beside its weights"
        )
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        raise InvalidRequestError(field="chat.messages", value=f"{len(chat.messages)} messages", expected=f"from 1 to {MAX_MESSAGES}")
    longest = limits.max_prompt_tokens * limits.max_token_bytes
    if sum(len(message.content) for message in chat.messages) > longest:
        raise InvalidRequestError(field="chat.messages", value="their texts", expected=f"surely under {longest} bytes together")
    try:
        arguments = json.loads(chat.template_arguments_json) if chat.template_arguments_json else {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequestError(field="chat.template_arguments_json", value=chat.template_arguments_json, expected="a JSON object")
    return [{"role": m.role, "content": m.content} for m in chat.messages], arguments


def check_text_size(text: str, limits: Limits) -> None:
    """Refuse a text prompt that is empty, not servable, or surely too long, without tokenising it. Raises InvalidRequestError."""
    if limits.max_token_bytes is None:
        raise InvalidRequestError(field="prompt", value=text, expected="token ids: the served model has no tokenizer beside its weights")
    if not text:
        raise InvalidRequestError(field="prompt", value=text, expected="at least one character or token")
    # A character takes at least one byte, so the cheap length decides most cases.
    longest = limits.max_prompt_tokens * limits.max_token_bytes
    if len(text) > longest or len(text.encode()) > longest:
        tokens = f"at most {limits.max_prompt_tokens} tokens (the context of {limits.model.max_model_len} less one for the answer)"
        raise InvalidRequestError(field="prompt", value=text, expected=f"{tokens}, so surely under {longest} bytes")


def check_token_ids(token_ids: Sequence[int], limits: Limits) -> tuple[int, ...]:
    """The prompt as a tuple. Raises InvalidRequestError when it is empty, too long, or has an id out of the vocabulary."""
    if not token_ids:
        raise InvalidRequestError(field="prompt", value=[], expected="at least one character or token")
    if len(token_ids) > limits.max_prompt_tokens:
        raise InvalidRequestError(
            f"prompt: {len(token_ids)} tokens, expected at most {limits.max_prompt_tokens}"
            f" (the context of {limits.model.max_model_len} less one for the answer)",
            field="prompt",
            value=f"{len(token_ids)} tokens",
            expected=f"at most {limits.max_prompt_tokens} tokens",
        )
    ids = tuple(token_ids)
    vocab_size = limits.model.vocab_size
    if min(ids) < 0 or max(ids) >= vocab_size:
        index = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise InvalidRequestError(field=f"prompt[{index}]", value=ids[index], expected=f"a token id from 0 to {vocab_size - 1}")
    return ids


def to_request(
    request_id: str,
    head: Head,
    token_ids: Sequence[int],
    limits: Limits,
    *,
    arrival_s: float,
    deadline_s: float | None,
    context: TraceContext | None = None,
) -> Request:
    """The request that serving sees. `arrival_s` and `deadline_s` are monotonic instants, `context` is its trace's (disagg/tracing.py).

    Raises InvalidRequestError.
    """
    kept = head.truncate_prompt_tokens
    ids = check_token_ids(token_ids if kept is None else token_ids[-kept:], limits)
    room = limits.model.max_model_len - len(ids)
    if head.max_tokens is not None and head.max_tokens > room:
        raise InvalidRequestError(
            field="max_tokens",
            value=head.max_tokens,
            expected=f"at most {room}: the context is {limits.model.max_model_len} tokens and the prompt has {len(ids)}",
        )
    sampling = head.sampling
    if head.max_tokens is None and room < sampling.max_tokens:
        sampling = _with_max_tokens(sampling, room)
    return Request(
        request_id=request_id,
        prompt_token_ids=ids,
        sampling=sampling,
        slo_class=head.slo_class,
        priority=head.priority,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        cache_salt=head.cache_salt,
        **(context or trace_context({})),
    )


def _with_max_tokens(sampling: Sampling, room: int) -> Sampling:
    """`sampling` cut to the room that the context has left: only where the client named no max_tokens."""
    if sampling.min_tokens > room:
        raise InvalidRequestError(field="min_tokens", value=sampling.min_tokens, expected=f"at most {room}, what the context has left")
    return replace(sampling, max_tokens=room)


def _check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID_CHARS or not request_id.isprintable():
        expected = f"at most {MAX_REQUEST_ID_CHARS} printable characters, or nothing"
        raise InvalidRequestError(field="request_id", value=request_id, expected=expected)


def _slo_class(name: str, classes: tuple[SloClass, ...]) -> SloClass:
    if not name:
        return classes[0]
    for known in classes:
        if known.name == name:
            return known
    raise InvalidRequestError(field="slo_class", value=name, expected=nearest(name, [c.name for c in classes]))


def _remembered_sampling(given: pb.SamplingParams, max_tokens: int | None, limits: Limits) -> Sampling:
    """Clients mostly ask for the same again, and to check it anew takes as long as all else of a request's head."""
    data = given.SerializeToString()
    found = limits.remembered.get(data)
    if found is None:
        found = _sampling(given, max_tokens, limits)
        if len(data) <= MAX_REMEMBERED_BYTES:
            if len(limits.remembered) >= MAX_REMEMBERED:
                limits.remembered.clear()
            limits.remembered[data] = found
    return found


def _sampling(given: pb.SamplingParams, max_tokens: int | None, limits: Limits) -> Sampling:
    temperature = number("temperature", given.temperature, 0.0, 100.0) if given.HasField("temperature") else NEUTRAL.temperature
    top_p = number("top_p", given.top_p, 0.0, 1.0, open_low=True) if given.HasField("top_p") else NEUTRAL.top_p
    min_p = number("min_p", given.min_p, 0.0, 1.0) if given.HasField("min_p") else NEUTRAL.min_p
    top_k = between("top_k", given.top_k, -1, limits.model.vocab_size) if given.HasField("top_k") else NEUTRAL.top_k
    repetition = NEUTRAL.repetition_penalty
    if given.HasField("repetition_penalty"):
        repetition = number("repetition_penalty", given.repetition_penalty, 0.01, 100.0)
    min_tokens = given.min_tokens
    most = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    if not 0 <= min_tokens <= most:
        raise InvalidRequestError(field="min_tokens", value=min_tokens, expected=f"from 0 to max_tokens, which is {most}")
    if not limits.has_logits:
        check_unshaped(given)
    return Sampling(
        max_tokens=most,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=min_p,
        seed=between("seed", given.seed, 0, 2**63 - 1) if given.HasField("seed") else None,
        presence_penalty=number("presence_penalty", given.presence_penalty, -2.0, 2.0),
        frequency_penalty=number("frequency_penalty", given.frequency_penalty, -2.0, 2.0),
        repetition_penalty=repetition,
        stop=_stop(given.stop, limits),
        stop_token_ids=_stop_token_ids(given.stop_token_ids, limits.model.vocab_size),
        ignore_eos=given.ignore_eos,
        logprobs=between("logprobs", given.logprobs, 0, MAX_LOGPROBS) if given.HasField("logprobs") else None,
        include_stop_str_in_output=given.include_stop_str_in_output,
        skip_special_tokens=given.skip_special_tokens if given.HasField("skip_special_tokens") else True,
        **shape(given, limits.model.vocab_size, MAX_LOGPROBS, limits.encode),
    )


def _stop(strings: Sequence[str], limits: Limits) -> tuple[str, ...]:
    if strings and limits.max_token_bytes is None:
        raise InvalidRequestError(field="stop", value=list(strings), expected="stop_token_ids: the served model has no tokenizer")
    if len(strings) > MAX_STOPS:
        raise InvalidRequestError(field="stop", value=list(strings), expected=f"at most {MAX_STOPS} strings")
    for index, text in enumerate(strings):
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequestError(field=f"stop[{index}]", value=text, expected=f"from 1 to {MAX_STOP_CHARS} characters")
    return tuple(strings)


def _stop_token_ids(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(field="stop_token_ids", value=list(ids), expected=f"at most {MAX_STOP_TOKEN_IDS} ids")
    for index, token in enumerate(ids):
        between(f"stop_token_ids[{index}]", token, 0, vocab_size - 1)
    return tuple(ids)
