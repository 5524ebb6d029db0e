"""Which arm to choose, from the rows of both. Pure.

Two arms, the first and the second, got the same requests, so requests are compared in pairs. A difference counts when (1) the 95 %
bootstrap interval of the difference, requests resampled as pairs, lies on one side of zero; (2) it is larger than what nobody would
act on (`floor`: 2 points of attainment, 5 % of a latency); (3) no round shows the opposite. Measures decide in a fixed order: SLO
attainment (of all requests, then of the classes, where those that differ agree), the tail of the inter-token gaps, TPOT, TTFT,
throughput. The first that differs chooses the arm; the reason also says what that arm does worse. When none differs, the verdict is
"either".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from disagg import slo
from disagg.ab.result import row_meets
from disagg.ab.rows import Row, span_s
from disagg.config import SloClass

Unit = Literal["share", "s", "tokens/s"]
Pair = tuple[Row, Row]  # (first, second) arm's row of one request
Samples = Sequence[Sequence[float]]  # per request, its samples

RESAMPLES = 400
_MOST_SAMPLES = 50_000_000  # drawn in all, over the resamples of one measure: what a second can do


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of both arms. `low` and `high`: 95 % interval of first - second. `better`: None when no difference is shown.

    `arms` and `values`: first, second. `slo_class`: None for all requests together.
    """

    measure: str
    slo_class: str | None
    unit: Unit
    arms: tuple[str, str]
    values: tuple[float, float]
    low: float
    high: float
    better: str | None

    def value(self, arm: str) -> float:
        return self.values[self.arms.index(arm)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`choose`: an arm, or "either". `reason`: plain words with the numbers."""

    choose: str
    reason: str
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True, slots=True)
class _Measure:
    """What is compared, of what each request contributes (a failed one contributes no latency): a percentile, or the mean for None."""

    name: str
    slo_class: str | None
    unit: Unit
    samples: Callable[[Row], Sequence[float]]
    percent: float | None
    higher_is_better: bool
    floor: Callable[[float, float], float]


def judge(
    first: Sequence[Row], second: Sequence[Row], classes: Sequence[SloClass], arms: tuple[str, str] = ("disagg", "colocated")
) -> Verdict:
    """The verdict on all rows of two arms. `arms`: their names."""
    pairs = _paired(first, second)
    comparisons = [c for m in _measures(pairs, {c.name: c for c in classes}) if (c := _compare(m, pairs, arms)) is not None]
    throughput = _compare_throughput(first, second, arms)
    return decide(comparisons if throughput is None else [*comparisons, throughput])


def decide(comparisons: Sequence[Comparison]) -> Verdict:
    """Choose by the first measure that differs, and say what the choice costs."""
    overall = [c for c in comparisons if c.slo_class is None]
    by_class = [c for c in comparisons if c.slo_class is not None and c.better is not None]
    chosen = _deciding(overall, by_class)
    names = comparisons[0].arms if comparisons else ("disagg", "colocated")
    arm = chosen or names[0]
    same = _listed([c for c in overall if c.better is None], arm)
    if chosen is None:
        reason = (
            f"No difference beyond the noise over all requests ({names[0]} against {names[1]}): {same or 'none completed in both arms'}."
        )
        for name in names:
            own = [c for c in by_class if c.better == name]
            reason += f" {name.capitalize()} is better in {_listed(own, name)}." if own else ""
        return Verdict("either", reason, tuple(comparisons))
    reason = f"{arm.capitalize()} is better in {_listed([c for c in (*overall, *by_class) if c.better == arm], arm)}."
    worse = _listed([c for c in (*overall, *by_class) if c.better not in (arm, None)], arm)
    reason += f" It is worse in {worse}." if worse else ""
    reason += f" Within the noise of this run: {same}." if same else ""
    return Verdict(arm, reason, tuple(comparisons))


def _deciding(overall: Sequence[Comparison], by_class: Sequence[Comparison]) -> str | None:
    """The arm that the first differing measure favours: attainment of all; of classes, where those that differ agree; then the others."""
    attainments = [c for c in (*overall[:1], *by_class) if c.unit == "share" and c.better is not None]
    favoured = {c.better for c in attainments}
    if overall and overall[0].better is not None:
        return overall[0].better
    if len(favoured) == 1:
        return attainments[0].better
    return next((c.better for c in overall if c.better is not None), None)


def _listed(comparisons: Sequence[Comparison], arm: str) -> str:
    """`ITL p99.9 (48 ms against 410 ms), ...`, the value of `arm` first."""
    return ", ".join(_told(c, arm) for c in comparisons)


def _told(c: Comparison, arm: str) -> str:
    other = c.arms[1 - c.arms.index(arm)]
    name = f"{c.slo_class} {c.measure}" if c.slo_class else c.measure
    return f"{name} ({_shown(c.value(arm), c.unit)} against {_shown(c.value(other), c.unit)})"


def _paired(first: Sequence[Row], second: Sequence[Row]) -> list[Pair]:
    other = {(r.round, r.index): r for r in second}
    return [(r, other[key]) for r in first if (key := (r.round, r.index)) in other]


def _measures(pairs: Sequence[Pair], classes: Mapping[str, SloClass]) -> list[_Measure]:
    """What is compared, most important first: over all requests, then over each class where there are several."""
    present = list(dict.fromkeys(pair[0].slo_class for pair in pairs))
    measures = [
        _attainment(classes, None),
        *_tail(pairs, "ITL", _gaps, (99.9, 99, 95), 0.002),
        *_tail(pairs, "TPOT", _tpot, (95, 90, 50), 0.001),
        *_tail(pairs, "TTFT", _ttft, (95, 90, 50), 0.005),
    ]
    for name in present if len(present) > 1 else []:
        measures += [
            _attainment(classes, name),
            *_tail(pairs, "ITL", _gaps, (99.9, 99, 95), 0.002, name),
            *_tail(pairs, "TTFT", _ttft, (50,), 0.005, name),
            *_tail(pairs, "TTFT", _ttft, (95, 90), 0.005, name),
        ]
    return measures


def _attainment(classes: Mapping[str, SloClass], slo_class: str | None) -> _Measure:
    def met(row: Row) -> Sequence[float]:
        return (float(row_meets(row, classes[row.slo_class])),)

    targeted = any(c.ttft_s is not None or c.tpot_s is not None for c in classes.values())
    name = "SLO attainment" if targeted else "share completed"
    return _Measure(name, slo_class, "share", _of_class(met, slo_class), None, True, lambda _a, _b: 0.02)


def _tail(
    pairs: Sequence[Pair],
    name: str,
    samples: Callable[[Row], Sequence[float]],
    percents: Sequence[float],
    floor_s: float,
    slo_class: str | None = None,
) -> list[_Measure]:
    """The first of `percents` for which both arms have samples enough; none when there is none."""
    own = _of_class(samples, slo_class)
    percent = next((p for p in percents if all(_enough(own, [pair[arm] for pair in pairs], p) for arm in (0, 1))), None)
    if percent is None:
        return []
    return [_Measure(f"{name} p{percent:g}", slo_class, "s", own, percent, False, lambda a, b: max(floor_s, 0.05 * min(a, b)))]


def _of_class(samples: Callable[[Row], Sequence[float]], slo_class: str | None) -> Callable[[Row], Sequence[float]]:
    return lambda row: samples(row) if slo_class is None or row.slo_class == slo_class else ()


def _gaps(row: Row) -> Sequence[float]:
    return row.itl_s if row.is_whole else ()


def _tpot(row: Row) -> Sequence[float]:
    seconds = row.tpot_s if row.is_whole else None
    return () if seconds is None else (seconds,)


def _ttft(row: Row) -> Sequence[float]:
    seconds = row.ttft_s if row.is_whole else None
    return () if seconds is None else (seconds,)


def _enough(samples: Callable[[Row], Sequence[float]], rows: Sequence[Row], percent: float) -> bool:
    pooled = [x for row in rows for x in samples(row)]
    return slo.percentile(pooled, percent) is not None


class _Pooled:
    """One arm's samples of a measure, sorted once; a resample only changes how often each request counts."""

    def __init__(self, measure: _Measure, rows: Sequence[Row]) -> None:
        each = [np.asarray(measure.samples(row), dtype=np.float64) for row in rows]
        values = np.concatenate(each) if each else np.empty(0)
        owners = np.repeat(np.arange(len(each)), [a.size for a in each])  # the place of each sample's request in `rows`
        order = np.argsort(values, kind="stable")
        self._values, self._owners = values[order], owners[order]
        self._percent = measure.percent
        self.size = int(values.size)

    def statistic(self, times: np.ndarray) -> float | None:
        """The measure when request i counts `times[i]` times; None when no sample is left. Percentiles as in slo.percentile."""
        weights = times[self._owners]
        upto = np.cumsum(weights)
        if not upto.size or upto[-1] == 0:
            return None
        if self._percent is None:
            return float(weights @ self._values / upto[-1])
        position = (int(upto[-1]) - 1) * self._percent / 100
        below = int(position)
        first, second = self._values[np.searchsorted(upto, [below, min(below + 1, int(upto[-1]) - 1)], side="right")]
        return float(first + (second - first) * (position - below))


def _compare(measure: _Measure, pairs: Sequence[Pair], names: tuple[str, str]) -> Comparison | None:
    """Bootstrap one measure; None when an arm has no sample of it."""
    arms = [_Pooled(measure, [pair[arm] for pair in pairs]) for arm in (0, 1)]
    ours, theirs = (arm.statistic(np.ones(len(pairs), dtype=np.int64)) for arm in arms)
    if ours is None or theirs is None:
        return None
    low, high = (float(x) for x in np.percentile(_resampled_differences(arms, len(pairs)), (2.5, 97.5)))
    difference = ours - theirs
    shown = (low > 0 or high < 0) and abs(difference) >= measure.floor(ours, theirs)
    shown = shown and not _contradicted(measure, arms, pairs, difference)
    first_better = (difference > 0) == measure.higher_is_better
    better = names[0 if first_better else 1] if shown else None
    return Comparison(measure.name, measure.slo_class, measure.unit, names, (ours, theirs), low, high, better)


def _resampled_differences(arms: Sequence[_Pooled], num_pairs: int) -> list[float]:
    """Differences of the measure over resampled pairs of requests, with a fixed seed: the same rows give the same verdict."""
    rng = np.random.default_rng(0)
    num_samples = sum(arm.size for arm in arms)
    differences = []
    for _ in range(max(50, min(RESAMPLES, _MOST_SAMPLES // max(1, num_samples)))):
        times = np.bincount(rng.integers(0, num_pairs, num_pairs), minlength=num_pairs)
        ours, theirs = (arm.statistic(times) for arm in arms)
        if ours is not None and theirs is not None:
            differences.append(ours - theirs)
    return differences or [0.0]


def _contradicted(measure: _Measure, arms: Sequence[_Pooled], pairs: Sequence[Pair], difference: float) -> bool:
    """Whether a round shows a clear difference of the opposite sign."""
    rounds = np.asarray([pair[0].round for pair in pairs])
    for number in np.unique(rounds):
        ours, theirs = (arm.statistic((rounds == number).astype(np.int64)) for arm in arms)
        if ours is None or theirs is None:
            continue
        if (ours - theirs) * difference < 0 and abs(ours - theirs) >= measure.floor(ours, theirs):
            return True
    return False


def _compare_throughput(first: Sequence[Row], second: Sequence[Row], names: tuple[str, str]) -> Comparison | None:
    """Output tokens/s; the interval is the spread over rounds, and a difference counts from 5 % on when all rounds (two at least) agree."""
    per_round = []
    for number in sorted({r.round for r in first} & {r.round for r in second}):
        ours, theirs = (_tokens_per_s([r for r in rows if r.round == number]) for rows in (first, second))
        per_round.append(ours - theirs)
    if not per_round:
        return None
    ours, theirs = _tokens_per_s(first), _tokens_per_s(second)
    agree = len(per_round) > 1 and (min(per_round) > 0 or max(per_round) < 0)
    shown = agree and abs(ours - theirs) >= 0.05 * max(ours, theirs)
    better = names[0 if ours > theirs else 1] if shown else None
    return Comparison("throughput", None, "tokens/s", names, (ours, theirs), min(per_round), max(per_round), better)


def _tokens_per_s(rows: Sequence[Row]) -> float:
    return slo.rate_per_s(sum(r.output_tokens for r in rows if r.is_whole), span_s(rows)) or 0.0


def _shown(value: float, unit: Unit) -> str:
    if unit == "share":
        return f"{value:.0%}"
    if unit == "tokens/s":
        return f"{value:.1f} tokens/s"
    return f"{value * 1e3:,.0f} ms"
