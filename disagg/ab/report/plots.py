"""The report's plots. Each takes what it shows as values and returns a Plot, or None where there is nothing to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from disagg.ab.measures import Samples, e2e, gaps, tpot, ttft
from disagg.ab.phases import phases
from disagg.ab.report.bands import Band
from disagg.ab.report.busy import Busy
from disagg.ab.report.style import PHASES, Look, Plot, drawing, finished, log_scale
from disagg.ab.result import ComparisonReport, CurveReport
from disagg.ab.rows import Row

_MOST_POINTS = 500  # of a distribution's line
ByArm = Mapping[str, Sequence[Row]]


def effects(comparisons: Sequence[ComparisonReport]) -> Plot | None:
    """Every measure of two arms as a relative difference with its interval."""
    shown = [c for c in comparisons if c.values[1] > 0 and c.low is not None and c.high is not None]
    if not shown:
        return None
    first, second = shown[0].arms
    with drawing(5.4, 0.8 + 0.26 * len(shown)) as (figure, axes):
        axis = axes[0][0]
        for place, c in enumerate(reversed(shown)):
            centre, low, high = (100 * x / c.values[1] for x in (c.values[0] - c.values[1], c.low or 0.0, c.high or 0.0))
            low, high = max(low, -150.0), min(high, 400.0)
            colour = "#777777" if c.better is None else "#0072B2" if c.better == first else "#D55E00"
            marker = "o" if c.better is None else "s" if c.better == first else "^"
            axis.plot([low, high], [place, place], color=colour, linewidth=2, linestyle=":" if c.better is None else "-")
            axis.plot([min(centre, 400.0)], [place], marker=marker, color=colour, markersize=5)
        axis.set_yticks(range(len(shown)), [_name(c) for c in reversed(shown)], fontsize=8)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_xlabel(f"{first} against {second}, %\n(grey, dotted: no difference shown)")
        alt = "; ".join(
            f"{_name(c)}: {100 * (c.values[0] / c.values[1] - 1):+.0f} %, better: {c.better or 'no difference shown'}" for c in shown
        )
        return finished(figure, f"effects-{first}-{second}", f"Effects with intervals: {first} against {second}", alt)


def _name(c: ComparisonReport) -> str:
    return f"{c.slo_class}: {c.measure}" if c.slo_class else c.measure


def against_rate(
    bands: Mapping[str, Mapping[str, Sequence[Band]]], name: str, title: str, label: str, look: Mapping[str, Look]
) -> Plot | None:
    """Lines with 95 % bands over the offered rate. `bands`: by arm, then by the line's name ("p50", "p95"), ascending rates."""
    lines = [(arm, line, points) for arm, own in bands.items() for line, points in own.items() if len(points) > 1]
    if not lines:
        return None
    with drawing() as (figure, axes):
        axis = axes[0][0]
        for arm, line, points in lines:
            rates = [p.rate_rps for p in points]
            is_tail = line not in ("", "p50")
            axis.plot(
                rates,
                [p.value for p in points],
                color=look[arm].colour,
                linestyle=look[arm].line,
                marker=look[arm].marker,
                markersize=5,
                markerfacecolor="white" if is_tail else look[arm].colour,
                linewidth=1.0 if is_tail else 1.6,
                label=f"{arm} {line}".strip(),
            )
            axis.fill_between(rates, [p.low for p in points], [p.high for p in points], color=look[arm].colour, alpha=0.15, linewidth=0)
        if name == "attainment":
            axis.axhline(90, color="black", linewidth=0.8, linestyle=":")
            axis.set_ylim(-3, 103)
        else:
            log_scale(axis.yaxis)
        axis.set_xlabel("offered requests/s")
        axis.set_ylabel(label)
        axis.legend()
        alt = "; ".join(f"{arm} {line}: " + ", ".join(f"{p.value:.3g} at {p.rate_rps:g}/s" for p in points) for arm, line, points in lines)
        return finished(figure, name, title, alt)


def latency_against_throughput(
    loads: Mapping[str, Sequence[tuple[float, float, float]]], curves: Mapping[str, CurveReport], look: Mapping[str, Look]
) -> Plot | None:
    """`loads`: by arm (requests/s, output tokens/s, mean E2E in s), ascending. Each point's region is written at it, the knee is ringed."""
    # A rate at which nothing completed has neither throughput nor latency.
    loads = {arm: [point for point in points if point[2] > 0] for arm, points in loads.items()}
    if not any(len(points) > 1 for points in loads.values()):
        return None
    with drawing() as (figure, axes):
        axis = axes[0][0]
        for arm, points in loads.items():
            style = look[arm]
            tokens, seconds = [p[1] for p in points], [p[2] for p in points]
            axis.plot(tokens, seconds, color=style.colour, linestyle=style.line, marker=style.marker, markersize=5, label=arm)
            curve = curves.get(arm)
            for rate, x, y in points:
                if curve is None:
                    continue
                region = curve.regions[f"{rate:g}"]
                axis.annotate(region[0].upper(), (x, y), textcoords="offset points", xytext=(5, -9), fontsize=7, color=style.colour)
                if curve.knee_rps == rate:
                    axis.plot(
                        [x], [y], marker="o", markersize=14, markerfacecolor="none", markeredgecolor=style.colour, markeredgewidth=1.5
                    )
        axis.set_xlabel("output tokens/s")
        axis.set_ylabel("mean E2E, s")
        log_scale(axis.yaxis)
        axis.legend(title="ring: knee;  L light, S saturating, O overloaded", title_fontsize=7)
        alt = "; ".join(f"{arm}: " + ", ".join(f"{y:.2f} s at {x:.0f} tokens/s" for _, x, y in points) for arm, points in loads.items())
        return finished(figure, "latency-throughput", "Latency against throughput", alt)


def distributions(rows: ByArm, look: Mapping[str, Look]) -> Plot | None:
    """CDFs of TTFT, TPOT and E2E, and the share of gaps above a length (ITL's tail), of whole answers."""
    kinds: tuple[tuple[str, Samples], ...] = (("TTFT", ttft), ("TPOT", tpot), ("E2E", e2e), ("ITL", gaps))
    if not any(kind(row) for own in rows.values() for row in own for _, kind in kinds):
        return None
    with drawing(5.4, 5.2, rows=2, columns=2) as (figure, axes):
        for (label, kind), axis in zip(kinds, axes.flat, strict=True):
            is_tail = label == "ITL"
            for arm, own in rows.items():
                values = np.sort(np.fromiter((x for row in own for x in kind(row)), dtype=float))
                if values.size:
                    _distribution(axis, values, is_tail, look[arm], arm)
            log_scale(axis.xaxis)
            axis.set_xlabel(f"{label}, ms")
            axis.set_ylabel("share of gaps above" if is_tail else "share of requests up to")
            if is_tail:
                axis.set_yscale("log")
        axes[0][0].legend()
        alt = "; ".join(f"{label} {arm}: {_told(own, kind)}" for label, kind in kinds for arm, own in rows.items())
        return finished(figure, "distributions", "Distributions", alt)


def _distribution(axis: Any, values: np.ndarray, is_tail: bool, look: Look, arm: str) -> None:
    share = np.arange(1, values.size + 1) / values.size
    if is_tail:
        share = 1 - share + 0.5 / values.size
    keep = np.unique(
        np.concatenate([np.linspace(0, values.size - 1, _MOST_POINTS).astype(int), np.arange(max(0, values.size - 100), values.size)])
    )
    axis.plot(
        np.maximum(values[keep] * 1e3, 1e-3),
        share[keep],
        color=look.colour,
        linestyle=look.line,
        marker=look.marker,
        markevery=max(1, keep.size // 6),
        markersize=4,
        label=arm,
    )


def _told(rows: Sequence[Row], kind: Samples) -> str:
    values = [x for row in rows for x in kind(row)]
    return f"median {np.median(values) * 1e3:.1f} ms, largest {max(values) * 1e3:.1f} ms of {len(values)}" if values else "none"


def timeline(rows: ByArm) -> Plot | None:
    """The same few requests in each arm, phase by phase. `rows`: the same requests of one round, by arm."""
    arms = [arm for arm, own in rows.items() if any(phases(row) for row in own)]
    if not arms:
        return None
    with drawing(5.4, 0.9 + sum(0.24 * len(rows[arm]) + 0.5 for arm in arms), rows=len(arms)) as (figure, axes):
        begin = min(row.sent_s for arm in arms for row in rows[arm])
        for axis, arm in zip(axes[:, 0], arms, strict=True):
            ordered = sorted(rows[arm], key=lambda r: r.sent_s, reverse=True)
            for place, row in enumerate(ordered):
                _bar(axis, place, row, begin)
            axis.set_yticks(range(len(ordered)), [f"{r.stream} {r.index}" for r in ordered], fontsize=7)
            axis.set_title(arm, loc="left", fontsize=9)
            axis.grid(visible=False, axis="y")
            axis.set_xlim(0, max(row.end_s for a in arms for row in rows[a]) - begin)
        axes[-1][0].set_xlabel("seconds; dots: tokens as the client got them")
        _phase_legend(figure)
        alt = "; ".join(f"{arm}, {r.stream} {r.index}: {_phase_words(r)}" for arm in arms for r in rows[arm])
        return finished(figure, "timeline", "The same requests, phase by phase", alt)


def _bar(axis: Any, place: int, row: Row, begin: float) -> None:
    found = phases(row)
    at = row.sent_s - begin
    if found is None:
        axis.barh(place, row.end_s - row.sent_s, left=at, height=0.6, color="white", edgecolor="black", hatch="...")
        return
    # Network time is drawn after the prefill: how it divides over both ways is not known.
    parts = [("queue", found.queue_s), ("prefill", found.prefill_s), ("network", found.network_s)]
    parts += [("transfer", found.transfer_s or 0.0), ("waiting", found.waiting_s or 0.0)]
    done = sum(seconds for _, seconds in parts)
    parts.append(("decode", max(0.0, row.token_s[-1] - row.sent_s - done)))
    for name, seconds in parts:
        colour, hatch = PHASES[name]
        axis.barh(place, seconds, left=at, height=0.6, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
        at += seconds
    axis.plot([t - begin for t in row.token_s], [place] * row.output_tokens, linestyle="", marker=".", markersize=1.5, color="black")


def _phase_legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name) for name, (colour, hatch) in PHASES.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=6, fontsize=7, handlelength=1.4, columnspacing=1.0)


def _phase_words(row: Row) -> str:
    found = phases(row)
    if found is None:
        return row.outcome
    return f"queue {found.queue_s * 1e3:.0f} ms, prefill {found.prefill_s * 1e3:.0f} ms, all {row.end_s - row.sent_s:.2f} s"


def phase_bars(means: Mapping[str, Mapping[str, float]], title: str, name: str) -> Plot | None:
    """Mean seconds by phase, one stacked bar an arm."""
    if not means:
        return None
    with drawing(5.4, 0.9 + 0.42 * len(means)) as (figure, axes):
        axis = axes[0][0]
        for place, own in enumerate(list(means.values())[::-1]):
            at = 0.0
            for phase, seconds in own.items():
                colour, hatch = PHASES[phase]
                axis.barh(place, seconds * 1e3, left=at, height=0.6, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
                at += seconds * 1e3
        axis.set_yticks(range(len(means)), list(means)[::-1])
        axis.set_xlabel("mean, ms")
        axis.grid(visible=False, axis="y")
        used = list(next(iter(means.values())))
        from matplotlib.patches import Patch

        handles = [Patch(facecolor=PHASES[p][0], hatch=PHASES[p][1], edgecolor="white", label=p) for p in used]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(used), fontsize=8)
        alt = "; ".join(f"{arm}: " + ", ".join(f"{p} {s * 1e3:.1f} ms" for p, s in own.items()) for arm, own in means.items())
        return finished(figure, name, title, alt)


def utilisation(busy: Mapping[str, Sequence[Busy]]) -> Plot | None:
    """Share of time in which each worker had a prompt to run, only streams to decode, or nothing."""
    workers = [(arm, worker) for arm, own in busy.items() for worker in own]
    if not workers:
        return None
    with drawing(5.4, 0.9 + 0.3 * len(workers)) as (figure, axes):
        axis = axes[0][0]
        for place, (_, worker) in enumerate(reversed(workers)):
            at = 0.0
            for phase, share in (("prefill", worker.prefill), ("decode", worker.decode_only)):
                colour, hatch = PHASES[phase]
                axis.barh(place, 100 * share, left=at, height=0.6, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
                at += 100 * share
        axis.set_yticks(range(len(workers)), [f"{arm}: {w.name}" for arm, w in reversed(workers)], fontsize=7)
        axis.set_xlim(0, 100)
        axis.set_xlabel("% of the time: a prompt runs (filled),\nonly decoding (hatched), idle (white)")
        axis.grid(visible=False, axis="y")
        alt = "; ".join(f"{arm}, {w.name}: {w.prefill:.0%} prefill, {w.decode_only:.0%} only decode" for arm, w in workers)
        return finished(figure, "utilisation", "Worker utilisation", alt)
