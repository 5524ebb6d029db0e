"""A worker put together: boxes -> engine -> outbox and inbox -> carriers -> RPC server."""

from __future__ import annotations

import contextlib
import resource

from disagg.config import Topology
from disagg.engine.start import start_engine
from disagg.errors import ConfigError
from disagg.kv.box import Box, available_memory_bytes, host_memory_bytes
from disagg.kv.carrier import Carrier, SlowCarrier, offered_carriers, this_host_id
from disagg.kv.carriers.grpc import GrpcCarrier
from disagg.kv.carriers.shm import ShmCarrier
from disagg.kv.carriers.tcp import TcpCarrier
from disagg.kv.carriers.torch_dist import TorchDistCarrier
from disagg.kv.inbox import Inbox
from disagg.kv.outbox import Outbox
from disagg.kv.sizes import check_host, check_longest_prompt, default_box_bytes
from disagg.serving.spans import WorkerSpans
from disagg.serving.worker import LocalWorker
from disagg.serving.worker_rpc_server import WorkerServer
from disagg.types import KvAddress, Role, new_id

MAX_DESCRIPTORS = 65_536
UNUSED_BOX_BYTES = 1 << 20  # a colocated worker moves no KV


async def start_worker(
    topology: Topology,
    role: Role,
    name: str,
    model: str | None = None,
    host: str = "127.0.0.1",
    cores: list[int] | None = None,
    workers_on_host: int | None = None,
) -> WorkerServer:
    """One worker of `topology` in this process, serving on a free port of `host` (the address that gateways and peers are told).

    `workers_on_host`: how many of the topology's workers share this host's memory; None: all of them.
    Raises ConfigError and its children; then nothing is left behind.
    """
    epoch = new_id()
    _allow_descriptors()
    async with contextlib.AsyncExitStack() as undo:
        moves_kv = role is not Role.COLOCATED
        outbox_bytes, inbox_bytes = box_bytes(topology, workers_on_host) if moves_kv else (UNUSED_BOX_BYTES, UNUSED_BOX_BYTES)
        outbox_box = Box(outbox_bytes, f"{name}-outbox")
        undo.callback(outbox_box.close)
        inbox_box = Box(inbox_bytes, f"{name}-inbox")
        undo.callback(inbox_box.close)
        engine = await start_engine(topology, role, name, model, outbox_box, inbox_box, cores)
        undo.push_async_callback(engine.close)
        if moves_kv:
            check_longest_prompt(engine.layout, engine.max_context_tokens, outbox_bytes, inbox_bytes)
        carriers = make_carriers(topology, host) if moves_kv else {}
        outbox = Outbox(outbox_box, engine.layout, epoch, topology.kv.lease_s)
        inbox = Inbox(inbox_box, engine.layout, carriers, this_host_id(), topology.kv.carrier, topology.kv.lease_s)
        endpoints = []
        for carrier in carriers.values():
            undo.push_async_callback(carrier.close)
            endpoints.append((carrier.name, await carrier.serve(outbox)))
        address = KvAddress(name, epoch, this_host_id(), tuple(endpoints))
        worker = LocalWorker(engine, outbox, inbox, list(carriers.values()), address, [outbox_box, inbox_box])
        spans = WorkerSpans.to(topology.gateway.traces_endpoint, name)
        server = await WorkerServer.start(worker, host, topology.admission.worker_timeout_s, spans)
        undo.pop_all()
    return server


def box_bytes(topology: Topology, workers_on_host: int | None) -> tuple[int, int]:
    """(outbox, inbox). Raises ConfigError when this host has no memory for those of all its workers."""
    workers = workers_on_host or sum(pool.count for pool in topology.active_pools().values())
    outbox_bytes, inbox_bytes = topology.kv.box_bytes(default_box_bytes(available_memory_bytes(), workers))
    check_host(outbox_bytes, inbox_bytes, workers, host_memory_bytes())
    return outbox_bytes, inbox_bytes


def _allow_descriptors() -> None:
    """As many as the system permits, up to a bound: each pull has a connection, and strangers at the KV port take some for a while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_carriers(topology: Topology, host: str) -> dict[str, Carrier]:
    """The carriers that `kv.carrier` asks for, by name; slowed down when the topology says so. Raises ConfigError."""
    kv = topology.kv
    carriers = {name: _make_carrier(name, host, kv.port) for name in offered_carriers(kv.carrier)}
    if kv.delay_s or kv.gbps:
        return {name: SlowCarrier(carrier, kv.delay_s, kv.gbps) for name, carrier in carriers.items()}
    return carriers


def _make_carrier(name: str, host: str, port: int) -> Carrier:
    match name:
        case "shm":
            return ShmCarrier()
        case "tcp":
            return TcpCarrier(host, port)
        case "grpc":
            return GrpcCarrier(host, port)
        case "torch_dist":
            return TorchDistCarrier(host, port)
    raise ConfigError(
        f"kv.carrier {name} moves KV between boxes in GPU memory; the boxes of these workers are in host memory; expected auto",
        key="kv.carrier",
        value=name,
        expected="auto, shm, tcp, grpc or torch_dist",
    )
