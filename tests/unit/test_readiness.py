"""Ready means that a request could be served now: a pool whose workers all stand still is not, though its processes live."""

from __future__ import annotations

import time

import pytest

from disagg.front.readiness import Readiness
from disagg.policy.view import PoolView, WorkerView
from disagg.serving.run import Run
from disagg.serving.signal import Signal
from disagg.types import EngineState, Mode, ModelInfo, Phase, Request, Role, Route

LIMIT_S = 5.0


class Rig:
    """Two prefill workers and one decode worker, and the runs that are under way."""

    def __init__(self) -> None:
        self.changes = Signal()
        self.live = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE}
        self.open_runs: list[Run] = []
        self.worked: dict[str, float] = {}
        self.readiness = Readiness(self, self, LIMIT_S)

    def worked_s(self, name: str) -> float:
        return self.worked.get(name, 0.0)

    def view(self, now_s: float) -> PoolView:
        workers = tuple(WorkerView(name, role, "host", EngineState("e")) for name, role in self.live.items())
        return PoolView(now_s, Mode.DISAGG, ModelInfo("m", 100, 100, 1), workers)

    def run(self, prefill: str, phase: Phase, silent_s: float) -> Run:
        """A run that has had no event for `silent_s`."""
        run = Run(Request("r", (1,)), lambda run: iter(()))  # type: ignore[arg-type, return-value]
        at_s = time.monotonic() - silent_s
        run.route, run.phase = Route(prefill, "d0", ""), phase
        run.timeline.routed_s = at_s
        if phase is not Phase.PREFILLING:
            run.timeline.first_token_s = run.timeline.last_token_s = at_s
            run.output_tokens = 2
        self.open_runs.append(run)
        return run


def test_ready_while_idle_and_while_tokens_come() -> None:
    rig = Rig()
    assert rig.readiness.obstacle() is None
    for prefill, phase in (("p0", Phase.PREFILLING), ("p1", Phase.PREFILLING), ("p0", Phase.DECODING), ("p0", Phase.WAITING)):
        rig.run(prefill, phase, LIMIT_S / 2)
    assert rig.readiness.obstacle() is None


@pytest.mark.parametrize("phase", [Phase.DECODING, Phase.WAITING, Phase.TRANSFERRING])
def test_a_decode_pool_that_stands_still(phase: Phase) -> None:
    rig = Rig()
    run = rig.run("p0", phase, LIMIT_S * 2)
    assert "no decode worker has done anything for 10 s" in (rig.readiness.obstacle() or "")
    run.timeline.last_token_s = time.monotonic()
    assert rig.readiness.obstacle() is None


def test_one_prefill_worker_of_two_is_enough() -> None:
    rig = Rig()
    rig.run("p0", Phase.PREFILLING, LIMIT_S * 2)
    assert rig.readiness.obstacle() is None
    rig.run("p1", Phase.PREFILLING, LIMIT_S * 3)
    assert "no prefill worker" in (rig.readiness.obstacle() or "")


def test_a_worker_that_works_is_not_wedged_by_one_slow_request() -> None:
    """It serves others, or shows the chunks of a long prompt."""
    rig = Rig()
    rig.run("p0", Phase.DECODING, LIMIT_S * 2)
    assert rig.readiness.obstacle() is not None
    rig.worked["d0"] = time.monotonic()
    assert rig.readiness.obstacle() is None


def test_a_missing_pool_and_a_closing_gateway() -> None:
    rig = Rig()
    del rig.live["d0"]
    assert rig.readiness.obstacle() == "no live decode worker"
    rig.live["d0"] = Role.DECODE
    rig.readiness.close()
    assert rig.readiness.obstacle() == "the gateway is closing"
