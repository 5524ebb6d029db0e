from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("decisions",)
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    def __init__(self, decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("request_id", "verdict", "reason", "waited_s", "slo_class", "priority", "context_tokens", "max_tokens", "ttft_target_s", "tpot_target_s", "queued_requests", "attempt", "candidates", "retry_after_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    verdict: str
    reason: str
    waited_s: float
    slo_class: str
    priority: int
    context_tokens: int
    max_tokens: int
    ttft_target_s: float
    tpot_target_s: float
    queued_requests: int
    attempt: int
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    retry_after_s: float
    def __init__(self, request_id: _Optional[str] = ..., verdict: _Optional[str] = ..., reason: _Optional[str] = ..., waited_s: _Optional[float] = ..., slo_class: _Optional[str] = ..., priority: _Optional[int] = ..., context_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., ttft_target_s: _Optional[float] = ..., tpot_target_s: _Optional[float] = ..., queued_requests: _Optional[int] = ..., attempt: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "cost", "note", "ttft_s", "tpot_s", "queue_s", "prefill_s", "transfer_s", "output_tokens", "kv_tokens", "cached_tokens")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    cost: float
    note: str
    ttft_s: float
    tpot_s: float
    queue_s: float
    prefill_s: float
    transfer_s: float
    output_tokens: int
    kv_tokens: int
    cached_tokens: int
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., cost: _Optional[float] = ..., note: _Optional[str] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., output_tokens: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...
