"""The verdict over all arms and rates of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from disagg.ab.result import ComparisonReport, VerdictReport, arm_figures
from disagg.ab.rows import Row
from disagg.ab.verdict import Verdict, judge_all
from disagg.config import SloClass

LEVEL = 0.9


def conclude(rows: Mapping[str, Sequence[Row]], classes: Sequence[SloClass]) -> tuple[VerdictReport, float]:
    """The verdict, and the rate it is about: the highest one at which an arm keeps 90 % inside their class, else the lowest.

    `rows`: by arm, of all rates.
    """
    rates = sorted({row.rate_rps or 0.0 for own in rows.values() for row in own})
    at = {rate: {name: [r for r in own if (r.rate_rps or 0.0) == rate] for name, own in rows.items()} for rate in rates}
    kept = [rate for rate in rates if any((arm_figures(own, classes, None).slo_attainment or 0) >= LEVEL for own in at[rate].values())]
    rate = kept[-1] if kept else rates[0]
    return verdict_report(judge_all(at[rate], classes), rate), rate


def verdict_report(verdict: Verdict, rate_rps: float | None = None) -> VerdictReport:
    """A verdict in result.json's form."""
    comparisons = [ComparisonReport(**asdict(c), rate_rps=rate_rps) for c in verdict.comparisons]
    return VerdictReport(choose=verdict.choose, reason=verdict.reason, comparisons=comparisons)
