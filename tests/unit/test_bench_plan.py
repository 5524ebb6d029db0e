"""`make bench` sizes itself: workloads to the machine's speed, turns to the time that is left."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from bench.ab import ARMS, CHUNK_TRIALS, RATES, TUNED_ON, WORKLOADS, Plan, _read_plan, plan
from bench.calibrate import REFERENCE_PREFILL_TOKENS_PER_S, REFERENCE_STEP_S, Capacity, Speed, scaled, slower_targets, times
from disagg.ab.chunk_search import TRIAL_S
from disagg.ab.workload import Lengths, load_workload
from disagg.config import SloClass

REFERENCE = Speed(REFERENCE_PREFILL_TOKENS_PER_S, REFERENCE_STEP_S, start_s=30)
SLOW = Speed(REFERENCE_PREFILL_TOKENS_PER_S / 4, REFERENCE_STEP_S * 5, start_s=50)
NUM_ARMS = len(ARMS.split(","))


def capacities(longest_s: float) -> dict[str, Capacity]:
    return {name: Capacity(16, 1.0, (0.3, 0.5, 0.8, 1.0, 1.25), longest_s) for name in WORKLOADS}


def test_on_the_machine_that_they_were_written_for_workloads_stay_as_they_are():
    for name in WORKLOADS:
        own = load_workload(name)
        assert scaled(own, REFERENCE).streams == own.streams
    fast = Speed(REFERENCE_PREFILL_TOKENS_PER_S * 9, REFERENCE_STEP_S / 9, 1)
    assert (fast.input_factor, fast.output_factor) == (1, 1)


def test_on_a_slower_machine_requests_take_as_long_and_have_fewer_tokens():
    document = next(s for s in scaled(load_workload(TUNED_ON), SLOW).streams if s.name == "document")
    assert (document.input_tokens.fixed, document.output_tokens.fixed) == (750, 4)
    assert times(Lengths(uniform=(40, 160)), 0.25).uniform == (10, 40)
    assert times(Lengths.model_validate({"lognormal": {"median": 42, "sigma": 0.7, "max": 150}}), 0.2).lognormal.max == 30
    assert times(Lengths(fixed=3), 0.1).fixed == 3
    assert [c.tpot_ms for c in slower_targets([SloClass(name="a", tpot_ms=100, ttft_ms=5), SloClass(name="b")], SLOW)] == [500, None]


@pytest.mark.parametrize(
    ("budget_min", "speed", "longest_s", "fits"), [(42, REFERENCE, 3.0, True), (42, SLOW, 4.0, True), (15, SLOW, 4.0, False)]
)
def test_what_is_planned_fits_the_budget_or_says_that_it_does_not(budget_min: float, speed: Speed, longest_s: float, fits: bool):
    spent_s = 200.0
    found = plan(budget_min, spent_s, speed, capacities(longest_s), NUM_ARMS)
    total_s = spent_s + CHUNK_TRIALS * (speed.start_s + TRIAL_S + longest_s)
    for name in WORKLOADS:
        turns = RATES * NUM_ARMS * found.rounds[name]
        total_s += NUM_ARMS * (speed.start_s + 3 * longest_s) + turns * (found.duration_s[name] + 1.5 * longest_s)
    assert found.probably_s == pytest.approx(total_s)
    assert 0.9 * 60 * budget_min < total_s
    assert (total_s <= 61 * budget_min) == fits
    assert ("more than the" in found.lines()[-1]) == (not fits)
    assert json.loads(json.dumps(asdict(found)))["budget_min"] == budget_min
    again: Plan = _read_plan(json.loads(json.dumps(asdict(found))))
    assert again == found
