"""A stream socket between two peers: headers, each after its length, and payloads, straight from and to the memory of the boxes.

What carriers `shm`, `tcp` and (for all but payloads) `torch_dist` have in common. Bytes are moved by the event loop that waits for
them, at most `PIECE_BYTES` at a time, so that other work of the loop comes in between. Nothing is copied in Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from disagg.errors import TransferCorruptError
from disagg.kv.frames import MAX_HEADER_BYTES, Header, pack, unpack

PIECE_BYTES = 1 << 20
KEPT_S = 2.0
KEPT_CONNECTIONS = 16  # to one worker: pulls come in bursts
_AHEAD_BYTES = 4096  # read in one go where a header is due
_LENGTH = struct.Struct("<I")


class Connection:
    """Owns a connected, non-blocking socket. One task may receive while another sends.

    The event loop keeps looking at the socket between two waits: peers mostly speak by turns, and to tell it each time costs more than a
    header. Bytes that nobody waits for end that.

    Every method raises EOFError when the peer has closed, OSError when the connection broke, and TimeoutError when the peer took or
    gave nothing for `silence_s`.
    """

    def __init__(self, sock: socket.socket, silence_s: float) -> None:
        self.sock = sock
        self.silence_s = silence_s
        self._waiting: set[asyncio.Future[None]] = set()
        self._is_looked_at = False  # by the event loop, for bytes to read
        self._readable: asyncio.Future[None] | None = None  # who receives waits for it
        self._heard: Callable[[], None] | None = None
        self._ahead = bytearray()  # received, and not asked for yet

    async def send(self, *headers: Header) -> None:
        """One or more in a row, in one piece."""
        await self._send(memoryview(b"".join(map(framed, headers))))

    async def send_payload(self, payload: memoryview) -> None:
        """Bytes that are not to change before the peer has said that it has them."""
        for start in range(0, len(payload), PIECE_BYTES):
            await self._send(payload[start : start + PIECE_BYTES])
            await asyncio.sleep(0)

    async def receive(self, timeout_s: float | None = -1.0) -> Header:
        """The next header, whose first byte comes within `timeout_s` (None: whenever; default: `silence_s`).

        Raises TransferCorruptError on anything that is not one.
        """
        while (header := self.receive_now()) is None:
            await self._wait_readable(self.silence_s if self._ahead or timeout_s == -1.0 else timeout_s)
        return header

    def receive_now(self) -> Header | None:
        """The next header if it is here already, while nobody receives. Raises as `receive`."""
        ahead = self._ahead
        while True:
            if len(ahead) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(ahead)[0]
                if end - _LENGTH.size > MAX_HEADER_BYTES:
                    raise TransferCorruptError(f"a header of {end - _LENGTH.size} bytes")
                if len(ahead) >= end:
                    data = bytes(ahead[_LENGTH.size : end])
                    del ahead[:end]
                    return unpack(data)
            try:
                more = self.sock.recv(_AHEAD_BYTES)  # headers are short, and often come several at a time
            except BlockingIOError:
                return None
            if not more:
                raise EOFError("the connection closed")
            ahead += more

    async def receive_into(self, room: memoryview) -> None:
        """A payload, to its place. When this returns or raises, also by a cancel, nothing writes there any more."""
        num_ahead = min(len(self._ahead), len(room))
        room[:num_ahead] = self._ahead[:num_ahead]
        del self._ahead[:num_ahead]
        await self._receive_into(room[num_ahead:])

    async def receive_with_fds(self) -> tuple[Header, list[int]]:
        """(Unix sockets) The next header, sent in one piece, and the descriptors beside it; the caller closes them."""
        await self._wait_readable(self.silence_s)
        data, fds, _, _ = socket.recv_fds(self.sock, MAX_HEADER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if not data:
                raise EOFError("the connection closed")
            return unpack(data[_LENGTH.size :]), list(fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    @property
    def is_quiet(self) -> bool:
        """Open, with nothing to read."""
        if self._ahead:
            return False
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def watch(self, said_or_closed: Callable[[], None]) -> None:
        """Be told when the peer says anything or closes, until `unwatch` or `close`; nobody receives meanwhile."""
        self._heard = said_or_closed
        self._look()

    def unwatch(self) -> None:
        """Idempotent."""
        self._heard = None

    def shut(self) -> None:
        """Neither side can send any more; whoever waits, here or there, gets EOFError or OSError. `close` is still due."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent. Whoever still waits here gets EOFError."""
        self._heard = None
        fd = self.sock.fileno()
        if fd >= 0:
            loop = asyncio.get_running_loop()
            loop.remove_reader(fd)
            loop.remove_writer(fd)
            self.sock.close()
        for ready in self._waiting:
            if not ready.done():
                ready.set_exception(EOFError("closed"))

    async def _send(self, data: memoryview) -> None:
        while len(data):
            try:
                data = data[self.sock.send(data) :]
            except BlockingIOError:
                await self._writable()

    async def _receive_into(self, room: memoryview) -> None:
        at, end = 0, len(room)
        while at < end:
            try:
                num_bytes = self.sock.recv_into(room[at : at + PIECE_BYTES])
            except BlockingIOError:
                await self._wait_readable(self.silence_s)
                continue
            if not num_bytes:
                raise EOFError("the connection closed")
            at += num_bytes
            if num_bytes == PIECE_BYTES:
                await asyncio.sleep(0)

    async def _wait_readable(self, timeout_s: float | None) -> None:
        self._readable = asyncio.get_running_loop().create_future()
        self._look()
        try:
            await self._wait(self._readable, timeout_s)
        finally:
            self._readable = None

    def _look(self) -> None:
        if not self._is_looked_at:
            asyncio.get_running_loop().add_reader(self.sock.fileno(), self._said)
            self._is_looked_at = True

    def _said(self) -> None:
        """There is something to read, or the peer has closed."""
        if self._readable is not None:
            _set(self._readable)
        elif self._heard is not None:
            if not self.is_quiet:  # the event loop may have looked before the last bytes were taken
                self._heard()
        else:  # left for later: the event loop would say it again and again
            asyncio.get_running_loop().remove_reader(self.sock.fileno())
            self._is_looked_at = False

    async def _writable(self) -> None:
        loop, fd = asyncio.get_running_loop(), self.sock.fileno()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_writer(fd, _set, ready)
        try:
            await self._wait(ready, self.silence_s)
        finally:
            if self.sock.fileno() == fd:
                loop.remove_writer(fd)

    async def _wait(self, ready: asyncio.Future[None], timeout_s: float | None) -> None:
        """Whoever closes the connection ends this, too."""
        timer = None if timeout_s is None else asyncio.get_running_loop().call_later(timeout_s, _expire, ready)
        self._waiting.add(ready)
        try:
            await ready
        finally:
            self._waiting.discard(ready)
            if timer is not None:
                timer.cancel()


def framed(header: Header) -> bytes:
    """A header as it goes over a stream."""
    data = pack(header)
    return _LENGTH.pack(len(data)) + data


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _expire(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_exception(TimeoutError())


class Keepable(Protocol):
    """What a kept connection can do; see Connection."""

    @property
    def is_quiet(self) -> bool: ...
    def watch(self, said_or_closed: Callable[[], None], /) -> None: ...
    def unwatch(self) -> None: ...
    def close(self) -> None: ...


C = TypeVar("C", bound=Keepable)


class KeptConnections(Generic[C]):
    """Connections whose last pull ended well, for the next pull within KEPT_S: no handshake, and TCP knows the path.

    By worker; only those to its latest (endpoint, epoch) count. One that the peer closes meanwhile is closed here, too.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[str, str], dict[C, asyncio.TimerHandle]]] = {}

    def take(self, worker: str, endpoint: str, epoch: str) -> C | None:
        """One that is still open, or None."""
        key, kept = self._kept.get(worker, ((endpoint, epoch), {}))
        if key != (endpoint, epoch):
            self.drop(worker)
            return None
        while kept:
            connection, timer = kept.popitem()
            timer.cancel()
            connection.unwatch()
            if connection.is_quiet:
                return connection
            connection.close()
        return None

    def keep(self, worker: str, endpoint: str, epoch: str, connection: C) -> None:
        """Owns `connection` from now on."""
        key, kept = self._kept.setdefault(worker, ((endpoint, epoch), {}))
        if key != (endpoint, epoch) or len(kept) >= KEPT_CONNECTIONS:
            connection.close()
            return
        kept[connection] = asyncio.get_running_loop().call_later(KEPT_S, self._end, worker, connection)
        connection.watch(lambda: self._end(worker, connection))

    def drop(self, worker: str) -> None:
        """Close all to that worker."""
        for connection in list(self._kept.get(worker, ("", {}))[1]):
            self._end(worker, connection)
        self._kept.pop(worker, None)

    def close(self) -> None:
        for worker in list(self._kept):
            self.drop(worker)

    def _end(self, worker: str, connection: C) -> None:
        kept = self._kept.get(worker, ("", {}))[1]
        if connection in kept:
            kept.pop(connection).cancel()
            connection.close()
        if not kept:
            self._kept.pop(worker, None)
