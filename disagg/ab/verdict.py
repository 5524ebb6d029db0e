"""Which arm to choose, from the rows of both. Pure.

Both arms got the same requests, so requests are compared in pairs. A difference counts when (1) the 95 % bootstrap interval of the
difference, requests resampled as pairs, lies on one side of zero; (2) it is larger than what nobody would act on (`floor`: 2 points of
attainment, 5 % of a latency); (3) no round shows the opposite. Measures decide in a fixed order: SLO attainment, the tail of the
inter-token gaps, TPOT, TTFT, throughput. The first that differs chooses the arm; the reason also says what that arm does worse. When none
differs, the verdict is "either".
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

ArmName = Literal["disagg", "colocated"]
Pair = tuple[Row, Row]  # (disagg, colocated) of one request
Samples = Sequence[Sequence[float]]  # per request, its samples

RESAMPLES = 400
_MOST_SAMPLES = 20_000_000  # drawn in all, over the resamples of one measure: what a second can do


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of both arms. `low` and `high`: 95 % interval of (disagg - colocated). `better`: None when no difference is shown."""

    measure: str
    unit: Literal["share", "s", "tokens/s"]
    disagg: float
    colocated: float
    low: float
    high: float
    better: ArmName | None

    def value(self, arm: ArmName) -> float:
        return self.disagg if arm == "disagg" else self.colocated


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason`: plain words with the numbers."""

    choose: Literal["disagg", "colocated", "either"]
    reason: str
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True, slots=True)
class _Measure:
    name: str
    unit: Literal["share", "s", "tokens/s"]
    samples: Callable[[Row], Sequence[float]]
    statistic: Callable[[np.ndarray], float]
    higher_is_better: bool
    floor: Callable[[float, float], float]


def judge(disagg: Sequence[Row], colocated: Sequence[Row], classes: Sequence[SloClass]) -> Verdict:
    """The verdict on all rows of both arms."""
    pairs = _paired(disagg, colocated)
    by_name = {c.name: c for c in classes}
    comparisons = tuple(c for m in _measures(pairs, by_name) if (c := _compare(m, pairs)) is not None)
    throughput = _compare_throughput(disagg, colocated)
    return decide(comparisons if throughput is None else (*comparisons, throughput))


def decide(comparisons: Sequence[Comparison]) -> Verdict:
    """Choose by the first measure that differs, and say what the choice costs."""
    deciding = next((c for c in comparisons if c.better is not None), None)
    if deciding is None or deciding.better is None:
        listed = "; ".join(_both(c) for c in comparisons) or "no request completed in both arms"
        return Verdict("either", f"No difference is shown: {listed}.", tuple(comparisons))
    arm: ArmName = deciding.better
    gains = [c for c in comparisons if c.better == arm]
    costs = [c for c in comparisons if c.better not in (arm, None)]
    same = [c for c in comparisons if c.better is None]
    sentences = [f"{arm} is better in {'; '.join(_both(c) for c in gains)}"]
    sentences += [f"{'; '.join(_both(c) for c in costs)}: worse with {arm}"] if costs else []
    sentences += [f"no difference shown in {'; '.join(_both(c) for c in same)}"] if same else []
    reason = ". ".join(s[0].upper() + s[1:] if i else s for i, s in enumerate(sentences)) + "."
    return Verdict(arm, reason, tuple(comparisons))


def _paired(disagg: Sequence[Row], colocated: Sequence[Row]) -> list[Pair]:
    other = {(r.round, r.index): r for r in colocated}
    return [(r, other[key]) for r in disagg if (key := (r.round, r.index)) in other]


def _measures(pairs: Sequence[Pair], classes: Mapping[str, SloClass]) -> list[_Measure]:
    """What is compared, most important first. The tail is the farthest percentile that the samples of both arms carry."""

    def met(row: Row) -> Sequence[float]:
        return (float(row_meets(row, classes[row.slo_class])),)

    def latency(value: Callable[[Row], float | None]) -> Callable[[Row], Sequence[float]]:
        def samples(row: Row) -> Sequence[float]:
            seconds = value(row) if row.is_whole else None
            return () if seconds is None else (seconds,)

        return samples

    def gaps(row: Row) -> Sequence[float]:
        return row.itl_s if row.is_whole else ()

    targeted = any(c.ttft_s is not None or c.tpot_s is not None for c in classes.values())
    attainment = _Measure(
        "SLO attainment" if targeted else "share completed", "share", met, lambda a: float(a.mean()), True, lambda _a, _b: 0.02
    )
    measures = [attainment]
    for name, samples, percents, floor_s in (
        ("ITL", gaps, (99.9, 99.0, 95.0), 0.002),
        ("TPOT", latency(lambda r: r.tpot_s), (95.0, 90.0, 50.0), 0.001),
        ("TTFT", latency(lambda r: r.ttft_s), (95.0, 90.0, 50.0), 0.005),
    ):
        percent = next((p for p in percents if all(_enough(samples, [pair[arm] for pair in pairs], p) for arm in (0, 1))), None)
        if percent is not None:
            measures.append(_tail(name, samples, percent, floor_s))
    return measures


def _tail(name: str, samples: Callable[[Row], Sequence[float]], percent: float, floor_s: float) -> _Measure:
    def statistic(values: np.ndarray) -> float:
        return float(np.percentile(values, percent))

    return _Measure(f"{name} p{percent:g}", "s", samples, statistic, False, lambda a, b: max(floor_s, 0.05 * min(a, b)))


def _enough(samples: Callable[[Row], Sequence[float]], rows: Sequence[Row], percent: float) -> bool:
    pooled = [x for row in rows for x in samples(row)]
    return slo.percentile(pooled, percent) is not None


def _compare(measure: _Measure, pairs: Sequence[Pair]) -> Comparison | None:
    """Bootstrap one measure; None when an arm has no sample of it."""
    both = [[np.asarray(measure.samples(pair[arm]), dtype=np.float64) for pair in pairs] for arm in (0, 1)]
    pooled = [np.concatenate(s) if s else np.empty(0) for s in both]
    if not all(p.size for p in pooled):
        return None
    ours, theirs = (measure.statistic(p) for p in pooled)
    differences = _resampled_differences(measure, both)
    low, high = (float(x) for x in np.percentile(differences, (2.5, 97.5)))
    difference = ours - theirs
    shown = (low > 0 or high < 0) and abs(difference) >= measure.floor(ours, theirs) and not _contradicted(measure, pairs, difference)
    disagg_better = (difference > 0) == measure.higher_is_better
    better: ArmName | None = ("disagg" if disagg_better else "colocated") if shown else None
    return Comparison(measure.name, measure.unit, ours, theirs, low, high, better)


def _resampled_differences(measure: _Measure, both: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Differences of the statistic over resampled pairs of requests, with a fixed seed: the same rows give the same verdict."""
    rng = np.random.default_rng(0)
    num_pairs = len(both[0])
    num_samples = sum(a.size for arm in both for a in arm)
    differences = []
    for _ in range(max(50, min(RESAMPLES, _MOST_SAMPLES // max(1, num_samples)))):
        chosen = rng.integers(0, num_pairs, num_pairs)
        pooled = [np.concatenate([arm[i] for i in chosen]) for arm in both]
        if all(p.size for p in pooled):
            differences.append(measure.statistic(pooled[0]) - measure.statistic(pooled[1]))
    return np.asarray(differences or [0.0])


def _contradicted(measure: _Measure, pairs: Sequence[Pair], difference: float) -> bool:
    """Whether a round shows a clear difference of the opposite sign."""
    for number in {pair[0].round for pair in pairs}:
        own = [pair for pair in pairs if pair[0].round == number]
        arms = [np.asarray([x for pair in own for x in measure.samples(pair[arm])]) for arm in (0, 1)]
        if all(a.size for a in arms):
            ours, theirs = (measure.statistic(a) for a in arms)
            if (ours - theirs) * difference < 0 and abs(ours - theirs) >= measure.floor(ours, theirs):
                return True
    return False


def _compare_throughput(disagg: Sequence[Row], colocated: Sequence[Row]) -> Comparison | None:
    """Output tokens/s; the interval is the spread over rounds, and a difference counts from 5 % on when all rounds agree."""
    per_round = []
    for number in sorted({r.round for r in disagg} & {r.round for r in colocated}):
        ours, theirs = (_tokens_per_s([r for r in rows if r.round == number]) for rows in (disagg, colocated))
        per_round.append(ours - theirs)
    if not per_round:
        return None
    ours, theirs = _tokens_per_s(disagg), _tokens_per_s(colocated)
    shown = abs(ours - theirs) >= 0.05 * max(ours, theirs) and (min(per_round) > 0 or max(per_round) < 0)
    better: ArmName | None = ("disagg" if ours > theirs else "colocated") if shown else None
    return Comparison("throughput", "tokens/s", ours, theirs, min(per_round), max(per_round), better)


def _tokens_per_s(rows: Sequence[Row]) -> float:
    return slo.rate_per_s(sum(r.output_tokens for r in rows if r.is_whole), span_s(rows)) or 0.0


def _both(c: Comparison) -> str:
    """`ITL p99.9 48 ms against 410 ms` with disagg named first."""
    return f"{c.measure} {_shown(c.disagg, c.unit)} disagg, {_shown(c.colocated, c.unit)} colocated"


def _shown(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.0%}"
    if unit == "tokens/s":
        return f"{value:.1f} tokens/s"
    return f"{value * 1e3:.0f} ms" if value < 10 else f"{value:.1f} s"
