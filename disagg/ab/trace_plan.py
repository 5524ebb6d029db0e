"""Trace workloads as the A/B sends them: the same four questions that workload.py answers for streams, for either kind of workload."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from disagg.ab import workload as streams
from disagg.ab.trace_workload import TraceWorkload, workload_trace
from disagg.ab.workload import MAX_REQUESTS, WARM_UP, PlannedRequest, Workload
from disagg.config import SloClass
from disagg.errors import ConfigError
from disagg.trace import Trace, TraceRequest

AnyWorkload = Workload | TraceWorkload
RATELESS = "a workload with a rate of its own (at least two requests at different instants), to scale it"


@dataclass(frozen=True, slots=True)
class PlannedTraceRequest(PlannedRequest):
    """A request of a trace. Its prompt is made block by block from the trace's identities, so that prompts share what they shared there."""

    prefix_hashes: tuple[int, ...] = ()
    prefix_block_tokens: int = 0

    def prompt_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Its token ids. Equal blocks within a round are equal tokens; without identities nothing is shared with any other prompt."""
        if not self.prefix_hashes:
            return super(PlannedTraceRequest, self).prompt_ids(vocab_size)
        ids = range(min(256, vocab_size // 2), vocab_size)
        tokens: list[int] = []
        for identity in self.prefix_hashes:
            block = random.Random(f"{self.seed}/{self.round}/{self.stream}/block/{identity}")
            tokens.extend(block.choices(ids, k=self.prefix_block_tokens))
        return tuple(tokens[: self.input_tokens])


def plan_round(workload: AnyWorkload, classes: Sequence[SloClass], seed: int, round_: int) -> tuple[PlannedRequest, ...]:
    """The requests of one round in the order of their due times. Every round of a trace has the same ones, with other prompts.

    Raises ConfigError.
    """
    if isinstance(workload, Workload):
        return streams.plan_round(workload, classes, seed, round_)
    trace = _trace(workload, tuple(classes), seed)
    return tuple(_planned(r, trace, seed, round_, i, r.arrival_s - trace.requests[0].arrival_s) for i, r in enumerate(trace.requests))


def plan_warm_up(workload: AnyWorkload, classes: Sequence[SloClass], seed: int, copies: int) -> tuple[PlannedRequest, ...]:
    """Short rehearsal: `copies` each of the shortest, the median and the longest request."""
    if isinstance(workload, Workload):
        return streams.plan_warm_up(workload, classes, seed, copies)
    trace = _trace(workload, tuple(classes), seed)
    ordered = sorted(trace.requests, key=lambda r: (r.input_tokens, r.output_tokens))
    kinds = dict.fromkeys((ordered[0], ordered[len(ordered) // 2], ordered[-1]))
    bare = [TraceRequest(0.0, r.input_tokens, r.output_tokens, r.slo_class) for r in kinds]
    chosen = [(r, float(kind * copies)) for kind, r in enumerate(bare) for _ in range(copies)]
    return tuple(_planned(r, trace, seed, WARM_UP, i, due_s) for i, (r, due_s) in enumerate(chosen))


def check_workload(workload: AnyWorkload, classes: Sequence[SloClass], max_model_len: int | None) -> None:
    """That every request can be served: its class is known, and it fits the context. Raises ConfigError."""
    if isinstance(workload, Workload):
        streams.check_workload(workload, classes, max_model_len)
        return
    trace = _trace(workload, tuple(classes), workload.seed)
    if len(trace.requests) > MAX_REQUESTS:
        raise ConfigError(key="trace.window_s", value=workload.trace.window_s, expected=f"a window of at most {MAX_REQUESTS:,} requests")
    longest = max(trace.requests, key=lambda r: r.input_tokens + r.output_tokens)
    if max_model_len is not None and longest.input_tokens + longest.output_tokens > max_model_len:
        expected = (
            f"at most {max_model_len}: a request of {longest.input_tokens} tokens in and {longest.output_tokens} out does not fit the "
            "model's context; clip or drop longer ones"
        )
        raise ConfigError(key="trace.max_total_tokens", value=workload.trace.max_total_tokens, expected=expected)


def mean_rate_rps(workload: AnyWorkload, classes: Sequence[SloClass]) -> float:
    """Mean requests per second that the workload asks for, as it is written. Raises ConfigError."""
    if isinstance(workload, Workload):
        return streams.mean_rate_rps(workload)
    return _trace(workload, tuple(classes), workload.seed).mean_rate_rps


def at_rate(workload: AnyWorkload, classes: Sequence[SloClass], rate_rps: float) -> AnyWorkload:
    """The workload with another mean rate. Streams send more or fewer requests in the same time; a trace sends the same ones in less or
    more time, so that its bursts keep their shape. Lengths stay. Raises ConfigError.
    """
    own = mean_rate_rps(workload, classes)
    if own <= 0:
        raise ConfigError(key="--rates", value=workload.name, expected=RATELESS)
    if isinstance(workload, Workload):
        return streams.faster(workload, rate_rps / own)
    source = workload.trace.model_copy(update={"rate_factor": workload.trace.rate_factor * rate_rps / own})
    return workload.model_copy(update={"trace": source})


def duration_s(workload: AnyWorkload, classes: Sequence[SloClass]) -> float:
    """How long one round sends."""
    if isinstance(workload, Workload):
        return workload.duration_s
    return _trace(workload, tuple(classes), workload.seed).span_s


@functools.lru_cache(maxsize=16)
def _trace(workload: TraceWorkload, classes: tuple[SloClass, ...], seed: int) -> Trace:
    return workload_trace(workload, classes, seed=seed)


def _planned(request: TraceRequest, trace: Trace, seed: int, round_: int, index: int, due_s: float) -> PlannedTraceRequest:
    assert request.slo_class is not None
    return PlannedTraceRequest(
        round=round_,
        index=index,
        stream="trace",
        slo_class=request.slo_class,
        due_s=round(due_s, 6),
        input_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        shared_prefix_tokens=0,
        ignore_eos=True,
        temperature=0.0,
        seed=str(seed),
        prefix_hashes=request.prefix_hashes,
        prefix_block_tokens=trace.prefix_block_tokens,
    )
