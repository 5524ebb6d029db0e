"""The verdict over all arms and rates of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from disagg.ab.result import ComparisonReport, VerdictReport, arm_figures
from disagg.ab.rows import Row
from disagg.ab.verdict import Verdict, judge
from disagg.config import SloClass

LEVEL = 0.9


def conclude(rows: Mapping[str, Sequence[Row]], classes: Sequence[SloClass]) -> tuple[VerdictReport, float]:
    """The verdict, and the rate it is about: the highest one at which an arm keeps 90 % inside their class, else the lowest.

    Arms are compared pairwise with `colocated`, or else the first one. `rows`: by arm, of all rates.
    """
    rates = sorted({row.rate_rps or 0.0 for own in rows.values() for row in own})
    at = {rate: {name: [r for r in own if (r.rate_rps or 0.0) == rate] for name, own in rows.items()} for rate in rates}
    kept = [rate for rate in rates if any((arm_figures(own, classes, None).slo_attainment or 0) >= LEVEL for own in at[rate].values())]
    rate = kept[-1] if kept else rates[0]
    baseline = "colocated" if "colocated" in rows else next(iter(rows))
    verdicts = [judge(at[rate][name], at[rate][baseline], classes, (name, baseline)) for name in rows if name != baseline]
    winners = [v for v in verdicts if v.choose not in ("either", baseline)]
    best = winners[0] if winners else next((v for v in verdicts if v.choose == baseline), verdicts[0])
    return verdict_report(best, rate), rate


def verdict_report(verdict: Verdict, rate_rps: float | None = None) -> VerdictReport:
    """A verdict in result.json's form."""
    comparisons = [ComparisonReport(**asdict(c), rate_rps=rate_rps) for c in verdict.comparisons]
    return VerdictReport(choose=verdict.choose, reason=verdict.reason, comparisons=comparisons)
