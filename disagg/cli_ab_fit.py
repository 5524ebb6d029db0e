"""`disagg ab --fit-machine`: measure one worker, then size workload and topology to it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disagg.ab.arms import Arm
    from disagg.ab.machine_fit import Fit, Speed
    from disagg.ab.out import OutFolder
    from disagg.ab.progress import RunProgress
    from disagg.ab.trace_plan import AnyWorkload
    from disagg.config import Topology
    from disagg.launch.session import RaySession

FIT_HELP = (
    "Measure one worker first. Where it is slower than the machine that the shipped workloads were written for, shorten prompts, chunks "
    "and answers, so that they take as long as there (tokens), or keep those and stretch gaps, durations and targets (time). The table "
    "and the report say by how much."
)


def fit_of(text: str) -> Fit:
    """The value of the option. Raises ConfigError."""
    from disagg.ab.machine_fit import Fit
    from disagg.errors import ConfigError, nearest

    try:
        return Fit(text)
    except ValueError:
        raise ConfigError(key="--fit-machine", value=text, expected=nearest(text, list(Fit))) from None


def fitted_to_machine(
    topology: Topology, workload: AnyWorkload, fit: Fit, base_dir: Path, folder: OutFolder, address: str | None
) -> tuple[Topology, AnyWorkload]:
    """Both sized to this machine, by its speed as it is in the folder of a resumed run, else as it is measured now.

    Raises ConfigError for a simulated engine or a trace, EngineError when the worker cannot be measured.
    """
    from rich.console import Console

    from disagg.ab.machine_fit import Speed, fitted_topology, fitted_workload, lone_worker, streams_only
    from disagg.ab.progress import RunProgress
    from disagg.launch.session import RaySession

    arm, streams = lone_worker(topology), streams_only(workload)
    with RunProgress(Console(stderr=True)) as progress:
        if folder.machine.exists():
            speed = Speed(**json.loads(folder.machine.read_text()))
        else:
            progress.say("measuring how fast one worker is here")
            assert arm.topology is not None
            with RaySession.start([arm.topology], address) as session:
                speed = asyncio.run(_measured(arm, session, base_dir, progress))
            folder.write(folder.machine, json.dumps(asdict(speed)) + "\n")
        progress.say(f"one worker: {speed.text(fit)}")
    return fitted_topology(topology, speed, fit), fitted_workload(streams, speed, fit)


async def _measured(arm: Arm, session: RaySession, base_dir: Path, progress: RunProgress) -> Speed:
    """The speed of the one worker that `arm` is; it is taken down whatever happens."""
    from disagg.ab.machine_fit import measure_speed
    from disagg.ab.ray_arms import RayArms

    assert arm.topology is not None
    source = RayArms(session, [arm], resident=False, base_dir=base_dir, say=progress.say)
    try:
        begin_s = time.monotonic()
        serving = await source.use(arm.name)
        return await measure_speed(serving.endpoint, arm.topology.slo_classes[0].name, 1, begin_s)
    finally:
        await source.close()
