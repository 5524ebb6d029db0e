"""What several rates say together: goodput, the highest sustained rate with enough requests inside their class; and attainment. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from disagg.ab.measures import ATTAINMENT_OVER_RATES, SHARE_FLOOR, attainment, row_meets
from disagg.ab.rows import Row
from disagg.ab.stats import DRIFT, Blocks, Effect, Statistic, Weights, difference, interval, of_turns, time_blocks
from disagg.ab.verdict import Comparison, blocks_of, compare_measure, paired
from disagg.config import SloClass

LEVEL = 0.9
Bound = Literal["within", "at_least", "below"]


def goodput_rps(attainment: Mapping[float, float], level: float = LEVEL, sent: Mapping[float, float] | None = None) -> tuple[float, Bound]:
    """Where attainment falls through `level`, by straight lines between the measured rates (requests/s).

    More load cannot help: attainment is made non-increasing first (`sent`: requests at each rate, which a rate weighs by), so that two
    late ones of twenty at the lightest rate do not decide alone. From there on the first crossing counts: a rate beyond an overload is
    not sustained. `at_least`: no rate failed, the highest is given. `below`: the lightest failed already; the line from (0, 1) to it is
    all that can be said.
    """
    previous, kept = 0.0, 1.0
    for rate, share in _non_increasing(attainment, sent).items():
        if share < level:
            crossing = previous + (rate - previous) * (kept - level) / (kept - share)
            return crossing, "within" if previous > 0 else "below"
        previous, kept = rate, share
    return previous, "at_least"


def _non_increasing(attainment: Mapping[float, float], sent: Mapping[float, float] | None) -> dict[float, float]:
    """The nearest values, by least squares, that never rise with the rate: pool adjacent violators (Ayer et al. 1955)."""
    pools: list[tuple[float, float, list[float]]] = []  # share, weight, rates
    for rate in sorted(attainment):
        share, weight, rates = attainment[rate], 1.0 if sent is None else sent[rate], [rate]
        while pools and pools[-1][0] < share:
            before, its_weight, its_rates = pools.pop()
            share = (before * its_weight + share * weight) / (its_weight + weight)
            weight, rates = its_weight + weight, its_rates + rates
        pools.append((share, weight, rates))
    return {rate: share for share, _, rates in pools for rate in rates}


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

    def goodput(self, weights: Weights) -> tuple[float, Bound] | None:
        """Goodput under these weights; None without a request. Rates without a request in these blocks are left out."""
        sent = {rate: n for rate, own in self._of_rate.items() if (n := float(weights[own] @ self._sent[own])) > 0}
        met = {rate: float(weights[own] @ self._met[own]) for rate, own in self._of_rate.items() if rate in sent}
        return goodput_rps({rate: met[rate] / n for rate, n in sent.items()}, self._level, sent) if sent else None

    def rates(self) -> list[float]:
        """Those with a request, ascending."""
        return sorted(rate for rate, own in self._of_rate.items() if self._sent[own].sum() > 0)

    def __call__(self, weights: Weights) -> float | None:
        """The rate of `goodput`."""
        found = self.goodput(weights)
        return None if found is None else found[0]


def goodput_interval(rows: Sequence[Row], classes: Sequence[SloClass], level: float = LEVEL) -> tuple[Effect, Bound]:
    """One arm's goodput in requests/s with its 95 % interval. An interval ends at the highest rate that was measured.

    Where the lightest rate failed already, the interval is all that lies below it: the line to (0, 1) is no measurement.
    """
    durations = sorted(r.end_s - r.sent_s for r in rows)
    memory_s = durations[int(0.9 * (len(durations) - 1))]
    blocks = time_blocks([r.round for r in rows], [r.due_s for r in rows], memory_s, [r.rate_rps for r in rows])
    arm = _Attainments(rows, classes, blocks, level)
    found, whole, rates = interval(arm, blocks), arm.goodput(blocks.everything()), arm.rates()
    assert found is not None
    assert whole is not None
    if whole[1] == "below":
        return Effect(found.value, 0.0, min(max(found.high, rates[0]), rates[-1])), "below"
    return Effect(found.value, max(0.0, found.low), min(found.high, rates[-1])), whole[1]


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
    better the more was measured, and says which curve lies higher. On a machine the interval is of_turns: what happens in one turn hits
    many of its requests, the more the nearer to saturation.
    """
    pairs = paired(first, second)
    if not pairs:
        return None
    measure = replace(attainment({c.name: c for c in classes}), name=ATTAINMENT_OVER_RATES)
    if simulated:
        sides = ([a for a, _ in pairs], [b for _, b in pairs])
        return compare_measure(measure, sides, blocks_of(sides), arms, family, 0.0)
    met = [((a.rate_rps, a.round), measure.samples(a)[0], measure.samples(b)[0]) for a, b in pairs if a.is_judged and b.is_judged]
    if not met:
        return None
    turns: dict[tuple[float | None, int], list[float]] = {}
    for turn, ours, theirs in met:
        turns.setdefault(turn, []).append(ours - theirs)
    values = (sum(ours for _, ours, _ in met) / len(met), sum(theirs for _, _, theirs in met) / len(met))
    effect = of_turns(list(turns.values()), family=family)
    is_shown = effect is not None and effect.excludes_zero and abs(effect.value) >= SHARE_FLOOR
    better = arms[0 if values[0] > values[1] else 1] if is_shown else None
    low, high = (None, None) if effect is None else (max(-1.0, effect.low), min(1.0, effect.high))
    return Comparison(measure.name, None, measure.unit, arms, values, low, high, better)
