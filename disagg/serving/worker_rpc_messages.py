"""The vocabulary as protobuf messages of worker.proto, and back. No I/O.

What is large is written `into` the message that it is a part of: a part that is made by itself is copied into the whole.
"""

from __future__ import annotations

import time
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter

from disagg.pb import worker_pb2 as pb
from disagg.tracing import TraceContext
from disagg.types import (
    CacheChange,
    Chunk,
    EngineState,
    FinishReason,
    KvAddress,
    KvCounters,
    Prefilled,
    PromptLogprobs,
    Request,
    Sampling,
    StepRecord,
    Structure,
    StructureKind,
    Token,
    TopLogprob,
    Transfer,
    plain_token,
)

# Numbers of FinishReason in inference.proto; 0 means that the request goes on.
_FINISH_TO_WIRE = {None: 0, FinishReason.STOP: 1, FinishReason.LENGTH: 2}
_FINISH_FROM_WIRE = {number: reason for reason, number in _FINISH_TO_WIRE.items()}
_REMEMBERED_BYTES = 256  # so long at most are sampling parameters whose value is remembered: ordinary ones, of which many are the same


def sampling_to_wire(s: Sampling, into: pb.SamplingMessage) -> None:
    """`stop` strings stay at the gateway: text is made there."""
    into.max_tokens = s.max_tokens
    into.min_tokens = s.min_tokens
    into.temperature = s.temperature
    into.top_p = s.top_p
    into.top_k = max(0, s.top_k)
    into.min_p = s.min_p
    into.presence_penalty = s.presence_penalty
    into.frequency_penalty = s.frequency_penalty
    into.repetition_penalty = s.repetition_penalty
    into.stop_token_ids.extend(s.stop_token_ids)
    into.ignore_eos = s.ignore_eos
    into.logprob_token_ids.extend(s.logprob_token_ids)
    into.allowed_token_ids.extend(s.allowed_token_ids)
    if s.seed is not None:
        into.seed = s.seed
    if s.logprobs is not None:
        into.logprobs = s.logprobs
    if s.prompt_logprobs is not None:
        into.prompt_logprobs = s.prompt_logprobs
    for token_id, bias in s.logit_bias:
        into.logit_bias[token_id] = bias
    for word in s.bad_words:
        into.bad_words.add(ids=word)
    if s.structure is not None:
        into.structure.CopyFrom(structure_to_wire(s.structure))


def sampling_from_wire(m: pb.SamplingMessage) -> Sampling:
    """The same value for the same parameters: a request's come more than once, and many requests have the same."""
    data = m.SerializeToString()
    return _remembered_sampling(data) if len(data) <= _REMEMBERED_BYTES else _sampling(m)


@lru_cache(maxsize=256)
def _remembered_sampling(data: bytes) -> Sampling:
    return _sampling(pb.SamplingMessage.FromString(data))


def _sampling(m: pb.SamplingMessage) -> Sampling:
    return Sampling(
        max_tokens=m.max_tokens,
        min_tokens=m.min_tokens,
        temperature=m.temperature,
        top_p=m.top_p,
        top_k=m.top_k,
        min_p=m.min_p,
        seed=m.seed if m.HasField("seed") else None,
        presence_penalty=m.presence_penalty,
        frequency_penalty=m.frequency_penalty,
        repetition_penalty=m.repetition_penalty,
        stop_token_ids=tuple(m.stop_token_ids),
        ignore_eos=m.ignore_eos,
        logprobs=m.logprobs if m.HasField("logprobs") else None,
        logprob_token_ids=tuple(m.logprob_token_ids),
        prompt_logprobs=m.prompt_logprobs if m.HasField("prompt_logprobs") else None,
        logit_bias=tuple(sorted(m.logit_bias.items())),
        bad_words=tuple([tuple(word.ids) for word in m.bad_words]),
        allowed_token_ids=tuple(m.allowed_token_ids),
        structure=structure_from_wire(m.structure) if m.HasField("structure") else None,
    )


def structure_to_wire(s: Structure) -> pb.StructureMessage:
    return pb.StructureMessage(
        kind=s.kind,
        spec=s.spec,
        any_whitespace=s.any_whitespace,
        additional_properties=s.additional_properties,
        whitespace_pattern=s.whitespace_pattern,
        reasoning_ended=s.reasoning_ended,
        reasoning_json=s.reasoning_json,
    )


def structure_from_wire(m: pb.StructureMessage) -> Structure:
    return Structure(
        kind=StructureKind(m.kind),
        spec=m.spec,
        any_whitespace=m.any_whitespace,
        additional_properties=m.additional_properties,
        whitespace_pattern=m.whitespace_pattern if m.HasField("whitespace_pattern") else None,
        reasoning_ended=m.reasoning_ended if m.HasField("reasoning_ended") else None,
        reasoning_json=m.reasoning_json,
    )


def request_to_wire(request: Request, into: pb.RequestMessage) -> None:
    """Instants do not cross the wire: the gateway keeps arrival and deadline."""
    into.request_id = request.request_id
    into.prompt_token_ids.extend(request.prompt_token_ids)
    into.prior_output.extend(request.prior_output)
    sampling_to_wire(request.sampling, into.sampling)
    into.slo_class = request.slo_class
    into.priority = request.priority
    into.cache_salt = request.cache_salt
    into.traceparent = request.traceparent
    into.tracestate = request.tracestate


def request_from_wire(m: pb.RequestMessage) -> Request:
    """`arrival_s` is the arrival at this worker, on its own clock."""
    return Request(
        request_id=m.request_id,
        prompt_token_ids=tuple(m.prompt_token_ids[:]),  # a slice is read in one go
        sampling=sampling_from_wire(m.sampling),
        slo_class=m.slo_class,
        priority=m.priority,
        arrival_s=time.monotonic(),
        prior_output=tuple(m.prior_output),
        cache_salt=m.cache_salt,
        traceparent=m.traceparent,
        tracestate=m.tracestate,
    )


def transfer_to_wire(transfer: Transfer, into: pb.TransferMessage) -> None:
    source = transfer.source
    into.transfer_id = transfer.transfer_id
    into.attempt = transfer.attempt
    into.source_worker = source.worker
    into.source_epoch = source.epoch
    into.source_host_id = source.host_id
    for carrier, endpoint in source.endpoints:
        into.source_endpoints[carrier] = endpoint
    into.num_tokens = transfer.num_tokens
    into.token_hash = transfer.token_hash
    into.traceparent = transfer.traceparent
    into.tracestate = transfer.tracestate
    into.form = transfer.form


def transfer_from_wire(m: pb.TransferMessage) -> Transfer:
    endpoints = m.source_endpoints
    source = KvAddress(m.source_worker, m.source_epoch, m.source_host_id, tuple([(name, endpoints[name]) for name in endpoints]))
    context = TraceContext(traceparent=m.traceparent, tracestate=m.tracestate)
    return Transfer(m.transfer_id, m.attempt, source, m.num_tokens, m.token_hash, m.form, **context)


def token_to_wire(token: Token) -> pb.StepToken:
    if token.logprob is None:
        return pb.StepToken(id=token.token_id)
    top = [pb.StepTopLogprob(id=t.token_id, logprob=t.logprob) for t in token.top]
    return pb.StepToken(id=token.token_id, logprob=token.logprob, top=top, rank=token.rank)


def token_from_wire(m: pb.StepToken) -> Token:
    if not m.HasField("logprob"):
        return plain_token(m.id)
    return Token(m.id, m.logprob, tuple([TopLogprob(t.id, t.logprob) for t in m.top]), m.rank)


def prompt_logprobs_to_wire(table: PromptLogprobs) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(width=table.width, token_ids=table.token_ids, logprobs=table.logprobs, ranks=table.ranks)


def prompt_logprobs_from_wire(m: pb.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(m.width, tuple(m.token_ids), tuple(m.logprobs), tuple(m.ranks))


def prefilled_to_wire(prefilled: Prefilled, into: pb.PrefillReply) -> None:
    into.first.CopyFrom(token_to_wire(prefilled.first))
    into.finish = _FINISH_TO_WIRE[prefilled.finish]
    into.cached_tokens = prefilled.cached_tokens
    into.newly_cached_tokens = prefilled.newly_cached_tokens
    if prefilled.prompt_logprobs is not None:
        into.prompt_logprobs.CopyFrom(prompt_logprobs_to_wire(prefilled.prompt_logprobs))


def prefilled_from_wire(m: pb.PrefillReply) -> Prefilled:
    table = prompt_logprobs_from_wire(m.prompt_logprobs) if m.HasField("prompt_logprobs") else None
    return Prefilled(token_from_wire(m.first), _FINISH_FROM_WIRE[m.finish], m.cached_tokens, table, m.newly_cached_tokens)


def add_chunk(step: pb.RequestStep, chunk: Chunk) -> None:
    """Put a chunk behind what `step` holds of the same request."""
    plain = [token.token_id for token in chunk.tokens if token.logprob is None]
    if len(plain) == len(chunk.tokens) and not step.tokens:
        step.token_ids.extend(plain)
    else:
        step.tokens.extend(map(token_to_wire, chunk.tokens))
    if chunk.finish is not None:
        step.finish = _FINISH_TO_WIRE[chunk.finish]
    if chunk.cached_tokens:
        step.cached_tokens = chunk.cached_tokens
    if chunk.newly_cached_tokens:
        step.newly_cached_tokens = chunk.newly_cached_tokens
    if chunk.prompt_logprobs is not None:
        step.prompt_logprobs.CopyFrom(prompt_logprobs_to_wire(chunk.prompt_logprobs))


def chunk_from_wire(m: pb.RequestStep) -> Chunk:
    table = prompt_logprobs_from_wire(m.prompt_logprobs) if m.HasField("prompt_logprobs") else None
    plain = tuple(map(plain_token, m.token_ids))
    tokens = plain + tuple(map(token_from_wire, m.tokens)) if m.tokens else plain
    return Chunk(tokens, _FINISH_FROM_WIRE[m.finish], table, m.cached_tokens, m.newly_cached_tokens)


_STATE_FIELDS = (
    "waiting_requests",
    "waiting_tokens",
    "running_requests",
    "free_kv_tokens",
    "total_kv_tokens",
    "step_s",
    "outbox_free_bytes",
    "outbox_total_bytes",
    "inbox_free_bytes",
    "inbox_total_bytes",
    "preemptions",
    "max_step_tokens",
    "max_running_requests",
    "mixed_step_tokens",
    "mixed_step_s",
    "cache_block_tokens",
)
_KV_FIELDS = tuple([f.name for f in fields(KvCounters)])
_STEP_FIELDS = tuple([f.name for f in fields(StepRecord)])
# All at once: one by one they cost as much again as the messages.
_state_values, _kv_values, _step_values = attrgetter(*_STATE_FIELDS), attrgetter(*_KV_FIELDS), attrgetter(*_STEP_FIELDS)


def state_to_wire(state: EngineState, after_step: int = -1, after_change: int = -1) -> pb.State:
    """With the steps and the changes of the prefix cache numbered above these. The epoch travels once, in the hello."""
    steps = [pb.StepRecordMessage(**dict(zip(_STEP_FIELDS, _step_values(s), strict=True))) for s in state.steps if s.number > after_step]
    kv = pb.KvCountersMessage(**dict(zip(_KV_FIELDS, _kv_values(state.kv), strict=True)))
    changes = [
        pb.CacheChangeMessage(number=c.number, stored=c.stored, removed=c.removed, is_cleared=c.is_cleared)
        for c in state.cache_changes
        if c.number > after_change
    ]
    return pb.State(steps=steps, kv=kv, cache_changes=changes, **dict(zip(_STATE_FIELDS, _state_values(state), strict=True)))


def state_from_wire(m: pb.State, epoch: str) -> EngineState:
    steps = tuple([StepRecord(*_step_values(s)) for s in m.steps])
    kv = KvCounters(*_kv_values(m.kv))
    changes = tuple([CacheChange(c.number, tuple(c.stored), tuple(c.removed), c.is_cleared) for c in m.cache_changes])
    values = dict(zip(_STATE_FIELDS, _state_values(m), strict=True))
    return EngineState(epoch=epoch, steps=steps, kv=kv, cache_changes=changes, **values)
