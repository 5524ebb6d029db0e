"""Which worker goes on which host, decided before anything starts. Pure: no Ray, no I/O.

A tensor-parallel worker is one bundle (so it never spans hosts) with as many GPUs as its degree. Workers are placed in groups: a
group is prefill workers and the decode workers that they feed most, kept on one host where KV can move by shared memory.

`place` is first-fit over groups, then first-fit-decreasing over single workers. For workers whose sizes divide one another (GPU
counts of 1, 2, 4, 8; equal cores) the latter finds room whenever there is room; so a refusal here is a real one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from disagg.config import PoolSettings, Topology
from disagg.errors import ConfigError, PlacementError
from disagg.perf.hardware import find_device
from disagg.types import Role

Resources = tuple[tuple[str, float], ...]

ACCELERATOR = "accelerator_type:"  # Ray's own resource of a host with GPUs of a kind: 1 on each such host
_RAY_NAMES = {"rtx-4090": "GeForce-RTX-4090"}  # where it is not the device's name in capitals
_OF_A_KIND = 0.001  # of that resource: only says which hosts will do


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker to place. `resources`: further named Ray resources. `binds`: its engine is bound to its cores."""

    name: str
    role: Role
    cores: int
    gpus: int = 0
    resources: Resources = ()
    binds: bool = False

    @property
    def demand(self) -> dict[str, float]:
        """Ray resources of its bundle, by Ray's names."""
        gpus = {"GPU": float(self.gpus)} if self.gpus else {}
        return {"CPU": float(self.cores), **gpus, **dict(self.resources)}

    @property
    def asks(self) -> str:
        """`1 GPU, 8 cores` for people."""
        kinds = [name.removeprefix(ACCELERATOR) for name, _ in self.resources if name.startswith(ACCELERATOR)]
        further = [f"{value:g} {name}" for name, value in self.resources if not name.startswith(ACCELERATOR)]
        return ", ".join([*([_plural(self.gpus, " ".join([*kinds, "GPU"]))] if self.gpus else []), _plural(self.cores, "core"), *further])


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of the cluster and what is free on it, by Ray's resource names."""

    name: str
    free: tuple[tuple[str, float], ...]

    def amount(self, resource: str) -> float:
        """What is free of a resource; 0 when the host does not have it."""
        return dict(self.free).get(resource, 0.0)

    def fits(self, demand: dict[str, float]) -> bool:
        """Whether `demand` is free here."""
        return all(self.amount(name) + 1e-9 >= value for name, value in demand.items())

    def less(self, demand: dict[str, float]) -> Host:
        """This host once `demand` is taken."""
        return replace(self, free=tuple((name, value - demand.get(name, 0.0)) for name, value in self.free))

    def describe(self, resources: Sequence[str]) -> str:
        """`host 10.0.0.1: 8 GPUs, 64 cores` for people."""
        parts = [_amount(self.amount(name), name) for name in resources if not name.startswith(ACCELERATOR)]
        parts += [name.removeprefix(ACCELERATOR) for name, value in self.free if name.startswith(ACCELERATOR) and value > 0]
        return f"host {self.name}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker on a host. `core_slots`: positions in the host's sorted list of usable cores; None when not bound."""

    spec: WorkerSpec
    host: str
    core_slots: tuple[int, ...] | None


def worker_specs(topology: Topology) -> tuple[WorkerSpec, ...]:
    """The workers of a topology, pool by pool, named ROLE-INDEX. Raises ConfigError where GPUs and parallel degree differ.

    A pool that names its GPUs asks for hosts that have such.
    """
    specs: list[WorkerSpec] = []
    has_kinds = any(pool.gpu for pool in topology.active_pools().values())
    for role, pool in topology.active_pools().items():
        _check_gpus(topology, role, pool)
        binds = pool.bind_cores and pool.gpus == 0 and topology.engine.kind == "vllm"
        named = topology.gpu_name(role) if has_kinds and pool.gpus else None
        resources = tuple(sorted({**pool.resources, **({accelerator(named): _OF_A_KIND} if named else {})}.items()))
        specs += [WorkerSpec(f"{role}-{index}", role, pool.cores, pool.gpus, resources, binds) for index in range(pool.count)]
    return tuple(specs)


def accelerator(gpu: str) -> str:
    """Ray's resource of the hosts that have GPUs of that name. Raises ConfigError for an unknown device."""
    name = find_device(gpu).name
    return ACCELERATOR + _RAY_NAMES.get(name, name.upper())


def _check_gpus(topology: Topology, role: Role, pool: PoolSettings) -> None:
    key = f"pools.{role}.gpus"
    if topology.engine.kind == "simulated":
        if pool.gpus:
            raise ConfigError(key=key, value=pool.gpus, expected="0: a simulated engine uses no GPU (its device is engine.simulated.gpu)")
        return
    if pool.gpu and not pool.gpus:
        raise ConfigError(key=f"pools.{role}.gpu", value=pool.gpu, expected=f"no name of GPUs where {key} is 0, or {key} of at least 1")
    degree = topology.engine_args(role).get("tensor_parallel_size", 1)
    if not isinstance(degree, int) or degree < 1:
        raise ConfigError(key=f"pools.{role}.args.tensor_parallel_size", value=degree, expected="a whole number of at least 1")
    if pool.gpus not in (0, degree):
        raise ConfigError(
            f"{key}: got {pool.gpus}, but tensor_parallel_size is {degree}; expected equal numbers, as each rank has one GPU",
            key=key,
            value=pool.gpus,
            expected=str(degree),
        )


def groups(topology: Topology, specs: Sequence[WorkerSpec]) -> tuple[tuple[WorkerSpec, ...], ...]:
    """Workers that had better share a host: each prefill worker with its share of the decode workers, or the other way round.

    Singletons where it does not matter (carriers that go over the network anyway, mode colocated).
    """
    prefill = [spec for spec in specs if spec.role is Role.PREFILL]
    decode = [spec for spec in specs if spec.role is Role.DECODE]
    if topology.kv.needs_no_host or not prefill or not decode:
        return tuple((spec,) for spec in specs)
    count = min(len(prefill), len(decode))
    members: list[list[WorkerSpec]] = [[] for _ in range(count)]
    for pool in (prefill, decode):
        for index, spec in enumerate(pool):
            members[index * count // len(pool)].append(spec)
    return tuple(tuple(group) for group in members)


def place(topology: Topology, hosts: Sequence[Host], *, there: str = "the cluster has") -> tuple[Placed, ...]:
    """Every worker on a host, in the order of `worker_specs`. Raises PlacementError: what is asked, what there is, what is short.

    `there`: how the error calls the hosts.
    """
    specs = worker_specs(topology)
    assigned = _by_group(topology, specs, hosts) or (None if topology.kv.needs_one_host else _by_size(specs, hosts))
    if assigned is None:
        apart = topology.kv.needs_one_host and _by_size(specs, hosts) is not None
        raise _no_room(specs, hosts, there, alone=f"carrier {topology.kv.carrier}" if apart else "")
    return with_cores(specs, assigned)


def with_cores(specs: Sequence[WorkerSpec], host_of: dict[str, str]) -> tuple[Placed, ...]:
    """Give bound workers consecutive core slots of their host, from 0, in order."""
    used: Counter[str] = Counter()
    placed = []
    for spec in specs:
        host = host_of[spec.name]
        first = used[host]
        if spec.binds:
            used[host] += spec.cores
        placed.append(Placed(spec, host, tuple(range(first, first + spec.cores)) if spec.binds else None))
    return tuple(placed)


def _by_group(topology: Topology, specs: Sequence[WorkerSpec], hosts: Sequence[Host]) -> dict[str, str] | None:
    left = list(hosts)
    host_of: dict[str, str] = {}
    strict = topology.kv.needs_one_host
    for group in groups(topology, specs):
        whole = _sum(group)
        parts = [(group, whole)] if strict or _first(left, whole) is not None else [((spec,), spec.demand) for spec in group]
        for members, need in parts:
            index = _roomiest(left, need) if topology.kv.needs_no_host else _first(left, need)
            if index is None:
                return None
            left[index] = left[index].less(need)
            host_of |= {spec.name: left[index].name for spec in members}
    return host_of


def _by_size(specs: Sequence[WorkerSpec], hosts: Sequence[Host]) -> dict[str, str] | None:
    left = list(hosts)
    host_of: dict[str, str] = {}
    for spec in sorted(specs, key=lambda s: (-s.gpus, -len(s.resources), -s.cores)):
        index = _first(left, spec.demand)
        if index is None:
            return None
        left[index] = left[index].less(spec.demand)
        host_of[spec.name] = left[index].name
    return host_of


def _first(hosts: Sequence[Host], demand: dict[str, float]) -> int | None:
    return next((index for index, host in enumerate(hosts) if host.fits(demand)), None)


def _roomiest(hosts: Sequence[Host], demand: dict[str, float]) -> int | None:
    fitting = [index for index, host in enumerate(hosts) if host.fits(demand)]
    return max(fitting, key=lambda index: (hosts[index].amount("GPU"), hosts[index].amount("CPU"), -index), default=None)


def _sum(specs: Sequence[WorkerSpec]) -> dict[str, float]:
    total: dict[str, float] = {}
    for spec in specs:
        for name, value in spec.demand.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _no_room(specs: Sequence[WorkerSpec], hosts: Sequence[Host], who_has: str, *, alone: str) -> PlacementError:
    asked = ", ".join(f"{count} x {role} ({asks})" for (role, asks), count in Counter((s.role.value, s.asks) for s in specs).items())
    total = _sum(specs)
    names = sorted(total, key=lambda name: (name != "GPU", name != "CPU", name))
    there = "; ".join(host.describe(names) for host in hosts[:8]) or "no live host"
    more = f"; and {len(hosts) - 8} more hosts" if len(hosts) > 8 else ""
    short = [_amount(lack, name) for name in names if (lack := _lack(specs, hosts, name, total[name])) > 1e-9]
    if short:
        why = f"short of {', '.join(short)}"
    elif alone:
        why = f"no host has room for a prefill worker and its decode workers together, which {alone} needs (kv.carrier: auto does not)"
    else:
        why = "enough in sum, but no single host has what one worker needs" if len(hosts) > 1 else "no room for all of them"
    return PlacementError(
        f"pools: asks {asked}; {who_has} {there}{more}: {why}", key="pools", value=asked, expected="fewer or smaller workers"
    )


def _lack(specs: Sequence[WorkerSpec], hosts: Sequence[Host], name: str, asked: float) -> float:
    """How much of a resource is short in sum; of a kind of GPUs: how many of them."""
    if not name.startswith(ACCELERATOR):
        return asked - sum(host.amount(name) for host in hosts)
    return sum(spec.gpus for spec in specs if name in spec.demand) - sum(host.amount("GPU") for host in hosts if host.amount(name) > 0)


def _plural(count: float, word: str) -> str:
    return f"{count:g} {word}" if count == 1 else f"{count:g} {word}s"


def _amount(value: float, resource: str) -> str:
    if resource.startswith(ACCELERATOR):
        return _plural(value, f"{resource.removeprefix(ACCELERATOR)} GPU")
    return _plural(value, {"CPU": "core", "GPU": "GPU"}[resource]) if resource in ("CPU", "GPU") else f"{value:g} {resource}"
