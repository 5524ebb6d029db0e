"""Goodput: the highest rate at which the wanted share of requests is inside its class, found by bisection. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from disagg.errors import ConfigError

MOST_PROBES = 40


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate that was tried, in the caller's unit, and the share of requests inside their class."""

    rate: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """`rate`: the highest that was seen to hold, 0 when none did. `failing_rate`: the lowest above it that did not (None: not found).

    `probes` in the order in which they were tried.
    """

    rate: float
    failing_rate: float | None
    probes: tuple[Probe, ...]


def find_goodput(
    attainment: Callable[[float], float],
    *,
    start: float,
    level: float = 0.9,
    tolerance: float = 0.01,
    enough: float | None = None,
) -> Goodput:
    """The highest rate with `attainment(rate) >= level`, to within a factor of 1 + `tolerance`.

    `start`: where to begin looking; the nearer, the fewer probes. `enough`: stop as soon as the goodput is known to be below it (only
    whether an arm beats another is asked). Attainment is taken to fall with the rate; where it wobbles, one crossing is found.
    """
    if not (start > 0 and math.isfinite(start)):
        raise ConfigError(key="start", value=start, expected="a rate above 0")
    if not 0 < level <= 1:
        raise ConfigError(key="level", value=level, expected="a share above 0, at most 1")
    if not tolerance > 0:
        raise ConfigError(key="tolerance", value=tolerance, expected="a number above 0")
    probes: list[Probe] = []

    def holds(rate: float) -> bool:
        probes.append(Probe(rate, attainment(rate)))
        return probes[-1].attainment >= level

    low, high = _bracket(holds, start)
    while high is not None and low > 0 and high / low > 1 + tolerance and len(probes) < MOST_PROBES:
        if enough is not None and high < enough:
            break
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return Goodput(low, high, tuple(probes))


def _bracket(holds: Callable[[float], bool], start: float) -> tuple[float, float | None]:
    """A rate that holds (0: none found) and one above it that does not (None: none found), by growing steps from `start`."""
    step = 1.15
    if holds(start):
        low = start
        for _ in range(MOST_PROBES // 2):
            high = low * step
            if not holds(high):
                return low, high
            low, step = high, min(2.0, step**1.5)
        return low, None
    high = start
    for _ in range(MOST_PROBES // 2):
        low = high / step
        if holds(low):
            return low, high
        high, step = low, min(2.0, step**1.5)
    return 0.0, high
