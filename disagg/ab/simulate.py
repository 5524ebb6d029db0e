"""A simulation as a result of the A/B: the same rows, the same figures, marked simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from disagg.ab.arms import Arm, setup_of
from disagg.ab.conclude import conclude, curves
from disagg.ab.environment import describe
from disagg.ab.result import PointReport, Result, RoundReport, arm_figures
from disagg.ab.rows import Row
from disagg.config import SloClass, Topology
from disagg.sim.cluster import Simulation, simulate
from disagg.sim.outcome import Outcome, SimReport
from disagg.sim.settings import SimSettings
from disagg.trace import Trace

_DIGITS = 6  # of instants, as in the A/B's rows


@dataclass(frozen=True, slots=True)
class SimulatedArm:
    """One arm's run at one rate: its name, topology and report. `rate_rps`: mean requests per second that were sent."""

    name: str
    topology: Topology
    report: SimReport
    rate_rps: float

    def without_outcomes(self) -> SimulatedArm:
        """What a result needs beside the rows. Outcomes hold on to the engines that made their tokens."""
        return replace(self, report=replace(self.report, outcomes=()))


def simulate_arms(topologies: Mapping[str, Topology], trace: Trace, settings: SimSettings, rate_rps: float) -> list[SimulatedArm]:
    """The same trace, which asks for `rate_rps`, through each topology. Raises ConfigError."""
    return [SimulatedArm(name, topology, simulate(topology, trace.requests, settings), rate_rps) for name, topology in topologies.items()]


def check_arms(topologies: Mapping[str, Topology], settings: SimSettings) -> None:
    """That each can be simulated. Raises ConfigError."""
    for topology in topologies.values():
        Simulation(topology, (), settings)


def sim_rows(arm: SimulatedArm, stream: str) -> Iterator[Row]:
    """One row a request, in the order in which they were sent. Requests that got a token in one step share its instant in memory."""
    instants: dict[float, float] = {}
    return (_row(arm, stream, outcome, instants) for outcome in arm.report.outcomes)


def _row(arm: SimulatedArm, stream: str, o: Outcome, instants: dict[float, float]) -> Row:
    assert o.status is not None
    assert o.end_s is not None
    whole = o.is_whole
    times = np.round(o.token_times_s(), _DIGITS).tolist() if whole else []
    prefill_s = (o.first_token_s - o.way_back_s / 2 - o.routed_s) if whole and o.first_token_s is not None and o.routed_s else None
    transfer_s = 0.0
    if whole and o.transferred_s is not None and o.first_token_s is not None:
        transfer_s = max(0.0, o.transferred_s - (o.first_token_s - o.way_back_s / 2))
    return Row(
        arm=arm.name,
        round=1,
        rate_rps=arm.rate_rps,
        index=o.index,
        stream=stream,
        slo_class=o.slo_class,
        input_tokens=o.request.input_tokens,
        max_output_tokens=o.request.output_tokens,
        prompt_digest=f"simulated-{o.index}",
        due_s=round(o.request.arrival_s, _DIGITS),
        sent_s=round(o.sent_s, _DIGITS),
        end_s=round(o.end_s, _DIGITS),
        token_s=tuple(map(instants.setdefault, times, times)),
        outcome=o.status,
        error=o.error,
        message=o.message,
        prefill_worker=o.prefill_worker if whole else None,
        decode_worker=o.decode_worker if whole else None,
        attempts=1 if whole else None,
        cached_tokens=o.cached_tokens if whole else None,
        queue_s=round(o.routed_s - o.received_s, _DIGITS) if whole and o.routed_s is not None else None,
        prefill_s=round(prefill_s, _DIGITS) if prefill_s is not None else None,
        transfer_s=round(transfer_s, _DIGITS) if whole else None,
        predicted_ttft_s=round(o.predicted_ttft_s, _DIGITS) if whole and o.predicted_ttft_s is not None else None,
        predicted_tpot_s=round(o.predicted_tpot_s, _DIGITS) if whole and o.predicted_tpot_s is not None else None,
    )


def simulated_result(
    arms: Sequence[SimulatedArm], rows: Mapping[str, Sequence[Row]], trace: Trace, workload: Mapping[str, Any], settings: SimSettings
) -> Result:
    """result.json of a simulation. `arms`: each arm once for each rate; `rows`: by arm's name, of all rates.

    The verdict compares all arms; nothing drifts in a simulation.
    """
    classes = arms[0].topology.slo_classes
    points = [_point(rate, [arm for arm in arms if arm.rate_rps == rate], rows, classes) for rate in sorted({arm.rate_rps for arm in arms})]
    verdict, reference_rps = conclude(rows, classes, simulated=True)
    reference = next(point for point in points if point.rate_rps == reference_rps)
    topologies = {arm.name: arm.topology for arm in arms}
    setups = {name: setup_of(Arm(name, topology.mode, topology)) for name, topology in topologies.items()}
    environment = describe(topologies, resident=False)
    environment |= {
        "simulated": True,
        "simulation": asdict(settings),
        "trace_notes": list(trace.notes),
        "workers": {arm.name: [asdict(w) for w in arm.report.workers] for arm in arms if arm.rate_rps == reference_rps},
    }
    return Result(
        schema=2,
        workload=dict(workload),
        environment=environment,
        setups=setups,
        points=points,
        rate_rps=reference_rps,
        rounds=reference.rounds,
        arms=reference.arms,
        curves=curves(rows, points, setups, classes),
        verdict=verdict,
        warnings=[
            "simulated: no engine ran; step times are the roofline's or a profile's, links and messages as set in environment.simulation"
        ],
    )


def _point(rate_rps: float, arms: Sequence[SimulatedArm], rows: Mapping[str, Sequence[Row]], classes: Sequence[SloClass]) -> PointReport:
    own = {arm.name: [row for row in rows[arm.name] if row.rate_rps == rate_rps] for arm in arms}
    return PointReport(
        rate_rps=rate_rps,
        probe=False,
        rounds=[RoundReport(round=1, order=[arm.name for arm in arms], sender={})],
        arms={arm.name: arm_figures(own[arm.name], classes, [arm.report.mean_in_flight]) for arm in arms},
        stopped="simulated: another round would be the same",
    )
