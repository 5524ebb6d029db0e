"""A carrier that does one wrong thing to one message: for any test that wants to know what happens then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from disagg.errors import TransferError
from disagg.kv.carrier import Carrier
from disagg.kv.frames import End, Frame, Header, Opened, Sink
from disagg.kv.outbox import Outbox
from disagg.types import Transfer

Fault = Literal["delay", "drop", "duplicate", "reorder", "truncate", "flip", "stall", "reset", "cut"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
HARMLESS: frozenset[Fault] = frozenset({"delay"})
OPENED = -1  # as `at_frame`: the message before the first frame


class FaultyCarrier:
    """`inner`, but frame `at_frame` of a pull meets `fault`. End counts as the frame after the last, Opened as the one before the first.

    delay: comes a little late. drop: never comes. duplicate: comes twice. reorder: comes after its successor. truncate: loses its last
    byte. flip: has one bit wrong. stall: nothing more comes (until the pull is cancelled; `stalled` is set). reset: the connection breaks
    before it. cut: the stream ends there as if it were whole.
    With `fault` None nothing is wrong; `on_message` is called with transfer and frame number before each message in any case.
    """

    def __init__(self, inner: Carrier, fault: Fault | None, at_frame: int = 0, bit: int = 0) -> None:
        self.inner = inner
        self.fault = fault
        self.at_frame = at_frame
        self.bit = bit
        self.pulls_left: int | None = None  # how many further pulls meet the fault; None: all
        self.on_message: Callable[[Transfer, int], None] | None = None
        self.stalled = asyncio.Event()
        self.num_faults = 0

    @property
    def name(self) -> str:
        return self.inner.name

    async def serve(self, outbox: Outbox) -> str:
        return await self.inner.serve(outbox)

    async def pull(self, endpoint: str, transfer: Transfer, sink: Sink) -> None:
        is_hit = self.fault is not None and self.pulls_left != 0
        if is_hit and self.pulls_left is not None:
            self.pulls_left -= 1
        await self.inner.pull(endpoint, transfer, _FaultySink(self, transfer, sink, is_hit))

    async def close(self) -> None:
        await self.inner.close()


class _FaultySink:
    def __init__(self, carrier: FaultyCarrier, transfer: Transfer, inner: Sink, is_hit: bool) -> None:
        self._carrier = carrier
        self._transfer = transfer
        self._inner = inner
        self._is_hit = is_hit
        self._next = OPENED
        self._held: tuple[Header, Sequence[memoryview]] | None = None

    def room(self, frame: Frame) -> memoryview:
        return self._inner.room(frame)

    async def receive(self, header: Header, payload: Sequence[memoryview]) -> bool:
        if not isinstance(header, Opened | Frame | End):
            return await self._inner.receive(header, payload)
        at, self._next = self._next, self._next + 1
        if self._carrier.on_message is not None:
            self._carrier.on_message(self._transfer, at)
        if self._is_hit and at == self._carrier.at_frame:
            return await self._harm(header, payload, at)
        complete = await self._inner.receive(header, payload)
        if self._held is not None:
            held, self._held = self._held, None
            complete = await self._inner.receive(*held)
        return complete

    async def _harm(self, header: Header, payload: Sequence[memoryview], at: int) -> bool:
        carrier = self._carrier
        carrier.num_faults += 1
        match carrier.fault:
            case "delay":
                await asyncio.sleep(0.002)
            case "drop":
                if isinstance(header, End):
                    raise TransferError("the connection closed")
                return False
            case "duplicate":
                await self._inner.receive(header, payload)
            case "reorder":
                if not isinstance(header, End):
                    self._held = (header, [memoryview(bytes(p)) for p in payload])
                    return False
            case "truncate":
                payload = _changed(payload, lambda data: data[:-1])
            case "flip":
                payload = _changed(payload, self._flipped)
            case "stall":
                carrier.stalled.set()
                await asyncio.Event().wait()
            case "reset":
                raise TransferError("the connection was reset")
            case "cut":
                return await self._inner.receive(End(self._transfer.transfer_id, max(at, 0)), ())
        return await self._inner.receive(header, payload)

    def _flipped(self, data: bytearray) -> bytearray:
        if data:
            bit = self._carrier.bit % (8 * len(data))
            data[bit // 8] ^= 1 << (bit % 8)
        return data


def _changed(payload: Sequence[memoryview], change: Callable[[bytearray], bytearray]) -> list[memoryview]:
    return [memoryview(bytes(change(bytearray(b"".join(payload)))))] if payload else []
