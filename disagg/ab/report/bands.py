"""One arm's measures at each rate with their 95 % intervals. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disagg import slo
from disagg.ab.measures import Samples, attainment
from disagg.ab.rows import Row
from disagg.ab.stats import Pooled, interval
from disagg.ab.verdict import blocks_of
from disagg.config import SloClass


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
        effect = interval(pooled, blocks, num_samples=pooled.size)
        if effect is not None:
            low = max(effect.low, 0.0)
            high = min(effect.high, 1.0) if percent is None else effect.high
            found.append(Band(rate, effect.value * unit, low * unit, high * unit))
    return found
