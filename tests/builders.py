"""A whole cluster in one process, for tests: simulated workers behind real gRPC doors, real carriers, one pool and coordinator.

async with cluster(prefill=2, decode=2) as c:
    answer = await c.ask(c.request(prompt=range(100)))
    assert answer.token_ids == c.expected(answer.request)
# leaving asserts that nothing is left anywhere
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from disagg.config import Topology, parse_topology
from disagg.engine.simulated import SimulatedEngine
from disagg.engine.simulated_model import expected_tokens
from disagg.engine.simulated_settings import simulated_model_info
from disagg.kv.carrier import Carrier
from disagg.serving import start
from disagg.serving.coordinator import Coordinator
from disagg.serving.pool import Pool
from disagg.serving.run import Run
from disagg.serving.worker import LocalWorker
from disagg.serving.worker_rpc_server import WorkerServer
from disagg.types import Chunk, FinishReason, Request, Role, Sampling, Token

ROOT = Path(__file__).parent.parent
SETTLE_S = 20.0  # gRPC lets go of a connection that makes no sense after 10 s, and a lease follows


@dataclass
class Answer:
    """What one request brought: its chunks with their receive instants."""

    request: Request
    run: Run
    chunks: list[Chunk] = field(default_factory=list)
    instants_s: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> list[Token]:
        return [t for c in self.chunks for t in c.tokens]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(t.token_id for t in self.tokens)

    @property
    def finish(self) -> FinishReason | None:
        return self.chunks[-1].finish if self.chunks else None


def sim_topology(
    *,
    mode: str = "disagg",
    prefill: int = 1,
    decode: int = 1,
    carrier: str = "auto",
    box_bytes: int = 64 << 20,
    kv: Mapping[str, Any] | None = None,
    admission: Mapping[str, Any] | None = None,
    **simulated: Any,
) -> Topology:
    """A topology of simulated workers; further keywords are SimulatedSettings. `speed` is 0 (no waiting) unless given."""
    settings = {"speed": 0, "kv_cache_tokens": 1 << 16, "max_model_len": 8192, "eos_mean_tokens": 1_000_000, **simulated}
    gib = box_bytes / (1 << 30)
    return parse_topology(
        {
            "model": "simulated",
            "mode": mode,
            "engine": {"kind": "simulated", "simulated": settings},
            "pools": {"prefill": {"count": prefill}, "decode": {"count": decode}},
            "kv": {"carrier": carrier, "outbox_gib": gib, "inbox_gib": gib, "lease_s": 5.0, **(kv or {})},
            "admission": {"worker_timeout_s": 10.0, **(admission or {})},
        }
    )


class Cluster:
    """The running parts. `workers` are in this process; `processes` are workers of their own process (see `spawn`)."""

    def __init__(self, topology: Topology, pool: Pool, coordinator: Coordinator) -> None:
        self.topology = topology
        self.pool = pool
        self.coordinator = coordinator
        self.workers: dict[str, WorkerServer] = {}
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.killed: list[WorkerServer] = []
        self._numbers = itertools.count()

    # ---- workers

    async def add(self, role: Role, name: str | None = None) -> str:
        """Start a worker in this process and let it join; a name that is given may be that of a killed worker."""
        name = name or f"{role}-{sum(n.startswith(role) for n in self.workers)}"
        server = await start.start_worker(self.topology, role, name)
        self.workers[name] = server
        await self.pool.join(name, role, server.target)
        return name

    async def spawn(self, role: Role, name: str) -> str:
        """Start a worker in a process of its own and let it join."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.worker_process",
            self.topology.model_dump_json(),
            role,
            name,
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        self.processes[name] = process
        assert process.stdout is not None
        async with asyncio.timeout(120):
            target = (await process.stdout.readline()).decode().strip()
        assert target, f"worker process {name} did not start"
        await self.pool.join(name, role, target)
        return name

    async def kill(self, name: str) -> None:
        """End a worker as abruptly as its kind allows: SIGKILL for a process, else its sockets close and its engine dies."""
        if name in self.processes:
            process = self.processes.pop(name)
            process.kill()
            await process.wait()
            return
        server = self.workers.pop(name)
        self.killed.append(server)
        self.engine_of(server).die()
        await server._server.stop(None)
        await server.worker.inbox.close()
        for carrier in server.worker._carriers:
            await _stop_accepting(carrier)
            await carrier.close()

    def worker(self, name: str) -> LocalWorker:
        return self.workers[name].worker

    def engine(self, name: str) -> SimulatedEngine:
        return self.engine_of(self.workers[name])

    @staticmethod
    def engine_of(server: WorkerServer) -> SimulatedEngine:
        engine = server.worker.engine
        assert isinstance(engine, SimulatedEngine)
        return engine

    # ---- requests

    def request(self, prompt: Sequence[int] | int = 32, max_tokens: int = 8, **fields: Any) -> Request:
        """A greedy request. `prompt`: token ids, or how many (then unlike any other prompt of this cluster)."""
        number = next(self._numbers)
        if isinstance(prompt, int):
            rng = random.Random(number)
            prompt = [rng.randrange(3, 30_000) for _ in range(prompt)]
        sampling = fields.pop("sampling", Sampling(max_tokens=max_tokens, temperature=0.0))
        return Request(request_id=f"r{number}", prompt_token_ids=tuple(prompt), sampling=sampling, arrival_s=time.monotonic(), **fields)

    def expected(self, request: Request) -> tuple[int, ...]:
        """The right answer."""
        settings = self.topology.simulated(next(iter(self.topology.active_pools())))
        return expected_tokens(settings, request.prompt_token_ids, request.sampling.max_tokens, request.sampling)

    async def ask(self, request: Request, on_chunk: Callable[[Answer], Any] | None = None) -> Answer:
        """Run a request to its end. `on_chunk` sees the answer so far after each chunk; what it returns is awaited when it can be."""
        answer = Answer(request, self.coordinator.submit(request))
        async with aclosing(answer.run.chunks()) as chunks:
            async for chunk in chunks:
                answer.chunks.append(chunk)
                answer.instants_s.append(time.monotonic())
                result = on_chunk(answer) if on_chunk else None
                if asyncio.iscoroutine(result):
                    await result
        return answer

    async def ask_right(self, request: Request) -> Answer:
        """`ask`, and assert that the answer is whole and right."""
        answer = await self.ask(request)
        assert answer.token_ids == self.expected(request)
        assert answer.finish is not None
        return answer

    # ---- the end

    async def settle(self) -> None:
        """Returns when clean-up has reached all workers, or after SETTLE_S."""
        deadline_s = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline_s:
            await self.coordinator.settle()
            try:
                self.assert_empty()
            except AssertionError:
                await asyncio.sleep(0.02)
            else:
                return

    def assert_empty(self) -> None:
        """No reservation, transfer, or request is left in the gateway or in any worker of this process."""
        self.coordinator.assert_empty()
        for server in self.workers.values():
            server.worker.assert_empty()
            self.engine_of(server).assert_empty()

    async def close(self) -> None:
        await self.coordinator.close()
        await self.pool.close()
        for server in [*self.workers.values(), *self.killed]:
            await server.close()
        for process in self.processes.values():
            process.kill()
            await process.wait()


async def _stop_accepting(carrier: Carrier) -> None:
    """Let connections that asyncio has just accepted reach their handler: it forgets those whose server closes before, unclosed.

    A process that dies has no such connections; a worker killed inside a living process would leave its peer waiting.
    """
    inner = getattr(carrier, "_inner", getattr(carrier, "inner", carrier))  # of a SlowCarrier or a fault injector
    for server in getattr(inner, "_servers", []):
        for listener in server.sockets if isinstance(server, asyncio.Server) else ():
            asyncio.get_running_loop().remove_reader(listener.fileno())
    for _ in range(3):
        await asyncio.sleep(0)


@asynccontextmanager
async def cluster(
    topology: Topology | None = None,
    *,
    wrap_carrier: Callable[[Carrier], Carrier] | None = None,
    start_workers: bool = True,
    check_empty: bool = True,
    **shape: Any,
) -> AsyncIterator[Cluster]:
    """A running cluster. `shape`: the keywords of `sim_topology`. `wrap_carrier` puts a fault injector around (or instead of) each carrier.

    Leaving without an exception asserts that nothing is left behind.
    """
    topology = topology or sim_topology(**shape)
    model = simulated_model_info(topology.simulated(next(iter(topology.active_pools()))), topology.model)
    pool = Pool(topology, model)
    c = Cluster(topology, pool, Coordinator(pool, topology, model))
    plain = start.make_carriers
    if wrap_carrier is not None:
        start.make_carriers = lambda t, h: {k.name: k for k in map(wrap_carrier, plain(t, h).values())}
    try:
        if start_workers:
            for role, settings in topology.active_pools().items():
                for _ in range(settings.count):
                    await c.add(role)
        yield c
        if check_empty:
            await c.settle()
            c.assert_empty()
    finally:
        start.make_carriers = plain
        await c.close()


def with_sampling(request: Request, **changes: Any) -> Request:
    """`request` with other sampling parameters."""
    return replace(request, sampling=replace(request.sampling, **changes))
