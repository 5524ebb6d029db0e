"""What the client takes and gives, and the translation to and from the wire that its sync and async forms share. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import grpc

from disagg.errors import (
    AccessError,
    CancelledRequestError,
    ConfigError,
    DeadlineError,
    DisaggError,
    EngineError,
    GatewayUnreachableError,
    InvalidRequestError,
    UnavailableError,
    from_wire,
)
from disagg.pb import inference_pb2 as pb
from disagg.tracing import TRACEPARENT, TRACESTATE, valid_traceparent, valid_tracestate
from disagg.types import FinishReason, Token, TopLogprob

ERROR_KEY = "disagg-error-bin"
# Room for the largest message that any gateway takes; the gateway's own bound decides.
MAX_MESSAGE_BYTES = 1 << 30
CONNECT_TIMEOUT_S = 3.0

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Bounds a connection attempt, so that an address that answers nothing is reported soon.
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1e3)),
    ("grpc.max_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1e3)),
    # A gateway whose host vanished ends our calls, also those without a deadline.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Clients of one process don't share a connection's back-off: one made after the gateway came back connects at once.
    ("grpc.use_local_subchannel_pool", 1),
    # A gateway is reached directly; proxies of the environment are for the web.
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a client shows who it is. `token`: a bearer token. `ca`, `cert`, `key`: paths of PEM files; with any of them it speaks TLS."""

    token: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """What is sent with each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token is not None else None

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None for a connection in the clear. Raises ConfigError for files that cannot be read."""
        if self.ca is None and self.cert is None:
            return None
        ca, key, cert = (_read(name, getattr(self, name)) for name in ("ca", "key", "cert"))
        return grpc.ssl_channel_credentials(ca, key, cert)


def _read(name: str, path: str | None) -> bytes | None:
    try:
        return None if path is None else Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror}", key=name, value=path, expected="a PEM file") from error


_FINISH = {pb.FINISH_REASON_STOP: FinishReason.STOP, pb.FINISH_REASON_LENGTH: FinishReason.LENGTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything of a request but its prompt. None leaves a value to the gateway (see proto/disagg/v1/inference.proto).

    `traceparent`: the caller's span, as W3C trace context writes it; the request's spans hang below it. `tracestate`:
    vendors' entries that go with it.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] = ()
    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    n: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    slo_class: str | None = None
    priority: int | None = None
    request_id: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None


_OUTSIDE_SAMPLING = ("slo_class", "priority", "request_id", "truncate_prompt_tokens", "cache_salt")
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")
_FORMS = ("json_schema", "json_object", "regex", "choice", "grammar")

Messages = Sequence[Mapping[str, str]]  # [{"role": "user", "content": text}, ...]
Prompt = str | Sequence[int] | Messages


@dataclass(frozen=True, slots=True)
class Usage:
    """What the answer took. Durations on the gateway's clock; `cached_tokens`: prompt tokens found in a prefix cache.

    `queue_s`: received to routed. `prefill_s`: routed to first token. `transfer_s`: first token to KV complete on the decode
    side. `decode_s`: first token to last. `attempts`: routes tried, 1 when nothing failed.
    `predicted_ttft_s`, `predicted_tpot_s`: what the router expected when the request came; None from a gateway that does not tell.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    prefill_worker: str
    decode_worker: str
    attempts: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One step of a streamed answer. `finish` and `usage` come with the last part only.

    `index`: which of n answers. `prompt_logprobs`, on an answer's first part when asked for: one token per prompt token.
    """

    request_id: str
    tokens: tuple[Token, ...]
    text: str
    finish: FinishReason | None = None
    usage: Usage | None = None
    index: int = 0
    prompt_logprobs: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `ttft_s` and `e2e_s` are seconds from sending to the first and the last token, on the client's clock."""

    request_id: str
    tokens: tuple[Token, ...]
    text: str
    finish: FinishReason
    usage: Usage
    ttft_s: float
    e2e_s: float
    index: int = 0
    prompt_logprobs: tuple[Token, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the output tokens."""
        return tuple(token.token_id for token in self.tokens)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for a single token."""
        return (self.e2e_s - self.ttft_s) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None


class AnswerBuilder:
    """Folds the parts of one stream into an Answer. Instants are `time.monotonic()`."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._first_s = self._last_s = sent_s
        self._tokens: list[Token] = []
        self._texts: list[str] = []
        self._prompt_logprobs: tuple[Token, ...] = ()
        self._last: Part | None = None

    def add(self, part: Part, now_s: float) -> None:
        if part.tokens:
            self._first_s = self._first_s if self._tokens else now_s
            self._last_s = now_s
        self._tokens.extend(part.tokens)
        self._texts.append(part.text)
        self._prompt_logprobs = self._prompt_logprobs or part.prompt_logprobs
        self._last = part

    def answer(self) -> Answer:
        """The whole answer. Raises EngineError when the stream ended without saying why: it may be cut."""
        last = self._last
        if last is None or last.finish is None or last.usage is None:
            raise EngineError(f"the answer ended after {len(self._tokens)} tokens without a finish reason")
        return Answer(
            request_id=last.request_id,
            tokens=tuple(self._tokens),
            text="".join(self._texts),
            finish=last.finish,
            usage=last.usage,
            ttft_s=self._first_s - self._sent_s,
            e2e_s=self._last_s - self._sent_s,
            index=last.index,
            prompt_logprobs=self._prompt_logprobs,
        )


class AnswersBuilder:
    """The same for a stream of several answers."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._builders: dict[int, AnswerBuilder] = {}

    def add(self, part: Part, now_s: float) -> None:
        self._builders.setdefault(part.index, AnswerBuilder(self._sent_s)).add(part, now_s)

    def answers(self, n: int) -> list[Answer]:
        """All n, by their index. Raises EngineError when one is not whole."""
        return [self._builders.get(index, AnswerBuilder(self._sent_s)).answer() for index in range(n)]


@dataclass(frozen=True, slots=True)
class SloClassInfo:
    """An SLO class that the gateway knows; targets in seconds, None for none."""

    name: str
    ttft_s: float | None
    tpot_s: float | None
    priority: int


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """A pool: names of its live workers, and how many it should have."""

    role: str
    workers: tuple[str, ...]
    wanted: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a gateway serves. `max_model_len`: longest prompt plus answer, in tokens."""

    model: str
    engine: str
    mode: str
    max_model_len: int
    vocab_size: int
    accepts_text: bool
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    slo_classes: tuple[SloClassInfo, ...]
    pools: tuple[PoolInfo, ...]


def to_metadata(access: Access, options: Options) -> tuple[tuple[str, str], ...] | None:
    """What is sent beside the request. Raises InvalidRequestError for a trace context that is none."""
    parent, state = options.traceparent, options.tracestate
    if parent is not None and not valid_traceparent(str(parent)):
        raise InvalidRequestError(
            field=TRACEPARENT, value=parent, expected="W3C trace context: 00-TRACE_ID-SPAN_ID-FLAGS, in lower-case hex"
        )
    if state is not None and (parent is None or not valid_tracestate(str(state))):
        raise InvalidRequestError(field=TRACESTATE, value=state, expected="W3C trace context: KEY=VALUE,KEY=VALUE, beside a traceparent")
    context = [(key, value) for key, value in ((TRACEPARENT, parent), (TRACESTATE, state)) if value is not None]
    return (*(access.metadata or ()), *context) or None


def to_message(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """The wire request. Raises InvalidRequestError for values of the wrong type or beyond 64 bits, and for more than one form."""
    message = pb.GenerateRequest()
    if isinstance(prompt, str):
        try:
            message.text = prompt
        except ValueError as error:
            raise InvalidRequestError(field="prompt", value=prompt, expected="text that can be written as UTF-8") from error
    elif prompt and isinstance(prompt[0], Mapping):
        for entry in prompt:
            _add_message(message.chat, entry)
    else:
        _extend("prompt", message.token_ids.ids, prompt)
        message.token_ids.SetInParent()
    message.sampling.SetInParent()
    for option in fields(Options):
        value = getattr(options, option.name)
        target: Any = message if option.name in _OUTSIDE_SAMPLING else message.sampling
        if value is None or option.name in (TRACEPARENT, TRACESTATE):
            continue
        if option.name in _LISTS:
            # A lone string would be taken for its characters.
            _extend(option.name, getattr(target, option.name), [value] if isinstance(value, str) else value)
        elif option.name == "choice":
            _extend("choice", message.sampling.choice.texts, value)
            message.sampling.choice.SetInParent()
        elif option.name == "logit_bias":
            _update(message.sampling.logit_bias, value)
        else:
            _set(target, option.name, json.dumps(value) if option.name == "json_schema" and not isinstance(value, str) else value)
    _check_one_form(options)
    return message


def _add_message(chat: pb.Chat, entry: Any) -> None:
    if not isinstance(entry, Mapping) or set(entry) != {"role", "content"}:
        raise InvalidRequestError(field="prompt", value=entry, expected='messages of the form {"role": ..., "content": ...}')
    message = chat.messages.add()
    _set(message, "role", entry["role"])
    _set(message, "content", entry["content"])


def _update(target: Any, biases: Mapping[int, float]) -> None:
    try:
        for token_id, bias in biases.items():
            target[token_id] = bias
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError(field="logit_bias", value=biases, expected="a mapping of token ids to numbers") from error


def _check_one_form(options: Options) -> None:
    """The wire would keep the last one in silence."""
    given = [name for name in _FORMS if getattr(options, name) is not None]
    if len(given) > 1:
        raise InvalidRequestError(field=given[1], value=f"beside {given[0]}", expected=f"at most one of {', '.join(_FORMS)}")


def _set(target: Any, name: str, value: Any) -> None:
    try:
        setattr(target, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(field=name, value=value, expected=str(error)) from error


def _extend(name: str, target: Any, values: Sequence[Any]) -> None:
    try:
        target.extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(field=name, value=values, expected=str(error)) from error


def to_part(message: pb.GenerateResponse) -> Part:
    """One response of the stream."""
    return Part(
        request_id=message.request_id,
        tokens=tuple(_token(token) for token in message.tokens),
        text=message.text,
        finish=_FINISH.get(message.finish_reason),
        usage=_usage(message.usage) if message.HasField("usage") else None,
        index=message.index,
        prompt_logprobs=tuple([_token(token) for token in message.prompt_logprobs]),
    )


def _token(message: pb.Token) -> Token:
    top = tuple(TopLogprob(t.id, t.logprob) for t in message.top_logprobs)
    return Token(message.id, message.logprob if message.HasField("logprob") else None, top, message.rank)


def _usage(message: pb.Usage) -> Usage:
    timing = message.timing
    return Usage(
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        cached_tokens=message.cached_tokens,
        prefill_worker=message.prefill_worker,
        decode_worker=message.decode_worker,
        attempts=message.attempts,
        queue_s=timing.queue_s,
        prefill_s=timing.prefill_s,
        transfer_s=timing.transfer_s,
        decode_s=timing.decode_s,
        predicted_ttft_s=message.predicted_ttft_s if message.HasField("predicted_ttft_s") else None,
        predicted_tpot_s=message.predicted_tpot_s if message.HasField("predicted_tpot_s") else None,
    )


def to_served_model(message: pb.ModelInfo) -> ServedModel:
    """What GetModelInfo answered."""
    classes = tuple(
        SloClassInfo(
            name=c.name,
            ttft_s=c.ttft_s if c.HasField("ttft_s") else None,
            tpot_s=c.tpot_s if c.HasField("tpot_s") else None,
            priority=c.priority,
        )
        for c in message.slo_classes
    )
    return ServedModel(
        model=message.model,
        engine=message.engine,
        mode=message.mode,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        accepts_text=message.accepts_text,
        eos_token_ids=tuple(message.eos_token_ids),
        kv_bytes_per_token=message.kv_bytes_per_token,
        slo_classes=classes,
        pools=tuple(PoolInfo(p.role, tuple(p.workers), p.wanted) for p in message.pools),
    )


def to_error(error: grpc.RpcError, address: str, *, answered: bool) -> DisaggError:
    """The typed error behind a failed call. `answered`: something of the answer had arrived before."""
    metadata: Any = error.trailing_metadata()
    for key, value in metadata or ():
        if key == ERROR_KEY:
            return from_wire(value)
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError("the request's timeout passed before its answer was whole")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return AccessError(details)
    if code is grpc.StatusCode.CANCELLED:
        return CancelledRequestError("the call was cancelled")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return InvalidRequestError(
            f"prompt: {details}", field="prompt", value="too many bytes", expected="a message within the gateway's bound"
        )
    if code is grpc.StatusCode.UNAVAILABLE and answered:
        return UnavailableError(f"the gateway at {address} went away in the middle of the answer: {details}")
    if code is grpc.StatusCode.UNAVAILABLE:
        return GatewayUnreachableError(address=address)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return GatewayUnreachableError(f"what answers at {address} is not a disagg gateway", address=address)
    return EngineError(f"the gateway at {address} failed: {code.name}: {details}")
