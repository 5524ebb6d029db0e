"""The vocabulary as protobuf messages of worker.proto, and back. No I/O."""

from __future__ import annotations

import time

from disagg.errors import DisaggError, from_wire, to_wire
from disagg.pb import worker_pb2 as pb
from disagg.types import Chunk, EngineState, FinishReason, KvAddress, Prefilled, Request, Sampling, Token, TopLogprob, Transfer

# Numbers of FinishReason in inference.proto; 0 means that the request goes on.
_FINISH_TO_WIRE = {None: 0, FinishReason.STOP: 1, FinishReason.LENGTH: 2}
_FINISH_FROM_WIRE = {number: reason for reason, number in _FINISH_TO_WIRE.items()}


def sampling_to_wire(s: Sampling) -> pb.SamplingMessage:
    """`stop` strings stay at the gateway: text is made there."""
    return pb.SamplingMessage(
        max_tokens=s.max_tokens,
        min_tokens=s.min_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=max(0, s.top_k),
        min_p=s.min_p,
        seed=s.seed,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        stop_token_ids=s.stop_token_ids,
        ignore_eos=s.ignore_eos,
        logprobs=s.logprobs,
    )


def sampling_from_wire(m: pb.SamplingMessage) -> Sampling:
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
    )


def request_to_wire(request: Request) -> pb.RequestMessage:
    """Instants do not cross the wire: the gateway keeps arrival and deadline."""
    return pb.RequestMessage(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        prior_output=request.prior_output,
        sampling=sampling_to_wire(request.sampling),
        slo_class=request.slo_class,
        priority=request.priority,
    )


def request_from_wire(m: pb.RequestMessage) -> Request:
    """`arrival_s` is the arrival at this worker, on its own clock."""
    return Request(
        request_id=m.request_id,
        prompt_token_ids=tuple(m.prompt_token_ids),
        sampling=sampling_from_wire(m.sampling),
        slo_class=m.slo_class,
        priority=m.priority,
        arrival_s=time.monotonic(),
        prior_output=tuple(m.prior_output),
    )


def transfer_to_wire(transfer: Transfer) -> pb.TransferMessage:
    source = transfer.source
    return pb.TransferMessage(
        transfer_id=transfer.transfer_id,
        attempt=transfer.attempt,
        source_worker=source.worker,
        source_epoch=source.epoch,
        source_host_id=source.host_id,
        source_endpoints=dict(source.endpoints),
        num_tokens=transfer.num_tokens,
        token_hash=transfer.token_hash,
    )


def transfer_from_wire(m: pb.TransferMessage) -> Transfer:
    source = KvAddress(m.source_worker, m.source_epoch, m.source_host_id, tuple(m.source_endpoints.items()))
    return Transfer(m.transfer_id, m.attempt, source, m.num_tokens, m.token_hash)


def token_to_wire(token: Token) -> pb.StepToken:
    if token.logprob is None:
        return pb.StepToken(id=token.token_id)
    top = [pb.StepTopLogprob(id=t.token_id, logprob=t.logprob) for t in token.top]
    return pb.StepToken(id=token.token_id, logprob=token.logprob, top=top)


def token_from_wire(m: pb.StepToken) -> Token:
    if not m.HasField("logprob"):
        return Token(m.id)
    return Token(m.id, m.logprob, tuple(TopLogprob(t.id, t.logprob) for t in m.top))


def prefilled_to_wire(prefilled: Prefilled) -> pb.PrefillReply:
    return pb.PrefillReply(
        first=token_to_wire(prefilled.first), finish=_FINISH_TO_WIRE[prefilled.finish], cached_tokens=prefilled.cached_tokens
    )


def prefilled_from_wire(m: pb.PrefillReply) -> Prefilled:
    return Prefilled(token_from_wire(m.first), _FINISH_FROM_WIRE[m.finish], m.cached_tokens)


def chunk_to_wire(key: str, chunk: Chunk) -> pb.RequestStep:
    return pb.RequestStep(request_key=key, tokens=[token_to_wire(t) for t in chunk.tokens], finish=_FINISH_TO_WIRE[chunk.finish])


def chunk_from_wire(m: pb.RequestStep) -> Chunk:
    return Chunk(tuple([token_from_wire(t) for t in m.tokens]), _FINISH_FROM_WIRE[m.finish])


def error_to_wire(key: str, error: DisaggError) -> pb.RequestStep:
    return pb.RequestStep(request_key=key, error=to_wire(error))


def error_from_wire(m: pb.RequestStep) -> DisaggError:
    return from_wire(m.error)


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
)


def state_to_wire(state: EngineState) -> pb.State:
    """The epoch travels once, in the hello."""
    return pb.State(**{name: getattr(state, name) for name in _STATE_FIELDS})


def state_from_wire(m: pb.State, epoch: str) -> EngineState:
    return EngineState(epoch=epoch, **{name: getattr(m, name) for name in _STATE_FIELDS})
