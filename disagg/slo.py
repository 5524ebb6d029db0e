"""The measures, defined once. Pure functions of instants and counts; every report, test and simulator takes them from here.

    TTFT         first output token received by the client minus request sent: network, queue and prefill
    ITL          gap between two consecutive output tokens of one request; n tokens have n - 1 gaps
    TPOT         (last token - first token) / (output tokens - 1); undefined for one token, and then not counted
    E2E          last token - sent; equals TTFT + TPOT x (output tokens - 1)
    attainment   share of *sent* requests that finished whole with TTFT and TPOT inside their class; a rejected, failed or cut answer misses
    throughput   output tokens of whole answers per second of the window
    concurrency  L = lambda x W (Little): requests per second times mean seconds in the system

Instants are seconds on one clock (`token_s`: when each output token was received, ascending); results are seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


def ttft_s(sent_s: float, token_s: Sequence[float]) -> float | None:
    """Time to first token; None when none came."""
    return token_s[0] - sent_s if token_s else None


def itl_s(token_s: Sequence[float]) -> tuple[float, ...]:
    """The gaps between consecutive tokens. Tokens that arrive in one message have a gap of 0."""
    return tuple(later - earlier for earlier, later in itertools.pairwise(token_s))


def tpot_s(token_s: Sequence[float]) -> float | None:
    """Mean time per output token after the first; None for fewer than two tokens."""
    return (token_s[-1] - token_s[0]) / (len(token_s) - 1) if len(token_s) > 1 else None


def e2e_s(sent_s: float, token_s: Sequence[float]) -> float | None:
    """From sent to the last token; None when none came."""
    return token_s[-1] - sent_s if token_s else None


def meets(*, whole: bool, ttft: float | None, tpot: float | None, ttft_target: float | None, tpot_target: float | None) -> bool:
    """Whether one request is inside its class. All in seconds; an absent target asks nothing.

    `whole`: it ended with a complete answer. An undefined TPOT (one token) is not held against it.
    """
    if not whole or ttft is None:
        return False
    in_ttft = ttft_target is None or ttft <= ttft_target
    in_tpot = tpot_target is None or tpot is None or tpot <= tpot_target
    return in_ttft and in_tpot


def attainment(num_met: int, num_sent: int) -> float | None:
    """Share of sent requests that met their class, 0 to 1; None when nothing was sent."""
    return num_met / num_sent if num_sent else None


def rate_per_s(count: float, span_s: float) -> float | None:
    """Tokens or requests per second of a window; None for an empty window."""
    return count / span_s if span_s > 0 else None


def little(arrivals_per_s: float, mean_in_system_s: float) -> float:
    """Mean number of requests in the system by Little's law, L = lambda x W."""
    return arrivals_per_s * mean_in_system_s


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """The `percent`-th percentile, by linear interpolation between order statistics (Hyndman-Fan type 7, numpy's default).

    None when fewer than 100 / (100 - percent) samples are there, that is when less than one of them is expected beyond the percentile:
    p50 needs 2, p90 10, p95 20, p99 100, p99.9 1,000. A tail read off fewer samples is their maximum under another name.
    """
    return _sorted_percentile(sorted(samples), percent)


def enough(count: int, percent: float) -> bool:
    """Whether `count` samples are enough for that percentile (see percentile)."""
    return count * (100 - percent) >= 100 - 1e-6


def _sorted_percentile(ordered: Sequence[float], percent: float) -> float | None:
    if not 0 < percent < 100:
        raise ValueError(f"percent: got {percent}, expected above 0 and below 100")
    count = len(ordered)
    if not enough(count, percent):
        return None
    position = (count - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, count - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Summary:
    """A distribution in a few numbers, in the unit of its samples. A percentile is None where the samples are too few for it."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    p999: float | None
    max: float | None


def summarise(samples: Sequence[float]) -> Summary:
    """Mean, percentiles and maximum of `samples`, in any order."""
    ordered = sorted(samples)
    p50, p90, p95, p99, p999 = (_sorted_percentile(ordered, percent) for percent in (50, 90, 95, 99, 99.9))
    mean = math.fsum(ordered) / len(ordered) if ordered else None
    return Summary(len(ordered), mean, p50, p90, p95, p99, p999, ordered[-1] if ordered else None)
