"""A proxy on the way to a KV port that does one wrong thing to the bytes: for network carriers, and for the socket of carrier shm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

WireFault = Literal["delay", "drop", "duplicate", "reorder", "truncate", "flip", "stall", "reset"]
WIRE_FAULTS: tuple[WireFault, ...] = get_args(WireFault)

_CHUNK_BYTES = 1 << 16
_SOURCE, _PULLER = "to the source", "to the puller"
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Harm:
    """`fault` hits `num_bytes` bytes that flow in one direction, `at_byte` bytes after it was armed; `flip` is of bit `bit` of the first.

    delay: they come 50 ms late. drop: they never come. duplicate: they come twice. reorder: they change places with as many before them.
    truncate: the connection closes before them. reset: it breaks before them. stall: nothing passes any more, in both directions.
    """

    fault: WireFault
    to_source: bool
    at_byte: int
    num_bytes: int = 1
    bit: int = 0


class FaultyWire:
    """Listens for pullers of the source at `target` ("host:port" or "@abstract name"); `endpoint` is what they are told."""

    def __init__(self, target: str) -> None:
        self.num_faults = 0
        self._target, slash, rest = target.partition("/")  # the rest: further ports of carrier torch_dist, not harmed
        self._harm: Harm | None = None
        self._countdown = 0
        self._stalled: set[_Link] = set()
        self._links: dict[asyncio.Task[None], _Link] = {}
        self._listener = _listener(self._target)
        name = self._listener.getsockname()
        self.endpoint = f"@{name[1:].decode()}" if isinstance(name, bytes) else f"{name[0]}:{name[1]}{slash}{rest}"
        self._accepting = asyncio.ensure_future(self._accept())

    def arm(self, harm: Harm) -> None:
        """Let `harm` happen once; what has not happened yet of an earlier one will not."""
        self._harm, self._countdown = harm, harm.at_byte

    def heal(self) -> None:
        """Disarm. Connections that stalled break, as they do when a network is there again."""
        self._harm = None
        for task, link in self._links.items():
            if link in self._stalled:
                link.reset()
                task.cancel()

    async def close(self) -> None:
        """End the listening and all connections."""
        tasks = [self._accepting, *self._links]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(self._listener)
            link = _Link(near)
            task = asyncio.ensure_future(self._run(link))
            self._links[task] = link
            task.add_done_callback(self._links.pop)

    async def _run(self, link: _Link) -> None:
        try:
            await link.connect(self._target)
            pumps = [
                asyncio.ensure_future(self._pump(link, link.near, link.far, _SOURCE)),
                asyncio.ensure_future(self._pump(link, link.far, link.near, _PULLER)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.wait(pumps)
                for pump in pumps:
                    if not pump.cancelled():
                        pump.exception()
        except OSError:
            pass  # nobody at the target: the puller's connection ends
        finally:
            self._stalled.discard(link)
            link.close()

    async def _pump(self, link: _Link, source: socket.socket, sink: socket.socket, way: str) -> None:
        """Pass one direction on until its end. Raises OSError when the connection breaks."""
        loop = asyncio.get_running_loop()
        while True:
            await _readable(source)
            if link in self._stalled:
                await asyncio.Event().wait()
            try:
                data, descriptors, _, _ = socket.recv_fds(source, _CHUNK_BYTES, 4)
            except BlockingIOError:
                continue
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            for piece in self._pieces(link, data, way):
                if isinstance(piece, float):
                    await asyncio.sleep(piece)
                elif piece is None:
                    await asyncio.Event().wait()
                elif piece and descriptors:
                    socket.send_fds(sink, [piece], descriptors)
                    for descriptor in descriptors:
                        os.close(descriptor)
                    descriptors = []
                else:
                    await loop.sock_sendall(sink, piece)

    def _pieces(self, link: _Link, data: bytes, way: str) -> Iterator[bytes | float | None]:
        """What to pass on of `data`: bytes, pauses in seconds, None for never again. Raises ConnectionResetError where it ends."""
        harm = self._harm
        if harm is None or harm.to_source != (way == _SOURCE):
            yield data
            return
        if self._countdown >= len(data):
            self._countdown -= len(data)
            yield data
            return
        self._harm = None
        self.num_faults += 1
        at, end = self._countdown, min(self._countdown + harm.num_bytes, len(data))
        before, hit, after = data[:at], data[at:end], data[end:]
        if before:
            yield before if harm.fault != "reorder" else before[: -len(hit)]
        match harm.fault:
            case "delay":
                yield 0.05
                yield hit + after
            case "drop":
                yield after
            case "duplicate":
                yield hit + hit + after
            case "reorder":
                yield hit + before[-len(hit) :] + after
            case "flip":
                yield bytes([hit[0] ^ 1 << harm.bit % 8]) + hit[1:] + after
            case "truncate":
                raise ConnectionResetError
            case "reset":
                link.reset()
                raise ConnectionResetError
            case "stall":
                self._stalled.add(link)
                yield None


class _Link:
    """The two sockets of one proxied connection."""

    def __init__(self, near: socket.socket) -> None:
        near.setblocking(False)
        self.near = near
        self.far = socket.socket(near.family, socket.SOCK_STREAM)
        self.far.setblocking(False)

    async def connect(self, target: str) -> None:
        await asyncio.get_running_loop().sock_connect(self.far, _address(target))

    def reset(self) -> None:
        """Both ends get a reset (on a Unix socket: an end) at once."""
        for sock in (self.near, self.far):
            with contextlib.suppress(OSError):
                if sock.family != socket.AF_UNIX:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.near.close()
        self.far.close()


def _listener(target: str) -> socket.socket:
    family = socket.AF_UNIX if target.startswith("@") else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind(f"\0{target[1:]}-wire" if family == socket.AF_UNIX else ("127.0.0.1", 0))
    sock.listen(1024)
    sock.setblocking(False)
    return sock


def _address(target: str) -> str | tuple[str, int]:
    if target.startswith("@"):
        return "\0" + target[1:]
    host, _, port = target.rpartition(":")
    return host, int(port)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(sock.fileno(), lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())
