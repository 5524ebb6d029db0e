from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GatewayFrame(_message.Message):
    __slots__ = ("gateway_id", "commands")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    def __init__(self, gateway_id: _Optional[str] = ..., commands: _Optional[_Iterable[_Union[Command, _Mapping]]] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("key", "prefill", "fetch", "start", "cancel", "release")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    key: int
    prefill: PrefillCommand
    fetch: FetchCommand
    start: StartCommand
    cancel: int
    release: TransferMessage
    def __init__(self, key: _Optional[int] = ..., prefill: _Optional[_Union[PrefillCommand, _Mapping]] = ..., fetch: _Optional[_Union[FetchCommand, _Mapping]] = ..., start: _Optional[_Union[StartCommand, _Mapping]] = ..., cancel: _Optional[int] = ..., release: _Optional[_Union[TransferMessage, _Mapping]] = ...) -> None: ...

class PrefillCommand(_message.Message):
    __slots__ = ("request", "transfer")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    request: RequestMessage
    transfer: TransferMessage
    def __init__(self, request: _Optional[_Union[RequestMessage, _Mapping]] = ..., transfer: _Optional[_Union[TransferMessage, _Mapping]] = ...) -> None: ...

class FetchCommand(_message.Message):
    __slots__ = ("transfer", "request")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    transfer: TransferMessage
    request: RequestMessage
    def __init__(self, transfer: _Optional[_Union[TransferMessage, _Mapping]] = ..., request: _Optional[_Union[RequestMessage, _Mapping]] = ...) -> None: ...

class StartCommand(_message.Message):
    __slots__ = ("request", "transfer", "prefilled", "fetched")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    request: RequestMessage
    transfer: TransferMessage
    prefilled: PrefillReply
    fetched: str
    def __init__(self, request: _Optional[_Union[RequestMessage, _Mapping]] = ..., transfer: _Optional[_Union[TransferMessage, _Mapping]] = ..., prefilled: _Optional[_Union[PrefillReply, _Mapping]] = ..., fetched: _Optional[str] = ...) -> None: ...

class StepFrame(_message.Message):
    __slots__ = ("hello", "state", "requests", "replies")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    state: State
    requests: _containers.RepeatedCompositeFieldContainer[RequestStep]
    replies: _containers.RepeatedCompositeFieldContainer[Reply]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., state: _Optional[_Union[State, _Mapping]] = ..., requests: _Optional[_Iterable[_Union[RequestStep, _Mapping]]] = ..., replies: _Optional[_Iterable[_Union[Reply, _Mapping]]] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("key", "error", "prefilled")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    key: int
    error: bytes
    prefilled: PrefillReply
    def __init__(self, key: _Optional[int] = ..., error: _Optional[bytes] = ..., prefilled: _Optional[_Union[PrefillReply, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker", "epoch", "host_id", "endpoints", "heartbeat_s", "kv_layout")
    class EndpointsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    worker: str
    epoch: str
    host_id: str
    endpoints: _containers.ScalarMap[str, str]
    heartbeat_s: float
    kv_layout: bytes
    def __init__(self, worker: _Optional[str] = ..., epoch: _Optional[str] = ..., host_id: _Optional[str] = ..., endpoints: _Optional[_Mapping[str, str]] = ..., heartbeat_s: _Optional[float] = ..., kv_layout: _Optional[bytes] = ...) -> None: ...

class RequestStep(_message.Message):
    __slots__ = ("key", "token_ids", "tokens", "finish", "error", "cached_tokens", "prompt_logprobs", "newly_cached_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NEWLY_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedCompositeFieldContainer[StepToken]
    finish: int
    error: bytes
    cached_tokens: int
    prompt_logprobs: PromptLogprobs
    newly_cached_tokens: int
    def __init__(self, key: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[_Union[StepToken, _Mapping]]] = ..., finish: _Optional[int] = ..., error: _Optional[bytes] = ..., cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., newly_cached_tokens: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("width", "token_ids", "logprobs", "ranks")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    width: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, width: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class StepToken(_message.Message):
    __slots__ = ("id", "logprob", "top", "rank")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[StepTopLogprob]
    rank: int
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[StepTopLogprob, _Mapping]]] = ..., rank: _Optional[int] = ...) -> None: ...

class StepTopLogprob(_message.Message):
    __slots__ = ("id", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class State(_message.Message):
    __slots__ = ("waiting_requests", "waiting_tokens", "running_requests", "free_kv_tokens", "total_kv_tokens", "step_s", "outbox_free_bytes", "outbox_total_bytes", "inbox_free_bytes", "inbox_total_bytes", "preemptions", "max_step_tokens", "max_running_requests", "steps", "kv", "mixed_step_tokens", "cache_block_tokens", "cache_changes", "mixed_step_s")
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    OUTBOX_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTBOX_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    INBOX_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    INBOX_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    MIXED_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_CHANGES_FIELD_NUMBER: _ClassVar[int]
    MIXED_STEP_S_FIELD_NUMBER: _ClassVar[int]
    waiting_requests: int
    waiting_tokens: int
    running_requests: int
    free_kv_tokens: int
    total_kv_tokens: int
    step_s: float
    outbox_free_bytes: int
    outbox_total_bytes: int
    inbox_free_bytes: int
    inbox_total_bytes: int
    preemptions: int
    max_step_tokens: int
    max_running_requests: int
    steps: _containers.RepeatedCompositeFieldContainer[StepRecordMessage]
    kv: KvCountersMessage
    mixed_step_tokens: int
    cache_block_tokens: int
    cache_changes: _containers.RepeatedCompositeFieldContainer[CacheChangeMessage]
    mixed_step_s: float
    def __init__(self, waiting_requests: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., running_requests: _Optional[int] = ..., free_kv_tokens: _Optional[int] = ..., total_kv_tokens: _Optional[int] = ..., step_s: _Optional[float] = ..., outbox_free_bytes: _Optional[int] = ..., outbox_total_bytes: _Optional[int] = ..., inbox_free_bytes: _Optional[int] = ..., inbox_total_bytes: _Optional[int] = ..., preemptions: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[StepRecordMessage, _Mapping]]] = ..., kv: _Optional[_Union[KvCountersMessage, _Mapping]] = ..., mixed_step_tokens: _Optional[int] = ..., cache_block_tokens: _Optional[int] = ..., cache_changes: _Optional[_Iterable[_Union[CacheChangeMessage, _Mapping]]] = ..., mixed_step_s: _Optional[float] = ...) -> None: ...

class KvCountersMessage(_message.Message):
    __slots__ = ("sent_frames", "sent_bytes", "received_frames", "received_bytes", "completed", "failed", "released", "corrupt", "transfer_s", "fenced", "refused", "late", "garbage", "turned_away")
    SENT_FRAMES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FRAMES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    GARBAGE_FIELD_NUMBER: _ClassVar[int]
    TURNED_AWAY_FIELD_NUMBER: _ClassVar[int]
    sent_frames: int
    sent_bytes: int
    received_frames: int
    received_bytes: int
    completed: int
    failed: int
    released: int
    corrupt: int
    transfer_s: float
    fenced: int
    refused: int
    late: int
    garbage: int
    turned_away: int
    def __init__(self, sent_frames: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., received_frames: _Optional[int] = ..., received_bytes: _Optional[int] = ..., completed: _Optional[int] = ..., failed: _Optional[int] = ..., released: _Optional[int] = ..., corrupt: _Optional[int] = ..., transfer_s: _Optional[float] = ..., fenced: _Optional[int] = ..., refused: _Optional[int] = ..., late: _Optional[int] = ..., garbage: _Optional[int] = ..., turned_away: _Optional[int] = ...) -> None: ...

class CacheChangeMessage(_message.Message):
    __slots__ = ("number", "stored", "removed", "is_cleared")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    IS_CLEARED_FIELD_NUMBER: _ClassVar[int]
    number: int
    stored: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[int]
    is_cleared: bool
    def __init__(self, number: _Optional[int] = ..., stored: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[int]] = ..., is_cleared: _Optional[bool] = ...) -> None: ...

class StepRecordMessage(_message.Message):
    __slots__ = ("number", "seconds", "prefill_tokens", "prefill_pairs", "decode_requests", "context_tokens")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PAIRS_FIELD_NUMBER: _ClassVar[int]
    DECODE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    number: int
    seconds: float
    prefill_tokens: int
    prefill_pairs: float
    decode_requests: int
    context_tokens: int
    def __init__(self, number: _Optional[int] = ..., seconds: _Optional[float] = ..., prefill_tokens: _Optional[int] = ..., prefill_pairs: _Optional[float] = ..., decode_requests: _Optional[int] = ..., context_tokens: _Optional[int] = ...) -> None: ...

class RequestMessage(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "prior_output", "sampling", "slo_class", "priority", "cache_salt", "traceparent", "tracestate")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIOR_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prior_output: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingMessage
    slo_class: str
    priority: int
    cache_salt: str
    traceparent: str
    tracestate: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., prior_output: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingMessage, _Mapping]] = ..., slo_class: _Optional[str] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class SamplingMessage(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids", "ignore_eos", "logprobs", "logprob_token_ids", "prompt_logprobs", "logit_bias", "bad_words", "allowed_token_ids", "structure")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    structure: StructureMessage
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., structure: _Optional[_Union[StructureMessage, _Mapping]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StructureMessage(_message.Message):
    __slots__ = ("kind", "spec", "any_whitespace", "additional_properties", "whitespace_pattern", "reasoning_ended", "reasoning_json")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ANY_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    ADDITIONAL_PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    WHITESPACE_PATTERN_FIELD_NUMBER: _ClassVar[int]
    REASONING_ENDED_FIELD_NUMBER: _ClassVar[int]
    REASONING_JSON_FIELD_NUMBER: _ClassVar[int]
    kind: str
    spec: str
    any_whitespace: bool
    additional_properties: bool
    whitespace_pattern: str
    reasoning_ended: bool
    reasoning_json: str
    def __init__(self, kind: _Optional[str] = ..., spec: _Optional[str] = ..., any_whitespace: _Optional[bool] = ..., additional_properties: _Optional[bool] = ..., whitespace_pattern: _Optional[str] = ..., reasoning_ended: _Optional[bool] = ..., reasoning_json: _Optional[str] = ...) -> None: ...

class TransferMessage(_message.Message):
    __slots__ = ("transfer_id", "attempt", "source_worker", "source_epoch", "source_host_id", "source_endpoints", "num_tokens", "token_hash", "traceparent", "form", "tracestate")
    class SourceEndpointsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_WORKER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_HOST_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_HASH_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    attempt: int
    source_worker: str
    source_epoch: str
    source_host_id: str
    source_endpoints: _containers.ScalarMap[str, str]
    num_tokens: int
    token_hash: str
    traceparent: str
    form: str
    tracestate: str
    def __init__(self, transfer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., source_worker: _Optional[str] = ..., source_epoch: _Optional[str] = ..., source_host_id: _Optional[str] = ..., source_endpoints: _Optional[_Mapping[str, str]] = ..., num_tokens: _Optional[int] = ..., token_hash: _Optional[str] = ..., traceparent: _Optional[str] = ..., form: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class PrefillReply(_message.Message):
    __slots__ = ("first", "finish", "cached_tokens", "prompt_logprobs", "newly_cached_tokens")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NEWLY_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    first: StepToken
    finish: int
    cached_tokens: int
    prompt_logprobs: PromptLogprobs
    newly_cached_tokens: int
    def __init__(self, first: _Optional[_Union[StepToken, _Mapping]] = ..., finish: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., newly_cached_tokens: _Optional[int] = ...) -> None: ...
