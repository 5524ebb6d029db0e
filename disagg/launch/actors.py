"""The two kinds of Ray actors: a worker's host and the gateway's.

Ray starts them, restarts them and tells who is where; no request and no token passes through Ray. A worker process that dies is
restarted by Ray; the gateway, waiting in `describe`, then learns the new life's address and epoch and lets it join. Nothing else is
touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from disagg.config import Topology
from disagg.errors import DisaggError, EngineError, LayoutMismatchError, PlacementError
from disagg.launch.heap import settle_heap
from disagg.launch.processes import descendants, me
from disagg.launch.report import ActorProcesses, DeploymentStatus, WorkerReport, WorkerStatus
from disagg.launch.session import LOCAL_HOST
from disagg.models import resolve_model
from disagg.types import Role

if TYPE_CHECKING:
    from disagg.front.gateway import Gateway

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0


class Server(Protocol):
    """What `serving.start.start_worker` returns."""

    @property
    def target(self) -> str: ...

    @property
    def epoch(self) -> str: ...

    async def wait_dead(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """All that a worker's actor needs. `core_slots`: positions among its node's usable cores, valid on node `node_id` only.

    `workers_on_host`: those that share its node's memory.
    `base_dir`: what a relative model path counts from. `is_local`: the whole Ray is one machine's, so that workers meet on 127.0.0.1.
    """

    topology: Topology
    role: Role
    name: str
    base_dir: Path
    is_local: bool
    core_slots: tuple[int, ...] | None
    node_id: str
    workers_on_host: int | None = None

    def cores(self) -> list[int] | None:
        """Core numbers to bind to on this machine; None where the plan binds none, or after a move to another node."""
        if self.core_slots is None or self.node_id != _node_id():
            return None
        usable = sorted(os.sched_getaffinity(0))
        if self.core_slots[-1] >= len(usable):
            raise PlacementError(
                f"worker {self.name} is to be bound to core number {self.core_slots[-1] + 1} of its host, which has {len(usable)}; "
                "expected fewer cores per worker, fewer workers, or bind_cores: false",
                key=f"pools.{self.role}.cores",
            )
        return [usable[slot] for slot in self.core_slots]


class WorkerActor:
    """Hosts one worker. It starts to load when its process starts; when its engine dies, the process ends and Ray makes a new one."""

    def __init__(self, plan: WorkerPlan) -> None:
        _log_to_stderr()
        self._plan = plan
        self._born_s = time.monotonic()
        self._server: Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self._ready = asyncio.create_task(self._start())

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def describe(self) -> WorkerReport:
        """Where the worker serves, once it does. Waits for loading, and across restarts. Raises why it could not start."""
        return await asyncio.shield(self._ready)

    async def processes(self) -> ActorProcesses:
        """This process and its children."""
        return _processes()

    async def close(self) -> None:
        """End the engine and its processes; the actor is of no use afterwards."""
        for task in (self._ready, self._watch):
            if task is not None:
                await _cancel(task)
        if self._server is not None:
            await self._server.close()

    async def _start(self) -> WorkerReport:
        from disagg.serving.start import start_worker  # here, so that each kind of actor imports only its own half

        plan = self._plan
        host = LOCAL_HOST if plan.is_local else ray.util.get_node_ip_address()
        try:
            cores = plan.cores()
            model = model_of(plan.topology, plan.base_dir)
            server = await start_worker(plan.topology, plan.role, plan.name, model, host, cores, plan.workers_on_host)
        except DisaggError:
            raise
        except Exception as error:
            log.exception("worker %s could not start", plan.name)
            raise EngineError(f"worker {plan.name} could not start: {type(error).__name__}: {error}") from error
        self._server = server
        settle_heap()
        self._watch = asyncio.create_task(self._die_with(server))
        loading_s = time.monotonic() - self._born_s
        log.info("worker %s serves at %s, epoch %s, after %.1f s", plan.name, server.target, server.epoch, loading_s)
        return WorkerReport(plan.name, plan.role, server.target, server.epoch, host, os.getpid(), loading_s)

    async def _die_with(self, server: Server) -> None:
        await server.wait_dead()
        log.error("worker %s: the engine is dead; ending the process so that Ray starts a new one", self._plan.name)
        logging.shutdown()
        os._exit(1)


@dataclass(slots=True)
class _Watched:
    """What the gateway remembers of one worker over its lives."""

    role: Role
    handle: ActorHandle
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    lives: int = 0
    epoch: str = ""
    report: WorkerReport | None = None
    trouble: str = "loading"
    refusal: LayoutMismatchError | None = None  # why the pool does not take it, ever


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """All that the gateway's actor needs. `workers`: actor name of each worker, by worker name, for a gateway that was restarted."""

    topology: Topology
    name: str
    base_dir: Path
    namespace: str
    workers: tuple[tuple[str, Role, str], ...]


class GatewayActor:
    """Hosts the gateway, and lets each life of each worker join its pool."""

    def __init__(self, plan: GatewayPlan) -> None:
        _log_to_stderr()
        self._plan = plan
        self._watched: dict[str, _Watched] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._gateway: Gateway | None = None
        self._started = asyncio.create_task(self._start())

    async def endpoint(self) -> str:
        """Where clients connect, once the door is open. Raises PlacementError (port in use) and ModelError."""
        return (await asyncio.shield(self._started)).endpoint

    async def watch(self, name: str, role: Role, handle: ActorHandle) -> None:
        """Take this worker into the pool whenever it is ready, from now on."""
        if name not in self._watched:
            self._watched[name] = _Watched(role, handle)
            self._own(self._keep_joined(name, self._watched[name]))

    async def wait_joined(self) -> None:
        """Returns once every watched worker has joined the pool at least once, and HTTP is served.

        Raises LayoutMismatchError for a worker whose KV cache does not suit the others'.
        """
        for watched in list(self._watched.values()):
            await watched.joined.wait()
            if watched.refusal is not None:
                raise watched.refusal
        await (await asyncio.shield(self._started)).wait_http()

    async def status(self) -> DeploymentStatus:
        """The deployment now, from the heartbeats."""
        gateway = await asyncio.shield(self._started)
        live = {worker.name: worker.state for worker in gateway.pool.view(time.monotonic()).workers}
        workers = tuple(
            WorkerStatus(
                name,
                watched.role,
                is_live=name in live,
                restarts=max(0, watched.lives - 1),
                report=watched.report,
                state=live.get(name),
                trouble="" if name in live else watched.trouble or "lost; waiting for its restart",
            )
            for name, _, _ in self._plan.workers
            if (watched := self._watched.get(name)) is not None
        )
        topology = self._plan.topology
        url = f"http{'s' if topology.gateway.tls else ''}://{gateway.http_endpoint}" if gateway.http_endpoint is not None else None
        return DeploymentStatus(
            self._plan.name, topology.model, topology.mode, gateway.endpoint, os.getpid(), workers, url, gateway.has_openai_api
        )

    async def processes(self) -> ActorProcesses:
        """This process and its children."""
        return _processes()

    async def close(self, grace_s: float) -> None:
        """Stop watching, let running requests end for `grace_s` seconds, cancel the rest."""
        for task in list(self._tasks):
            await _cancel(task)
        await _cancel(self._started)
        if self._gateway is not None:
            await self._gateway.close(grace_s)

    async def _start(self) -> Gateway:
        from disagg.front.gateway import Gateway

        plan = self._plan
        try:
            self._gateway = await Gateway.start(plan.topology, model_of(plan.topology, plan.base_dir), wait_http=False)
        except DisaggError:
            raise
        except Exception as error:
            log.exception("the gateway could not start")
            raise EngineError(f"the gateway could not start: {type(error).__name__}: {error}") from error
        settle_heap()
        await self._find_workers()
        return self._gateway

    async def _find_workers(self) -> None:
        """Those that an earlier life of this gateway had; on the first start there are none yet."""
        for name, role, actor_name in self._plan.workers:
            with contextlib.suppress(ValueError):
                await self.watch(name, role, await asyncio.to_thread(ray.get_actor, actor_name, self._plan.namespace))

    async def _keep_joined(self, name: str, watched: _Watched) -> None:
        """Join, wait until lost, join the next life: for ever. A worker that cannot start, or is stuck, gets a new process."""
        gateway = await asyncio.shield(self._started)
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                report = await self._describe(watched)
                await gateway.pool.join(name, watched.role, report.target)
            except (DisaggError, RayError, TimeoutError) as error:
                watched.trouble = f"{_sentence(error)}; trying again"
                if isinstance(error, LayoutMismatchError):
                    watched.refusal = error
                    watched.joined.set()
                log.warning("worker %s: %s in %.1f s", name, watched.trouble, backoff_s)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
                continue
            backoff_s = FIRST_BACKOFF_S
            watched.report, watched.trouble, watched.refusal = report, "", None
            if report.epoch != watched.epoch:
                watched.epoch, watched.lives = report.epoch, watched.lives + 1
            watched.joined.set()
            log.info("worker %s joined, epoch %s, life %d", name, report.epoch, watched.lives)
            await gateway.pool.wait_lost(name)
            log.warning("worker %s, epoch %s, is lost", name, report.epoch)

    async def _describe(self, watched: _Watched) -> WorkerReport:
        """The report of the worker's present life. One that is stuck or failed to start is killed, so that Ray starts it anew."""
        try:
            async with asyncio.timeout(self._plan.topology.ray.startup_timeout_s):
                report: WorkerReport = await watched.handle.describe.remote()
        except (RayTaskError, TimeoutError):
            ray.kill(watched.handle, no_restart=False)
            raise
        return report

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def model_of(topology: Topology, base_dir: Path) -> str | None:
    """What the engine of this machine loads: a folder or a hub name; None for simulated engines. Raises ModelError."""
    return None if topology.engine.kind == "simulated" else str(resolve_model(topology.model, base_dir))


def cause_of(error: BaseException) -> BaseException:
    """The error of ours inside one that Ray wrapped, else the error itself."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(error, RayTaskError) and isinstance(cause, BaseException) else error


def _sentence(error: BaseException) -> str:
    cause = cause_of(error)
    return (
        cause.message if isinstance(cause, DisaggError) else f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
    )


def _processes() -> ActorProcesses:
    return ActorProcesses(_node_id(), (me(), *descendants(os.getpid())))


def _node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _log_to_stderr() -> None:
    """Ray keeps each actor's standard error in its session's log folder."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, DisaggError):
        await task
