"""What several rates say together: goodput, the highest sustained rate with enough requests inside their class; and attainment. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from disagg.ab.measures import ATTAINMENT_OVER_RATES, attainment, row_meets
from disagg.ab.rows import Row
from disagg.ab.stats import DRIFT, Blocks, Effect, Statistic, Weights, difference, interval, time_blocks
from disagg.ab.verdict import Comparison, blocks_of, compare_measure, paired
from disagg.config import SloClass

LEVEL = 0.9
Bound = Literal["within", "at_least", "below"]


def goodput_rps(attainment: Mapping[float, float], level: float = LEVEL) -> tuple[float, Bound]:
    """Where attainment falls through `level`, by straight lines between the measured rates (requests/s).

    From the lightest rate on, the first crossing counts: a rate beyond an overload is not sustained. `at_least`: no rate failed, the
    highest is given. `below`: the lightest failed already; the line from (0, 1) to it is all that can be said.
    """
    previous, kept = 0.0, 1.0
    for rate in sorted(attainment):
        share = attainment[rate]
        if share < level:
            crossing = previous + (rate - previous) * (kept - level) / (kept - share)
            return crossing, "within" if previous > 0 else "below"
        previous, kept = rate, share
    return previous, "at_least"


class _Attainments:
    """One arm's attainment at each rate, as blocks are resampled."""

    def __init__(self, rows: Sequence[Row], classes: Sequence[SloClass], blocks: Blocks, level: float) -> None:
        by_name = {c.name: c for c in classes}
        judged = np.asarray([row.is_judged for row in rows], dtype=np.float64)
        met = np.asarray([row_meets(row, by_name[row.slo_class]) for row in rows], dtype=np.float64)
        self._met = np.bincount(blocks.of_request, weights=met * judged, minlength=blocks.count)
        self._sent = np.bincount(blocks.of_request, weights=judged, minlength=blocks.count)
        rates = np.zeros(blocks.count)
        rates[blocks.of_request] = [row.rate_rps or 0.0 for row in rows]
        self._of_rate = {float(rate): rates == rate for rate in np.unique(rates)}
        self._level = level

    def at(self, weights: Weights) -> dict[float, float]:
        """Attainment by rate; rates without a request in these blocks are absent."""
        found = {}
        for rate, own in self._of_rate.items():
            sent = float(weights[own] @ self._sent[own])
            if sent > 0:
                found[rate] = float(weights[own] @ self._met[own]) / sent
        return found

    def __call__(self, weights: Weights) -> float | None:
        """Goodput under these weights."""
        attainment = self.at(weights)
        return goodput_rps(attainment, self._level)[0] if attainment else None


def goodput_interval(rows: Sequence[Row], classes: Sequence[SloClass], level: float = LEVEL) -> tuple[Effect, Bound]:
    """One arm's goodput in requests/s with its 95 % interval. An interval ends at the highest rate that was measured.

    Where the lightest rate failed already, the interval is all that lies below it: the line to (0, 1) is no measurement.
    """
    durations = sorted(r.end_s - r.sent_s for r in rows)
    memory_s = durations[int(0.9 * (len(durations) - 1))]
    blocks = time_blocks([r.round for r in rows], [r.due_s for r in rows], memory_s, [r.rate_rps for r in rows])
    arm = _Attainments(rows, classes, blocks, level)
    found = interval(arm, blocks)
    assert found is not None
    attainment = arm.at(blocks.everything())
    bound = goodput_rps(attainment, level)[1]
    if bound == "below":
        return Effect(found.value, 0.0, max(found.high, min(attainment))), bound
    return Effect(found.value, max(0.0, found.low), min(found.high, max(attainment))), bound


def compare_goodput(
    first: Sequence[Row],
    second: Sequence[Row],
    classes: Sequence[SloClass],
    arms: tuple[str, str],
    *,
    level: float = LEVEL,
    family: int = 1,
    simulated: bool = False,
) -> Comparison | None:
    """Goodput of two arms over the requests that both were sent. Where both keep the level at every rate, no difference can show."""
    pairs = paired(first, second)
    if not pairs:
        return None
    sides = ([a for a, _ in pairs], [b for _, b in pairs])
    blocks = blocks_of(sides)
    ours, theirs = (_Attainments(side, classes, blocks, level) for side in sides)
    statistics: tuple[Statistic, Statistic] = (ours, theirs)
    effect = difference(*statistics, blocks, scale="ratio", drift=0.0 if simulated else DRIFT, family=family)
    values = (ours(blocks.everything()), theirs(blocks.everything()))
    if effect is None or values[0] is None or values[1] is None:
        return None
    is_shown = effect.excludes_zero and abs(effect.value) >= 0.05 * max(values[0], values[1])
    better = arms[0 if effect.value > 0 else 1] if is_shown else None
    return Comparison("goodput", None, "requests/s", arms, (values[0], values[1]), effect.low, effect.high, better)


def compare_attainment(
    first: Sequence[Row],
    second: Sequence[Row],
    classes: Sequence[SloClass],
    arms: tuple[str, str],
    *,
    family: int = 1,
    simulated: bool = False,
) -> Comparison | None:
    """Attainment of two arms over the requests of all rates.

    Goodput hangs on where one curve first falls through its level, which a single bad minute at a light rate moves far; this is known the
    better the more was measured, and says which curve lies higher.
    """
    pairs = paired(first, second)
    if not pairs:
        return None
    sides = ([a for a, _ in pairs], [b for _, b in pairs])
    measure = replace(attainment({c.name: c for c in classes}), name=ATTAINMENT_OVER_RATES)
    return compare_measure(measure, sides, blocks_of(sides), arms, family, 0.0 if simulated else DRIFT)
