"""One worker: an engine with its boxes and carriers. Implements `Worker` in the process that owns the memory.

    prefill:  outbox.open -> engine.prefill stages frames -> a peer pulls and acknowledges -> free
    decode:   inbox.fetch -> inbox.take -> engine.decode loads -> end_read -> free

The gateway that a call comes from owns its entries (`owner`): while it is attached its leases are renewed, and what it leaves behind is
fenced `lease_s` after it has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from disagg.engine.engine import Chunks, Engine
from disagg.errors import EngineError, InvalidRequestError, WorkerLostError
from disagg.kv.box import Box
from disagg.kv.carrier import Carrier
from disagg.kv.counters import InboxCounters, OutboxCounters
from disagg.kv.inbox import Inbox
from disagg.kv.layout import KvLayout
from disagg.kv.outbox import Outbox
from disagg.types import Chunk, EngineState, KvAddress, KvCounters, Prefilled, Request, Transfer

log = logging.getLogger(__name__)

STALL_S = 300.0  # an engine that has work and shows no progress for so long is wedged; far above any single step


class LocalWorker:
    """Owns everything that it is given, and ends it in `close`. Build it with `serving.start.start_worker`."""

    def __init__(
        self,
        engine: Engine,
        outbox: Outbox,
        inbox: Inbox,
        carriers: Sequence[Carrier],
        address: KvAddress,
        boxes: Sequence[Box] = (),
        stall_s: float = STALL_S,
    ) -> None:
        self.engine = engine
        self.outbox = outbox
        self.inbox = inbox
        self._carriers = carriers
        self._address = address
        self._boxes = boxes
        self._closed = False
        self._stall_s = stall_s
        self._stalled = False
        self._num_running = 0  # engine calls under way
        self._num_events = 0  # their starts, chunks and ends: what shows that the engine works

    @property
    def address(self) -> KvAddress:
        return self._address

    @property
    def name(self) -> str:
        return self._address.worker

    @property
    def epoch(self) -> str:
        """Names this life of the worker's process."""
        return self._address.epoch

    @property
    def layout(self) -> KvLayout:
        """Of the engine's cache."""
        return self.engine.layout

    @property
    def is_alive(self) -> bool:
        """False once the engine died or got stuck."""
        return self.engine.is_alive and not self._stalled

    async def prefill(self, request: Request, transfer: Transfer, owner: str = "") -> Prefilled:
        """See Worker. With `max_tokens` reached or an end token first, the entry is released: nobody will fetch it."""
        _check_tokens(request, transfer)
        try:
            entry = await self.outbox.open(transfer, owner)
            with self._engine_call():
                prefilled = await self.engine.prefill(request, entry)
        except BaseException:
            self.outbox.release(transfer.transfer_id)
            raise
        if prefilled.finish is not None:
            self.outbox.release(transfer.transfer_id)
        return prefilled

    async def fetch(self, transfer: Transfer, request: Request | None = None, owner: str = "") -> None:
        if request is not None and not self.inbox.knows(transfer.transfer_id):
            _check_tokens(request, transfer)
            first_token = await self.engine.cached_tokens(request)
            if first_token != transfer.first_token:
                transfer = replace(transfer, first_token=first_token)
        await self.inbox.fetch(transfer, owner)

    async def decode(self, request: Request, prefilled: Prefilled, transfer: Transfer, owner: str = "") -> AsyncGenerator[Chunk, None]:
        _check_tokens(request, transfer)
        try:
            await self.inbox.fetch(transfer, owner)
            entry = await self.inbox.take(transfer.transfer_id)
            try:
                chunks = self.engine.decode(request, prefilled, entry)
            except BaseException:
                entry.end_read()
                raise
            async with aclosing(self._relay(chunks)) as stream:
                async for chunk in stream:
                    yield chunk
        finally:
            self.inbox.release(transfer.transfer_id)

    def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        return self._relay(self.engine.generate(request))

    async def release(self, transfer: Transfer) -> None:
        self.outbox.release(transfer.transfer_id)
        self.inbox.release(transfer.transfer_id)

    def renew(self, owner: str) -> None:
        """The gateway `owner` lives: so do the transfers that it left here."""
        self.outbox.renew(owner)
        self.inbox.renew(owner)

    def state(self) -> EngineState:
        return replace(
            self.engine.state(),
            epoch=self.epoch,
            outbox_free_bytes=self.outbox.free_bytes,
            outbox_total_bytes=self.outbox.total_bytes,
            inbox_free_bytes=self.inbox.free_bytes,
            inbox_total_bytes=self.inbox.total_bytes,
            kv=_kv_counters(self.outbox.counters, self.inbox.counters),
        )

    async def wait_dead(self) -> None:
        """Returns when the engine has died, was closed, or is stuck: it has work, and nothing at all has come of it for `stall_s`."""
        died = asyncio.ensure_future(self.engine.wait_dead())
        try:
            while not died.done():
                seen = self._num_events
                await asyncio.wait({died}, timeout=self._stall_s)
                if not died.done() and self._num_running and self._num_events == seen:
                    log.error(
                        "worker %s: its engine has %d requests and did nothing for %.0f s", self.name, self._num_running, self._stall_s
                    )
                    self._stalled = True
                    return
        finally:
            died.cancel()

    async def close(self) -> None:
        """End the engine, the transfers, the carriers and the boxes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self.engine.close()
        await self.inbox.close()
        self.outbox.close()
        for carrier in self._carriers:
            await carrier.close()
        for box in self._boxes:
            box.close()

    def assert_empty(self) -> None:
        """No transfer holds anything in either box."""
        self.outbox.assert_empty()
        self.inbox.assert_empty()

    async def _relay(self, chunks: Chunks) -> AsyncGenerator[Chunk, None]:
        with self._engine_call():
            async with aclosing(chunks) as stream:
                async for chunk in stream:
                    self._num_events += 1
                    yield chunk

    @contextlib.contextmanager
    def _engine_call(self) -> Iterator[None]:
        """Count a call under way. An engine's error after which it is dead is the worker's loss: another worker may serve the request."""
        self._num_running += 1
        self._num_events += 1
        try:
            yield
        except EngineError as error:
            if self.engine.is_alive:
                raise
            raise WorkerLostError(f"worker {self.name} lost its engine: {error.message}", worker=self.name) from error
        finally:
            self._num_running -= 1
            self._num_events += 1


def _kv_counters(sent: OutboxCounters, received: InboxCounters) -> KvCounters:
    return KvCounters(
        sent_frames=sent.sent_frames,
        sent_bytes=sent.sent_bytes,
        received_frames=received.frames,
        received_bytes=received.bytes,
        completed=received.completed,
        failed=received.failed,
        released=received.released,
        corrupt=received.corrupt,
        transfer_s=received.transfer_s,
        fenced=sent.expired + received.expired,
        refused=sent.refused,
        late=sent.late + sent.duplicates + received.late,
        garbage=sent.garbage,
        turned_away=sent.turned_away,
    )


def _check_tokens(request: Request, transfer: Transfer) -> None:
    if transfer.num_tokens != request.num_context_tokens:
        raise InvalidRequestError(
            field="transfer.num_tokens", value=transfer.num_tokens, expected=f"{request.num_context_tokens}, the context"
        )
