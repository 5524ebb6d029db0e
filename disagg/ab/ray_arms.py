"""Both arms as Ray deployments in one session."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from disagg.ab.arms import Serving
from disagg.config import Topology
from disagg.types import Mode

if TYPE_CHECKING:
    from disagg.launch.deployment import Deployment
    from disagg.launch.session import RaySession


class RayArms:
    """An ArmSource. `resident`: the first `use` brings both arms up, one after the other, and they stay; otherwise one arm is up at a time.

    `base_dir`: what a relative model path counts from. `say` gets lines of progress. The session is the caller's; close this first. Use
    it in the main thread: while it starts or ends an arm it blocks, and Ctrl-C and SIGTERM raise KeyboardInterrupt.
    """

    def __init__(
        self, session: RaySession, topologies: Mapping[Mode, Topology], *, resident: bool, base_dir: Path, say: Callable[[str], None]
    ) -> None:
        self._session = session
        self._topologies = topologies
        self._resident = resident
        self._base_dir = base_dir
        self._say = say
        self._up: dict[Mode, Deployment] = {}
        self._starts = 0
        self._life: dict[Mode, int] = {}

    async def use(self, arm: Mode) -> Serving:
        """The arm, up and ready."""
        if arm not in self._up:
            if not self._resident:
                await self.close()
            with _interruptible():
                for wanted in self._topologies if self._resident else (arm,):
                    self._start(wanted)
        return Serving(self._up[arm].endpoint, self._life[arm])

    def _start(self, arm: Mode) -> None:
        from disagg.launch.deployment import Deployment  # needs ray, which a machine that only reads results may lack

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
