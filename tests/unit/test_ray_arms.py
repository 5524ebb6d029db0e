"""The arms as deployments, without a Ray: what is asked of one that is up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disagg.ab.arms import Arm
from disagg.ab.ray_arms import RayArms
from disagg.launch.report import DeploymentStatus, WorkerStatus
from disagg.types import EngineState, Role
from tests.ab_rig import topology


class Restarted:
    """A deployment whose gateway was lost and is there again: another process, another port."""

    endpoint = "127.0.0.1:1"

    def status(self) -> DeploymentStatus:
        states = (WorkerStatus(f"w{n}", Role.DECODE, is_live=True, state=EngineState("epoch", preemptions=n)) for n in (2, 5))
        return DeploymentStatus("name", "model", "disagg", "127.0.0.1:2", 42, tuple(states))


async def test_a_gateway_that_was_started_anew_is_found_where_it_listens_now():
    source = RayArms(None, [Arm("disagg", "disagg", topology())], resident=True, base_dir=Path(), say=lambda line: None)
    deployment: Any = Restarted()
    source._up["disagg"], source._life["disagg"] = deployment, 1
    source._wait_whole = nothing  # type: ignore[method-assign]
    serving = await source.use("disagg")
    assert (serving.endpoint, serving.life) == ("127.0.0.1:2", 1)
    assert (await source.lives("disagg"))["gateway"] == "42"
    assert (await source.preemptions("disagg"), await source.preemptions("external")) == (7, None)


async def nothing(arm: str) -> None:
    """All its workers are there."""
