"""The two processes of `bench.micro.kv`: a source with an outbox and a puller with an inbox, told what to do line by line on stdin.

Both are built as workers build theirs (serving/start.py), without engines. A source's box is filled once and never changes, so the digest
of a frame is computed once per place: staging costs next to nothing, and what is timed is the transfer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from disagg.kv.box import Box
from disagg.kv.carrier import Carrier, this_host_id
from disagg.kv.carriers.grpc import GrpcCarrier
from disagg.kv.carriers.loopback import LoopbackCarrier
from disagg.kv.carriers.shm import ShmCarrier
from disagg.kv.carriers.tcp import TcpCarrier
from disagg.kv.carriers.torch_dist import TorchDistCarrier
from disagg.kv.copy import digest
from disagg.kv.inbox import Inbox
from disagg.kv.layout import KvLayout, hash_tokens
from disagg.kv.outbox import Outbox
from disagg.types import KvAddress, Transfer, new_id

MB = 1_000_000
# A block of 16 tokens of Llama-3.1-8B in bf16: 32 layers x 2 x 8 heads x 128 x 2 bytes = 131,072 bytes a token.
LAYOUT = KvLayout(model="bench", backend="b", dtype="bf16", block_tokens=16, num_layers=32, block_bytes=2 * 16 * 8 * 128 * 2)
BOX_BYTES = 544 << 20
HOST_ID = this_host_id()
CARRIERS: dict[str, Callable[[], Carrier]] = {
    "loopback": LoopbackCarrier,
    "shm": ShmCarrier,
    "tcp": TcpCarrier,
    "grpc": GrpcCarrier,
    "torch_dist": TorchDistCarrier,
}


def tokens_of(num_bytes: int) -> int:
    """Tokens whose KV has about so many bytes: whole blocks, at least one."""
    return max(1, round(num_bytes / LAYOUT.slab_bytes)) * LAYOUT.block_tokens


class End:
    """What both processes are: commands are methods, named in the first field of a JSON line; the answer is one JSON line."""

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            name, *args = json.loads(line)
            result = getattr(self, name)(*args)
            print(json.dumps(await result if asyncio.iscoroutine(result) else result), flush=True)

    def cpu_s(self) -> float:
        """CPU seconds of this process so far, all threads, in user and kernel."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime


class Source(End):
    """Holds KV and serves it over every carrier."""

    def __init__(self) -> None:
        self.box = Box(BOX_BYTES, "bench-outbox")
        np.frombuffer(self.box.buffer, dtype=np.uint8)[:] = np.random.default_rng(1).integers(0, 256, BOX_BYTES, dtype=np.uint8)
        self.outbox = Outbox(self.box, LAYOUT, new_id(), lease_s=600.0)
        self.digests: dict[tuple[int, int], int] = {}

    async def endpoints(self, names: list[str]) -> dict[str, Any]:
        self.carriers = {name: CARRIERS[name]() for name in names}
        served = {name: await carrier.serve(self.outbox) for name, carrier in self.carriers.items()}
        return {"epoch": self.outbox.epoch, "endpoints": served}

    async def stage(self, num_tokens: int, count: int) -> list[str]:
        """Open and stage `count` transfers; their ids."""
        ids = []
        for _ in range(count):
            address = KvAddress("source", self.outbox.epoch, HOST_ID, ())
            transfer = Transfer(new_id(), 0, address, num_tokens, hash_tokens([]))
            entry = await self.outbox.open(transfer)
            blocks = LAYOUT.num_blocks(num_tokens)
            for first in range(0, blocks, LAYOUT.frame_blocks):
                num = min(LAYOUT.frame_blocks, blocks - first)
                start, size = entry.offset + first * LAYOUT.slab_bytes, num * LAYOUT.slab_bytes
                if (start, size) not in self.digests:
                    self.digests[start, size] = digest(self.box.buffer[start : start + size])
                entry.stage(0, first, num, self.digests[start, size])
            entry.end_write()
            ids.append(transfer.transfer_id)
        return ids

    def tcp_listen(self) -> int:
        self.listener = socket.create_server(("127.0.0.1", 0))
        return int(self.listener.getsockname()[1])

    async def tcp_send(self, num_bytes: int) -> float:
        """Plain blocking sockets: one connection, kept, as the carrier's would be."""

        def send() -> float:
            if not hasattr(self, "connection"):
                self.connection, _ = self.listener.accept()
            self.connection.sendall(self.box.buffer[:num_bytes])
            return 0.0

        return await asyncio.to_thread(send)

    async def torch_start(self, port: int) -> bool:
        self.group = await asyncio.to_thread(torch_group, port, 0)
        return True

    async def torch_send(self, num_bytes: int) -> float:
        import torch

        tensor = torch.frombuffer(self.box.buffer[:num_bytes], dtype=torch.uint8)
        await asyncio.to_thread(lambda: self.group.send([tensor], 1, 0).wait())
        return 0.0


class Puller(End):
    """Pulls and takes the times."""

    def __init__(self) -> None:
        self.box = Box(BOX_BYTES, "bench-inbox")
        np.frombuffer(self.box.buffer, dtype=np.uint8)[:] = 1
        self.from_box = Box(128 << 20, "bench-copied")
        np.frombuffer(self.from_box.buffer, dtype=np.uint8)[:] = 2

    def start(self, names: list[str], served: dict[str, Any]) -> bool:
        self.served = served
        self.carriers = {name: CARRIERS[name]() for name in names}
        self.inbox = Inbox(self.box, LAYOUT, self.carriers, HOST_ID, lease_s=600.0)
        return True

    async def pull(self, name: str, num_tokens: int, ids: list[str]) -> float:
        """Seconds until all of these transfers are complete and verified, all fetched at once."""
        address = KvAddress("source", self.served["epoch"], HOST_ID, ((name, self.served["endpoints"][name]),))
        transfers = [Transfer(i, 0, address, num_tokens, hash_tokens([])) for i in ids]
        began_s = time.perf_counter()
        await asyncio.gather(*(self.inbox.fetch(t) for t in transfers))
        took_s = time.perf_counter() - began_s
        for transfer in transfers:
            (await self.inbox.take(transfer.transfer_id)).end_read()
        return took_s

    def memcpy(self, num_bytes: int) -> float:
        target = np.frombuffer(self.box.buffer, dtype=np.uint8)[:num_bytes]
        source = np.frombuffer(self.from_box.buffer, dtype=np.uint8)[:num_bytes]
        began_s = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began_s

    async def tcp_receive(self, port: int, num_bytes: int) -> float:
        def receive() -> float:
            if not hasattr(self, "connection"):
                self.connection = socket.create_connection(("127.0.0.1", port))
            room = self.box.buffer[:num_bytes]
            began_s, at = time.perf_counter(), 0
            while at < num_bytes:
                at += self.connection.recv_into(room[at:])
            return time.perf_counter() - began_s

        return await asyncio.to_thread(receive)

    async def torch_start(self, port: int) -> bool:
        self.group = await asyncio.to_thread(torch_group, port, 1)
        return True

    async def torch_receive(self, num_bytes: int) -> float:
        import torch

        tensor = torch.frombuffer(self.box.buffer[:num_bytes], dtype=torch.uint8)
        began_s = time.perf_counter()
        await asyncio.to_thread(lambda: self.group.recv([tensor], 0, 0).wait())
        return time.perf_counter() - began_s


class Both(Source):
    """Source and puller in one process, for carrier loopback."""

    async def start(self, names: list[str]) -> bool:
        self.puller = Puller()
        return self.puller.start(names, await self.endpoints(names))

    async def pull(self, name: str, num_tokens: int, ids: list[str]) -> float:
        return await self.puller.pull(name, num_tokens, ids)


def torch_group(port: int, rank: int) -> Any:
    """torch.distributed's own point-to-point over gloo, with nothing of ours around it."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, 2, options)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    random.seed(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run({"source": Source, "puller": Puller, "both": Both}[sys.argv[1]]().serve())
