"""`make bench` sizes its turns to the time that is left."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.ab import ARMS, CHUNK_TRIALS, RATES, WORKLOADS, Plan, _limit_s, _read_plan, _run, plan
from bench.calibrate import Capacity
from disagg.ab.chunk_search import TRIAL_S
from disagg.ab.machine_fit import REFERENCE_PREFILL_TOKENS_PER_S, REFERENCE_STEP_S, Speed

REFERENCE = Speed(REFERENCE_PREFILL_TOKENS_PER_S, REFERENCE_STEP_S, start_s=30)
SLOW = Speed(REFERENCE_PREFILL_TOKENS_PER_S / 4, REFERENCE_STEP_S * 5, start_s=50)
NUM_ARMS = len(ARMS.split(","))


def capacities(longest_s: float) -> dict[str, Capacity]:
    return {name: Capacity(16, 1.0, (0.3, 0.5, 0.8, 1.0, 1.25), longest_s) for name in WORKLOADS}


@pytest.mark.parametrize(
    ("budget_min", "speed", "longest_s", "fits"), [(42, REFERENCE, 3.0, True), (42, SLOW, 4.0, True), (15, SLOW, 4.0, False)]
)
def test_what_is_planned_fits_the_budget_or_says_that_it_does_not(budget_min: float, speed: Speed, longest_s: float, fits: bool):
    spent_s = 200.0
    found = plan(budget_min, spent_s, speed, capacities(longest_s), NUM_ARMS)
    total_s = spent_s + CHUNK_TRIALS * (speed.start_s + TRIAL_S + 5 * longest_s)
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


@pytest.mark.parametrize(
    ("left", "codes", "is_whole"),
    [
        ("run.json", (2, 0), True),  # broken off: goes on
        ("run.json", (2, 2), False),  # and once only
        ("", (2,), False),  # it never began: the same would happen again
        ("result.json", (1,), False),  # a result that is none, which is no accident
    ],
)
def test_a_case_that_is_broken_off_goes_on_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str, codes: tuple[int, ...], is_whole: bool
):
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "short-chat"
        folder.mkdir(exist_ok=True)
        for name in {left, "run.json"} if left else ():
            (folder / name).touch()
        commands.append(command)
        return subprocess.CompletedProcess(command, codes[len(commands) - 1])

    monkeypatch.setattr(subprocess, "run", run)
    planned = plan(42, 0.0, REFERENCE, capacities(3.0), NUM_ARMS)
    assert _run("short-chat", planned, tmp_path, 600.0, resume=False) is is_whole
    assert ["--resume" in command for command in commands] == [False, True][: len(codes)]


def test_time_that_a_case_leaves_is_the_others(tmp_path: Path):
    planned = plan(42, 200.0, REFERENCE, capacities(3.0), NUM_ARMS)
    left_s = 42 * 60 - 200.0
    trials_s = CHUNK_TRIALS * (30 + TRIAL_S + 15)
    assert _limit_s(WORKLOADS[0], planned, left_s, 3, tmp_path) == pytest.approx(trials_s + planned.case_s)
    in_time_s = left_s - trials_s - planned.case_s
    assert _limit_s(WORKLOADS[0], planned, in_time_s + trials_s, 2, tmp_path) == pytest.approx(trials_s + planned.case_s)
    assert _limit_s(WORKLOADS[0], planned, in_time_s + trials_s + 300, 2, tmp_path) == pytest.approx(trials_s + planned.case_s + 150)
    # What is over its time still measures something.
    assert _limit_s(WORKLOADS[0], planned, 0.0, 1, tmp_path) == pytest.approx(trials_s + 0.5 * planned.case_s)
