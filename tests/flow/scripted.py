"""A coordinator whose answers a test writes, behind the real door on a real port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from disagg.config import Topology, parse_topology
from disagg.front.model_info import Served, read_served
from disagg.front.readiness import Readiness
from disagg.front.server import DoorServer
from disagg.front.text import SyntheticTokenizer
from disagg.policy.view import PoolView, WorkerView
from disagg.serving.run import Run
from disagg.serving.signal import Signal
from disagg.types import Chunk, EngineState, FinishReason, Mode, Phase, Request, Role, Route, Token

TEXT = SyntheticTokenizer().decode
Script = Callable[[Request], AsyncGenerator[Chunk, None]]


def topology(**overrides: Any) -> Topology:
    """One prefill and one decode worker, simulated, on any free port."""
    raw = {
        "model": "a-model",
        "engine": {"kind": "simulated", "simulated": {"max_model_len": 4096, "vocab_size": 32000}},
        "pools": {"prefill": {"count": 1}, "decode": {"count": 1}},
        "gateway": {"port": 0},
        "slo_classes": [{"name": "chat", "ttft_ms": 2000, "priority": 1}, {"name": "batch"}],
    }
    return parse_topology({**raw, **overrides})


async def counting(request: Request) -> AsyncGenerator[Chunk, None]:
    """Tokens 0, 1, 2, ... until max_tokens."""
    last = request.sampling.max_tokens - 1
    for n in range(last + 1):
        yield Chunk((Token(n),), FinishReason.LENGTH if n == last else None)


def failing(error: Exception, after: int = 0) -> Script:
    async def script(request: Request) -> AsyncGenerator[Chunk, None]:
        for n in range(after):
            yield Chunk((Token(n),))
        raise error

    return script


async def endless(request: Request) -> AsyncGenerator[Chunk, None]:
    """One token, then nothing for ever."""
    yield Chunk((Token(1),))
    await asyncio.Event().wait()


class Scripted:
    """The coordinator, and the pools that the door asks for live workers."""

    def __init__(self, script: Script = counting) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.ended: list[Phase] = []
        self.changes = Signal()
        self.live = {Role.PREFILL, Role.DECODE}
        self.model: Any = None

    def submit(self, request: Request) -> Run:
        self.requests.append(request)
        return Run(request, self._serve)

    async def _serve(self, run: Run) -> AsyncGenerator[Chunk, None]:
        run.route, run.attempts = Route("p0", "d0", "scripted"), 1
        try:
            async with aclosing(self.script(run.request)) as chunks:
                async for chunk in chunks:
                    if chunk.finish is not None:
                        run.end(Phase.FINISHED)
                    yield chunk
        finally:
            run.end(Phase.CANCELLED)
            self.ended.append(run.phase)
            self.changes.fire()

    async def wait_ended(self, count: int) -> None:
        """Returns when `count` requests have ended."""
        async with asyncio.timeout(60):
            while len(self.ended) < count:
                await self.changes.next().wait()

    def set_live(self, *roles: Role) -> None:
        """Workers of these roles are there from now on."""
        self.live = set(roles)
        self.changes.fire()

    @property
    def open_runs(self) -> tuple[()]:
        return ()

    def worked_s(self, name: str) -> float:
        return 0.0

    def view(self, now_s: float) -> PoolView:
        names = {Role.PREFILL: "p0", Role.DECODE: "d0"}
        workers = tuple(WorkerView(names[role], role, "host", EngineState(epoch="e")) for role in sorted(self.live))
        return PoolView(at_s=now_s, mode=Mode.DISAGG, model=self.model, workers=workers)


@dataclass(frozen=True)
class Door:
    """A served scripted coordinator."""

    scripted: Scripted
    server: DoorServer

    @property
    def address(self) -> str:
        return self.server.endpoint


@asynccontextmanager
async def serve(script: Script = counting, settings: Topology | None = None, served: Served | None = None) -> AsyncIterator[Door]:
    """The door on a free port; ends with the assertion that no request is left in it."""
    settings = settings or topology()
    scripted = Scripted(script)
    served = served or read_served(settings, None)
    scripted.model = served.info
    server = await DoorServer.start(settings, served, scripted, Readiness(scripted, scripted, 60.0))
    try:
        yield Door(scripted, server)
    finally:
        await server.close(0.0)
        async with asyncio.timeout(60):
            while server.door.num_running:  # noqa: ASYNC110 - a call that its client has just cancelled ends in its own task
                await asyncio.sleep(0.01)
        assert len(scripted.ended) == len(scripted.requests)
