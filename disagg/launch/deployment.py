"""One topology, running: placed, started, watched and ended.

    Deployment.up      room? -> placement groups -> gateway (its port is the first thing to fail) -> workers, a few at a time -> joined
    Deployment.down    gateway -> workers -> placement groups -> their processes are gone

Several deployments may live in one session; they are told apart by name.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from disagg.config import Topology
from disagg.errors import ConfigError, DisaggError, EngineError, PlacementError
from disagg.launch.actors import GatewayActor, GatewayPlan, WorkerActor, WorkerPlan, cause_of, model_of
from disagg.launch.placement import WorkerSpec, groups, place, with_cores, worker_specs
from disagg.launch.processes import ProcessId, end, wait_gone
from disagg.launch.report import ActorProcesses, DeploymentStatus, WorkerReport
from disagg.launch.session import NAMESPACE, RaySession

log = logging.getLogger(__name__)

Progress = Callable[[str], None]
ValueT = TypeVar("ValueT")

GATEWAY = "gateway"
STARTS_PER_NODE = 8  # workers that load at the same time on one node
GATEWAY_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 30.0
NOTE_EVERY_S = 15.0
GRACE_S = 5.0


def _silent(line: str) -> None:
    log.info("%s", line)


class Deployment:
    """A running topology. Made by `up` or `find`, ended by `down`.

    Keep the one that `up` made as long as it is to run: Ray ends actors whose handles are all gone, unless they are detached.
    """

    def __init__(self, session: RaySession, name: str, gateway: ActorHandle, endpoint: str, workers: Sequence[ActorHandle] = ()) -> None:
        self.session = session
        self.name = name
        self.endpoint = endpoint
        self._gateway = gateway
        self._workers = workers

    @classmethod
    def up(
        cls,
        session: RaySession,
        topology: Topology,
        name: str | None = None,
        progress: Progress = _silent,
        *,
        base_dir: Path | None = None,
        detached: bool = False,
    ) -> Deployment:
        """Start every worker and the gateway; returns when all workers have joined. After any failure, Ctrl-C included, nothing is left.

        `base_dir`: what a relative model path counts from (the topology file's folder). `detached`: outlive this process. Raises
        PlacementError (no room, port in use), ModelError, ConfigError (name taken, wrong engine argument), EngineError (a worker
        failed to start).
        """
        name = name or topology.name
        if _actor(_actor_name(name, GATEWAY)) is not None:
            raise ConfigError(
                f"a deployment named {name!r} is up already; end it with `disagg down --name {name}`, or give this one another name",
                key="name",
                value=name,
            )
        base_dir = (base_dir or Path.cwd()).absolute()
        model_of(topology, base_dir)
        session.check_room(topology)
        start = _Start(session, topology, name, base_dir, detached, progress, time.monotonic() + topology.ray.startup_timeout_s)
        try:
            return start.run()
        except BaseException:
            progress("taking down what was started")
            session.attempt(lambda: _remove(name))
            raise

    @classmethod
    def find(cls, session: RaySession, name: str) -> Deployment | None:
        """The running deployment of that name in the session's Ray, or None."""
        gateway = _actor(_actor_name(name, GATEWAY))
        if gateway is None:
            return None
        return cls(session, name, gateway, _call(gateway.endpoint.remote(), CALL_TIMEOUT_S, "the gateway"))

    @classmethod
    def remove(cls, session: RaySession, name: str) -> None:
        """End whatever bears that name in the session's Ray, also where its gateway is dead. Idempotent."""
        _remove(name)

    def status(self) -> DeploymentStatus:
        """What the gateway knows now. Raises EngineError when the gateway does not answer."""
        status: DeploymentStatus = _call(self._gateway.status.remote(), CALL_TIMEOUT_S, "the gateway")
        return status

    def down(self, grace_s: float = GRACE_S) -> None:
        """End it: requests get `grace_s` seconds to finish. Returns when its processes and placement groups are gone. Idempotent.

        Where the local Ray itself has died there is nothing to ask; closing the session then ends what is left.
        """
        self.session.attempt(lambda: _remove(self.name, grace_s))


def names(session: RaySession) -> list[str]:
    """Deployments of the session's Ray."""
    return sorted({name.rpartition("/")[0] for name in _actor_names() if name.endswith(f"/{GATEWAY}")})


@dataclass(frozen=True, slots=True)
class _Bundle:
    """A worker's place: bundle `index` of a placement group, which lies on Ray node `node_id`."""

    group: PlacementGroup
    index: int
    node_id: str


@dataclass(frozen=True, slots=True)
class _Start:
    """The steps of one `up`, with one deadline over all of them."""

    session: RaySession
    topology: Topology
    name: str
    base_dir: Path
    detached: bool
    progress: Progress
    deadline_s: float

    def run(self) -> Deployment:
        specs = worker_specs(self.topology)
        bundles = self._reserve(specs)
        gateway = self._start_gateway(specs)
        endpoint: str = _call(gateway.endpoint.remote(), GATEWAY_TIMEOUT_S, "the gateway")
        self.progress(f"gateway listens at {endpoint}")
        workers = self._start_workers(specs, bundles, gateway)
        _call(gateway.wait_joined.remote(), self._left_s(), "the gateway")
        status: DeploymentStatus = _call(gateway.status.remote(), CALL_TIMEOUT_S, "the gateway")
        if status.http_url is not None:
            self.progress(f"OpenAI API at {status.http_url}/v1" if status.has_openai_api else f"health and metrics at {status.http_url}")
        return Deployment(self.session, self.name, gateway, endpoint, workers)

    def _reserve(self, specs: Sequence[WorkerSpec]) -> dict[str, _Bundle]:
        """Placement groups, and each worker's place in them."""
        kv = self.topology.kv
        together = (tuple(specs),) if kv.needs_no_host else groups(self.topology, specs)
        strategy = "SPREAD" if kv.needs_no_host else "STRICT_PACK" if kv.needs_one_host else "PACK"
        lifetime = "detached" if self.detached else None
        made = [
            placement_group([spec.demand for spec in group], strategy=strategy, name=f"{self.name}/{index}", lifetime=lifetime)
            for index, group in enumerate(together)
        ]
        bundles: dict[str, _Bundle] = {}
        for group, members in zip(made, together, strict=True):
            if not group.wait(max(0.0, min(self._left_s(), CALL_TIMEOUT_S))):
                place(self.topology, self.session.hosts())  # says what is short, when somebody else took it meanwhile
                raise PlacementError(
                    f"pools: Ray found no place for {', '.join(spec.name for spec in members)} within {CALL_TIMEOUT_S:g} s",
                    key="pools",
                )
            nodes = placement_group_table(group)["bundles_to_node_id"]
            bundles |= {spec.name: _Bundle(group, index, nodes[index]) for index, spec in enumerate(members)}
        return bundles

    def _start_gateway(self, specs: Sequence[WorkerSpec]) -> ActorHandle:
        """On this node, so that 127.0.0.1 is this machine's."""
        workers = tuple((spec.name, spec.role, _actor_name(self.name, spec.name)) for spec in specs)
        plan = GatewayPlan(self.topology, self.name, self.base_dir, NAMESPACE, workers)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return self._actor(GatewayActor, GATEWAY, scheduling_strategy=here, num_cpus=0).remote(plan)

    def _start_workers(self, specs: Sequence[WorkerSpec], bundles: dict[str, _Bundle], gateway: ActorHandle) -> list[ActorHandle]:
        """Start them, a few at a time, and hand each to the gateway once it serves."""
        started: list[ActorHandle] = []
        placed = deque(with_cores(specs, {spec.name: bundles[spec.name].node_id for spec in specs}))
        limit = STARTS_PER_NODE * len({bundle.node_id for bundle in bundles.values()})
        loading: dict[Any, tuple[str, ActorHandle, float]] = {}
        while placed or loading:
            while placed and len(loading) < limit:
                item = placed.popleft()
                bundle = bundles[item.spec.name]
                plan = WorkerPlan(
                    self.topology,
                    item.spec.role,
                    item.spec.name,
                    self.base_dir,
                    self.session.is_local,
                    item.core_slots,
                    bundle.node_id,
                    sum(bundles[spec.name].node_id == bundle.node_id for spec in specs),
                )
                handle = self._worker(item.spec, bundle).remote(plan)
                loading[handle.describe.remote()] = (item.spec.name, handle, time.monotonic())
                self.progress(f"worker {item.spec.name} loading")
            for ref in self._some_done(loading):
                worker, handle, since_s = loading.pop(ref)
                report: WorkerReport = _call(ref, CALL_TIMEOUT_S, f"worker {worker}")
                _call(gateway.watch.remote(worker, report.role, handle), CALL_TIMEOUT_S, "the gateway")
                started.append(handle)
                self.progress(f"worker {worker} ready after {time.monotonic() - since_s:.1f} s")
        return started

    def _some_done(self, loading: dict[Any, tuple[str, ActorHandle, float]]) -> list[Any]:
        while True:
            done, _ = ray.wait(list(loading), num_returns=1, timeout=max(0.0, min(NOTE_EVERY_S, self._left_s())))
            if done:
                return list(done)
            waiting = ", ".join(name for name, _, _ in loading.values())
            if self._left_s() <= 0:
                timeout_s = self.topology.ray.startup_timeout_s
                raise EngineError(f"not ready within ray.startup_timeout_s = {timeout_s:g} s: {waiting}")
            self.progress(f"still loading: {waiting}")

    def _worker(self, spec: WorkerSpec, bundle: _Bundle) -> Any:
        where = PlacementGroupSchedulingStrategy(placement_group=bundle.group, placement_group_bundle_index=bundle.index)
        resources = dict(spec.resources)
        return self._actor(
            WorkerActor, spec.name, scheduling_strategy=where, num_cpus=spec.cores, num_gpus=spec.gpus, resources=resources or None
        )

    def _actor(self, kind: type, name: str, **options: Any) -> Any:
        lifetime = "detached" if self.detached else None
        return ray.remote(kind).options(
            name=_actor_name(self.name, name), namespace=NAMESPACE, lifetime=lifetime, max_restarts=-1, **options
        )

    def _left_s(self) -> float:
        return self.deadline_s - time.monotonic()


def _actor_name(deployment: str, part: str) -> str:
    return f"{deployment}/{part}"


def _actor_names() -> list[str]:
    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]


def _actor(name: str) -> ActorHandle | None:
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None


def _call(ref: Any, timeout_s: float, who: str) -> Any:
    """The value of one Ray call; errors of ours as they were raised, Ray's as EngineError."""
    try:
        return ray.get(ref, timeout=max(0.0, timeout_s))
    except GetTimeoutError:
        raise EngineError(f"{who} did not answer within {timeout_s:.0f} s") from None
    except RayError as error:
        cause = cause_of(error)
        if isinstance(cause, DisaggError):
            raise cause from None
        raise EngineError(f"{who} failed: {type(cause).__name__}: {str(cause).strip()[:500]}") from error


def _gather(refs: Sequence[Any], timeout_s: float) -> list[Any]:
    """The values of those calls that succeed within the time."""
    if not refs:
        return []
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    values = []
    for ref in done:
        with contextlib.suppress(RayError, DisaggError):
            values.append(ray.get(ref))
    return values


def _remove(name: str, grace_s: float = GRACE_S) -> None:
    """Take down whatever bears the name, also the remains of a start that failed half-way.

    Bounded; each step is tried whatever failed before.
    """
    mine = [actor for actor in _actor_names() if actor.rpartition("/")[0] == name]
    gateways = [handle for actor in mine if actor.endswith(f"/{GATEWAY}") and (handle := _actor(actor)) is not None]
    workers = [handle for actor in mine if not actor.endswith(f"/{GATEWAY}") and (handle := _actor(actor)) is not None]
    _gather([gateway.close.remote(grace_s) for gateway in gateways], grace_s + CALL_TIMEOUT_S)
    known = _gather([handle.processes.remote() for handle in gateways + workers], 5.0)
    _gather([worker.close.remote() for worker in workers], CALL_TIMEOUT_S)
    for handle in gateways + workers:
        with contextlib.suppress(RayError):
            ray.kill(handle)
    _remove_groups(name)
    _await_deaths(gateways + workers, known)


def _remove_groups(name: str) -> None:
    ids = [
        key for key, entry in placement_group_table().items() if entry["name"].rpartition("/")[0] == name and entry["state"] != "REMOVED"
    ]
    for key in ids:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(key)))
    deadline_s = time.monotonic() + CALL_TIMEOUT_S
    while any(placement_group_table()[key]["state"] != "REMOVED" for key in ids) and time.monotonic() < deadline_s:
        time.sleep(0.05)  # Ray tells nobody when a group is gone


def _await_deaths(handles: Sequence[ActorHandle], known: Sequence[ActorProcesses]) -> None:
    """Return when Ray has buried the actors, and this node's processes among them are gone (by force at last)."""
    refs = [handle.processes.remote() for handle in handles]
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=CALL_TIMEOUT_S)
    here = ray.get_runtime_context().get_node_id()
    mine: list[ProcessId] = [process for actor in known if actor.node_id == here for process in actor.processes]
    left = wait_gone(mine, GRACE_S)
    if left and (still := end(left, grace_s=0.0)):
        log.warning("processes survive: %s", [process.pid for process in still])
