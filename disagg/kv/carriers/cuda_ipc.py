"""Carrier `cuda_ipc`: two workers with GPUs on one host, boxes in GPU memory. One copy, device to device, on a stream of its own.

The source shows its outbox as a CUDA IPC handle; the puller opens it once for each life of the source. Both processes must see both
GPUs (CUDA_VISIBLE_DEVICES), and the GPUs must reach each other. The producer stages a frame when its writes have completed, so no event
of the source is waited for.

All that touches a device is in `DeviceCopies`: `CudaCopies` here, memory of the host in tests/contracts. No GPU has run this yet.

Without the rest (bench): `CudaCopies().show(box)` in one process, where `box.buffer` is a uint8 tensor on its GPU, gives bytes for
`CudaCopies().open(bytes)` in another, and `copy(room, opened, start, num_bytes)` there returns when the bytes have come.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgpack

from disagg.errors import ConfigError, TransferCorruptError, TransferError, TransferFencedError
from disagg.kv.carriers.mapped import MappedCarrier
from disagg.kv.carriers.stream import Connection, framed
from disagg.kv.frames import HEARTBEAT_S, SILENCE_S, Frame, Shown, Sink
from disagg.kv.outbox import Outbox
from disagg.types import Transfer


class DeviceCopies(Protocol):
    """What the carrier asks of a device."""

    def show(self, box: Any) -> bytes:
        """What another process on this host opens the memory of `box` by, for as long as this one keeps it."""
        ...

    def open(self, shown: bytes) -> Any:
        """The memory of the other process, readable here. Raises RuntimeError or ValueError when it cannot be reached."""
        ...

    def copy(self, room: Any, source: Any, start: int, num_bytes: int) -> None:
        """Copy source[start : start + num_bytes] to `room`; returns when the bytes are there. Blocks its thread, without spinning."""
        ...


class CudaIpcCarrier(MappedCarrier[Any]):
    """See the module. `silence_s`: how long a source may say nothing before it counts as lost. Raises ConfigError without a GPU."""

    def __init__(self, silence_s: float = SILENCE_S, heartbeat_s: float = HEARTBEAT_S, copies: DeviceCopies | None = None) -> None:
        super().__init__("cuda_ipc", _DeviceMapping(copies or CudaCopies()), silence_s, heartbeat_s)


class _DeviceMapping:
    def __init__(self, copies: DeviceCopies) -> None:
        self._copies = copies
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="disagg-kv-device")  # one stream: copies do not overtake each other

    def show(self, sock: socket.socket, outbox: Outbox) -> None:
        sock.sendall(framed(Shown(outbox.epoch, outbox.box.num_bytes, self._copies.show(outbox.box))))

    async def receive(self, connection: Connection, transfer: Transfer) -> tuple[Any, int]:
        header = await connection.receive()
        if not isinstance(header, Shown) or header.epoch != transfer.source.epoch:
            raise TransferFencedError(f"worker {transfer.source.worker} has no box of epoch {transfer.source.epoch} any more")
        try:
            return await asyncio.to_thread(self._copies.open, header.handle), header.num_bytes
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"cannot open the GPU memory of worker {transfer.source.worker}: {error}; expected GPUs that reach each other, "
                "both visible to both workers",
                key="kv.carrier",
                value="cuda_ipc",
                expected="auto",
            ) from error

    async def payload(self, box: tuple[Any, int], start: int, frame: Frame, sink: Sink) -> memoryview:
        """Copied to its place. A cancel is obeyed when the device has left it."""
        opened, num_bytes = box
        if start + frame.num_bytes > num_bytes:
            raise TransferCorruptError(f"a frame at {start}..{start + frame.num_bytes} of a box of {num_bytes} bytes")
        room = sink.room(frame)
        copy = asyncio.get_running_loop().run_in_executor(self._thread, self._copies.copy, room, opened, start, frame.num_bytes)
        try:
            await asyncio.shield(copy)
        except asyncio.CancelledError:
            while not copy.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({copy})
            raise
        except RuntimeError as error:
            raise TransferError(f"a copy from the GPU memory of transfer {frame.transfer_id} failed: {error}") from error
        return room


class CudaCopies:
    """The current CUDA device's copies, by torch; `box.buffer` is a uint8 tensor on a device. Raises ConfigError without one."""

    def __init__(self) -> None:
        if importlib.util.find_spec("torch") is None or not _torch().cuda.is_available():
            raise ConfigError(
                "kv.carrier cuda_ipc needs a CUDA GPU and torch in this process; expected auto, shm, tcp, grpc or torch_dist",
                key="kv.carrier",
                value="cuda_ipc",
                expected="auto, shm, tcp, grpc or torch_dist",
            )
        self._stream = _torch().cuda.Stream()

    def show(self, box: Any) -> bytes:
        """torch's own form of a CUDA IPC handle: device, handle, size, offset, and its counter of users."""
        shown: bytes = msgpack.packb(list(box.buffer.untyped_storage()._share_cuda_()))
        return shown

    def open(self, shown: bytes) -> Any:
        torch = _torch()
        storage = torch.UntypedStorage._new_shared_cuda(*msgpack.unpackb(shown))
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def copy(self, room: Any, source: Any, start: int, num_bytes: int) -> None:
        cuda = _torch().cuda
        with cuda.stream(self._stream):
            room.copy_(source[start : start + num_bytes], non_blocking=True)
            done = cuda.Event(blocking=True)
            done.record(self._stream)
        done.synchronize()


def _torch() -> Any:
    import torch

    return torch
