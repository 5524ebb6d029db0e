"""`make bench` sizes its turns to the time that is left."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bench.ab import ARMS, CHUNK_TRIALS, RATES, WORKLOADS, Cases, Plan, _read_plan, limit_of, plan
from bench.calibrate import Capacity
from disagg.ab.arms import parse_arms
from disagg.ab.chunk_search import TRIAL_S
from disagg.ab.machine_fit import REFERENCE_PREFILL_TOKENS_PER_S, REFERENCE_STEP_S, Speed
from disagg.ab.progress import RunProgress
from disagg.config import load_topology
from disagg.errors import EngineError

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
    total_s = spent_s + CHUNK_TRIALS * (speed.start_s + TRIAL_S + 5 * longest_s) + NUM_ARMS * speed.start_s
    for name in WORKLOADS:
        turns = RATES * NUM_ARMS * found.rounds[name]
        total_s += NUM_ARMS * 3 * longest_s + turns * (found.duration_s[name] + 1.5 * longest_s)
    assert found.probably_s == pytest.approx(total_s)
    assert 0.9 * 60 * budget_min < total_s
    assert (total_s <= 61 * budget_min) == fits
    assert ("more than the" in found.lines()[-1]) == (not fits)
    assert json.loads(json.dumps(asdict(found)))["budget_min"] == budget_min
    again: Plan = _read_plan(json.loads(json.dumps(asdict(found))))
    assert again == found


def cases(tmp_path: Path) -> Cases:
    """On nothing that could be started."""
    topology = load_topology("cluster/topologies/cpu-1p1d.yaml")
    planned = plan(42, 0.0, REFERENCE, capacities(3.0), NUM_ARMS)
    return Cases(planned, topology, parse_arms(ARMS, topology), tmp_path, None, RunProgress(Console()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("left", "ends", "is_whole", "resume"),
    [
        ("run.json", ("broken", "whole"), True, False),  # broken off: goes on
        ("run.json", ("broken", "whole"), True, True),  # and so does one that had gone on before
        ("run.json", ("broken", "broken"), False, False),  # and once only
        ("", ("broken",), False, False),  # it never began: the same would happen again
        ("result.json", ("none",), False, False),  # a result that is none, which is no accident
    ],
)
async def test_a_case_that_is_broken_off_goes_on_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str, ends: tuple[str, ...], is_whole: bool, resume: bool
):
    resumed: list[bool] = []
    if resume:
        (tmp_path / "short-chat").mkdir()
        (tmp_path / "short-chat" / left).touch()

    async def measure(self: Cases, name: str, limit_s: float, *, resume: bool) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        for file in {left, "run.json"} if left else ():
            (tmp_path / name / file).touch()
        resumed.append(resume)
        end = ends[len(resumed) - 1]
        if end == "broken":
            raise EngineError("a worker is lost")
        return SimpleNamespace(not_a_result="nothing was sent" if end == "none" else None)

    monkeypatch.setattr(Cases, "_measure", measure)
    assert await cases(tmp_path).run("short-chat", 600.0, 1, resume=resume) is is_whole
    assert resumed == [resume, True][: len(ends)]


def test_a_chunk_that_a_case_of_this_run_found_is_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    searches = {
        "cpu-interference": None,
        "short-chat": SimpleNamespace(chosen_tokens=64),
        "azure-conv-cpu": SimpleNamespace(chosen_tokens=32),
    }
    monkeypatch.setattr("bench.ab.read_result", lambda file: SimpleNamespace(chunk_search=searches[file.parent.name]))
    for name in WORKLOADS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").touch()
    found = [cases(tmp_path)._chunk_found(name) for name in WORKLOADS]
    assert found == [None, None, 64]  # what stands in the folder of a later case is an older run's


def test_time_that_a_case_leaves_is_the_others():
    planned = plan(42, 200.0, REFERENCE, capacities(3.0), NUM_ARMS)
    left_s = 42 * 60 - 200.0
    begin_s = CHUNK_TRIALS * (30 + TRIAL_S + 15) + NUM_ARMS * 30
    assert limit_of(planned, left_s, 3, NUM_ARMS) == pytest.approx(begin_s + planned.case_s)
    in_time_s = left_s - begin_s - planned.case_s
    assert limit_of(planned, in_time_s, 2, 0) == pytest.approx(planned.case_s)
    assert limit_of(planned, in_time_s + 300, 2, 0) == pytest.approx(planned.case_s + 150)
    # What is over its time still measures something.
    assert limit_of(planned, 0.0, 1, 0) == pytest.approx(0.5 * planned.case_s)
