"""What one pull brings: exactly the messages of one whole transfer, in order, each frame in its place and verified."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

from disagg.errors import LayoutMismatchError, TransferCorruptError, TransferFencedError
from disagg.kv.counters import InboxCounters
from disagg.kv.form import check_entry
from disagg.kv.frames import Coverage, End, Frame, Opened
from disagg.kv.layout import KvLayout
from disagg.kv.verify import Payload, Verifier
from disagg.types import Transfer


class Landing:
    """Where the frames of `transfer` belong, for an engine whose cache is of `layout`.

    `open`, then `place`, then frames (`room` and) `write`, then `end`; at last, whatever happened, `leave`. Methods raise
    TransferCorruptError on anything that is not due. `copier`: threads for large copies. `counters`: frames and bytes that are verified.
    """

    def __init__(self, transfer: Transfer, layout: KvLayout, counters: InboxCounters, copier: Executor) -> None:
        self._transfer = transfer
        self._named = (transfer.transfer_id, transfer.source.epoch, transfer.attempt)  # as messages name it
        self._cache_layout = layout
        self._counters = counters
        self._verifier = Verifier(copier)
        self._layout: KvLayout | None = None  # of the entry, once the source has said it
        self._memory: memoryview | None = None
        self._first_block = 0
        self._coverage = Coverage(layout, transfer.num_tokens)
        self._num_claimed = 0  # frames that have their place
        self._num_frames = 0  # frames received
        self._rooms: dict[int, memoryview] = {}  # by `seq`: places given to the carrier, whose frames have not been received
        self._counted = (0, 0)  # frames and bytes that stand in the counters

    def open(self, header: Opened) -> KvLayout:
        """The entry's own geometry. Raises TransferFencedError and LayoutMismatchError where the source has something else."""
        t = self._transfer
        if self._layout is not None:
            raise self.corrupt("opened twice")
        if (header.transfer_id, header.epoch, header.attempt) != self._named:
            raise TransferFencedError(f"asked for transfer {t.transfer_id} of epoch {t.source.epoch}, got {header.transfer_id}")
        if header.form != t.form:
            raise LayoutMismatchError(f"transfer {t.transfer_id} comes in form {header.form!r}, asked for {t.form!r}")
        try:
            check_entry(self._cache_layout, header.layout, header.form)
        except LayoutMismatchError as error:
            raise LayoutMismatchError(f"worker {t.source.worker}: {error.message}") from None
        if (header.num_tokens, header.token_hash) != (t.num_tokens, t.token_hash):
            raise TransferFencedError(f"transfer {t.transfer_id} holds the KV of other tokens")
        layout = self._layout = header.layout
        self._first_block = t.first_token // layout.block_tokens
        self._coverage = Coverage(layout, t.num_tokens, self._first_block)
        return layout

    def place(self, memory: memoryview) -> None:
        """The entry's bytes, from the transfer's `first_token` on."""
        self._memory = memory

    def room(self, frame: Frame) -> memoryview:
        """See frames.Sink."""
        room = self._rooms[frame.seq] = self._claim(frame)
        return room

    def _claim(self, frame: Frame) -> memoryview:
        """The place of the next frame, once."""
        t, layout, memory = self._transfer, self._layout, self._memory
        if layout is None or memory is None:
            raise self.corrupt("a frame before Opened")
        if frame[:3] != self._named:
            raise self.corrupt(f"a frame of transfer {frame.transfer_id}")
        if frame.seq != self._num_claimed:
            raise self.corrupt(f"frame {frame.seq} where {self._num_claimed} is due")
        fault = self._coverage.fault(frame.rank, frame.first_block, frame.num_blocks)
        if fault is None and self._coverage.count(frame.rank, frame.first_block, frame.num_blocks):
            fault = f"blocks {frame.first_block}.. of rank {frame.rank} came twice"
        expected = frame.num_blocks * layout.slab_bytes
        if fault is None and frame.num_bytes != expected:
            fault = f"frame {frame.seq} says {frame.num_bytes} bytes, expected {expected}"
        if fault is not None:
            raise self.corrupt(fault)
        self._coverage.add(frame.rank, frame.first_block, frame.num_blocks)
        self._num_claimed += 1
        start = layout.offset(t.num_tokens - t.first_token, frame.rank, frame.first_block - self._first_block)
        return memory[start : start + frame.num_bytes]

    async def write(self, frame: Frame, payload: Sequence[memoryview]) -> None:
        """Bring the payload to its place, unless it is there already, and verify it, now or later."""
        if frame.seq != self._num_frames:
            raise self.corrupt(f"frame {frame.seq} where {self._num_frames} is due")
        room = self._rooms.pop(frame.seq, None)
        is_there = room is not None and len(payload) == 1 and payload[0] is room
        if room is None:
            room = self._claim(frame)
        num_bytes = sum(map(len, payload))
        if num_bytes != len(room):
            raise self.corrupt(f"frame {frame.seq} has {num_bytes} bytes, expected {len(room)}")
        self._num_frames += 1
        await self._verifier.add(Payload(frame, room, () if is_there else payload))
        self.check()

    def check(self) -> None:
        """Raise TransferCorruptError when a frame has been found to fail its digest."""
        self._count()
        if self._verifier.corrupt is not None:
            raise self.corrupt(f"frame {self._verifier.corrupt.seq} fails its checksum")

    def _count(self) -> None:
        frames, num_bytes = self._verifier.num_verified, self._verifier.verified_bytes
        self._counters.frames += frames - self._counted[0]
        self._counters.bytes += num_bytes - self._counted[1]
        self._counted = (frames, num_bytes)

    async def end(self, header: End) -> None:
        """Returns when every block is there and verified."""
        if self._memory is None:
            raise self.corrupt("ended before Opened")
        await self._verifier.settle()
        self.check()
        is_whole = self._coverage.is_complete and self._num_claimed == self._num_frames == header.num_frames
        if header.transfer_id != self._transfer.transfer_id or not is_whole:
            got = f"{self._num_frames} frames, {self._coverage.num_blocks} of {self._coverage.total_blocks} blocks"
            raise self.corrupt(f"ended with {got}; the source says {header.num_frames} frames")

    async def leave(self) -> None:
        """Returns when no thread of this pull is in the entry's memory. A cancel does not cut it short."""
        await self._verifier.leave()
        self._count()

    def corrupt(self, why: str) -> TransferCorruptError:
        """The error that says why the pull cannot go on."""
        return TransferCorruptError(f"transfer {self._transfer.transfer_id}: {why}")
