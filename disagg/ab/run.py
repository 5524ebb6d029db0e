"""`disagg ab`: the same requests at the same times to both arms, in turns, on the same cores.

    bring up (both arms, or each for its turn)  ->  warm up (not measured)  ->  round 1: A B  ->  round 2: B A  ->  ...  ->  result

An arm is measured alone: the other one is idle or down, and a turn begins when the one before has answered everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

from disagg.ab.arms import ARMS, ArmSource, Serving, arm_topologies, known_context, most_workers
from disagg.ab.environment import describe
from disagg.ab.load import LoadReport, OpenLoop
from disagg.ab.out import OutFolder
from disagg.ab.progress import RunProgress
from disagg.ab.result import ArmFigures, ComparisonReport, Result, RoundReport, VerdictReport, arm_figures
from disagg.ab.rows import Row, RowFile
from disagg.ab.trace_plan import AnyWorkload, check_workload, duration_s, plan_round, plan_warm_up
from disagg.ab.verdict import Verdict, judge
from disagg.ab.workload import PlannedRequest
from disagg.client import AsyncClient
from disagg.config import Topology
from disagg.errors import DisaggError
from disagg.types import Mode

BUSY_LOAD = 0.5  # load average per core from which other programs blur the figures
_MOST_WARM_UP_COPIES = 8


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is to be run: both arms' topologies, the workload as run (its seed and rounds are the ones used), whether both arms stay up."""

    topologies: Mapping[Mode, Topology]
    workload: AnyWorkload
    resident: bool

    @property
    def any_topology(self) -> Topology:
        """SLO classes and model are the same in both."""
        return self.topologies[Mode.DISAGG]


@dataclass(slots=True)
class _Measured:
    """What the run has gathered; rows are in requests.jsonl as well."""

    rows: dict[Mode, list[Row]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    reports: dict[Mode, list[LoadReport]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    orders: list[tuple[Mode, ...]] = field(default_factory=list)
    warm: set[tuple[Mode, int]] = field(default_factory=set)


def compare(
    topology: Topology,
    workload: AnyWorkload,
    *,
    resident: bool,
    rounds: int | None = None,
    seed: int | None = None,
    colocated_chunk: int | None = None,
) -> Comparison:
    """Check everything that can be checked before an engine starts. Raises ConfigError."""
    topologies = arm_topologies(topology, colocated_chunk)
    check_workload(workload, topology.slo_classes, known_context(topologies))
    as_run = workload.model_copy(
        update={"rounds": workload.rounds if rounds is None else rounds, "seed": workload.seed if seed is None else seed}
    )
    plan_round(as_run, topology.slo_classes, as_run.seed, 0)
    return Comparison(topologies, as_run, resident)


async def run_ab(comparison: Comparison, source: ArmSource, out: OutFolder, progress: RunProgress) -> Result:
    """Run all rounds; rows go to `out` as requests end, the result at the end. The caller closes `source`.

    Raises what bringing up raises, ConfigError when the workload does not fit the model, DisaggError when a warm-up request fails or the
    disk is full. Failed requests of a round are counted, never raised.
    """
    environment = describe({arm.value: t for arm, t in comparison.topologies.items()}, resident=comparison.resident)
    measured = _Measured()
    workload = comparison.workload
    progress.plan(workload.rounds * len(ARMS), duration_s(workload, comparison.any_topology.slo_classes))
    with RowFile(out.requests) as file:
        for round_ in range(workload.rounds):
            order = ARMS if round_ % 2 == 0 else ARMS[::-1]
            measured.orders.append(order)
            planned = plan_round(workload, comparison.any_topology.slo_classes, workload.seed, round_)
            for arm in order:
                await _turn(comparison, await source.use(arm), arm, planned, measured, file, progress)
    result = _result(comparison, measured, environment)
    out.write_result(result.to_json())
    return result


async def _turn(
    comparison: Comparison,
    serving: Serving,
    arm: Mode,
    planned: Sequence[PlannedRequest],
    measured: _Measured,
    file: RowFile,
    progress: RunProgress,
) -> None:
    """One arm's part of one round."""
    workload = comparison.workload
    async with AsyncClient(serving.endpoint) as client:
        info = await client.model_info()
        check_workload(workload, comparison.any_topology.slo_classes, info.max_model_len)
        if (arm, serving.life) not in measured.warm:
            await _warm_up(client, comparison, arm, info.vocab_size, progress)
            measured.warm.add((arm, serving.life))
        progress.begin_turn(f"round {planned[0].round + 1} of {workload.rounds}, {arm}", len(planned))
        load = OpenLoop(client, planned, arm=arm.value, vocab_size=info.vocab_size, timeout_s=workload.timeout_s)
        async with aclosing(load.rows()) as rows:
            async for row in rows:
                file.append(row)
                measured.rows[arm].append(row)
                progress.request_ended()
        measured.reports[arm].append(load.report)
        progress.end_turn()


async def _warm_up(client: AsyncClient, comparison: Comparison, arm: Mode, vocab_size: int, progress: RunProgress) -> None:
    """Every length once on every worker (at most 8 at a time), unmeasured. Raises DisaggError when a request fails."""
    workload = comparison.workload
    copies = min(_MOST_WARM_UP_COPIES, most_workers(comparison.topologies[arm]))
    planned = plan_warm_up(workload, comparison.any_topology.slo_classes, workload.seed, copies)
    progress.say(f"warming up {arm}: {len(planned)} requests")
    for _, alike in itertools.groupby(planned, key=lambda r: r.due_s):
        kind = [request.at_once() for request in alike]
        load = OpenLoop(client, kind, arm=arm.value, vocab_size=vocab_size, timeout_s=workload.timeout_s)
        async with aclosing(load.rows()) as rows:
            async for row in rows:
                if not row.is_whole:
                    what = f"warm-up request of {row.input_tokens} tokens in, {row.max_output_tokens} out"
                    raise DisaggError(f"arm {arm}: a {what} failed: {row.error}: {row.message}")


def _result(comparison: Comparison, measured: _Measured, environment: dict[str, Any]) -> Result:
    classes = comparison.any_topology.slo_classes
    figures = {arm: arm_figures(measured.rows[arm], classes, [r.mean_in_flight for r in measured.reports[arm]]) for arm in ARMS}
    verdict = judge(measured.rows[Mode.DISAGG], measured.rows[Mode.COLOCATED], classes)
    return Result(
        schema=2,
        workload=comparison.workload.model_dump(mode="json", exclude_none=True),
        environment=environment,
        rounds=[
            RoundReport(
                round=i + 1,
                order=[arm.value for arm in order],
                sender={arm.value: asdict(measured.reports[arm][i]) for arm in order},
            )
            for i, order in enumerate(measured.orders)
        ],
        arms={arm.value: figures[arm] for arm in ARMS},
        verdict=verdict_report(verdict),
        warnings=_warnings(figures, measured.reports, environment),
    )


def verdict_report(verdict: Verdict) -> VerdictReport:
    """A verdict in result.json's form."""
    comparisons = [ComparisonReport(**asdict(c)) for c in verdict.comparisons]
    return VerdictReport(choose=verdict.choose, reason=verdict.reason, comparisons=comparisons)


def _warnings(
    figures: Mapping[Mode, ArmFigures], reports: Mapping[Mode, Sequence[LoadReport]], environment: Mapping[str, Any]
) -> list[str]:
    """What a reader must know before believing the figures."""
    found = []
    load, cores = environment["load_before"], environment["cores"]
    if load > BUSY_LOAD * cores:
        found.append(f"other programs were busy on this machine before the run (load {load:g} on {cores} cores): latencies are theirs, too")
    for arm in ARMS:
        found += [f"round {i + 1}, {arm}: {r.warning}" for i, r in enumerate(reports[arm]) if r.warning is not None]
        law = figures[arm].littles_law
        if law is not None and not law.agrees:
            found.append(
                f"{arm}: {law.measured:.2f} requests were in flight on average, Little's law gives {law.expected:.2f}: "
                "the sender's count and the rows disagree, so some rows are missing or wrong"
            )
        lost = figures[arm].sent - figures[arm].completed
        if lost:
            kinds = ", ".join(f"{n} x {name}" for name, n in sorted(figures[arm].errors.items()))
            found.append(
                f"{arm}: {lost} of {figures[arm].sent} requests did not complete ({kinds}); they count as SLO misses, not in latencies"
            )
    return found
