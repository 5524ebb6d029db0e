"""A worker put together: boxes -> engine -> outbox and inbox -> carriers -> RPC server."""

from __future__ import annotations

import contextlib

from disagg.config import Topology
from disagg.engine.start import start_engine
from disagg.errors import ConfigError
from disagg.kv.box import Box
from disagg.kv.carrier import Carrier, SlowCarrier, offered_carriers, this_host_id
from disagg.kv.carriers.grpc import GrpcCarrier
from disagg.kv.carriers.shm import ShmCarrier
from disagg.kv.carriers.tcp import TcpCarrier
from disagg.kv.carriers.torch_dist import TorchDistCarrier
from disagg.kv.inbox import Inbox
from disagg.kv.outbox import Outbox
from disagg.serving.worker import LocalWorker
from disagg.serving.worker_rpc_server import WorkerServer
from disagg.types import KvAddress, Role, new_id

UNUSED_BOX_BYTES = 1 << 20  # a colocated worker moves no KV


async def start_worker(
    topology: Topology, role: Role, name: str, model: str | None = None, host: str = "127.0.0.1", cores: list[int] | None = None
) -> WorkerServer:
    """One worker of `topology` in this process, serving on a free port of `host` (the address that gateways and peers are told).

    Raises ConfigError and its children; then nothing is left behind.
    """
    epoch = new_id()
    async with contextlib.AsyncExitStack() as undo:
        moves_kv = role is not Role.COLOCATED
        outbox_box = Box(topology.kv.outbox_bytes if moves_kv else UNUSED_BOX_BYTES, f"{name}-outbox")
        undo.callback(outbox_box.close)
        inbox_box = Box(topology.kv.inbox_bytes if moves_kv else UNUSED_BOX_BYTES, f"{name}-inbox")
        undo.callback(inbox_box.close)
        engine = await start_engine(topology, role, name, model, outbox_box, inbox_box, cores)
        undo.push_async_callback(engine.close)
        carriers = make_carriers(topology, host) if moves_kv else {}
        outbox = Outbox(outbox_box, engine.layout, epoch, topology.kv.lease_s)
        inbox = Inbox(inbox_box, engine.layout, carriers, this_host_id(), topology.kv.carrier, topology.kv.lease_s)
        endpoints = []
        for carrier in carriers.values():
            undo.push_async_callback(carrier.close)
            endpoints.append((carrier.name, await carrier.serve(outbox)))
        address = KvAddress(name, epoch, this_host_id(), tuple(endpoints))
        worker = LocalWorker(engine, outbox, inbox, list(carriers.values()), address, [outbox_box, inbox_box])
        server = await WorkerServer.start(worker, host, topology.admission.worker_timeout_s)
        undo.pop_all()
    return server


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
