"""Seeded runs of a simulated cluster with one fault each: every request ends in the right answer or a typed error, and nothing is left.

A run is named by carrier, seed and number, and can be repeated alone. Its fault sits at one of three places:

    frame   between carrier and inbox, at a message boundary (tests/faulty_carrier.py)
    wire    in the bytes between the two ports (tests/faulty_wire.py); not for `loopback`, which has none, and `cuda_ipc`
    kill    a worker ends at a message boundary, or its process gets SIGKILL

`python -m bench.faults` runs them by the hundred; tests/flow/test_faults.py some of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from disagg.errors import DisaggError
from disagg.kv.carrier import Carrier
from disagg.kv.carriers.loopback import LoopbackCarrier
from disagg.kv.layout import hash_tokens
from disagg.kv.outbox import Outbox
from disagg.serving.worker_rpc_server import WorkerServer
from disagg.types import Request, Role, Transfer, new_id
from tests.builders import Answer, Cluster, cluster
from tests.faulty_carrier import FAULTS, OPENED, FaultyCarrier
from tests.faulty_wire import WIRE_FAULTS, FaultyWire, Harm
from tests.kv_rig import FakeCudaIpcCarrier

Place = Literal["frame", "wire", "kill"]
_BETWEEN_OBJECTS: dict[str, Callable[[], Carrier]] = {"loopback": LoopbackCarrier, "cuda_ipc": FakeCudaIpcCarrier}  # no other processes
KILLS = ("prefill worker", "decode worker", "prefill process", "decode process")

CHUNK_TOKENS = 512  # a prefill step, and so a frame
SILENCE_S = 1.0  # instead of 15 s: a run with a silent peer should not take that long
HEARTBEAT_S = 0.2
SLACK_S = 5.0  # how late after its deadline a request may end before it counts as hanging, beside the time that this process stood still
SETTLE_S = 25.0  # gRPC lets go of a connection that stands but says nothing sensible after 10 s
SPARE = 10  # descriptors and tasks: gRPC opens and closes connections when it likes


@dataclass(frozen=True, slots=True)
class Scene:
    """One run's fault and requests: all that is random in it. `at`: message number (frame, kill) or byte number (wire)."""

    number: int
    place: Place
    fault: str
    at: int
    num_pulls: int  # that meet it
    num_bytes: int
    bit: int
    to_source: bool
    prompts: tuple[int, ...]
    max_tokens: int
    deadline_s: float
    delay_s: float


@dataclass(slots=True)
class Summary:
    """What the runs came to. `outcomes`: by place and fault, how often requests ended how; `problems`: every breach, with its scene."""

    carrier: str
    seed: int
    num_runs: int = 0
    num_requests: int = 0
    num_faults: int = 0
    seconds: float = 0.0
    worst_lateness_s: float = 0.0
    outcomes: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def count(self, scene: Scene, outcome: str) -> None:
        self.num_requests += 1
        self.outcomes.setdefault((scene.place, scene.fault), Counter())[outcome] += 1


def scene_of(carrier: str, seed: int, number: int) -> Scene:
    """The `number`-th scene of a seed. Places and faults come in turn; everything else is drawn."""
    kinds = [("frame", fault) for fault in FAULTS] + [("kill", fault) for fault in KILLS[:2]]
    if carrier not in _BETWEEN_OBJECTS:
        kinds += [("wire", fault) for fault in WIRE_FAULTS]
        if number % 4 == 0:  # a process takes a second to start
            kinds += [("kill", fault) for fault in KILLS[2:]]
    rng = random.Random(f"{carrier} {seed} {number}")
    place, fault = kinds[number % len(kinds)] if number % 3 else rng.choice(kinds)
    is_process = fault.endswith("process")
    count = 4 if is_process else rng.choice([1, 1, 2, 3])
    prompts = tuple([rng.choice([1, 15, 16, 17, 100, 511, 512, 513, rng.randrange(1, 3000)]) for _ in range(count)])
    num_frames = -(-prompts[0] // CHUNK_TOKENS)
    return Scene(
        number=number,
        place=place,  # type: ignore[arg-type]
        fault=fault,
        at=rng.choice([0, rng.randrange(400), rng.randrange(200_000)]) if place == "wire" else rng.randint(OPENED, num_frames),
        num_pulls=rng.choice([1, 1, 2, 99]),
        num_bytes=rng.choice([1, 7, 300]),
        bit=rng.randrange(1 << 24),
        to_source=rng.random() < 0.3,
        prompts=prompts,
        max_tokens=rng.randint(2, 24),
        deadline_s=rng.uniform(0.5, 1.5) if fault == "stall" and place == "frame" else rng.uniform(4.0, 6.0),
        delay_s=rng.uniform(0.0, 0.2),
    )


class Injector(FaultyCarrier):
    """Both injectors around one worker's carrier."""

    def __init__(self, inner: Carrier) -> None:
        super().__init__(inner, None)
        self.wires: list[FaultyWire] = []
        for name, value in (("_silence_s", SILENCE_S), ("_heartbeat_s", HEARTBEAT_S)):
            if hasattr(inner, name):
                setattr(inner, name, value)
        if hasattr(inner, "_idle"):
            inner._idle._most = 1  # kept for later pulls: as many as the warm-up leaves, so that more are a leak

    async def serve(self, outbox: Outbox) -> str:
        endpoint = await super().serve(outbox)
        if self.name in _BETWEEN_OBJECTS:
            return endpoint
        self.wires.append(FaultyWire(endpoint))
        return self.wires[-1].endpoint

    async def close(self) -> None:
        await super().close()
        for wire in self.wires:
            await wire.close()
        self.wires.clear()


class FaultRuns:
    """A cluster of 2 + 2 simulated workers on `carrier`, and what its runs came to so far."""

    def __init__(self, c: Cluster, summary: Summary) -> None:
        self.cluster = c
        self.summary = summary
        self._open: Counter[str] = Counter()
        self._lost_s = 0.0

    async def warm(self) -> None:
        """Let every pair of workers meet, and note what is open then."""
        c = self.cluster
        workers = [(server.worker, name.split("-")[0]) for name, server in c.workers.items()]
        for p, d in [(p, d) for p, role in workers for d, other in workers if (role, other) == (Role.PREFILL, Role.DECODE)]:
            request = c.request(20, 2)
            transfer = Transfer(new_id(), 0, p.address, 20, hash_tokens(request.prompt_token_ids))
            prefilled = await p.prefill(request, transfer)
            async with aclosing(d.decode(request, prefilled, transfer)) as chunks:
                assert [chunk async for chunk in chunks]
        await c.ask_right(c.request(100, 3))
        await c.settle()
        await asyncio.sleep(2 * HEARTBEAT_S)
        self._open = _open()

    async def run(self, scene: Scene) -> None:
        """One run; every breach becomes a problem of the summary."""
        start_s = time.monotonic()
        c = self.cluster
        victim = await c.spawn(Role(scene.fault.split()[0]), "victim") if scene.fault.endswith("process") else None
        kill = _Kill(c, scene, victim)
        self._arm(scene, kill)
        stood_still = asyncio.create_task(self._watch_pace())
        try:
            requests = [c.request(n, scene.max_tokens, deadline_s=time.monotonic() + scene.deadline_s) for n in scene.prompts]
            async with asyncio.timeout(scene.deadline_s + 12 * SLACK_S):
                await asyncio.gather(*(self._ask(scene, request) for request in requests))
        except TimeoutError:
            self._problem(scene, f"hangs: not ended {12 * SLACK_S:.0f} s after its deadline")
        except Exception as error:  # noqa: BLE001 - anything that is not a typed error of ours
            self._problem(scene, f"foreign error {error!r}")
        finally:
            stood_still.cancel()
            self._disarm(kill)
        dead = await kill.finish()
        await self._check_nothing_left(scene, dead)
        self.summary.num_runs += 1
        self.summary.seconds += time.monotonic() - start_s

    async def _ask(self, scene: Scene, request: Request) -> None:
        expected = self.cluster.expected(request)
        answers: list[Answer] = []
        try:
            answer = await self.cluster.ask(request, on_chunk=answers.append)
        except DisaggError as error:
            outcome = type(error).__name__
            got = answers[-1].token_ids if answers else ()
        else:
            got = answer.token_ids
            outcome = "right" if answer.run.attempts == 1 else "right, retried"
            if got != expected or answer.finish is None:
                outcome = "WRONG"
        if got != expected[: len(got)] or outcome == "WRONG":
            outcome = "WRONG"
            self._problem(scene, f"wrong tokens for {request.num_prompt_tokens} prompt tokens: {got} instead of {expected}")
        assert request.deadline_s is not None
        lateness_s = time.monotonic() - request.deadline_s - self._lost_s
        self.summary.worst_lateness_s = max(self.summary.worst_lateness_s, lateness_s)
        if lateness_s > SLACK_S:
            self._problem(scene, f"hangs: ended {lateness_s:.1f} s after its deadline, {outcome}")
        self.summary.count(scene, outcome)

    async def _watch_pace(self) -> None:
        """Count the seconds that the machine gave this process nothing, or its event loop was held up: no deadline is kept then."""
        self._lost_s = 0.0
        while True:
            start_s = time.monotonic()
            await asyncio.sleep(0.05)
            self._lost_s += max(0.0, time.monotonic() - start_s - 0.1)

    def _arm(self, scene: Scene, kill: _Kill) -> None:
        for injector in self._injectors():
            match scene.place:
                case "frame":
                    injector.fault, injector.at_frame, injector.bit = scene.fault, scene.at, scene.bit  # type: ignore[assignment]
                    injector.pulls_left = scene.num_pulls
                case "kill":
                    injector.on_message = kill.hook(injector)
                case _:
                    for wire in injector.wires:
                        wire.arm(Harm(scene.fault, scene.to_source, scene.at, scene.num_bytes, scene.bit))  # type: ignore[arg-type]

    def _disarm(self, kill: _Kill) -> None:
        self.summary.num_faults += kill.has_begun
        for injector in self._injectors():
            injector.fault, injector.on_message = None, None
            self.summary.num_faults += injector.num_faults
            injector.num_faults = 0
            for wire in injector.wires:
                self.summary.num_faults += wire.num_faults
                wire.num_faults = 0
                wire.heal()

    def _injectors(self) -> list[Injector]:
        return [k for server in self.cluster.workers.values() for k in server.worker._carriers if isinstance(k, Injector)]

    async def _check_nothing_left(self, scene: Scene, dead: WorkerServer | None) -> None:
        await self.cluster.settle()
        try:
            self.cluster.assert_empty()
            if dead is not None:
                dead.worker.assert_empty()
        except AssertionError as error:
            self._problem(scene, f"left behind: {error}")
        if more := await _surplus(self._open):
            self._problem(scene, f"left behind: {more}")
            self._open |= _open()

    def _problem(self, scene: Scene, what: str) -> None:
        self.summary.problems.append(f"{self.summary.carrier} seed {self.summary.seed}: {what} ({scene})")


class _Kill:
    """Ends a worker at the scene's message, once, and puts a new life of it in its place."""

    def __init__(self, c: Cluster, scene: Scene, victim: str | None) -> None:
        self._cluster = c
        self._scene = scene
        self._victim = victim
        self._task: asyncio.Task[WorkerServer | None] | None = None
        if scene.fault == "decode process":  # its pulls are not ours to see
            self._begin("victim", scene.delay_s)

    @property
    def has_begun(self) -> bool:
        return self._task is not None

    def hook(self, injector: Injector) -> Callable[[Transfer, int], None]:
        def on_message(transfer: Transfer, at: int) -> None:
            if at < self._scene.at or self._task is not None:
                return
            if self._victim is not None:
                if transfer.source.worker == self._victim:
                    self._begin(self._victim)
            elif self._scene.fault == "prefill worker":
                self._begin(transfer.source.worker)
            else:
                self._begin(next(n for n, s in self._cluster.workers.items() if injector in s.worker._carriers))

        return on_message

    def _begin(self, name: str, delay_s: float = 0.0) -> None:
        self._task = asyncio.create_task(self._kill(name, delay_s))

    async def _kill(self, name: str, delay_s: float) -> WorkerServer | None:
        c = self._cluster
        await asyncio.sleep(delay_s)
        await c.kill(name)
        if name == "victim":
            return None
        server = c.killed.pop()
        await server.close()
        await c.add(Role(name.split("-")[0]), name)
        return server

    async def finish(self) -> WorkerServer | None:
        """When the new life serves: the dead one, where it was in this process."""
        dead = await self._task if self._task is not None else None
        if self._victim is not None:
            if self._task is None:
                await self._cluster.kill(self._victim)
            await self._cluster.pool.leave(self._victim)
        return dead


@asynccontextmanager
async def fault_runs(carrier: str, seed: int) -> AsyncIterator[FaultRuns]:
    """A cluster for runs on one carrier. Leaving closes it, and notes what stays open as a problem."""
    summary = Summary(carrier, seed)

    def wrap(inner: Carrier) -> Carrier:
        return Injector(_BETWEEN_OBJECTS[carrier]() if carrier in _BETWEEN_OBJECTS else inner)

    shape = {"prefill": 2, "decode": 2, "carrier": "auto" if carrier in _BETWEEN_OBJECTS else carrier, "kv": {"lease_s": 2.0}}
    engine = {"speed": 200, "max_num_batched_tokens": CHUNK_TOKENS, "kv_cache_tokens": 1 << 15}
    async with cluster(wrap_carrier=wrap, box_bytes=1 << 20, **shape, **engine) as c:
        await c.ask_right(c.request())  # what the process opens once: gRPC's own descriptors
        await c.settle()
    before = _open()
    async with cluster(wrap_carrier=wrap, check_empty=False, box_bytes=1 << 20, **shape, **engine) as c:
        runs = FaultRuns(c, summary)
        await runs.warm()
        yield runs
    if more := await _surplus(before):
        summary.problems.append(f"{carrier} seed {seed}: after the cluster has closed: {more}")


async def _surplus(before: Counter[str]) -> str:
    """What is open beyond `before`, after SETTLE_S at most; nothing when it closes meanwhile."""
    deadline_s = time.monotonic() + SETTLE_S
    while (more := _open() - before).total() > SPARE:
        if time.monotonic() > deadline_s:
            return f"still open: {dict(more)}"
        await asyncio.sleep(0.1)
        gc.collect()  # a view of a box that only a traceback still holds is no leak
    return ""


def _open() -> Counter[str]:
    """This process's file descriptors and tasks, by what they are."""
    found: Counter[str] = Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            found[str(descriptor.readlink()).partition(":[")[0]] += 1
    return found
