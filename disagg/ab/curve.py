"""Latency against throughput of one arm: three regions, the knee, and where to operate. Pure.

The knee is where power = throughput / mean time in system is largest (Kleinrock 1979, Power and Deterministic Rules of Thumb for
Probabilistic Problems in Computer Communications; Jain 1991, The Art of Computer Systems Performance Analysis, section 3.3). Up to it
more load costs little latency (`light`); beyond it latency pays for each further request (`saturating`); where further work that is asked
for brings less than half of the throughput that it brought at light load, the system is `overloaded`. Work is counted in output tokens: a
short round has more or fewer requests, and longer or shorter ones, than its rate says. The recommended concurrency is that of the knee, or
of the goodput where the SLO is lost before the knee: by Little's law, what a concurrency limit has to let in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Region = Literal["light", "saturating", "overloaded"]
METHOD = (
    "knee: largest throughput / mean time in system (Kleinrock 1979; Jain 1991, 3.3); overloaded: of further tokens asked for, under half "
    "of the share comes that came at light load; recommended: the lower rate of knee and goodput"
)
_LEAST_POINTS = 3
_LEAST_GAIN = 0.5


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One rate as measured: requests/s offered, output tokens/s, mean seconds in the system, mean requests in the system.

    `asked_tokens_per_s`: what the requests asked for while they were sent; None where it is not known, then requests count.
    """

    rate_rps: float
    tokens_per_s: float
    mean_in_system_s: float
    concurrency: float
    asked_tokens_per_s: float | None = None

    @property
    def power(self) -> float:
        """Throughput per second of latency."""
        return self.tokens_per_s / self.mean_in_system_s if self.mean_in_system_s > 0 else 0.0


def regions(points: Sequence[LoadPoint]) -> list[Region]:
    """The region of each point, ascending rates. Fewer than three points have no knee: what is not overloaded counts as light."""
    knee = knee_of(points)
    last_light = knee.rate_rps if knee is not None else math.inf
    asked = [p.asked_tokens_per_s for p in points]
    work = [p.rate_rps if None in asked else a or 0.0 for p, a in zip(points, asked, strict=True)]
    at_light = points[0].tokens_per_s / work[0] if work and work[0] > 0 else 0.0
    found: list[Region] = []
    for i, point in enumerate(points):
        # Output tokens/s that further work brought, by that work.
        more = work[i] - work[i - 1] if i else 0.0
        gain = (point.tokens_per_s - points[i - 1].tokens_per_s) / more if more > 0 else math.inf
        overloaded = "overloaded" in found or gain < _LEAST_GAIN * at_light
        found.append("overloaded" if overloaded else "light" if point.rate_rps <= last_light else "saturating")
    return found


def knee_of(points: Sequence[LoadPoint]) -> LoadPoint | None:
    """The point of greatest power; None for fewer than three points, where nothing was completed, or when it is the highest rate: the knee
    lies beyond that."""
    if len(points) < _LEAST_POINTS:
        return None
    best = max(points, key=lambda p: p.power)
    return None if best.rate_rps == points[-1].rate_rps or best.power <= 0 else best


def concurrency_at(points: Sequence[LoadPoint], rate_rps: float) -> float:
    """Mean requests in the system at a rate, by straight lines from (0, 0) through the points; beyond them, the last one's."""
    previous_rate, previous = 0.0, 0.0
    for point in points:
        if rate_rps <= point.rate_rps:
            share = (rate_rps - previous_rate) / (point.rate_rps - previous_rate)
            return previous + (point.concurrency - previous) * share
        previous_rate, previous = point.rate_rps, point.concurrency
    return previous
