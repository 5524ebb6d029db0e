"""A class that no pair can ever meet is named at start, with the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disagg.config import SloClass, parse_topology
from disagg.launch.check import check_topology
from disagg.policy.feasibility import impossible
from disagg.policy.step_cost import StepCost
from disagg.types import Mode, Role

QUICK = StepCost(base_s=10e-3, over_s=0.0, token_s=0.0, pair_s=0.0, decode_s=0.0, context_s=0.0)
COSTS = {Role.PREFILL: QUICK, Role.DECODE: QUICK.scaled(4)}


@pytest.mark.parametrize(
    ("mode", "ttft_ms", "tpot_ms", "said"),
    [
        (Mode.DISAGG, 20, 50, ""),
        (Mode.DISAGG, 5, 50, "a first token takes 10.0 ms on the quickest worker (prefill), its target is 5 ms"),
        (Mode.DISAGG, 20, 30, "a further token takes 40.0 ms on the quickest worker (decode), its target is 30 ms"),
        (Mode.ADAPTIVE, 20, 30, ""),  # the prefill worker may decode
        (Mode.DISAGG, None, None, ""),
    ],
)
def test_a_class_is_impossible_when_the_quickest_worker_misses_it(mode: Mode, ttft_ms: Any, tpot_ms: Any, said: str) -> None:
    found = impossible(mode, [SloClass(name="c", ttft_ms=ttft_ms, tpot_ms=tpot_ms)], COSTS)
    assert found == ((f"class c can never be met: {said}",) if said else ())


def test_check_refuses_it_before_anything_starts(tmp_path: Path) -> None:
    pools = {"prefill": {"count": 1}, "decode": {"count": 1}}
    classes = ["chat", {"name": "hasty", "tpot_ms": 3}]
    topology = parse_topology({"model": "m", "engine": {"kind": "simulated"}, "pools": pools, "slo_classes": classes})
    (problem,) = [p for p in check_topology(topology, tmp_path).problems if "class" in p]
    assert problem.startswith("class hasty can never be met: a further token takes")
