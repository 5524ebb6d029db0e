"""What a plan is made for: a workload's requests as numbers, and the same requests sent at any rate. Pure."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from disagg.config import SloClass
from disagg.errors import ConfigError
from disagg.trace import Scaling, Trace, TraceRequest, scale

Numbers = NDArray[np.float64]

SAMPLED = 256  # requests that the screening looks at
_MOST_BURSTINESS = 20.0


@dataclass(frozen=True)
class Sample:
    """Some of the requests, evenly picked: [requests] each. Lengths in tokens, targets in seconds (inf: none asked)."""

    inputs: Numbers
    outputs: Numbers
    cached: Numbers  # prompt tokens that a prefix cache would save
    ttft_s: Numbers
    tpot_s: Numbers


@dataclass(frozen=True)
class Load:
    """`trace`: every request has a class of `classes`. `cached_share`: of prompt tokens, found in prefix caches, at best."""

    trace: Trace
    classes: tuple[SloClass, ...]
    cached_share: float = 0.0

    @property
    def rate_rps(self) -> float:
        return self.trace.mean_rate_rps

    @property
    def mean_input(self) -> float:
        return float(np.mean([r.input_tokens for r in self.trace.requests]))

    @property
    def mean_output(self) -> float:
        return float(np.mean([r.output_tokens for r in self.trace.requests]))

    @property
    def longest_tokens(self) -> int:
        """Prompt and answer of the longest request."""
        return max(r.input_tokens + r.output_tokens for r in self.trace.requests)

    @cached_property
    def burstiness(self) -> float:
        """Squared coefficient of variation of the gaps between arrivals: 1 for Poisson."""
        gaps = np.diff([r.arrival_s for r in self.trace.requests])
        if len(gaps) < 2 or gaps.mean() == 0:
            return 1.0
        return float(min(_MOST_BURSTINESS, np.var(gaps) / gaps.mean() ** 2))

    @cached_property
    def sample(self) -> Sample:
        requests = self.trace.requests
        picked = [requests[int(i)] for i in np.linspace(0, len(requests) - 1, min(SAMPLED, len(requests)))]
        by_name = {c.name: c for c in self.classes}
        targets = [by_name[r.slo_class or self.classes[0].name] for r in picked]
        inputs = np.array([r.input_tokens for r in picked], dtype=np.float64)
        return Sample(
            inputs=inputs,
            outputs=np.array([r.output_tokens for r in picked], dtype=np.float64),
            cached=np.floor(inputs * self.cached_share),
            ttft_s=np.array([t.ttft_s or math.inf for t in targets]),
            tpot_s=np.array([t.tpot_s or math.inf for t in targets]),
        )

    def sent(self, rate_rps: float, count: int) -> tuple[TraceRequest, ...]:
        """The first `count` requests at a mean rate of `rate_rps`, over and over where there are fewer. Bursts keep their shape."""
        requests = self.trace.requests
        period_s = self.trace.span_s + 1 / self.rate_rps
        factor = rate_rps / self.rate_rps
        rounds = itertools.chain.from_iterable(((turn, r) for r in requests) for turn in itertools.count())
        begin_s = requests[0].arrival_s
        chosen = itertools.islice(rounds, count)
        return tuple([replace(r, arrival_s=(r.arrival_s - begin_s + turn * period_s) / factor) for turn, r in chosen])


def load_of(trace: Trace, classes: tuple[SloClass, ...], max_context_tokens: int) -> Load:
    """Raises ConfigError for fewer than two instants, and for a request that the model's context does not hold (0: unknown)."""
    if len(trace.requests) < 2 or trace.span_s <= 0:
        raise ConfigError(key="workload", value=trace.name, expected="at least two requests at different instants")
    load = Load(trace, classes, cached_share(trace))
    if max_context_tokens and load.longest_tokens > max_context_tokens:
        over = sum(r.input_tokens + r.output_tokens > max_context_tokens for r in trace.requests)
        expected = (
            f"requests of at most {max_context_tokens:,} tokens, the model's context: {over:,} of {len(trace.requests):,} are longer, "
            f"up to {load.longest_tokens:,}; set max_total_tokens, or shorten the streams' lengths"
        )
        raise ConfigError(key="workload", value=trace.name, expected=expected)
    return load


def cached_share(trace: Trace) -> float:
    """Share of the prompt tokens that a request before had in the same place; 0 where the trace says nothing of prefixes."""
    seen: set[int] = set()
    cached = total = 0
    for request in trace.requests:
        total += request.input_tokens
        known = itertools.takewhile(seen.__contains__, request.prefix_hashes)
        cached += min(request.input_tokens - 1, sum(1 for _ in known) * trace.prefix_block_tokens)
        seen.update(request.prefix_hashes)
    return cached / total if total else 0.0


def stretched(load: Load, *, inputs: float = 1.0, outputs: float = 1.0) -> Load:
    """The same load with other lengths."""
    return replace(load, trace=scale(load.trace, Scaling(input_factor=inputs, output_factor=outputs)))


def with_cached(load: Load, share: float, block_tokens: int = 128) -> Load:
    """As if each prompt began with `share` of itself that all prompts share, in whole blocks of `block_tokens`."""

    def cached(r: TraceRequest) -> TraceRequest:
        return replace(r, prefix_hashes=tuple(range(int(r.input_tokens * share) // block_tokens)))

    trace = replace(load.trace, requests=tuple([cached(r) for r in load.trace.requests]), prefix_block_tokens=block_tokens)
    return replace(load, trace=trace, cached_share=cached_share(trace))
