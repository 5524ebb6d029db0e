"""The simulated engine of the simulator: runs of steps change nothing but the number of appointments."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from disagg.config import SimulatedSettings
from disagg.sim.agenda import Agenda
from disagg.sim.engine import Leg, SimEngine


class Owner:
    """Keeps what it is told."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self.first_s: dict[Leg, float] = {}
        self.end_s: dict[Leg, float] = {}
        self.loaded_legs: list[Leg] = []

    def loaded(self, leg: Leg) -> None:
        self.loaded_legs.append(leg)

    def computed(self, leg: Leg) -> None:
        assert leg.num_computed < leg.num_tokens

    def first_token(self, leg: Leg) -> None:
        assert leg not in self.first_s
        self.first_s[leg] = self._agenda.now_s

    def ended(self, leg: Leg) -> None:
        assert leg not in self.end_s
        self.end_s[leg] = self._agenda.now_s


CPU = {"gpu": "cpu", "shape": "smollm2-135m", "tp": 1}  # loading KV takes time there


def settings_of(**changes: Any) -> SimulatedSettings:
    return SimulatedSettings(**{"kv_cache_tokens": 4096, "max_num_batched_tokens": 256, "max_num_seqs": 16, **changes})


def history(seed: int, *, runs: bool, **changes: Any) -> tuple[list[list[float]], SimEngine, int]:
    """Token instants of each leg of a random history, with runs or step by step; the appointments it took."""
    rng = random.Random(seed)
    agenda = Agenda()
    engine = SimEngine(agenda, "e", settings_of(**changes), prefix_unit_blocks=2)
    if not runs:
        engine.scheduler.steady_steps = lambda most: 0  # type: ignore[method-assign]
    owner = Owner(agenda)
    legs: list[Leg] = []
    at_s = 0.0
    for _ in range(60):
        at_s += rng.expovariate(8)
        size, ready = rng.randint(1, 700), rng.random() < 0.3
        prefix = tuple(rng.randrange(2) * 1000 + i for i in range(size // 32))
        leg = Leg(size + ready, num_ready=size if ready else 0, owner=owner, remaining=rng.randint(1, 120), prefix=prefix)
        legs.append(leg)
        agenda.at(at_s, lambda leg=leg: engine.submit(leg))
        if rng.random() < 0.2:
            agenda.at(at_s + rng.random(), lambda leg=leg: engine.cancel(leg))
        if rng.random() < 0.1:
            factor = rng.choice([1.0, 3.0])
            agenda.at(at_s + rng.random(), lambda factor=factor: engine.slow_down(factor))
    agenda.run()
    engine.assert_empty()
    return [list(engine.token_times_s(leg)) for leg in legs], engine, agenda.done


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("changes", [{}, {"kv_cache_tokens": 1024}, {"max_num_batched_tokens": 8}, CPU, {**CPU, "kv_cache_tokens": 1024}])
def test_runs_and_single_steps_give_the_same_tokens(seed: int, changes: dict[str, Any]) -> None:
    """Also when the cache is small (preemptions), when a step cannot serve all, when legs are cancelled or the engine slows down, and where
    KV is loaded over several steps."""
    fast, by_run, few = history(seed, runs=True, **changes)
    slow, by_step, many = history(seed, runs=False, **changes)
    for a, b in zip(fast, slow, strict=True):
        assert len(a) == len(b)
        assert np.allclose(a, b, rtol=0, atol=1e-9)
    assert by_run.busy_s == pytest.approx(by_step.busy_s, rel=1e-9)
    assert by_run.decode_tokens == by_step.decode_tokens
    assert by_run.scheduler.preemptions == by_step.scheduler.preemptions
    if not changes:
        assert few < many * 0.7, "runs save no appointments"


def test_a_leg_alone_takes_what_the_roofline_says() -> None:
    agenda = Agenda()
    engine = SimEngine(agenda, "e", settings_of())
    owner = Owner(agenda)
    leg = Leg(600, owner=owner, remaining=50)
    engine.submit(leg)
    agenda.run()
    model = engine._model
    prefill_s = model.prefill_s(600, max_num_batched_tokens=256)
    assert owner.first_s[leg] == pytest.approx(prefill_s)
    decode_s = sum(model.decode_step_s(1, 601 + i) for i in range(49))
    assert owner.end_s[leg] == pytest.approx(prefill_s + decode_s)
    assert len(engine.token_times_s(leg)) == 50


def test_a_ready_leg_starts_with_one_decode_step_and_is_loaded_once() -> None:
    agenda = Agenda()
    engine = SimEngine(agenda, "e", settings_of())
    owner = Owner(agenda)
    leg = Leg(601, num_ready=600, owner=owner, remaining=1)
    engine.submit(leg)
    agenda.run()
    assert owner.end_s[leg] == pytest.approx(engine._model.decode_step_s(1, 601))
    assert owner.loaded_legs == [leg]


def test_state_in_the_middle_of_a_run() -> None:
    """Free room is that of the steps so far, not of the run's begin or end."""
    agenda = Agenda()
    engine = SimEngine(agenda, "e", settings_of())
    leg = Leg(16, owner=Owner(agenda), remaining=1000)
    engine.submit(leg)
    seen = []
    for i in range(1, 20):
        agenda.run(until_s=i * 0.5)
        state = engine.state()
        produced = engine.produced(leg)
        assert state.running_requests == 1
        used = state.total_kv_tokens - state.free_kv_tokens
        assert used == -(-(16 + produced) // 16) * 16
        seen.append(produced)
    assert seen == sorted(set(seen)), "it goes on"
    engine.cancel(leg)
    agenda.run()
    engine.assert_empty()


def test_records_tell_of_every_kind_of_step() -> None:
    agenda = Agenda()
    engine = SimEngine(agenda, "e", settings_of())
    engine.submit(Leg(300, owner=Owner(agenda), remaining=5))
    agenda.run()
    records = list(engine.recent)
    assert [r.prefill_tokens for r in records] == [256, 44, 0, 0, 0, 0]
    assert records[1].prefill_pairs == 44 * (256 + 22.5)
    assert [r.context_tokens for r in records[2:]] == [301, 302, 303, 304]
    assert [r.number for r in records] == [1, 2, 3, 4, 5, 6]
    assert sum(r.seconds for r in records) == pytest.approx(agenda.now_s)
