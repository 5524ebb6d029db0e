"""The requests of a requests.jsonl again: the same lengths, classes and due times, and the same prompts where the workload is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from disagg.ab.conclude import conclude
from disagg.ab.environment import describe
from disagg.ab.load import DEFAULT_VOCAB, LoadReport, OpenLoop, StreamingClient
from disagg.ab.out import OutFolder
from disagg.ab.progress import RunProgress
from disagg.ab.result import PointReport, Result, RoundReport, arm_figures, classes_of, read_result
from disagg.ab.rows import Row, RowFile, read_rows
from disagg.ab.run import planned_at
from disagg.ab.trace_plan import AnyWorkload, at_rate, mean_rate_rps
from disagg.ab.trace_workload import TraceWorkload
from disagg.ab.workload import PlannedRequest, Workload
from disagg.config import SloClass, Topology, validated
from disagg.errors import ConfigError, DisaggError, nearest

REPLAY = "replay"
_WARM_UP_COPIES = 2  # of each length; how many workers there are is not known
Turn = tuple[float, int]  # requests/s, round


@dataclass(frozen=True, slots=True)
class Recording:
    """One arm's requests as they were sent. `turns`: what to send again, by rate and round. `same_prompts`: token for token.

    `vocab_size`: from which prompts were drawn; None where the recording does not say.
    """

    arm: str
    rows: tuple[Row, ...]
    turns: Mapping[Turn, tuple[PlannedRequest, ...]]
    classes: tuple[SloClass, ...]
    workload: Mapping[str, Any]
    timeout_s: float
    same_prompts: bool
    vocab_size: int | None


def load_recording(path: Path, arm: str | None = None) -> Recording:
    """Read a requests.jsonl; `arm`: None takes its first. Raises ConfigError.

    A result.json beside it tells the workload, from which the prompts follow; without it, prompts of the same lengths are made anew.
    """
    rows = read_rows(path)
    if not rows:
        raise ConfigError(f"{path}: it has no request; at least one row is needed", key=str(path), expected="a row")
    names = list(dict.fromkeys(r.arm for r in rows))
    chosen = names[0] if arm is None else arm
    if chosen not in names:
        raise ConfigError(key="--arm", value=arm, expected=f"an arm of {path}: {nearest(chosen, names)}")
    # What was sent again once is no replay of itself: both would have one name.
    name = f"{chosen}-before" if chosen == REPLAY else chosen
    own = tuple(
        sorted(
            (replace(r, arm=name, rate_rps=r.rate_rps or 0.0) for r in rows if r.arm == chosen),
            key=lambda r: (r.rate_rps or 0.0, r.round, r.index),
        )
    )
    beside = path.with_name("result.json")
    result = read_result(beside) if beside.exists() else None
    classes = _classes(own, result)
    planned, same = _planned(own, result, classes)
    workload = dict(result.workload) if result else {"name": path.stem}
    vocab_size = result.environment.get("vocab_size") if result is not None else None
    return Recording(name, own, planned, classes, workload, _timeout_s(result), same, vocab_size)


def _classes(rows: Sequence[Row], result: Result | None) -> tuple[SloClass, ...]:
    known = {c.name: c for c in classes_of(result)} if result is not None else {}
    return tuple(known.get(name, SloClass(name=name)) for name in dict.fromkeys(r.slo_class for r in rows))


def _timeout_s(result: Result | None) -> float:
    return float(result.workload.get("timeout_s", 120.0)) if result is not None else 120.0


def _planned(
    rows: Sequence[Row], result: Result | None, classes: Sequence[SloClass]
) -> tuple[dict[Turn, tuple[PlannedRequest, ...]], bool]:
    workload = _workload(result)
    turns: dict[Turn, tuple[PlannedRequest, ...]] = {}
    same = workload is not None
    for turn in dict.fromkeys((r.rate_rps or 0.0, r.round) for r in rows):
        own = [r for r in rows if (r.rate_rps or 0.0, r.round) == turn]
        again = _as_the_run_planned(workload, turn, classes, own) if workload is not None else None
        same = same and again is not None
        turns[turn] = again if again is not None else tuple(_from_row(row) for row in own)
    return turns, same


def _workload(result: Result | None) -> AnyWorkload | None:
    if result is None or result.environment.get("simulated"):
        return None
    try:
        raw = dict(result.workload)
        return validated(TraceWorkload, raw, "result.json") if "trace" in raw else validated(Workload, raw, "result.json")
    except ConfigError:
        return None


def _as_the_run_planned(
    workload: AnyWorkload, turn: Turn, classes: Sequence[SloClass], rows: Sequence[Row]
) -> tuple[PlannedRequest, ...] | None:
    """The run's own plan of that turn; None when it does not give these rows (another version, a trace that is not here)."""
    rate, round_ = turn
    try:
        own = mean_rate_rps(workload, classes)
        paced = workload if abs(own - rate) <= 0.005 * own else at_rate(workload, classes, rate)
        planned = planned_at(paced, rate, classes, round_ - 1)
    except ConfigError:
        return None
    wanted = {(r.index, r.input_tokens, r.max_output_tokens, r.due_s) for r in rows}
    return planned if {(p.index, p.input_tokens, p.output_tokens, p.due_s) for p in planned} >= wanted else None


def _from_row(row: Row) -> PlannedRequest:
    return PlannedRequest(
        round=row.round - 1,
        index=row.index,
        stream=row.stream,
        slo_class=row.slo_class,
        due_s=row.due_s,
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens if row.is_whole else row.max_output_tokens,  # one that ended by itself was shorter
        shared_prefix_tokens=0,
        ignore_eos=True,
        temperature=0.0,
        seed=f"replay/{row.prompt_digest}",
    )


async def replay(
    recording: Recording,
    client: StreamingClient,
    vocab_size: int | None,
    out: OutFolder,
    progress: RunProgress,
    environment: Mapping[str, Any],
) -> Result:
    """Send everything again, turn by turn; rows of both runs go to `out`, so that its result compares them. Failed requests are counted.

    `vocab_size`: of the model that is asked, None where it does not say.
    Raises DisaggError when a warm-up request fails, or the disk is full.
    """
    vocab_size = min(filter(None, (recording.vocab_size, vocab_size)), default=DEFAULT_VOCAB)
    sent: list[Row] = []
    reports: dict[Turn, LoadReport] = {}
    progress.plan(len(recording.turns), max(p.due_s for turn in recording.turns.values() for p in turn))
    await _warm_up(recording, client, vocab_size, progress)
    with RowFile(out.requests) as file:
        for row in recording.rows:
            file.append(row)
        for number, (turn, planned) in enumerate(recording.turns.items(), start=1):
            progress.begin_turn(f"{number} of {len(recording.turns)}: round {turn[1]} at {turn[0]:g}/s", len(planned))
            load = OpenLoop(client, planned, arm=REPLAY, vocab_size=vocab_size, timeout_s=recording.timeout_s, rate_rps=turn[0])
            async with aclosing(load.rows()) as rows:
                async for row in rows:
                    sent.append(row)
                    file.append(row)
                    progress.request_ended()
            reports[turn] = load.report
            progress.end_turn()
    result = _result(recording, sent, reports, environment)
    out.write_result(result.to_json())
    return result


async def _warm_up(recording: Recording, client: StreamingClient, vocab_size: int, progress: RunProgress) -> None:
    """The shortest, the median and the longest request, a few of each at once, unmeasured. Raises DisaggError when one fails."""
    ordered = sorted(recording.rows, key=lambda row: (row.input_tokens, row.max_output_tokens))
    kinds = list(dict.fromkeys((ordered[0], ordered[len(ordered) // 2], ordered[-1])))
    progress.say(f"warming up: {len(kinds) * _WARM_UP_COPIES} requests")
    for row in kinds:
        alike = [replace(_from_row(row), seed=f"replay/warm-up/{row.index}/{copy}", due_s=0.0) for copy in range(_WARM_UP_COPIES)]
        load = OpenLoop(client, alike, arm=REPLAY, vocab_size=vocab_size, timeout_s=recording.timeout_s)
        async with aclosing(load.rows()) as rows:
            async for ended in rows:
                if not ended.is_whole:
                    what = f"warm-up request of {ended.input_tokens} tokens in, {ended.max_output_tokens} out"
                    raise DisaggError(f"replay: a {what} failed: {ended.error}: {ended.message}")


def _result(recording: Recording, sent: Sequence[Row], reports: Mapping[Turn, LoadReport], environment: Mapping[str, Any]) -> Result:
    rows = {recording.arm: list(recording.rows), REPLAY: list(sent)}
    verdict, reference = conclude(rows, recording.classes)
    points = [_point(recording, rows, rate, reports) for rate in sorted({rate for rate, _ in recording.turns})]
    point = next(p for p in points if p.rate_rps == reference)
    return Result(
        schema=2,
        workload=dict(recording.workload),
        environment=dict(environment),
        points=points if len(points) > 1 else [],
        rate_rps=reference or None,
        rounds=point.rounds,
        arms=point.arms,
        verdict=verdict,
        warnings=_warnings(recording, sent),
        not_a_result=next((fault for report in reports.values() if (fault := report.fault) is not None), None),
    )


def _point(recording: Recording, rows: Mapping[str, Sequence[Row]], rate: float, reports: Mapping[Turn, LoadReport]) -> PointReport:
    numbers = sorted(number for r, number in recording.turns if r == rate)
    at = {name: [r for r in own if (r.rate_rps or 0.0) == rate] for name, own in rows.items()}
    counted = [reports[(rate, number)].mean_in_flight for number in numbers]
    arms = {name: arm_figures(own, recording.classes, counted if name == REPLAY else None) for name, own in at.items()}
    rounds = [RoundReport(round=number, order=[REPLAY], sender={REPLAY: asdict(reports[(rate, number)])}) for number in numbers]
    return PointReport(rate_rps=rate, probe=False, rounds=rounds, arms=arms, stopped="as recorded")


def _warnings(recording: Recording, sent: Sequence[Row]) -> list[str]:
    before = {(r.rate_rps or 0.0, r.round, r.index): r.prompt_digest for r in recording.rows}
    differ = sum(before.get((r.rate_rps or 0.0, r.round, r.index)) != r.prompt_digest for r in sent)
    found = [f"{recording.arm} was measured before, the replay now: a difference may be the machine's"]
    if differ:
        found.append(f"{differ} of {len(sent)} prompts have other tokens than the recorded ones (same lengths): a prefix cache sees others")
    return found


def replay_environment(topology: Topology | None, target: str, model: str) -> dict[str, Any]:
    """Where the replay ran. `target`: the address, or the topology's file."""
    found = describe({REPLAY: topology} if topology is not None else {}, resident=False)
    return {**found, "model": model, "replayed_to": target}
