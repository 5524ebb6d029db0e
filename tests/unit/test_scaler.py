"""The scaler's decisions tick by tick, and workers that change roles in a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from disagg.errors import ConfigError
from disagg.plan.scaler import Forecast, Scaler, ScalerSettings
from disagg.policy.fleet import FleetObservation, Move
from disagg.sim.cluster import Simulation
from disagg.sim.fleet import FleetSettings
from disagg.sim.outcome import Outcome
from disagg.sim.settings import SimSettings
from disagg.types import Role
from tests.sim_rig import EagerDispatcher, poisson, sim_topology

SETTINGS = ScalerSettings(prompt_token_s=1e-4, output_token_s=1e-3)


def seen(prefill_work: float, decode_work: float, prefill: int = 4, decode: int = 4, **more: int) -> FleetObservation:
    """One second in which so many worker-seconds of work arrived."""
    return FleetObservation(1.0, 10, round(prefill_work * 1e4), decode_work * 1e3, more.pop("waiting_tokens", 0), prefill, decode, **more)


def drive(scaler: Scaler, observations: Sequence[FleetObservation], start_s: float = 0.0) -> list[tuple[float, Move]]:
    """Moves by second; each takes effect at once."""
    moves: list[tuple[float, Move]] = []
    shift_p = shift_d = 0
    for second, observation in enumerate(observations):
        now = replace(observation, prefill=observation.prefill + shift_p, decode=observation.decode + shift_d)
        for move in scaler.on_tick(now, start_s + second):
            moves.append((start_s + second, move))
            shift_p += (move.target is Role.PREFILL) - (move.source is Role.PREFILL)
            shift_d += (move.target is Role.DECODE) - (move.source is Role.DECODE)
    return moves


def test_a_balanced_fleet_stays_as_it_is() -> None:
    assert drive(Scaler(SETTINGS), [seen(2.0, 2.0)] * 300) == []
    assert drive(Scaler(SETTINGS), [seen(0.0, 0.0)] * 300) == [], "nobody asks for anything"


def test_work_moves_workers_one_by_one_and_stops_at_its_share() -> None:
    moves = drive(Scaler(SETTINGS), [seen(4.8, 0.8)] * 300)
    assert [m.target for _, m in moves] == [Role.PREFILL] * 3, "its share is 6.9 of 8 workers"
    assert moves[0][0] >= SETTINGS.hold_s
    assert moves[1][0] - moves[0][0] >= SETTINGS.cooldown_s
    assert "wanted 6.9 prefill and 1.1 decode workers of 4 + 4" in moves[0][1].reason
    back = drive(Scaler(SETTINGS), [seen(0.8, 4.8)] * 300)
    assert [m.target for _, m in back] == [Role.DECODE] * 3


def test_no_pool_loses_its_last_worker() -> None:
    assert len(drive(Scaler(SETTINGS), [seen(50.0, 0.0)] * 300)) == 3
    assert len(drive(Scaler(SETTINGS), [seen(0.0, 50.0)] * 300)) == 3
    assert drive(Scaler(SETTINGS), [seen(50.0, 0.0, 1, 1)] * 300) == []


def test_a_load_that_swings_around_a_border_does_not_make_it_flap() -> None:
    swings = [seen(2.5 + 0.6 * math.sin(i / 3), 2.5 - 0.6 * math.sin(i / 3)) for i in range(600)]
    assert len(drive(Scaler(SETTINGS), swings)) <= 1


def test_waiting_prompts_are_answered_at_once() -> None:
    scaler = Scaler(SETTINGS)
    assert drive(scaler, [seen(2.0, 2.0)] * 60) == []
    moves = drive(scaler, [seen(2.0, 2.0, waiting_tokens=200_000)] * 3, start_s=60.0)
    assert moves[0][0] == 60.0
    assert moves[0][1].target is Role.PREFILL


def test_a_fleet_grows_at_once_and_shrinks_late() -> None:
    elastic = replace(SETTINGS, is_elastic=True)
    scaler = Scaler(elastic)
    grown = scaler.on_tick(seen(4.0, 1.0, spare=2), 0.0)
    assert [(m.source, m.target) for m in grown] == [(None, Role.PREFILL)]
    quiet = drive(Scaler(elastic), [seen(0.5, 0.5)] * 400)
    assert quiet[0][0] >= SETTINGS.shrink_hold_s
    assert sum(m.target is None for _, m in quiet) >= 2
    assert all(m.source is not None for _, m in quiet)


def test_nothing_moves_while_a_worker_is_moving() -> None:
    assert drive(Scaler(SETTINGS), [seen(50.0, 0.0, moving=1)] * 60) == []


def test_the_forecast_is_ahead_of_a_ramp() -> None:
    forecast = Forecast(level_s=20.0, trend_s=60.0, memory_s=180.0)
    for second in range(200):
        forecast.see(second * 0.1, 1.0)
    assert forecast.at(30.0, 0.0) == pytest.approx(20.0 + 30 * 0.1, rel=0.1)
    assert forecast.at(30.0, 0.0) > forecast.level


@pytest.mark.parametrize(
    ("change", "key"),
    [({"target_busy": 0.0}, "target_busy"), ({"least": 0}, "least"), ({"hold_s": -1.0}, "hold_s"), ({"level_s": 0.0}, "level_s")],
)
def test_bad_settings_are_named(change: dict[str, float], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(SETTINGS, **change)  # type: ignore[arg-type]
    assert caught.value.key == f"scaler.{key}"


class Script:
    """Asks for what it was told at given seconds, and remembers what it saw."""

    def __init__(self, moves: dict[float, Move]) -> None:
        self.moves = moves
        self.seen: list[FleetObservation] = []

    def on_tick(self, observation: FleetObservation, now_s: float) -> Sequence[Move]:
        self.seen.append(observation)
        return [self.moves[now_s]] if now_s in self.moves else []


def run(script: Script) -> tuple[Simulation, Sequence[Outcome]]:
    topology = sim_topology("disagg", prefill=2, decode=2)
    fleet = FleetSettings(script, move_s=0.5)
    simulation = Simulation(
        topology, poisson(4.0, 200, 1000, 80), SimSettings(), dispatcher=EagerDispatcher(), keep_events=True, fleet=fleet
    )
    outcomes = simulation.run().outcomes
    assert all(o.is_whole for o in outcomes)
    return simulation, outcomes


def test_a_worker_changes_its_role_and_no_request_notices() -> None:
    """`run` asserts that nothing is left anywhere."""
    script = Script(
        {10.0: Move(Role.DECODE, Role.PREFILL, "try"), 30.0: Move(Role.PREFILL, None, "park"), 40.0: Move(None, Role.DECODE, "back")}
    )
    simulation, outcomes = run(script)
    assert simulation.fleet is not None
    assert [round(at_s) for at_s, _, _ in simulation.fleet.moves] == [10, 30, 40]
    shapes = [(o.prefill, o.decode, o.spare) for o in script.seen]
    assert shapes[0] == (2, 2, 0)
    assert (3, 1, 0) in shapes
    assert (2, 1, 1) in shapes
    assert shapes[-1] == (2, 2, 0)
    moved = next(name for _, name, _ in simulation.fleet.moves)
    after = [o for o in outcomes if o.prefill_worker == moved]
    assert after
    assert min(o.sent_s for o in after) > 10.0
    assert script.seen[-1].waiting_tokens == 0
    assert sum(o.prompt_tokens for o in script.seen) <= 200 * 1000


def test_the_last_worker_of_a_pool_stays_whatever_is_asked() -> None:
    script = Script({float(s): Move(Role.DECODE, Role.PREFILL, "all of them") for s in range(5, 40, 5)})
    simulation, _ = run(script)
    assert simulation.fleet is not None
    assert len(simulation.fleet.moves) == 1


def test_same_seed_same_moves() -> None:
    runs = [run(Script({10.0: Move(Role.DECODE, Role.PREFILL, "try")})) for _ in range(2)]
    assert runs[0][0]._events == runs[1][0]._events
