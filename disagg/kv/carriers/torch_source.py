"""The source's side of carrier `torch_dist`: answers pulls with headers, and each Want with a payload over the pair's group."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from disagg.errors import TransferCorruptError, TransferFencedError
from disagg.kv.carriers.pulls import serve_pull
from disagg.kv.carriers.stream import Connection
from disagg.kv.carriers.torch_groups import Groups, all_done, tensor
from disagg.kv.frames import Frame, Header, Join, Pull, Via, Want, failed
from disagg.kv.outbox import Outbox, Reader

log = logging.getLogger(__name__)


class Source:
    """Serves `outbox`; what `Listener` calls."""

    def __init__(self, outbox: Outbox, groups: Groups, heartbeat_s: float) -> None:
        self._outbox = outbox
        self._groups = groups
        self._heartbeat_s = heartbeat_s
        self._pulls: dict[str, _Pulled] = {}

    async def serve(self, connection: Connection, request: Header) -> None:
        """One request of a connection, to its end."""
        match request:
            case Join():
                await self._serve_pair(connection, request)
            case Via():
                header = await connection.receive()
                if not isinstance(header, Pull):
                    raise TransferCorruptError(f"unexpected {type(header).__name__} after Via")
                await self._serve_pull(connection, request.pull_id, header)
            case _:
                raise TransferCorruptError(f"unexpected {type(request).__name__}")

    async def _serve_pull(self, connection: Connection, pull_id: str, request: Pull) -> None:
        pulled = _Pulled({}, set())

        def announce(frame: Frame, reader: Reader) -> None:
            pulled.payloads[frame.seq] = reader.payload(frame)

        self._pulls[pull_id] = pulled
        try:
            await serve_pull(self._outbox, request, connection, self._heartbeat_s, announce=announce, leave=pulled.settle)
        finally:
            self._pulls.pop(pull_id, None)

    async def _serve_pair(self, control: Connection, request: Join) -> None:
        if request.epoch != self._outbox.epoch:
            fenced = TransferFencedError(f"asked for a process group of epoch {request.epoch}, this worker lives in {self._outbox.epoch}")
            await control.send(failed(fenced))
            return
        await control.send(request)
        order = asyncio.Lock()
        try:
            group = await self._groups.accept(request.pair_id)
        except RuntimeError as error:
            raise EOFError(str(error)) from error
        while True:
            want = await control.receive(timeout_s=None)
            if not isinstance(want, Want):
                raise TransferCorruptError(f"unexpected {type(want).__name__} in a pair")
            pulled = self._pulls.get(want.pull_id)
            wanted = range(want.seq, want.seq + want.num_frames)
            if pulled is None or not wanted or not all(seq in pulled.payloads for seq in wanted):
                raise EOFError("a Want of what is not served")  # ends the pair, and so the peer's wait for it
            payload = tensor([pulled.payloads.pop(seq) for seq in wanted])
            task = asyncio.ensure_future(self._give(group, payload, want.tag, control, order))
            pulled.sends.add(task)
            task.add_done_callback(pulled.sends.discard)

    async def _give(self, group: Any, payload: Any, tag: int, control: Connection, order: asyncio.Lock) -> None:
        try:
            async with order:
                work = await self._groups.post(group.send, [payload], 1, tag)
            await self._groups.wait(work)
        except RuntimeError as error:
            log.info("torch_dist: a pair ended: %s", error)
            control.shut()  # the loop above ends, and drops the pair


@dataclass(frozen=True, slots=True)
class _Pulled:
    """A pull under way at the source: payloads that were announced and not yet asked for, by `seq`, and sends that use the outbox."""

    payloads: dict[int, memoryview]
    sends: set[asyncio.Task[None]]

    async def settle(self) -> None:
        """Returns when no send reads from the outbox. A cancel does not cut it short."""
        await all_done(list(self.sends))
