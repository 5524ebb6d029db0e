"""The inbox: KV on its way to a decode engine, complete and verified before the engine sees it.

    fetch:   one pull per transfer id; room is reserved when the source says `Opened`; the carrier writes frames, each checked
    take:    the complete entry, for the engine, once
    end:     read by the engine | released | failed | expired (complete, but not taken for `lease_s`)
    free:    ended AND the pull writes no more AND the engine reads no more

All methods belong to the worker's event loop; large copies run in the inbox's threads, a few frames at a time for each pull.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from disagg.errors import DisaggError, TransferCorruptError, TransferError, TransferFencedError, from_wire, to_wire
from disagg.kv.api import InboxEntry
from disagg.kv.box import Box, Region, Room
from disagg.kv.carrier import Carrier, CarrierChoice, choose_carrier
from disagg.kv.counters import InboxCounters
from disagg.kv.frames import End, Failed, Frame, Header, Opened, Waiting, raise_failed
from disagg.kv.landing import Landing
from disagg.kv.layout import KvLayout
from disagg.kv.lease import Leases, Tombstones
from disagg.types import Transfer

log = logging.getLogger(__name__)

_COPY_THREADS = 2  # a core copies less than the memory gives


class Inbox:
    """Entries in `box` for an engine whose cache is of `layout`, pulled by `carriers` (by name). `choice` is the setting kv.carrier."""

    def __init__(
        self,
        box: Box,
        layout: KvLayout,
        carriers: Mapping[str, Carrier],
        host_id: str,
        choice: CarrierChoice = "auto",
        lease_s: float = 30.0,
    ) -> None:
        self.box = box
        self.layout = layout
        self.counters = InboxCounters()
        self._carriers = carriers
        self._host_id = host_id
        self._choice = choice
        self.room = Room(box.num_bytes, "kv.inbox_gib")
        self._closed = False
        self._copier = ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="disagg-kv-copy")
        self._entries: dict[str, _Entry] = {}
        self._pulls: set[asyncio.Task[None]] = set()
        self._ended: Tombstones[DisaggError | None] = Tombstones()  # None: it went to the engine
        self._leases = Leases(lease_s, self._expire)

    @property
    def free_bytes(self) -> int:
        return self.room.free_bytes

    @property
    def total_bytes(self) -> int:
        return self.room.total_bytes

    def knows(self, transfer_id: str) -> bool:
        """Whether the transfer was fetched or has ended."""
        return transfer_id in self._entries or transfer_id in self._ended

    async def fetch(self, transfer: Transfer, owner: str = "") -> None:
        """Pull `transfer` from its `first_token` on; returns when it is complete and verified, or was so before.

        Concurrent calls share one pull, of what the first of them asked for.

        Raises TransferError and its children, ConfigError (no carrier reaches), InvalidRequestError (the box is too small). The same
        error again for a transfer that has failed. Cancelling the last waiter releases the transfer.
        """
        transfer_id = transfer.transfer_id
        entry = self._entries.get(transfer_id)
        if entry is None and transfer_id in self._ended:
            self.counters.duplicates += 1
            error = self._ended.get(transfer_id)
            if error is not None:
                raise _again(error)
            return
        if entry is None:
            entry = self._begin(transfer, owner)
        else:
            self.counters.duplicates += 1
        await self._wait(entry)

    async def take(self, transfer_id: str) -> InboxEntry:
        """The complete entry, for one engine, once; waits for a fetch under way. The caller must call `end_read` on it.

        Raises what the pull raised, and TransferFencedError for a transfer that is unknown, released, or taken already.
        """
        entry = self._entries.get(transfer_id)
        if entry is None:
            error = self._ended.get(transfer_id)
            raise _again(error) if error else TransferFencedError(f"transfer {transfer_id} is not in the inbox (never fetched, or used up)")
        await self._wait(entry)
        if entry.taken:
            raise TransferFencedError(f"transfer {transfer_id} was taken already")
        entry.taken = True
        self._leases.stop(transfer_id)
        return entry

    def release(self, transfer_id: str) -> None:
        """Nobody wants it: stop its pull, free it when neither pull nor engine use it. Idempotent; unknown is fine."""
        entry = self._entries.get(transfer_id)
        error = TransferFencedError(f"transfer {transfer_id} was released")
        if entry is None:
            self._ended.add(transfer_id, error)
        elif not entry.ended:
            self.counters.released += 1
            self._end(entry, error)

    def renew(self, owner: str = "") -> None:
        """The owner lives: its running leases start again."""
        for entry in self._entries.values():
            if entry.owner == owner and entry.transfer.transfer_id in self._leases:
                self._leases.start(entry.transfer.transfer_id)

    def assert_empty(self) -> None:
        """Assert that no transfer holds anything."""
        assert not self._entries, f"inbox entries left: {list(self._entries)}"
        self.room.assert_empty()

    async def close(self) -> None:
        """End every transfer and the pulls; no new ones begin. The box and the carriers are the caller's to close."""
        self._closed = True
        for entry in list(self._entries.values()):
            self.release(entry.transfer.transfer_id)
        for task in self._pulls:
            task.cancel()
        if self._pulls:
            await asyncio.wait(self._pulls)
        self._copier.shutdown()

    def _begin(self, transfer: Transfer, owner: str) -> _Entry:
        if self._closed:
            raise TransferFencedError(f"transfer {transfer.transfer_id} cannot be fetched: this worker is closing")
        name = choose_carrier(transfer.source, self._carriers, self._host_id, self._choice)
        endpoint = transfer.source.endpoint(name)
        assert endpoint is not None
        entry = _Entry(self, transfer, owner)
        self._entries[transfer.transfer_id] = entry
        self.counters.fetches += 1
        task = asyncio.ensure_future(self._pull(entry, self._carriers[name], endpoint))
        entry.pull = task
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)
        return entry

    async def _pull(self, entry: _Entry, carrier: Carrier, endpoint: str) -> None:
        """One transfer's whole pull. Every way out ends the writing, and the waiters learn of it."""
        transfer_id = entry.transfer.transfer_id
        error: DisaggError = TransferFencedError(f"the pull of transfer {transfer_id} was cancelled")
        sink = _PullSink(self, entry)
        try:
            await carrier.pull(endpoint, entry.transfer, sink)
            error = TransferError(f"transfer {transfer_id} ended before it was complete")
        except DisaggError as cause:
            error = cause
        except Exception as cause:  # a carrier's bug must not leave waiters hanging
            log.exception("carrier %s failed on transfer %s", carrier.name, transfer_id)
            error = TransferError(f"carrier {carrier.name} failed: {cause!r}")
        finally:
            await sink.landing.leave()
            entry.writing = False
            if not entry.complete and not entry.ended:
                self.counters.failed += 1
                self.counters.corrupt += isinstance(error, TransferCorruptError)
                source = entry.transfer.source.worker
                log.warning("transfer %s from %s over %s failed: %s", transfer_id, source, carrier.name, error.message)
                self._end(entry, error)
            self._settle(entry)

    async def _wait(self, entry: _Entry) -> None:
        entry.waiters += 1
        try:
            await asyncio.shield(entry.done)
        except asyncio.CancelledError:
            if entry.waiters == 1 and not entry.taken:
                self.release(entry.transfer.transfer_id)
            raise
        finally:
            entry.waiters -= 1
        if entry.error is not None:
            raise _again(entry.error)

    def _completed(self, entry: _Entry) -> None:
        entry.complete = True
        entry.writing = False
        self.counters.completed += 1
        self.counters.transfer_s += asyncio.get_running_loop().time() - entry.opened_s
        if not entry.done.done():
            entry.done.set_result(None)
        self._leases.start(entry.transfer.transfer_id)

    def _expire(self, transfer_id: str) -> None:
        entry = self._entries.get(transfer_id)
        if entry is not None and not entry.ended:
            log.info("inbox: transfer %s expired: not taken", transfer_id)
            self.counters.expired += 1
            self._end(entry, TransferFencedError(f"transfer {transfer_id} expired: it was complete but nobody took it"))

    def _end(self, entry: _Entry, error: DisaggError | None) -> None:
        """The transfer has reached its end, once."""
        if error is not None:
            error = _again(error)  # its traceback holds what the pull saw: the peer's whole box
        entry.ended = True
        entry.error = error
        self._ended.add(entry.transfer.transfer_id, error)
        self._leases.stop(entry.transfer.transfer_id)
        if not entry.done.done():
            entry.done.set_result(None)
        if not entry.complete and entry.pull is not None and entry.writing:
            entry.pull.cancel()
        self._settle(entry)

    def _settle(self, entry: _Entry) -> None:
        if not entry.ended or entry.writing or entry.is_read:
            return
        if self._entries.pop(entry.transfer.transfer_id, None) is not None and entry.region is not None:
            self.room.free(entry.region)


class _Entry:
    """One transfer in the inbox; what the engine sees of it is kv.api.InboxEntry."""

    def __init__(self, inbox: Inbox, transfer: Transfer, owner: str) -> None:
        self.transfer = transfer
        self.owner = owner
        self.region: Region | None = None
        self.opened_s = 0.0
        self.layout = inbox.layout  # until the source says in which geometry the entry comes
        self.pull: asyncio.Task[None] | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: DisaggError | None = None
        self.waiters = 0
        self.writing = True
        self.complete = False
        self.taken = False
        self.ended = False
        self._read_ended = False
        self._inbox = inbox

    @property
    def transfer_id(self) -> str:
        return self.transfer.transfer_id

    @property
    def num_tokens(self) -> int:
        return self.transfer.num_tokens

    @property
    def first_token(self) -> int:
        return self.transfer.first_token

    @property
    def form(self) -> str:
        return self.transfer.form

    @property
    def num_bytes(self) -> int:
        """Bytes of what is pulled. `first_token` lies at a block's border, so the rest is an entry of its own."""
        return self.layout.entry_bytes(self.num_tokens - self.first_token)

    @property
    def offset(self) -> int:
        assert self.region is not None
        return self.region.offset

    @property
    def view(self) -> memoryview:
        """The entry's bytes, read-only."""
        return self.writable().toreadonly()

    @property
    def is_read(self) -> bool:
        """An engine has it and may still read it."""
        return self.taken and not self._read_ended

    def writable(self) -> memoryview:
        """The entry's bytes, for the pull."""
        return self._inbox.box.buffer[self.offset : self.offset + self.num_bytes]

    def end_read(self) -> None:
        """See kv.api.InboxEntry."""
        if self._read_ended:
            return
        self._read_ended = True
        if self.ended:
            self._inbox._settle(self)
        else:
            self._inbox._end(self, None)


class _PullSink:
    """The sink of one pull (frames.Sink): brings its messages to `landing`, room for them into the inbox, and the entry to its end."""

    def __init__(self, inbox: Inbox, entry: _Entry) -> None:
        self._inbox = inbox
        self._entry = entry
        self.landing = Landing(entry.transfer, inbox.layout, inbox.counters, inbox._copier)

    def room(self, frame: Frame) -> memoryview:
        return self.landing.room(frame)

    async def receive(self, header: Header, payload: Sequence[memoryview]) -> bool:
        entry, landing, counters = self._entry, self.landing, self._inbox.counters
        if entry.complete:
            counters.late += 1
            return True
        match header:
            case Frame():
                await landing.write(header, payload)
            case Waiting():
                landing.check()
            case Failed():
                raise_failed(header)
            case Opened():
                entry.layout = landing.open(header)
                counters.saved_bytes += entry.layout.entry_bytes(entry.num_tokens) - entry.num_bytes
                entry.region = await self._inbox.room.reserve(entry.num_bytes)
                entry.opened_s = asyncio.get_running_loop().time()
                landing.place(entry.writable())
            case End():
                await landing.end(header)
                self._inbox._completed(entry)
            case _:
                raise landing.corrupt(f"unexpected {type(header).__name__}")
        return entry.complete


def _again(error: DisaggError) -> DisaggError:
    """A fresh copy: one exception object must not be raised by several tasks."""
    return from_wire(to_wire(error))
