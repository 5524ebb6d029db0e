"""Who decides in the simulator: policy.dispatch.Dispatcher, the object that a live gateway runs. Pure.

The only file here that knows how it is made; the cluster drives it as the live coordinator does, with the simulation's clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from disagg.config import Topology
from disagg.perf.shapes import ModelShape
from disagg.policy.decision import Decisions
from disagg.policy.dispatch import Dispatcher
from disagg.policy.priors import pass_tokens_of, priors_of
from disagg.types import EngineState, Mode, ModelInfo, Request, Role


class SimDispatcher(Protocol):
    """What the simulator calls: policy.dispatch.Dispatcher's own methods. Tests put something plainer in its place."""

    def join(self, name: str, role: Role, host_id: str, state: EngineState, now_s: float) -> None: ...

    def leave(self, name: str, now_s: float) -> None: ...

    def report(self, name: str, state: EngineState, now_s: float) -> None: ...

    def submit(
        self, request: Request, now_s: float, avoid: Collection[str] = (), attempt: int = 0, prefix: Sequence[int] | None = None
    ) -> int: ...

    def withdraw(self, key: int) -> None: ...

    def decide(self, now_s: float) -> Decisions: ...

    def first_token(self, key: int, now_s: float, cached_tokens: int = 0) -> None: ...

    def arrived(self, key: int, now_s: float) -> None: ...

    def decoding(self, key: int, now_s: float) -> None: ...

    def progress(self, key: int, output_tokens: int, now_s: float) -> None: ...

    def end(self, key: int, now_s: float, *, is_whole: bool) -> None: ...


def make_dispatcher(topology: Topology, model: ModelInfo, shape: ModelShape | None = None) -> SimDispatcher:
    """The dispatcher of a live gateway of this topology, told the same priors of its workers' speed. `shape`: of a real model, if known."""
    mode, classes = Mode(topology.mode), topology.slo_classes
    return Dispatcher(mode, model, classes, topology.admission, priors_of(topology, shape), pass_tokens_of(topology))
