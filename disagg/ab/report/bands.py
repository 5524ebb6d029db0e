"""One arm's measures at each rate with their 95 % intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disagg import slo
from disagg.ab.measures import Samples, attainment
from disagg.ab.rows import Row
from disagg.ab.stats import Pooled, Statistic, Weights, interval
from disagg.ab.verdict import blocks_of
from disagg.config import SloClass

_MOST_LOG = 300.0  # a band without an upper end stays a number


@dataclass(frozen=True, slots=True)
class Band:
    """A value at a rate, and its interval, all in the unit that is plotted."""

    rate_rps: float
    value: float
    low: float
    high: float


def by_rate(rows: Sequence[Row]) -> dict[float, list[Row]]:
    """Ascending rates; rows without one stand at 0."""
    found: dict[float, list[Row]] = {}
    for row in rows:
        found.setdefault(row.rate_rps or 0.0, []).append(row)
    return dict(sorted(found.items()))


def attainment_bands(rows: Sequence[Row], classes: Sequence[SloClass]) -> list[Band]:
    """Attainment in per cent."""
    measure = attainment({c.name: c for c in classes})
    return _bands(rows, measure.samples, None, 100.0)


def latency_bands(rows: Sequence[Row], samples: Samples, percents: Sequence[float]) -> Mapping[str, list[Band]]:
    """Percentiles in ms, by "p50" ...; a rate with too few samples is left out."""
    return {f"p{percent:g}": _bands(rows, samples, percent, 1e3) for percent in percents}


def _bands(rows: Sequence[Row], samples: Samples, percent: float | None, unit: float) -> list[Band]:
    found = []
    for rate, own in by_rate(rows).items():
        blocks = blocks_of([own])
        pooled = Pooled([samples(row) for row in own], blocks.of_request, percent)
        if percent is not None and not slo.enough(pooled.size, percent):
            continue
        effect = interval(pooled if percent is None else _logarithm(pooled), blocks, num_samples=pooled.size)
        if effect is None:
            continue
        if percent is None:
            value, low, high = effect.value, max(effect.low, 0.0), min(effect.high, 1.0)
        else:  # as the verdict does: noise of a latency is alike at all sizes, and none is below zero
            value, low, high = (math.exp(min(x, _MOST_LOG)) for x in (effect.value, effect.low, effect.high))
        found.append(Band(rate, value * unit, low * unit, high * unit))
    return found


def _logarithm(pooled: Pooled) -> Statistic:
    def log_of(weights: Weights) -> float | None:
        value = pooled(weights)
        return math.log(value) if value is not None and value > 0 else None

    return log_of
