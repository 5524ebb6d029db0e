"""The verdict over all arms and rates of a run, and each arm's curve. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Literal

from disagg.ab.curve import METHOD, LoadPoint, concurrency_at, knee_of, regions
from disagg.ab.goodput import LEVEL, compare_attainment, compare_goodput, goodput_interval
from disagg.ab.measures import ATTAINMENT_OVER_RATES
from disagg.ab.result import ArmFigures, ComparisonReport, CurveReport, PointReport, SetupReport, VerdictReport, arm_figures
from disagg.ab.rows import Row
from disagg.ab.verdict import Comparison, Verdict, compare_arms, judge_all
from disagg.config import SloClass

_OF_ALL_RATES = (compare_goodput, compare_attainment)  # in the order in which they decide


def conclude(
    rows: Mapping[str, Sequence[Row]], classes: Sequence[SloClass], *, simulated: bool = False, probes: Collection[float] = ()
) -> tuple[VerdictReport, float]:
    """The verdict, and the rate that its latencies are about: the highest at which an arm keeps 90 % in their class, else the lowest.

    `rows`: by arm, of all rates. With several rates, what is said of all of them decides first. `simulated`: no machine drifted.
    `probes`: rates of one round, which say less of latencies; they are about none of them.
    """
    rates = sorted({row.rate_rps or 0.0 for own in rows.values() for row in own})
    at = {rate: {name: [r for r in own if (r.rate_rps or 0.0) == rate] for name, own in rows.items()} for rate in rates}
    candidates = [rate for rate in rates if rate not in probes] or rates
    kept = [rate for rate in candidates if any((arm_figures(own, classes, None).slo_attainment or 0) >= LEVEL for own in at[rate].values())]
    reference = kept[-1] if kept else candidates[0]
    num_pairs = max(1, len(rows) - 1)

    def compare(name: str, other: str) -> list[Comparison]:
        arms = (name, other)
        found = compare_arms(at[reference][name], at[reference][other], classes, arms, num_pairs=num_pairs, simulated=simulated)
        if len(rates) == 1:
            return found
        family = 2 * num_pairs
        both = [of_all(rows[name], rows[other], classes, arms, family=family, simulated=simulated) for of_all in _OF_ALL_RATES]
        return [*[c for c in both if c is not None], *found]

    return verdict_report(judge_all(list(rows), compare), reference), reference


def verdict_report(verdict: Verdict, rate_rps: float | None = None) -> VerdictReport:
    """A verdict in result.json's form. `rate_rps`: of those of its comparisons that are not about all rates."""
    of_all = ("goodput", ATTAINMENT_OVER_RATES)
    comparisons = [ComparisonReport(**asdict(c), rate_rps=None if c.measure in of_all else rate_rps) for c in verdict.comparisons]
    return VerdictReport(choose=verdict.choose, reason=verdict.reason, comparisons=comparisons)


def curves(
    rows: Mapping[str, Sequence[Row]],
    points: Sequence[PointReport],
    setups: Mapping[str, SetupReport],
    classes: Sequence[SloClass],
) -> dict[str, CurveReport]:
    """Each arm's goodput, regions, knee and recommended concurrency, from two rates on. `points` ascending."""
    if len(points) < 2:
        return {}
    return {name: _curve(own, points, setups.get(name), name, classes) for name, own in rows.items() if any(r.is_judged for r in own)}


def _curve(
    rows: Sequence[Row], points: Sequence[PointReport], setup: SetupReport | None, name: str, classes: Sequence[SloClass]
) -> CurveReport:
    measured = [p for p in points if name in p.arms]
    loads = [_load(p.rate_rps, p.arms[name], [r for r in rows if (r.rate_rps or 0.0) == p.rate_rps]) for p in measured]
    knee = knee_of(loads)
    goodput, bound = goodput_interval(rows, classes)
    operate = goodput.value if knee is None else min(goodput.value, knee.rate_rps)
    unit, count = _unit(setup)
    return CurveReport(
        level=LEVEL,
        goodput_rps=goodput.value,
        goodput_low_rps=goodput.low,
        goodput_high_rps=goodput.high,
        goodput_bound=bound,
        goodput_per_unit_rps=goodput.value / count if count else None,
        unit=unit,
        knee_rps=knee.rate_rps if knee is not None else None,
        regions={f"{p.rate_rps:g}": region for p, region in zip(measured, regions(loads), strict=True)},
        recommended_rps=operate,
        recommended_concurrency=concurrency_at(loads, operate),
        method=METHOD,
    )


def _load(rate_rps: float, figures: ArmFigures, rows: Sequence[Row]) -> LoadPoint:
    seconds, tokens = figures.e2e_s.mean or 0.0, figures.output_tokens_per_s or 0.0
    return LoadPoint(rate_rps, tokens, seconds, figures.mean_concurrency or 0.0, _asked_tokens_per_s(rows))


def _asked_tokens_per_s(rows: Sequence[Row]) -> float | None:
    """Output tokens that were asked for, per second of sending; None where no round has requests at different instants."""
    rounds: dict[int, list[Row]] = {}
    for row in rows:
        rounds.setdefault(row.round, []).append(row)
    tokens, seconds = 0, 0.0
    for own in rounds.values():
        tokens += sum(row.max_output_tokens for row in own)
        seconds += max(row.due_s for row in own) - min(row.due_s for row in own)
    return tokens / seconds if seconds > 0 else None


def _unit(setup: SetupReport | None) -> tuple[Literal["GPU", "core"] | None, int]:
    """What goodput is divided by: GPUs where there are some, else cores. Nothing is known of an external arm."""
    if setup is None or (not setup.gpus and not setup.cores):
        return None, 0
    return ("GPU", setup.gpus) if setup.gpus else ("core", setup.cores or 0)
