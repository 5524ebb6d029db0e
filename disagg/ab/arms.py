"""The two arms: which deployments are compared, and bringing them up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from disagg.config import PoolSettings, Topology, parse_topology
from disagg.errors import ConfigError
from disagg.types import Mode, Role

ARMS = (Mode.DISAGG, Mode.COLOCATED)


@dataclass(frozen=True, slots=True)
class Serving:
    """An arm that answers at `endpoint` ("host:port"). `life` changes whenever its engines were started anew, and so are cold."""

    endpoint: str
    life: int


class ArmSource(Protocol):
    """Where the arms come from: Ray, or for tests a process that is up already."""

    async def use(self, arm: Mode) -> Serving:
        """Make `arm` ready to be measured, bringing it up if need be."""
        ...

    async def close(self) -> None:
        """Take down what `use` brought up. Idempotent."""
        ...


def arm_topologies(topology: Topology, colocated_chunk: int | None = None) -> dict[Mode, Topology]:
    """One deployment per arm: as many workers on as many cores and GPUs, the same settings but those of the mode.

    `colocated_chunk`: tokens per engine step of the colocated arm (its prefill chunk), in place of the topology's. Raises ConfigError
    when the arms would not get the same hardware.
    """
    pools = topology.pools
    if pools.prefill is None or pools.decode is None:
        missing = "prefill" if pools.prefill is None else "decode"
        raise ConfigError(key=f"pools.{missing}", value=None, expected="a pool: an A/B needs the disaggregated arm as well")
    arms = {arm: _on_free_ports(topology.with_mode(arm)) for arm in ARMS}
    if colocated_chunk is not None:
        arms[Mode.COLOCATED] = _with_chunk(arms[Mode.COLOCATED], colocated_chunk)
    _check_same_hardware(arms)
    return arms


def can_be_resident(topologies: Mapping[Mode, Topology]) -> bool:
    """Whether both arms' engines may stay up at once. On CPU cores an idle engine costs memory only; a GPU's memory holds one arm."""
    return all(pool.gpus == 0 for topology in topologies.values() for pool in topology.active_pools().values())


def most_workers(topology: Topology) -> int:
    """Size of the largest pool of an arm."""
    return max(pool.count for pool in topology.active_pools().values())


def known_context(topologies: Mapping[Mode, Topology]) -> int | None:
    """The smallest context that the topology itself names, in tokens; None when only the model says."""
    found = []
    for topology in topologies.values():
        for role in topology.active_pools():
            if topology.engine.kind == "simulated":
                found.append(topology.simulated(role).max_model_len)
            elif isinstance(length := topology.engine_args(role).get("max_model_len"), int):
                found.append(length)
    return min(found, default=None)


def _on_free_ports(topology: Topology) -> Topology:
    """Two arms may be up at once, beside a deployment of the same file: their ports must not meet."""
    raw = topology.model_dump()
    raw["gateway"]["port"] = 0
    raw["gateway"]["http_port"] = None
    raw["kv"]["port"] = 0
    raw["name"] = f"{topology.name[:30].rstrip('-')}-{topology.mode}"
    return parse_topology(raw)


def _with_chunk(topology: Topology, chunk: int) -> Topology:
    if chunk < 1:
        raise ConfigError(key="--colocated-chunk", value=chunk, expected="a positive number of tokens")
    raw = topology.model_dump()
    pool = topology.active_pools()[Role.COLOCATED].model_dump()
    section = "simulated" if topology.engine.kind == "simulated" else "args"
    pool[section] = {**pool[section], "max_num_batched_tokens": chunk}
    raw["pools"]["colocated"] = pool
    return parse_topology(raw)


def _check_same_hardware(topologies: Mapping[Mode, Topology]) -> None:
    counted: tuple[tuple[str, Callable[[PoolSettings], int]], ...] = (
        ("count", lambda p: p.count),
        ("cores", lambda p: p.count * p.cores),
        ("gpus", lambda p: p.count * p.gpus),
    )
    for field, total in counted:
        disagg, colocated = (sum(total(p) for p in topologies[arm].active_pools().values()) for arm in ARMS)
        if disagg != colocated:
            what = {"count": "workers", "cores": "cores in all", "gpus": "GPUs in all"}[field]
            expected = (
                f"as many as prefill and decode have together: the disaggregated arm has {disagg} {what}, the colocated one {colocated}"
            )
            raise ConfigError(key=f"pools.colocated.{field}", value=colocated, expected=expected)
