"""The report's first paragraph, in plain words: the verdict, how large the effect is, what it costs, and when it would flip. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from disagg.ab.flip import TargetFlip
from disagg.ab.measures import Unit
from disagg.ab.result import ComparisonReport, Result
from disagg.ab.verdict import EITHER, Comparison, baseline_of, obstacle, shown


def verdict_pair(result: Result) -> tuple[str, str] | None:
    """The two arms that the verdict is worded with: the chosen one and its rival; None when nothing was compared."""
    if not result.verdict.comparisons:
        return None
    baseline = baseline_of(list(result.arms))
    chosen = result.verdict.choose
    pairs = [c.arms for c in result.verdict.comparisons]
    wanted = [p for p in pairs if chosen in p and (baseline in p)] if chosen != EITHER else pairs
    return wanted[0] if wanted else pairs[0]


def comparisons_of(result: Result, pair: tuple[str, str]) -> list[ComparisonReport]:
    """Those of one pair of arms, most important first."""
    return [c for c in result.verdict.comparisons if c.arms == pair]


def opening(result: Result, choices: Mapping[float, str], flips: Sequence[TargetFlip]) -> list[str]:
    """Sentences. `choices`: what the verdict is at each measured rate by itself; `flips`: by how much targets would have to move."""
    pair = verdict_pair(result)
    about = f"{result.workload.get('name')} with {result.environment.get('model')} on {_hardware(result)}"
    simulated = "Simulated, no engine ran: " if result.environment.get("simulated") else ""
    if result.not_a_result is not None:
        return [f"Not a result: {result.not_a_result}."]
    if pair is None:
        return [f"{simulated}{about}: one arm was measured, nothing is compared."]
    comparisons = comparisons_of(result, pair)
    chosen = result.verdict.choose
    if (hindered := _obstacle(comparisons)) is not None and chosen == EITHER:
        said = [f"{simulated}No choice for {about}. {hindered}"]
    elif chosen == EITHER:
        said = [f"{simulated}No difference shown between {pair[0]} and {pair[1]} for {about}."]
        said += _largest_left(comparisons)
    else:
        said = [f"{simulated}Choose {chosen} for {about}."]
        said += _effect(comparisons, chosen) + _costs(comparisons, chosen) + _money(result, pair, chosen)
    return said + _flip_words(result, pair, choices, flips)


def _obstacle(comparisons: Sequence[ComparisonReport]) -> str | None:
    return obstacle([Comparison(c.measure, c.slo_class, _unit(c), c.arms, c.values, c.low, c.high, c.better) for c in comparisons])


def _hardware(result: Result) -> str:
    gpus = result.environment.get("gpus") or []
    if result.environment.get("simulated"):
        return "simulated workers"
    if gpus:
        return f"{len(gpus)} x {gpus[0].split(',')[0]}"
    return f"{result.environment.get('cores')} cores of {result.environment.get('cpu')}"


def change(c: ComparisonReport, arm: str) -> str:
    """`-9 % (interval -12 % to -6 %)`, of `arm` against the other one; points for shares."""
    first = c.arms[0] == arm
    difference = (c.values[0] - c.values[1]) * (1 if first else -1)
    interval = None if c.low is None or c.high is None else (c.low, c.high) if first else (-c.high, -c.low)
    if c.unit == "share":
        unit, scale = "points", 100.0
    else:
        base = c.values[1] if first else c.values[0]
        if base == 0:
            return shown(difference, _unit(c))
        unit, scale = "%", 100.0 / base
        # The interval was computed at the second arm's value; seen from that arm it is relative to the first.
        scale_of_interval = scale if first else 100.0 / c.values[0] if c.values[0] else scale
        interval = None if interval is None else (interval[0] * scale_of_interval / scale, interval[1] * scale_of_interval / scale)
    said = f"{difference * scale:+.0f} {unit}"
    return said if interval is None else f"{said} (interval {interval[0] * scale:+.0f} to {interval[1] * scale:+.0f} {unit})"


def _unit(c: ComparisonReport) -> Unit:
    return cast(Unit, c.unit)


def _named(c: ComparisonReport) -> str:
    return f"{c.measure} of {c.slo_class}" if c.slo_class else c.measure


def _values(c: ComparisonReport, arm: str) -> str:
    own, other = (c.values[0], c.values[1]) if c.arms[0] == arm else (c.values[1], c.values[0])
    return f"{shown(own, _unit(c))} against {shown(other, _unit(c))}"


def _effect(comparisons: Sequence[ComparisonReport], chosen: str) -> list[str]:
    better = [c for c in comparisons if c.better == chosen]
    deciding = [c for c in better if c.slo_class is None] or better
    if not deciding:
        return []
    c = deciding[0]
    said = [f"What decides is {_named(c)}: {_values(c, chosen)}, {change(c, chosen)}."]
    others = [f"{_named(o)} {change(o, chosen)}" for o in better if o is not c][:3]
    return said + ([f"It is also better in {', '.join(others)}."] if others else [])


def _costs(comparisons: Sequence[ComparisonReport], chosen: str) -> list[str]:
    worse = [c for c in comparisons if c.better not in (chosen, None)]
    if worse:
        return ["What it costs: " + ", ".join(f"{_named(c)} {_values(c, chosen)}, {change(c, chosen)}" for c in worse[:4]) + "."]
    first = next((c for c in comparisons if c.measure.startswith("TTFT") and c.slo_class is None), None)
    return ["No measure is shown to be worse" + (f"; {_named(first)} is {_values(first, chosen)}." if first else ".")]


def _money(result: Result, pair: tuple[str, str], chosen: str) -> list[str]:
    other = pair[1] if pair[0] == chosen else pair[0]
    ours, theirs = (result.arms[arm].cost_per_million_output_tokens for arm in (chosen, other))
    if ours is None or theirs is None:
        return []
    return [f"A million output tokens cost {ours:.2f} at this rate, {theirs:.2f} with {other} (in the currency of the price per hour)."]


def _largest_left(comparisons: Sequence[ComparisonReport]) -> list[str]:
    bounded = [c for c in comparisons if c.low is not None and c.slo_class is None]
    if not bounded:
        return ["Too little was measured for an interval."]
    c = bounded[0]
    return [f"{_named(c)}: {_values(c, c.arms[0])}, {change(c, c.arms[0])}; a difference inside that interval may exist and was not seen."]


def _flip_words(result: Result, pair: tuple[str, str], choices: Mapping[float, str], flips: Sequence[TargetFlip]) -> list[str]:
    said = []
    if len(choices) > 1:
        parts = [f"{'no difference' if choice == EITHER else choice} at {rate:g}/s" for rate, choice in choices.items()]
        said.append(f"Rate by rate the verdict is: {', '.join(parts)}.")
    chosen = result.verdict.choose
    if chosen == EITHER:
        return said
    other = pair[1] if pair[0] == chosen else pair[0]
    for flip in flips:
        how = f"{flip.factor:.1f} times as loose" if flip.factor > 1 else f"{1 / flip.factor:.1f} times as strict"
        said.append(
            f"It would flip if all {flip.target} targets were {how}: {other} would then keep {flip.other_attainment:.0%} of the requests "
            f"inside their class, {chosen} {flip.chosen_attainment:.0%}."
        )
    if not flips:
        said.append("No change of the TTFT or TPOT targets by up to ten times makes the other arm keep more requests inside their class.")
    if len(choices) > 1 and not any(choice not in (chosen, EITHER) for choice in choices.values()):
        said.append(f"At none of the measured rates {other} is chosen.")
    return said
