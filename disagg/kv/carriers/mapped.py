"""What carriers `shm` and `cuda_ipc` have in common: the puller reaches into the source's box; only headers cross a socket.

Each worker listens on an abstract unix socket, named by its epoch (nothing in a file system, so nothing is ever left behind).
A peer says Hello once and is shown the outbox; that connection stays open, and its end means that the peer is gone and the mapping is
dropped. A pull has a connection of its own while it runs: closing it is the cancel, from either side.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from disagg.errors import ConfigError, DisaggError, PlacementError, TransferCorruptError, TransferError, TransferFencedError
from disagg.kv.carriers.pulls import BACKLOG, Listener, lost, pull, serve_pull
from disagg.kv.carriers.stream import Connection, KeptConnections
from disagg.kv.frames import HEARTBEAT_S, SILENCE_S, Frame, Header, Hello, Opened, Pull, Sink
from disagg.kv.outbox import Outbox
from disagg.types import Transfer

BoxT = TypeVar("BoxT")  # a peer's box, as this process sees it


class Mapping(Protocol[BoxT]):
    """How a source shows its box, and what a puller does with one that it was shown."""

    def show(self, sock: socket.socket, outbox: Outbox) -> None:
        """Answer Hello on `sock`, in one piece."""
        ...

    async def receive(self, connection: Connection, transfer: Transfer) -> BoxT:
        """The source's box from the answer to Hello. Raises TransferCorruptError or ConfigError when that is not what was asked for."""
        ...

    async def payload(self, box: BoxT, start: int, frame: Frame, sink: Sink) -> memoryview:
        """The bytes of `frame`, which begin at `start` of the box. Raises TransferCorruptError when they are outside."""
        ...


class MappedCarrier(Generic[BoxT]):
    """What carriers have in common whose pullers reach into the source's box. `silence_s`: when a silent source counts as lost."""

    def __init__(self, name: str, mapping: Mapping[BoxT], silence_s: float = SILENCE_S, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._name = name
        self._mapping = mapping
        self._silence_s = silence_s
        self._heartbeat_s = heartbeat_s
        self._listeners: list[Listener] = []
        self._kept: KeptConnections[Connection] = KeptConnections()
        self._peers: dict[str, asyncio.Task[_Peer[BoxT]]] = {}

    @property
    def name(self) -> str:
        return self._name

    async def serve(self, outbox: Outbox) -> str:
        async def serve(connection: Connection, request: Header) -> None:
            if _peer_uid(connection.sock) != os.getuid():
                raise TransferCorruptError("a peer of another user")
            match request:
                case Hello():
                    self._mapping.show(connection.sock, outbox)  # the peer holds the connection open for as long as it keeps the mapping
                case Pull():
                    await serve_pull(outbox, request, connection, self._heartbeat_s)
                case _:
                    raise TransferCorruptError(f"unexpected {type(request).__name__}")

        endpoint = f"@disagg-{self.name}-{outbox.epoch}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(_path(endpoint))
            sock.listen(BACKLOG)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            raise PlacementError(
                f"cannot listen on {endpoint}: {error.strerror}", key="kv.carrier", value=self.name, expected="a fresh epoch"
            ) from error
        self._listeners.append(Listener(self.name, sock, outbox, serve, self._silence_s))
        return endpoint

    async def pull(self, endpoint: str, transfer: Transfer, sink: Sink) -> None:
        source = transfer.source
        box = await self._map(endpoint, transfer)
        opened: Opened | None = None

        async def payload(header: Header) -> Sequence[memoryview]:
            nonlocal opened
            if isinstance(header, Opened):
                opened = header
            if not isinstance(header, Frame):
                return ()
            if opened is None:
                raise TransferCorruptError("a frame before Opened")
            start = opened.box_offset + opened.layout.offset(opened.num_tokens, header.rank, header.first_block)
            return (await self._mapping.payload(box, start, header, sink),)

        connection = self._kept.take(source.worker, endpoint, source.epoch) or self._connect(endpoint, transfer)
        try:
            await pull(connection, transfer, sink, payload)
        except BaseException:
            connection.close()
            raise
        self._kept.keep(source.worker, endpoint, source.epoch, connection)

    async def close(self) -> None:
        self._kept.close()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            await listener.close()
        peers, self._peers = list(self._peers.values()), {}
        for handshake in peers:
            handshake.cancel()
        mapped = await asyncio.gather(*peers, return_exceptions=True)
        watchers = [peer.watcher for peer in mapped if isinstance(peer, _Peer)]
        for task in watchers:
            task.cancel()
        if watchers:
            await asyncio.wait(watchers)

    async def _map(self, endpoint: str, transfer: Transfer) -> BoxT:
        """The source's box, mapped; one handshake per peer, shared by all pulls."""
        task = self._peers.get(endpoint)
        if task is None:
            task = asyncio.ensure_future(self._handshake(endpoint, transfer))
            self._peers[endpoint] = task
            task.add_done_callback(lambda t: self._peers.pop(endpoint, None) if t.cancelled() or t.exception() else None)
        try:
            return (await asyncio.shield(task)).box
        except DisaggError as error:
            raise type(error)(error.message) if isinstance(error, TransferError) else error from None

    async def _handshake(self, endpoint: str, transfer: Transfer) -> _Peer[BoxT]:
        connection = self._connect(endpoint, transfer)
        try:
            await connection.send(Hello(transfer.source.epoch))
            box = await self._mapping.receive(connection, transfer)
        except (OSError, TimeoutError, EOFError, TransferCorruptError, ConfigError) as error:
            connection.close()
            raise lost(transfer, f"no box: {error}") from error
        except BaseException:
            connection.close()
            raise

        async def watch() -> None:
            try:
                await connection.receive(timeout_s=None)
            except (OSError, EOFError, TransferCorruptError):
                pass
            finally:
                self._peers.pop(endpoint, None)
                self._kept.drop(transfer.source.worker)
                connection.close()

        return _Peer(box, asyncio.ensure_future(watch()))

    def _connect(self, endpoint: str, transfer: Transfer) -> Connection:
        """A local connection is made or refused at once; uvloop (on which Ray runs actors) connects to no abstract name."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(_path(endpoint))
            if _peer_uid(sock) != os.getuid():
                raise TransferFencedError(f"{endpoint} belongs to another user")
        except OSError as error:
            sock.close()
            raise lost(transfer, f"nobody listens at {endpoint}") from error
        except BaseException:
            sock.close()
            raise
        return Connection(sock, self._silence_s)


class _Peer(Generic[BoxT]):
    """A peer's mapped outbox, for as long as `watcher` sees it alive."""

    def __init__(self, box: BoxT, watcher: asyncio.Task[None]) -> None:
        self.box = box
        self.watcher = watcher


def _path(endpoint: str) -> str:
    return "\0" + endpoint.removeprefix("@")


def _peer_uid(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
