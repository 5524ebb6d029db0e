"""Carrier `tcp`: peers anywhere, over plain sockets. The kernel reads from the outbox and writes into the inbox; Python sees headers.

A pull has a connection of its own while it runs; one that ended well is kept for the next pull from that worker. Like the gRPC carrier
it neither encrypts nor asks who reads: a transfer's random id is the key to its bytes, and the network between workers is trusted.
"""

from __future__ import annotations

import asyncio
import socket

from disagg.errors import TransferCorruptError
from disagg.kv.carriers.pulls import BACKLOG, Listener, in_place, lost, not_listening, pull, serve_pull
from disagg.kv.carriers.stream import Connection, KeptConnections
from disagg.kv.frames import HEARTBEAT_S, SILENCE_S, Frame, Header, Pull, Sink
from disagg.kv.outbox import Outbox, Reader
from disagg.types import Transfer


class TcpCarrier:
    """Serves on `host`:`port` (0: a free one), the host name that peers are told.

    `silence_s`: how long a peer may say nothing before it counts as lost.
    """

    name = "tcp"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        silence_s: float = SILENCE_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._host = host
        self._port = port
        self._silence_s = silence_s
        self._heartbeat_s = heartbeat_s
        self._listeners: list[Listener] = []
        self._kept: KeptConnections[Connection] = KeptConnections()

    async def serve(self, outbox: Outbox) -> str:
        async def serve(connection: Connection, request: Header) -> None:
            if not isinstance(request, Pull):
                raise TransferCorruptError(f"unexpected {type(request).__name__}")

            async def send_payload(frame: Frame, reader: Reader) -> None:
                await connection.send_payload(reader.payload(frame))

            _keep_alive(connection.sock, self._silence_s)
            await serve_pull(outbox, request, connection, self._heartbeat_s, send_payload)

        sock = listening(self._host, self._port)
        self._listeners.append(Listener(self.name, sock, outbox, serve, self._silence_s))
        return f"{self._host}:{sock.getsockname()[1]}"

    async def pull(self, endpoint: str, transfer: Transfer, sink: Sink) -> None:
        source = transfer.source
        connection = self._kept.take(source.worker, endpoint, source.epoch) or await self._connect(endpoint, transfer)
        try:
            await pull(connection, transfer, sink, in_place(connection, sink))
        except BaseException:
            connection.close()
            raise
        self._kept.keep(source.worker, endpoint, source.epoch, connection)

    async def close(self) -> None:
        self._kept.close()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            await listener.close()

    async def _connect(self, endpoint: str, transfer: Transfer) -> Connection:
        return await connected(endpoint, transfer, self._silence_s)


async def connected(endpoint: str, transfer: Transfer, silence_s: float) -> Connection:
    """A connection to HOST:PORT. Raises as `connected_socket` does."""
    return Connection(await connected_socket(endpoint, transfer, silence_s), silence_s)


async def connected_socket(endpoint: str, transfer: Transfer, silence_s: float) -> socket.socket:
    """A non-blocking socket, connected to HOST:PORT. Raises TransferError when nobody answers within `silence_s`."""
    host, _, port = endpoint.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(silence_s):
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
            except BaseException:
                sock.close()
                raise
    except TimeoutError:
        raise lost(transfer, f"{endpoint} does not answer") from None
    except (OSError, ValueError) as error:
        raise lost(transfer, f"nobody listens at {endpoint}: {error}") from error
    _keep_alive(sock, silence_s)
    return sock


def listening(host: str, port: int) -> socket.socket:
    """A listening socket. Raises PlacementError when it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a former life do not hold the port
            sock.bind(address)
            sock.listen(BACKLOG)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise not_listening(host, port, error.strerror or str(error)) from error
    return sock


def _keep_alive(sock: socket.socket, silence_s: float) -> None:
    """A host that vanishes without a word is noticed within about `silence_s`, also while nothing is sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silence_s / 3)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(silence_s / 3)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))
