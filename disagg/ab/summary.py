"""From what a run has measured to its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from disagg.ab.arms import setup_of
from disagg.ab.conclude import conclude, curves
from disagg.ab.journal import Turn, TurnKey
from disagg.ab.result import ArmFigures, PointReport, RepeatedRound, Result, RoundReport, WarmUpReport, arm_figures
from disagg.ab.rules import warm_up_report
from disagg.ab.turns import Turns, load_report, sender_faults

if TYPE_CHECKING:
    from disagg.ab.run import Comparison

_PROBED = "a probe of the range: one round"
_BEFORE = "measured before the run was resumed for other rates"
BUSY_SHARE = 0.2  # of the cores at work before the run, from which on other programs blur the figures


def result_of(
    comparison: Comparison, turns: Turns, environment: dict[str, Any], probes: Sequence[float], stopped: Mapping[float, str]
) -> Result:
    """The whole of result.json."""
    names = [arm.name for arm in comparison.arms]
    setups = {arm.name: setup_of(arm) for arm in comparison.arms}
    points = [
        _point(comparison, turns, rate, stopped.get(rate, _PROBED if rate in probes else _BEFORE), rate in probes and rate not in stopped)
        for rate in sorted({rate for _, rate, _ in turns.rows})
    ]
    by_arm = {name: [row for key in sorted(turns.rows) if key[0] == name for row in turns.rows[key]] for name in names}
    verdict, reference_rps = conclude(by_arm, comparison.classes, probes=[point.rate_rps for point in points if point.probe])
    reference = next(point for point in points if point.rate_rps == reference_rps)
    faults = sender_faults(turns.journal.counted)
    return Result(
        schema=2,
        workload={**comparison.workload.model_dump(mode="json", exclude_none=True), "rounds": len(reference.rounds)},
        environment={**environment, "preemptions": _preemptions(turns, reference_rps)},
        setups=setups,
        points=points,
        rate_rps=reference_rps,
        rounds=reference.rounds,
        arms=reference.arms,
        curves=curves(by_arm, points, setups, comparison.classes),
        chunk_search=comparison.chunk_search,
        warm_up=_warm_ups(comparison, turns),
        repeated=[
            RepeatedRound(arm=t.arm, rate_rps=t.rate_rps, round=t.round, requests=t.requests, reason=t.trouble or "")
            for t in turns.repeated
        ],
        verdict=verdict,
        warnings=_warnings(comparison, turns, points, environment),
        not_a_result=f"{faults[0]}; the requests were not sent as the workload wanted them" if faults else None,
    )


def _point(comparison: Comparison, turns: Turns, rate: float, stopped: str, probe: bool) -> PointReport:
    counted = {key: turn for key, turn in turns.journal.counted.items() if key[1] == rate}
    rounds = sorted({key[2] for key in counted})
    return PointReport(
        rate_rps=rate,
        probe=probe,
        rounds=[_round(number, [turn for turn in counted.values() if turn.round == number]) for number in rounds],
        arms={
            arm.name: arm_figures(
                [row for number in rounds for row in turns.rows[(arm.name, rate, number)]],
                comparison.classes,
                [turns.report((arm.name, rate, number))["mean_in_flight"] for number in rounds],
            )
            for arm in comparison.arms
        },
        stopped=stopped,
    )


def _round(number: int, turns: Sequence[Turn]) -> RoundReport:
    ordered = sorted(turns, key=lambda turn: turn.place)
    return RoundReport(round=number, order=[t.arm for t in ordered], sender={t.arm: t.sender for t in ordered})


def _preemptions(turns: Turns, rate_rps: float) -> dict[str, int]:
    """By arm, over its turns at that rate; without those of which nobody knows."""
    found: dict[str, int] = {}
    for turn in turns.journal.counted.values():
        if turn.rate_rps == rate_rps and turn.preemptions is not None:
            found[turn.arm] = found.get(turn.arm, 0) + turn.preemptions
    return found


def _warm_ups(comparison: Comparison, turns: Turns) -> dict[str, WarmUpReport]:
    """Of each arm, at the rate that it was measured at first."""
    found = {}
    for arm in comparison.arms:
        rate = next((turn.rate_rps for turn in turns.journal.turns if turn.counts and turn.arm == arm.name), None)
        rounds = [turns.rows[key] for key in sorted(turns.rows) if key[0] == arm.name and key[1] == rate]
        found[arm.name] = warm_up_report(turns.warm_up_requests.get(arm.name, 0), rounds)
    return found


def _warnings(comparison: Comparison, turns: Turns, points: Sequence[PointReport], environment: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing the figures."""
    found = []
    busy, cores = environment["busy_cores_before"], environment["cores"]
    if busy is not None and busy > BUSY_SHARE * cores:
        found.append(
            f"other programs were busy on this machine right before the run ({busy:.1f} of {cores} cores): latencies are theirs, too"
        )
    several = len(points) > 1
    counted: Mapping[TurnKey, Turn] = turns.journal.counted
    for turn in counted.values():
        where = f"round {turn.round}, {turn.arm}" + (f", {turn.rate_rps:g}/s" if several else "")
        if turn.trouble is not None:
            found.append(f"{where}: {turn.trouble} in every try; it counts as it was")
        if (fault := load_report(turn.sender).fault) is not None:
            found.append(f"{where}: {fault}")
    found += _lags(list(counted.values()))
    found += [
        f"round {t.round}, {t.arm}, {t.rate_rps:g}/s {'was measured again' if t.key in counted else 'does not count'}: {t.trouble}"
        for t in turns.repeated
    ]
    found += [f"{arm}: {said}; it may be cold in its first round" for arm, said in turns.cold.items()]
    for arm, warm in _warm_ups(comparison, turns).items():
        if warm.enough is False:
            found.append(f"{arm}: the first requests took {warm.ratio or 0:.2f} times as long per token as later ones: it was not warm")
    for point in points:
        at = f" at {point.rate_rps:g}/s" if several else ""
        found += [line for name, figures in point.arms.items() for line in _arm_warnings(f"{name}{at}", figures)]
    return found


def _lags(turns: Sequence[Turn]) -> list[str]:
    """Where the sender lagged by little: one sentence for all turns, with the worst of them."""
    lagging = [turn for turn in turns if (report := load_report(turn.sender)).warning is not None and report.fault is None]
    if not lagging:
        return []
    worst = max(lagging, key=lambda turn: max(turn.sender["late_share"], turn.sender["loop_late_share"]))
    said = load_report(worst.sender).warning
    return [f"{said} (round {worst.round}, {worst.arm}; the worst of {len(lagging)} such turns of {len(turns)})"]


def _arm_warnings(name: str, figures: ArmFigures) -> list[str]:
    found = []
    law = figures.littles_law
    if law is not None and law.warning is not None:
        found.append(f"{name}: {law.warning}")
    lost = figures.rejected + figures.failed
    if lost:
        kinds = ", ".join(f"{n} x {kind}" for kind, n in sorted(figures.errors.items()))
        found.append(f"{name}: {lost} of {figures.sent} requests did not complete ({kinds}); they count as SLO misses, not in latencies")
    return found
