"""The arms as Ray deployments in one session; external ones are only addresses."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from disagg.ab.arms import Arm, Serving, deployed
from disagg.errors import DisaggError, EngineError

if TYPE_CHECKING:
    from disagg.launch.deployment import Deployment
    from disagg.launch.session import RaySession

_LOOK_EVERY_S = 0.5


class RayArms:
    """An ArmSource. `resident`: the first `use` brings all arms up, one after the other, and they stay; otherwise one arm is up at a time.

    `base_dir`: what a relative model path counts from. `say` gets lines of progress. The session is the caller's (None where all arms are
    external); close this first. Use it in the main thread: while it starts or ends an arm it blocks, and Ctrl-C and SIGTERM raise
    KeyboardInterrupt.
    """

    def __init__(
        self, session: RaySession | None, arms: Sequence[Arm], *, resident: bool, base_dir: Path, say: Callable[[str], None]
    ) -> None:
        self._session = session
        self._topologies = deployed(arms)
        self._urls = {arm.name: arm.url for arm in arms if arm.url is not None}
        self._resident = resident
        self._base_dir = base_dir
        self._say = say
        self._up: dict[str, Deployment] = {}
        self._starts = 0
        self._life: dict[str, int] = {}
        self._preemptions: dict[str, int] = {}

    async def use(self, arm: str) -> Serving:
        """The arm, up and ready. Raises what bringing it up raises, EngineError when a lost worker of it does not come back."""
        if arm in self._urls:
            return Serving(self._urls[arm], 0)
        if arm not in self._up:
            if not self._resident:
                await self.close()
            with _interruptible():
                for wanted in self._topologies if self._resident else (arm,):
                    self._start(wanted)
            return Serving(self._up[arm].endpoint, self._life[arm])
        await self._wait_whole(arm)
        status = await asyncio.to_thread(self._up[arm].status)
        return Serving(status.endpoint, self._life[arm])  # a gateway that Ray started anew listens at another port

    async def lives(self, arm: str) -> Mapping[str, str]:
        """Worker -> its epoch, "" while it is down; and the gateway's process. An arm that does not answer has no lives."""
        if arm not in self._up:
            return {}
        try:
            status = await asyncio.to_thread(self._up[arm].status)
        except DisaggError:
            return {"gateway": ""}
        self._preemptions[arm] = sum(w.state.preemptions for w in status.workers if w.state is not None)
        workers = {w.name: w.report.epoch if w.report is not None and w.is_live else "" for w in status.workers}
        return {"gateway": str(status.gateway_pid), **workers}

    async def preemptions(self, arm: str) -> int | None:
        """Of all its workers, from the heartbeats that the last `lives` saw; None of an external arm."""
        return self._preemptions.get(arm)

    async def _wait_whole(self, arm: str) -> None:
        """Ray restarts a lost worker; this waits until it has joined again, as long as a start may take."""
        limit_s = self._topologies[arm].ray.startup_timeout_s
        deadline_s = time.monotonic() + limit_s
        said = False
        while missing := [name for name, life in (await self.lives(arm)).items() if not life]:
            if time.monotonic() > deadline_s:
                raise EngineError(f"arm {arm}: {', '.join(missing)} did not come back within {limit_s:g} s")
            if not said:
                self._say(f"waiting for {', '.join(missing)} of the {arm} arm to come back")
                said = True
            await asyncio.sleep(_LOOK_EVERY_S)  # Ray tells this process nothing when an actor is there again

    def _start(self, arm: str) -> None:
        from disagg.launch.deployment import Deployment  # needs ray, which a machine that only reads results may lack

        assert self._session is not None
        self._say(f"starting the {arm} arm")
        self._starts += 1
        self._life[arm] = self._starts
        self._up[arm] = Deployment.up(
            self._session, self._topologies[arm], progress=lambda line: self._say(f"  {line}"), base_dir=self._base_dir
        )

    async def close(self) -> None:
        """Take down what is up."""
        while self._up:
            arm, deployment = self._up.popitem()
            self._say(f"taking down the {arm} arm")
            deployment.down()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Inside an event loop the first Ctrl-C only cancels the running task, which a blocking call does not notice; here it interrupts."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
