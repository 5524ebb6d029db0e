"""Both sides of a pull over a stream socket: what carriers `shm`, `tcp` and `torch_dist` do alike.

Listener    accepts connections, each with an owner task; counts and closes those that speak garbage
serve_pull  the source's side of one pull, payloads by a function of the carrier
pull        the puller's side, over a connection that is kept for the next pull when all went well
in_place    (carriers `tcp` and `grpc`) payloads follow their header
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from disagg.errors import DisaggError, PlacementError, TransferCorruptError, TransferError
from disagg.kv.carriers.stream import Connection
from disagg.kv.frames import HEARTBEAT_S, Ack, End, Failed, Frame, Header, Pull, Sink, failed, pull_request, raise_failed
from disagg.kv.outbox import Outbox, Reader
from disagg.types import Transfer

log = logging.getLogger(__name__)

BACKLOG = 1024  # pulls that may connect in one instant
MAX_CONNECTIONS = 4096  # of peers, and at most half of the descriptors allowed; more are closed at once
MOST_AT_ONCE = 64  # headers in one write
MAX_STRANGERS = (
    1024  # connections that have not said yet what they want; then the oldest goes: a peer says it with its first bytes. At most a quarter
)
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_DESCRIPTORS_AGAIN_S = 0.2

Serve = Callable[[Connection, Header], Awaitable[None]]
Payload = Callable[[Header], Awaitable[Sequence[memoryview]]]


class Listener:
    """Serves a listening socket until `close`. `serve` answers a connection's first header and those after it, one call per header.

    Strangers are bounded in number and time and never keep a peer out. Garbage, and connections closed because there were too many, are
    counted in the outbox's counters.
    """

    def __init__(
        self,
        name: str,
        sock: socket.socket,
        outbox: Outbox,
        serve: Serve,
        silence_s: float,
        max_connections: int = MAX_CONNECTIONS,
        max_strangers: int = MAX_STRANGERS,
    ) -> None:
        self._name = name
        self._sock = sock
        self._outbox = outbox
        self._serve = serve
        self._silence_s = silence_s
        self._max_connections = of_descriptors(1 / 2, max_connections)
        self._max_strangers = of_descriptors(1 / 4, max_strangers)
        self._connections: set[asyncio.Task[None]] = set()
        self._strangers: dict[Connection, None] = {}  # oldest first
        self._acceptor = asyncio.ensure_future(self._accept())

    async def close(self) -> None:
        """End every connection. Idempotent."""
        self._acceptor.cancel()
        await asyncio.wait({self._acceptor})
        self._sock.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(self._sock)
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:  # the peer stays in the backlog; running pulls will give descriptors back
                    await asyncio.sleep(_DESCRIPTORS_AGAIN_S)
                continue
            if len(self._connections) - len(self._strangers) >= self._max_connections:
                self._outbox.counters.turned_away += 1
                peer.close()
                continue
            if len(self._strangers) >= self._max_strangers:
                self._outbox.counters.turned_away += 1
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.close()
            peer.setblocking(False)
            connection = Connection(peer, self._silence_s)
            self._strangers[connection] = None
            task = asyncio.ensure_future(self._attend(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            await asyncio.sleep(0)  # it may say now what it wants, before the next one comes

    async def _attend(self, connection: Connection) -> None:
        try:
            async with asyncio.timeout(self._silence_s):
                header = await connection.receive()
            self._strangers.pop(connection, None)
            while True:
                await self._serve(connection, header)
                header = await connection.receive(timeout_s=None)  # a peer may keep a connection for its next pull
        except TransferCorruptError as error:
            self._outbox.counters.garbage += 1
            log.warning("%s: closed a connection: %s", self._name, error.message)
        except (OSError, EOFError, TimeoutError):
            pass  # the peer is gone; its reader has been let go
        finally:
            self._strangers.pop(connection, None)
            connection.close()


async def serve_pull(
    outbox: Outbox,
    request: Pull,
    connection: Connection,
    heartbeat_s: float = HEARTBEAT_S,
    send_payload: Callable[[Frame, Reader], Awaitable[None]] | None = None,
    announce: Callable[[Frame, Reader], None] | None = None,
    leave: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Send until End or an error while listening for the Ack; raises EOFError when the peer leaves without one, or after an error.

    `send_payload` sends what follows a frame's header; `announce` is told of a frame before its header is sent. `leave` returns when
    nothing reads from the outbox any more. After End there is no deadline but the peer's life: it may be waiting for
    inbox room, and its death closes the connection.
    """
    with outbox.reader(request) as reader:
        try:
            sent_all = await _send(reader, connection, heartbeat_s, send_payload, announce)
            answer = await connection.receive(timeout_s=None if sent_all else connection.silence_s)
            if not isinstance(answer, Ack):
                raise TransferCorruptError(f"unexpected {type(answer).__name__} in a pull")
            reader.acknowledge()
        finally:
            if leave is not None:
                await leave()


async def _send(
    reader: Reader,
    connection: Connection,
    heartbeat_s: float,
    send_payload: Callable[[Frame, Reader], Awaitable[None]] | None,
    announce: Callable[[Frame, Reader], None] | None,
) -> bool:
    """Send everything from Opened to End, or until the peer says something or closes; False when an error was sent instead."""
    heard = False

    def hear() -> None:
        nonlocal heard
        heard = True
        connection.unwatch()
        reader.wake()

    try:
        headers: list[Header] = []
        while not headers or not isinstance(headers[-1], End):
            headers = _ready(reader, 1 if send_payload is not None else MOST_AT_ONCE)
            if not headers:  # nothing but this wait needs to be told of a peer that leaves: a send fails by itself
                connection.watch(hear)
                try:
                    headers = [await reader.next(heartbeat_s)]
                finally:
                    connection.unwatch()
                if heard:
                    return True
            if announce is not None:
                for header in headers:
                    if isinstance(header, Frame):
                        announce(header, reader)
            await connection.send(*headers)
            if isinstance(headers[-1], Frame) and send_payload is not None:
                await send_payload(headers[-1], reader)
    except DisaggError as error:
        await connection.send(failed(error))
        return False
    return True


def _ready(reader: Reader, most: int) -> list[Header]:
    """What can be said now, up to End."""
    headers: list[Header] = []
    while len(headers) < most and (header := reader.ready()) is not None:
        headers.append(header)
        if isinstance(header, End):
            break
    return headers


class Heard(Protocol):
    """What a puller needs of its connection: kv.carriers.stream.Connection, or what says the same in another way."""

    silence_s: float

    async def send(self, *headers: Header) -> None: ...
    async def receive(self) -> Header: ...
    async def receive_into(self, room: memoryview) -> None: ...


def in_place(connection: Heard, sink: Sink) -> Payload:
    """For `pull`: payloads that follow their header go to their places in the inbox."""

    async def payload(header: Header) -> Sequence[memoryview]:
        if not isinstance(header, Frame):
            return ()
        room = sink.room(header)
        await connection.receive_into(room)
        return (room,)

    return payload


async def pull(connection: Heard, transfer: Transfer, sink: Sink, payload: Payload) -> None:
    """One pull over `connection`, from Pull to Ack. `payload` gives the bytes of a header, none for other headers than frames.

    Raises TransferError when the source refuses, fails, closes or falls silent, and what `sink` raises. After an error the connection
    is of no use any more.
    """
    try:
        await connection.send(pull_request(transfer))
        complete = False
        while not complete:
            header = await connection.receive()
            if isinstance(header, Failed):
                raise_failed(header)
            complete = await sink.receive(header, await payload(header))
        await connection.send(Ack(transfer.transfer_id))
    except TimeoutError:
        raise lost(transfer, f"silent for {connection.silence_s} s") from None
    except EOFError:
        raise lost(transfer, "the connection closed") from None
    except OSError as error:
        raise lost(transfer, error.strerror or str(error)) from error


def of_descriptors(share: float, most: int) -> int:
    """That share of the file descriptors that this process may have, at most `most`: the rest is for what else it does."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if allowed == resource.RLIM_INFINITY else min(most, int(allowed * share))


def lost(transfer: Transfer, why: str) -> TransferError:
    """The source of `transfer` is gone."""
    return TransferError(f"worker {transfer.source.worker} was lost during transfer {transfer.transfer_id}: {why}")


def not_listening(host: str, port: int, why: str) -> PlacementError:
    """The port for KV cannot be had."""
    return PlacementError(f"cannot listen on {host}:{port} for KV: {why}", key="kv.port", value=port, expected="a free port, or 0")
