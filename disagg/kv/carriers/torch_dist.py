"""Carrier `torch_dist`: payloads by torch.distributed's point-to-point send and recv, from box to box; gloo for boxes in host memory.

    puller                                              source
      control: Join(pair) --------------------------->            both build a process group of two over the source's TCPStore
      pull:    Via(pull), Pull ---------------------->
               <------------------------------------- Opened, Frame headers, Waiting, End
      recv posted; control: Want(pull, seq, n, tag) ->            send posted
               <===================================== n payloads as one, by the process group
      pull:    Ack ---------------------------------->

A pair of workers has one group, built by its first pull and kept until one of them dies or a send or recv fails; then both drop it, and
the next pull builds a new one. It has a connection for each of gloo's devices (torch_groups.py), so two receives of a pull do not wait for
each other. There is no global process group. The source sends only what the puller already waits for, in the order
of the Wants (NCCL matches by order, not by tag); so a cancelled pull has only to wait for the few frames that it asked for.

As with the other network carriers, the network between workers is trusted: neither the store nor the group knows who connects.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from disagg.errors import ConfigError, TransferCorruptError, TransferError
from disagg.kv.carriers.pulls import Listener, lost
from disagg.kv.carriers.stream import Connection, KeptConnections
from disagg.kv.carriers.tcp import connected, listening
from disagg.kv.carriers.torch_groups import DEVICES, Groups, all_done, are_together, tensor
from disagg.kv.carriers.torch_source import Source
from disagg.kv.frames import HEARTBEAT_S, SILENCE_S, Ack, Failed, Frame, Header, Join, Sink, Via, Want, pull_request, raise_failed
from disagg.kv.outbox import Outbox
from disagg.types import Transfer, new_id

RECEIVE_BYTES = 16 << 20  # frames that lie together and have been announced are received as one, up to so many bytes: each costs threads
RECEIVES_AHEAD = DEVICES  # of one pull that may be under way
FRAMES_AHEAD = 12  # of one pull that may be announced while those are
PAIR_RECEIVES = 8  # of one pair that may be under way; each holds a thread on both sides


class TorchDistCarrier:
    """Serves on `host`:`port` (0: a free one) and three more ports of `host`, the host name that peers are told.

    `silence_s`: how long a peer may say or give nothing before it counts as lost. Raises ConfigError without torch.
    """

    name = "torch_dist"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        silence_s: float = SILENCE_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        if importlib.util.find_spec("torch") is None:
            raise ConfigError(
                "kv.carrier torch_dist needs torch, which is not installed; expected tcp or grpc, or the extra cpu or gpu of disagg",
                key="kv.carrier",
                value="torch_dist",
                expected="tcp or grpc",
            )
        self._host = host
        self._port = port
        self._silence_s = silence_s
        self._heartbeat_s = heartbeat_s
        self._listeners: list[Listener] = []
        self._kept: KeptConnections[Connection] = KeptConnections()
        self._pairs: dict[str, asyncio.Task[_Pair]] = {}  # as puller, by endpoint
        self._watchers: set[asyncio.Task[None]] = set()

    @cached_property
    def _groups(self) -> Groups:
        return Groups(self._host, self._silence_s)

    async def serve(self, outbox: Outbox) -> str:
        source = Source(outbox, self._groups, self._heartbeat_s)
        sock = listening(self._host, self._port)
        self._listeners.append(Listener(self.name, sock, outbox, source.serve, self._silence_s))
        return f"{self._host}:{sock.getsockname()[1]}/{self._groups.serve_store()}"

    async def pull(self, endpoint: str, transfer: Transfer, sink: Sink) -> None:
        pair = await self._pair(endpoint, transfer)
        source = transfer.source
        kept = self._kept.take(source.worker, endpoint, source.epoch)
        connection = kept or await connected(endpoint.partition("/")[0], transfer, self._silence_s)
        receives: deque[_Receive] = deque()
        is_well = False
        try:
            await self._pull(pair, connection, transfer, sink, receives)
            is_well = True
        except (OSError, EOFError, TimeoutError) as error:
            if receives:
                pair.close()
            why = f"silent for {self._silence_s} s" if isinstance(error, TimeoutError) else "the connection closed"
            raise lost(transfer, why) from error
        finally:
            # The group writes into the inbox until these have ended: soon when the source lives, or when its end of the pair is gone.
            await all_done([each.done for each in receives])
            if is_well:
                self._kept.keep(source.worker, endpoint, source.epoch, connection)
            else:
                connection.close()

    async def close(self) -> None:
        self._kept.close()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            await listener.close()
        handshakes, self._pairs = list(self._pairs.values()), {}
        for handshake in handshakes:
            handshake.cancel()
        for pair in await asyncio.gather(*handshakes, return_exceptions=True):
            if isinstance(pair, _Pair):
                pair.close()
        if self._watchers:
            await asyncio.wait(self._watchers)
        self._groups.close()

    async def _pull(self, pair: _Pair, connection: Connection, transfer: Transfer, sink: Sink, receives: deque[_Receive]) -> None:
        """The messages of one pull, in order, with up to RECEIVES_AHEAD receives under way."""
        pull_id = new_id()
        await connection.send(Via(pull_id), pull_request(transfer))
        announced: deque[_Place] = deque()  # frames that have not been asked for
        held: Header | None = None  # its turn comes when what was announced before it is there
        reading: asyncio.Task[Header] | None = None
        complete = False
        try:
            while not complete:
                while held is None and len(announced) < FRAMES_AHEAD:
                    header = connection.receive_now() if reading is None else reading.result() if reading.done() else None
                    if header is None:
                        break
                    reading = None
                    if isinstance(header, Failed):
                        raise_failed(header)
                    if isinstance(header, Frame):
                        announced.append((header, sink.room(header)))
                    else:
                        held = header
                while announced and len(receives) < RECEIVES_AHEAD:
                    receives.append(_ask(pair, pull_id, announced, RECEIVES_AHEAD - len(receives)))
                if receives and receives[0].done.done():
                    _check_received(receives[0], transfer)
                    for frame, room in receives.popleft().places:
                        complete = await sink.receive(frame, (room,))
                elif held is not None and not receives:
                    complete = await sink.receive(held, ())
                    held = None
                else:
                    waits: set[asyncio.Future[Any]] = {receives[0].done} if receives else set()
                    if held is None and len(announced) < FRAMES_AHEAD:
                        reading = reading or asyncio.ensure_future(connection.receive())
                        waits.add(reading)
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await connection.send(Ack(transfer.transfer_id))
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.wait({reading})
                if not reading.cancelled():
                    reading.exception()

    async def _pair(self, endpoint: str, transfer: Transfer) -> _Pair:
        """The group with that source; one handshake, shared by all pulls."""
        task = self._pairs.get(endpoint)
        if task is not None and task.done() and not task.exception() and task.result().is_closed:
            task = None
        if task is None:
            task = asyncio.ensure_future(self._join(endpoint, transfer))
            self._pairs[endpoint] = task
            task.add_done_callback(lambda t: self._pairs.pop(endpoint, None) if t.cancelled() or t.exception() else None)
        try:
            return await asyncio.shield(task)
        except TransferError as error:
            raise type(error)(error.message) from None

    async def _join(self, endpoint: str, transfer: Transfer) -> _Pair:
        address, _, store_port = endpoint.partition("/")
        control = await connected(address, transfer, self._silence_s)
        pair_id = new_id()
        try:
            await control.send(Join(transfer.source.epoch, pair_id))
            answer = await control.receive()  # the same again: the source goes to the store now
            if isinstance(answer, Failed):
                raise_failed(answer)
            group = await self._groups.join(address.rpartition(":")[0], int(store_port), pair_id)
        except (OSError, EOFError, TimeoutError, RuntimeError, ValueError, TransferCorruptError) as error:
            control.close()
            raise lost(transfer, f"no process group: {error}") from error
        except BaseException:
            control.close()
            raise
        pair = _Pair(group, control, self._groups)
        del group  # its connections close with the last reference

        async def watch() -> None:
            with contextlib.suppress(OSError, EOFError, TransferCorruptError):
                await control.receive(timeout_s=None)
            pair.close()
            control.close()

        watcher = asyncio.ensure_future(watch())
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return pair


_Place = tuple[Frame, memoryview]  # a frame and where its payload belongs


@dataclass(frozen=True, slots=True)
class _Receive:
    """Payloads on their way, in one piece."""

    places: list[_Place]
    done: asyncio.Task[None]


def _ask(pair: _Pair, pull_id: str, announced: deque[_Place], num_receives: int) -> _Receive:
    """Ask for announced frames that lie together, so many that `num_receives` such receives would share what is announced."""
    most = -(-len(announced) // num_receives)
    places = [announced.popleft()]
    num_bytes = len(places[0][1])
    while announced and len(places) < most and are_together(places[-1][1], announced[0][1]):
        num_bytes += len(announced[0][1])
        if num_bytes > RECEIVE_BYTES:
            break
        places.append(announced.popleft())
    rooms = [room for _, room in places]
    return _Receive(places, asyncio.ensure_future(pair.receive(pull_id, places[0][0].seq, rooms)))


def _check_received(receive: _Receive, transfer: Transfer) -> None:
    error = receive.done.exception()
    if error is not None:
        raise lost(transfer, f"no payload of frame {receive.places[0][0].seq}: {error}")


class _Pair:
    """The puller's end of a group of two. Whoever made it watches `control`, and closes it and the pair when its end has come."""

    def __init__(self, group: Any, control: Connection, groups: Groups) -> None:
        self.is_closed = False
        self._group = group
        self._control = control
        self._groups = groups
        self._slots = asyncio.Semaphore(PAIR_RECEIVES)
        self._order = asyncio.Lock()
        self._num_receives = 0

    async def receive(self, pull_id: str, seq: int, rooms: Sequence[memoryview]) -> None:
        """Ask for the payloads of frames from `seq` on, whose `rooms` lie together, and wait until they are there.

        Not to be cancelled: the group writes into `rooms` until this returns.

        Raises OSError, EOFError, TimeoutError or RuntimeError when the pair is lost; it is closed then.
        """
        async with self._slots:
            try:
                async with self._order:
                    if self.is_closed:
                        raise EOFError("the process group was closed")
                    tag, self._num_receives = self._num_receives, self._num_receives + 1
                    work = await self._groups.post(self._group.recv, [tensor(rooms)], 0, tag)
                    await self._control.send(Want(pull_id, seq, len(rooms), tag))
            except BaseException:
                self.close()
                raise
            try:
                await self._groups.wait(work)
            except RuntimeError:
                self.close()
                raise

    def close(self) -> None:
        """No receive begins any more; the source drops its end, and with it those that wait fail. Idempotent."""
        self.is_closed = True
        self._group = None
        self._control.shut()
