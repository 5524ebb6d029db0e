"""Carrier `shm`: peers on one host. The puller maps the source's outbox and copies from there to the inbox, once."""

from __future__ import annotations

import os
import socket

from disagg.errors import TransferCorruptError, TransferFencedError
from disagg.kv.box import attach
from disagg.kv.carriers.mapped import MappedCarrier
from disagg.kv.carriers.stream import Connection, framed
from disagg.kv.frames import HEARTBEAT_S, SILENCE_S, Frame, Mapped, Sink
from disagg.kv.outbox import Outbox
from disagg.types import Transfer


class ShmCarrier(MappedCarrier[memoryview]):
    """See the module. `silence_s`: how long a source may say nothing before it counts as lost."""

    def __init__(self, silence_s: float = SILENCE_S, heartbeat_s: float = HEARTBEAT_S) -> None:
        super().__init__("shm", MemfdMapping(), silence_s, heartbeat_s)


class MemfdMapping:
    """A box in host memory is shown by a descriptor that can only read it."""

    def show(self, sock: socket.socket, outbox: Outbox) -> None:
        fd = outbox.box.open_read_only()
        try:
            socket.send_fds(sock, [framed(Mapped(outbox.epoch, outbox.box.num_bytes))], [fd])
        finally:
            os.close(fd)

    async def receive(self, connection: Connection, transfer: Transfer) -> memoryview:
        header, fds = await connection.receive_with_fds()
        try:
            if len(fds) != 1:
                raise TransferCorruptError(f"{len(fds)} descriptors in the answer to Hello")
            if not isinstance(header, Mapped) or header.epoch != transfer.source.epoch:
                raise TransferFencedError(f"worker {transfer.source.worker} has no box of epoch {transfer.source.epoch} any more")
            return attach(fds[0], header.num_bytes)
        finally:
            for fd in fds:
                os.close(fd)

    async def payload(self, box: memoryview, start: int, frame: Frame, sink: Sink) -> memoryview:
        """The bytes where they lie: the inbox copies them."""
        end = start + frame.num_bytes
        if end > len(box):
            raise TransferCorruptError(f"a frame at {start}..{end} of a box of {len(box)} bytes")
        return box[start:end]
