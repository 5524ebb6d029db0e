"""The report's tables: text cells, a heading row, rows of one cell as group headings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from disagg.ab.measures import Unit
from disagg.ab.result import ComparisonReport, Distribution, Figures, Result
from disagg.ab.table import ABSENT, milliseconds, number, share
from disagg.ab.verdict import shown
from disagg.ab.words import change


@dataclass(frozen=True, slots=True)
class Table:
    """`rows`: as many cells as `heads`, or one: a heading of the rows below."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


_PERCENTILES = ("p50", "p90", "p95", "p99", "p999")


def effect_table(comparisons: Sequence[ComparisonReport]) -> Table | None:
    """Every comparison of one pair of arms."""
    if not comparisons:
        return None
    first, second = comparisons[0].arms
    rows = [
        [
            f"{c.slo_class}: {c.measure}" if c.slo_class else c.measure,
            shown(c.values[0], cast(Unit, c.unit)),
            shown(c.values[1], cast(Unit, c.unit)),
            change(c, first),
            c.better or "no difference shown",
        ]
        for c in comparisons
    ]
    return Table(f"{first} against {second}", ["measure", first, second, "difference", "better"], rows)


def figure_table(result: Result) -> Table:
    """Every latency with its percentiles, counts, throughput and cost, of the reference rate: one column an arm."""
    arms = list(result.arms.values())
    rows: list[list[str]] = [
        ["sent", *(f"{a.sent:,}" for a in arms)],
        ["completed / rejected / failed", *(f"{a.completed:,} / {a.rejected:,} / {a.failed:,}" for a in arms)],
        ["within SLO", *(share(a.slo_attainment) for a in arms)],
        ["output tokens/s", *(number(a.output_tokens_per_s) for a in arms)],
        ["input tokens/s", *(number(a.input_tokens_per_s) for a in arms)],
        ["mean tokens in / out", *(f"{number(a.mean_input_tokens, 0)} / {number(a.mean_output_tokens, 0)}" for a in arms)],
        ["mean concurrency", *(number(a.mean_concurrency, 2) for a in arms)],
        ["tokens found in prefix caches", *(f"{a.cached_tokens:,}" for a in arms)],
        ["requests that took more than one route", *(f"{a.retried:,}" for a in arms)],
    ]
    if any(a.cost_per_million_output_tokens is not None for a in arms):
        rows.append(["cost per million output tokens", *(number(a.cost_per_million_output_tokens, 2) for a in arms)])
    rows += _latencies(arms)
    for name in arms[0].classes:
        own: list[Figures] = [a.classes[name] for a in arms if name in a.classes]
        if len(own) < len(arms):
            continue
        targets = arms[0].classes[name]
        rows.append([f"class {name}: TTFT within {milliseconds(targets.ttft_target_s)}, TPOT within {milliseconds(targets.tpot_target_s)}"])
        rows.append(["sent, within SLO", *(f"{f.sent:,}, {share(f.slo_attainment)}" for f in own)])
        rows += _latencies(own)
    at = f" at {result.rate_rps:g} requests/s" if result.rate_rps is not None else ""
    return Table(f"All figures{at}", ["", *result.arms], rows)


def _latencies(figures: Sequence[Figures]) -> list[list[str]]:
    rows = []
    for label, field in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("E2E", "e2e_s")):
        of_arms: list[Distribution] = [getattr(f, field) for f in figures]
        for percentile in _PERCENTILES:
            values = [getattr(d, percentile) for d in of_arms]
            if any(v is not None for v in values):
                name = "p99.9" if percentile == "p999" else percentile
                rows.append([f"{label} {name}", *(milliseconds(v) for v in values)])
        rows.append([f"{label} max", *(milliseconds(d.max) for d in of_arms)])
    return rows


def phase_table(result: Result) -> Table | None:
    """Mean and tail of each phase."""
    arms = {name: a.phases for name, a in result.arms.items() if a.phases is not None}
    if not arms:
        return None
    rows: list[list[str]] = []
    for title, names in (("of TTFT", ("queue", "prefill", "network")), ("of the gap after the first token", ("transfer", "waiting"))):
        rows.append([title])
        for name in names:
            own = [getattr(p, f"{name}_s") for p in arms.values()]
            rows.append([name, *(f"{milliseconds(d.mean)}; {milliseconds(d.p50, d.p95)}" for d in own)])
    return Table("Phases: mean; p50 / p95", ["", *arms], rows)


def rate_table(result: Result) -> Table | None:
    """One row a rate and arm."""
    if len(result.points) < 2:
        return None
    rows = []
    for point in result.points:
        rounds = f"{len(point.rounds)} round{'s' if len(point.rounds) != 1 else ''}"
        rows.append([f"{point.rate_rps:g} requests/s, {rounds}" + (" (probe)" if point.probe else "")])
        for name, f in point.arms.items():
            curve = result.curves.get(name)
            region = curve.regions.get(f"{point.rate_rps:g}", ABSENT) if curve else ABSENT
            cells = [share(f.slo_attainment), milliseconds(f.ttft_s.p50, f.ttft_s.p95), milliseconds(f.tpot_s.p50, f.tpot_s.p95)]
            rows.append([name, *cells, number(f.output_tokens_per_s), number(f.mean_concurrency, 2), region])
    heads = ["", "within SLO", "TTFT p50 / p95", "TPOT p50 / p95", "output tokens/s", "concurrency", "region"]
    return Table("Every rate", heads, rows)


def curve_table(result: Result) -> Table | None:
    """Goodput, knee and recommended concurrency, one row an arm."""
    if not result.curves:
        return None
    rows = []
    for name, c in result.curves.items():
        bound = {"within": "", "at_least": "at least ", "below": "below the lightest rate; about "}[c.goodput_bound]
        per_unit = f"{c.goodput_per_unit_rps:.3g} per {c.unit}" if c.goodput_per_unit_rps is not None else ABSENT
        knee = f"{c.knee_rps:g}/s" if c.knee_rps is not None else "not reached"
        goodput = f"{bound}{c.goodput_rps:.3g}/s ({c.goodput_low_rps:.3g} to {c.goodput_high_rps:.3g})"
        rows.append([name, goodput, per_unit, knee, f"{c.recommended_concurrency:.1f} (at {c.recommended_rps:.3g}/s)"])
    level = next(iter(result.curves.values())).level
    heads = ["", f"goodput at {level:.0%} (95 % interval)", "per unit", "knee", "recommended concurrency"]
    return Table("How much each arm takes", heads, rows)


def law_table(result: Result) -> Table | None:
    """Little's law for every arm at every rate."""
    points = [(f"{p.rate_rps:g}/s, ", p.arms) for p in result.points] or [("", result.arms)]
    rows = []
    for at, arms in points:
        for name, figures in arms.items():
            law = figures.littles_law
            if law is not None:
                told = f"{law.arrivals_per_s:.3f}/s x {law.mean_in_system_s:.3f} s = {law.expected:.3f}"
                rows.append([f"{at}{name}", f"{law.measured:.3f}", told, "agree" if law.agrees else "DIFFER"])
    return Table("Little's law: L against λ·W", ["", "L as counted", "λ·W of the rows", "within 5 %"], rows) if rows else None
