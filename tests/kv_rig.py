"""One source and one destination worker's KV path, without engines: what the KV tests run on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from disagg.kv.box import Box, attach
from disagg.kv.carrier import Carrier, this_host_id
from disagg.kv.carriers.cuda_ipc import CudaIpcCarrier
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

LAYOUT = KvLayout(model="m", backend="b", dtype="bf16", block_tokens=4, num_layers=3, block_bytes=40)  # 120 bytes a block
LARGE = KvLayout(model="m", backend="b", dtype="bf16", block_tokens=4, num_layers=3, block_bytes=1 << 19)  # 1.5 MiB a block, 2 a frame


class HostCopies:
    """carriers.cuda_ipc.DeviceCopies in host memory: a box is shown by the path of its memfd."""

    def show(self, box: Box) -> bytes:
        return box.path.encode()

    def open(self, shown: bytes) -> memoryview:
        fd = os.open(shown.decode(), os.O_RDONLY)
        try:
            return attach(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def copy(self, room: memoryview, source: memoryview, start: int, num_bytes: int) -> None:
        room[:] = source[start : start + num_bytes]


class FakeCudaIpcCarrier(CudaIpcCarrier):
    def __init__(self, **settings: float) -> None:
        super().__init__(copies=HostCopies(), **settings)


CARRIERS: dict[str, Callable[..., Carrier]] = {
    "loopback": LoopbackCarrier,
    "shm": ShmCarrier,
    "cuda_ipc": FakeCudaIpcCarrier,
    "tcp": TcpCarrier,
    "grpc": GrpcCarrier,
    "torch_dist": TorchDistCarrier,
}


@dataclass
class Rig:
    outbox: Outbox
    inbox: Inbox
    address: KvAddress
    source_carrier: Carrier
    carrier: Carrier
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def transfer(self, num_tokens: int) -> Transfer:
        return Transfer(new_id(), 0, self.address, num_tokens, hash_tokens(range(num_tokens)))

    async def write(self, transfer: Transfer, frame_blocks: int = 3, upto: int | None = None, pause: bool = False) -> bytes:
        """Play the engine: open, fill with random bytes, stage in frames, end (unless only the first `upto` frames are wanted)."""
        entry = await self.outbox.open(transfer)
        try:
            layout = self.outbox.layout
            data = self.random.randbytes(len(entry.view))
            entry.view[:] = data
            for rank, first, num in frames_of(layout, transfer.num_tokens, frame_blocks)[:upto]:
                start = layout.offset(transfer.num_tokens, rank, first)
                entry.stage(rank, first, num, digest(entry.view[start : start + num * layout.slab_bytes]))
                if pause:
                    await asyncio.sleep(0.001)
            return data
        finally:
            if upto is None:
                entry.end_write()

    async def move(self, transfer: Transfer, frame_blocks: int = 3, pause: bool = False) -> tuple[bytes, bytes]:
        """One whole transfer, the fetch sent first: what was written and what was read."""
        fetch = asyncio.ensure_future(self.inbox.fetch(transfer))
        try:
            written = await self.write(transfer, frame_blocks, pause=pause)
            await fetch
        finally:
            fetch.cancel()
        entry = await self.inbox.take(transfer.transfer_id)
        read = bytes(entry.view)
        entry.end_read()
        return written, read

    async def assert_empty(self) -> None:
        """Both boxes are free again, as soon as the peers have noticed."""
        await until(lambda: not (self.outbox._entries or self.outbox._early or self.inbox._entries))
        self.outbox.assert_empty()
        self.inbox.assert_empty()


async def until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds; TimeoutError when it does not within 60 s."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event, on purpose
            await asyncio.sleep(0.001)


def frames_of(layout: KvLayout, num_tokens: int, frame_blocks: int) -> list[tuple[int, int, int]]:
    """(rank, first block, number of blocks) of an entry's frames, chunk by chunk over all ranks."""
    total, step = layout.num_blocks(num_tokens), min(frame_blocks, layout.frame_blocks)
    return [(rank, first, min(step, total - first)) for first in range(0, total, step) for rank in range(layout.num_ranks)]


@contextlib.asynccontextmanager
async def rig(
    kind: str,
    layout: KvLayout = LAYOUT,
    outbox_bytes: int = 64 << 20,
    inbox_bytes: int = 64 << 20,
    lease_s: float = 30.0,
    wrap: Callable[[Carrier], Carrier] = lambda carrier: carrier,
    inbox_layout: KvLayout | None = None,
    **carrier_args: float,
) -> AsyncIterator[Rig]:
    """A rig over carrier `kind`; everything is closed at the end, and must be empty then."""
    outbox_box, inbox_box = Box(outbox_bytes, "outbox"), Box(inbox_bytes, "inbox")
    outbox = Outbox(outbox_box, layout, new_id(), lease_s)
    source, carrier = CARRIERS[kind](**carrier_args), wrap(CARRIERS[kind](**carrier_args))
    endpoint = await source.serve(outbox)
    address = KvAddress("prefill-0", outbox.epoch, this_host_id(), ((kind, endpoint),))
    inbox = Inbox(inbox_box, inbox_layout or layout, {kind: carrier}, this_host_id(), lease_s=lease_s)
    r = Rig(outbox, inbox, address, source, carrier)
    try:
        yield r
        await r.assert_empty()
    finally:
        await inbox.close()
        outbox.close()
        await carrier.close()
        await source.close()
        outbox_box.close()
        inbox_box.close()
