"""The outbox: KV that a prefill engine has finished, until its reader has it.

    open:    room is reserved (first come first served) -> the engine stages frames -> end_write
    reader:  may come before open; gets Opened, then frames in the order staged, as they are staged, then End
    end:     acked | released | expired (no reader for `lease_s` after the engine ended) | incomplete (the engine ended too early)
    free:    ended AND the engine has ended writing AND no reader is left

All methods belong to the worker's event loop. Outbox room is taken before inbox room (a puller reserves when `Opened` has come), so
waiting for room cannot form a cycle.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from disagg.errors import DisaggError, TransferError, TransferFencedError
from disagg.kv.api import OutboxEntry
from disagg.kv.box import Box, Region, Room
from disagg.kv.counters import OutboxCounters
from disagg.kv.form import entry_layout
from disagg.kv.frames import HEARTBEAT_S, Frame, Header, Pull, Waiting
from disagg.kv.layout import KvLayout
from disagg.kv.lease import Leases, Tombstones
from disagg.kv.staging import Sending, Staged
from disagg.types import Transfer

log = logging.getLogger(__name__)


class Outbox:
    """Entries in `box` for KV of an engine whose cache is of `layout`, owned by the process life `epoch`.

    A finished entry that nobody reads is fenced `lease_s` seconds after the engine ended, its last reader left or its owner renewed it.
    A reader of a transfer that is not opened is refused after `lease_s`, too.
    """

    def __init__(self, box: Box, layout: KvLayout, epoch: str, lease_s: float = 30.0) -> None:
        self.box = box
        self.layout = layout
        self.epoch = epoch
        self.lease_s = lease_s
        self.counters = OutboxCounters()
        self._room = Room(box.num_bytes, "kv.outbox_gib")
        self._entries: dict[str, _Entry] = {}
        self._early: dict[str, set[Reader]] = {}  # readers that came before open
        self._ended: Tombstones[str] = Tombstones()
        self._leases = Leases(lease_s, self._expire)

    @property
    def free_bytes(self) -> int:
        return self._room.free_bytes

    @property
    def total_bytes(self) -> int:
        return self._room.total_bytes

    async def open(self, transfer: Transfer, owner: str = "") -> OutboxEntry:
        """Room for `transfer`'s KV, as soon as there is some. `owner` (a gateway) can renew the lease later.

        Raises TransferFencedError when the transfer has ended before (also while waiting), InvalidRequestError when the box is too small,
        LayoutMismatchError for a form that the engine's cache cannot have.
        The caller must see to it that `end_write` is called on what it gets, whatever happens.
        """
        transfer_id = transfer.transfer_id
        if transfer_id in self._entries or transfer_id in self._ended:
            self.counters.late += 1
            raise self._fenced(transfer_id, self._ended.get(transfer_id) or "open already")
        try:
            layout = entry_layout(self.layout, transfer.form)
        except DisaggError as error:
            self._ended.add(transfer_id, f"not opened: {error}")
            raise
        entry = _Entry(self, transfer, layout, owner)
        self._entries[transfer_id] = entry
        entry.readers |= self._early.pop(transfer_id, set())
        for reader in entry.readers:
            reader.entry = entry
        try:
            await entry.reserve(self._room)
        except BaseException as error:
            entry.writer_ended = True
            if entry.ended is None:
                self._end(entry, f"not opened: {error}" if isinstance(error, DisaggError) else "cancelled")
            else:
                self._settle(entry)
            raise
        if entry.ended is not None:  # released in the same instant
            entry.writer_ended = True
            self._settle(entry)
            raise self._fenced(transfer_id, entry.ended)
        self.counters.opened += 1
        entry.wake()
        return entry

    def release(self, transfer_id: str) -> None:
        """Nobody wants it: fence, end its reads at the next frame, free when the engine has ended. Idempotent; unknown is fine."""
        entry = self._entries.get(transfer_id)
        if entry is None:
            self._ended.add(transfer_id, "released")
            for reader in self._early.get(transfer_id, ()):
                reader.wake()
        elif entry.ended is None:
            self.counters.released += 1
            self._end(entry, "released")

    def renew(self, owner: str = "") -> None:
        """The owner lives: its running leases start again.

        Not that of an entry whose reader has left without an acknowledgement: nobody reads a transfer twice. Either its reader failed and
        the owner releases it, or the acknowledgement was lost and nobody ever will.
        """
        for entry in self._entries.values():
            if entry.owner == owner and not entry.was_read and entry.transfer_id in self._leases:
                self._leases.start(entry.transfer_id)

    @contextlib.contextmanager
    def reader(self, pull: Pull) -> Iterator[Reader]:
        """(for carriers) A reader of the transfer that `pull` asks for. Keep it until the peer has ended copying: it holds the bytes."""
        reader = Reader(self, pull)
        entry = self._entries.get(pull.transfer_id)
        reader.entry = entry
        (entry.readers if entry else self._early.setdefault(pull.transfer_id, set())).add(reader)
        if entry is not None:
            self._leases.stop(entry.transfer_id)
        try:
            yield reader
        finally:
            self._leave(reader)

    def assert_empty(self) -> None:
        """Assert that no transfer holds anything."""
        assert not self._entries, f"outbox entries left: {list(self._entries)}"
        assert not self._early, f"readers left: {self._early}"
        self._room.assert_empty()

    def close(self) -> None:
        """End every transfer. The box is the caller's to close."""
        for entry in list(self._entries.values()):
            entry.end_write()
            if entry.ended is None:
                self._end(entry, "closed")

    def refusal(self, pull: Pull) -> DisaggError | None:
        """Why this outbox will not serve `pull`, or None (also when it is not open yet)."""
        entry = self._entries.get(pull.transfer_id)
        if pull.epoch != self.epoch:
            return TransferFencedError(f"transfer {pull.transfer_id} is of epoch {pull.epoch}, this worker lives in epoch {self.epoch}")
        if entry is None:
            how = self._ended.get(pull.transfer_id)
            return None if how is None else self._fenced(pull.transfer_id, how)
        if entry.transfer.token_hash != pull.token_hash:
            return TransferFencedError(f"transfer {pull.transfer_id} holds the KV of other tokens")
        if pull.first_token > entry.num_tokens or pull.first_token % entry.layout.block_tokens:
            return TransferFencedError(f"transfer {pull.transfer_id} cannot be read from token {pull.first_token} on")
        if entry.transfer.attempt != pull.attempt:
            return TransferFencedError(f"transfer {pull.transfer_id} is of attempt {entry.transfer.attempt}, not {pull.attempt}")
        return None if entry.ended is None else self._fenced(pull.transfer_id, entry.ended)

    def _fenced(self, transfer_id: str, how: str) -> DisaggError:
        if how.startswith("incomplete"):
            return TransferError(f"transfer {transfer_id}: {how}")
        return TransferFencedError(f"transfer {transfer_id} cannot be used: {how}")

    def _expire(self, transfer_id: str) -> None:
        entry = self._entries.get(transfer_id)
        if entry is not None and entry.ended is None:
            log.info("outbox: transfer %s expired: no reader for %.1f s", transfer_id, self.lease_s)
            self.counters.expired += 1
            self._end(entry, f"expired: no reader for {self.lease_s} s")

    def _end(self, entry: _Entry, how: str) -> None:
        """The transfer has reached its end, once: nothing new may use it, and it is freed when its last user leaves."""
        entry.ended = how
        self._ended.add(entry.transfer_id, how)
        self._leases.stop(entry.transfer_id)
        if entry.reserving is not None:
            entry.reserving.cancel()
        entry.wake()
        self._settle(entry)

    def _settle(self, entry: _Entry) -> None:
        """Free what has no user any more; let the lease run for what waits for a reader."""
        if not entry.writer_ended or entry.readers:
            return
        if entry.ended is None:
            self._leases.start(entry.transfer_id)
            return
        if self._entries.pop(entry.transfer_id, None) is not None and entry.region is not None:
            self._room.free(entry.region)

    def _leave(self, reader: Reader) -> None:
        entry = reader.entry
        if entry is None:
            waiting = self._early.get(reader.pull.transfer_id, set())
            waiting.discard(reader)
            if not waiting:
                self._early.pop(reader.pull.transfer_id, None)
            return
        entry.readers.discard(reader)
        entry.was_read = True
        self._settle(entry)

    def _acknowledge(self, entry: _Entry) -> None:
        if entry.ended is not None:
            self.counters.late += 1
            return
        self.counters.acked += 1
        self._end(entry, "acknowledged")


class _Entry:
    """One transfer in the outbox; what the engine sees of it is kv.api.OutboxEntry."""

    def __init__(self, outbox: Outbox, transfer: Transfer, layout: KvLayout, owner: str) -> None:
        self.transfer = transfer
        self.layout = layout
        self.owner = owner
        self.region: Region | None = None
        self.reserving: asyncio.Task[Region] | None = None
        self.staged = Staged(transfer, layout, outbox.epoch)
        self.writer_ended = False
        self.ended: str | None = None
        self.was_read = False  # a reader has left
        self.readers: set[Reader] = set()
        self._outbox = outbox

    @property
    def transfer_id(self) -> str:
        return self.transfer.transfer_id

    @property
    def num_tokens(self) -> int:
        return self.transfer.num_tokens

    @property
    def form(self) -> str:
        return self.transfer.form

    @property
    def offset(self) -> int:
        assert self.region is not None
        return self.region.offset

    @property
    def view(self) -> memoryview:
        return self._outbox.box.buffer[self.offset : self.offset + self.layout.entry_bytes(self.num_tokens)]

    def stage(self, rank: int, first_block: int, num_blocks: int, digest: int) -> None:
        """See kv.api.OutboxEntry. Raises EngineError for a range that cannot be a frame, or that overlaps what is staged in part."""
        counters = self._outbox.counters
        if self.ended is not None or self.writer_ended:
            counters.late += 1
            return
        num_bytes = self.staged.add(rank, first_block, num_blocks, digest)
        if not num_bytes:
            counters.duplicates += 1
            return
        counters.frames += 1
        counters.bytes += num_bytes
        self.wake()

    def end_write(self) -> None:
        """See kv.api.OutboxEntry."""
        if self.writer_ended:
            return
        self.writer_ended = True
        if self.ended is None and not self.staged.is_complete:
            self._outbox.counters.incomplete += 1
            self._outbox._end(self, f"incomplete: the prefill ended after {self.staged.progress}")
        else:
            self._outbox._settle(self)

    async def reserve(self, room: Room) -> None:
        """Wait for the entry's room. A release meanwhile ends the wait with TransferFencedError."""
        num_bytes = self.layout.entry_bytes(self.num_tokens)
        self.region = room.try_reserve(num_bytes)
        if self.region is not None:
            return
        self.reserving = asyncio.ensure_future(room.reserve(num_bytes))
        try:
            self.region = await self.reserving
        except asyncio.CancelledError:
            if self.reserving.done() and not self.reserving.cancelled():  # granted in the same instant as the cancel
                self.region = self.reserving.result()
            task = asyncio.current_task()
            if self.ended is not None and (task is None or not task.cancelling()):
                raise self._outbox._fenced(self.transfer_id, self.ended) from None
            raise
        finally:
            self.reserving = None

    def wake(self) -> None:
        """Let the readers look again."""
        for reader in self.readers:
            reader.wake()


class Reader:
    """One peer's reading of one transfer (for carriers): `next` gives what to send, `payload` the bytes of a frame."""

    def __init__(self, outbox: Outbox, pull: Pull) -> None:
        self.pull = pull
        self.entry: _Entry | None = None
        self._outbox = outbox
        self._changed: asyncio.Future[None] | None = None
        self._open_by_s = asyncio.get_running_loop().time() + outbox.lease_s
        self._sending: Sending | None = None  # once the entry has its room

    async def next(self, heartbeat_s: float = HEARTBEAT_S) -> Header:
        """Opened, then frames as they are staged, at last End; Waiting when there was nothing new for `heartbeat_s`.

        Raises TransferFencedError when the transfer is refused or has ended, TransferError when its engine ended too early.
        """
        header = self.ready()
        if header is not None:
            return header
        loop = asyncio.get_running_loop()
        self._changed = loop.create_future()
        timeout_s = heartbeat_s
        if self.entry is None:
            timeout_s = max(0.0, min(heartbeat_s, self._open_by_s - loop.time()))
        timer = loop.call_later(timeout_s, self.wake)
        try:
            await self._changed
        finally:
            self._changed = None
            timer.cancel()
        return self.ready() or Waiting()

    def payload(self, frame: Frame) -> memoryview:
        """The bytes of a frame that `next` gave; valid while this reader is held."""
        assert self._sending is not None
        return self._sending.payload(frame)

    def acknowledge(self) -> None:
        """The peer has everything, verified. Later ones are counted and ignored."""
        if self.entry is not None:
            self._outbox._acknowledge(self.entry)

    def wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def ready(self) -> Header | None:
        """What `next` would give at once, or None. Raises as `next`."""
        refusal = self._outbox.refusal(self.pull)
        entry = self.entry
        if refusal is None and entry is None and asyncio.get_running_loop().time() >= self._open_by_s:
            refusal = TransferFencedError(f"transfer {self.pull.transfer_id} was not opened within {self._outbox.lease_s} s")
        if refusal is not None:
            self._outbox.counters.refused += 1
            raise refusal
        if entry is None or entry.region is None:
            return None
        if self._sending is None:
            self._sending = Sending(entry.staged, entry.view, self.pull.first_token)
            return entry.staged.opened(entry.offset)
        header = self._sending.next()
        if isinstance(header, Frame):
            self._outbox.counters.sent_frames += 1
            self._outbox.counters.sent_bytes += header.num_bytes
        return header
