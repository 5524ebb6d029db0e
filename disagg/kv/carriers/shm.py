"""Carrier `shm`: peers on one host. Bytes are copied once, from the mapped outbox to the inbox; only headers cross a socket.

Each worker listens on an abstract unix socket, named by its epoch (nothing in a file system, so nothing is ever left behind).
A peer says Hello once and gets a read-only descriptor of the outbox; that connection stays open, and its end means that the peer is
gone and the mapping is dropped. Each pull has a connection of its own: closing it is the cancel, from either side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from disagg.errors import ConfigError, DisaggError, PlacementError, TransferCorruptError, TransferError, TransferFencedError
from disagg.kv.box import attach
from disagg.kv.frames import (
    HEARTBEAT_S,
    MAX_HEADER_BYTES,
    SILENCE_S,
    Ack,
    End,
    Failed,
    Frame,
    Header,
    Hello,
    Mapped,
    Opened,
    Pull,
    Sink,
    failed,
    pack,
    pull_request,
    raise_failed,
    unpack,
)
from disagg.kv.outbox import Outbox, Reader
from disagg.types import Transfer

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_BACKLOG = 1024  # pulls that may connect in one instant: a full backlog refuses, it does not wait


class ShmCarrier:
    """See the module. `silence_s`: how long a source may say nothing before it counts as lost."""

    name = "shm"

    def __init__(self, silence_s: float = SILENCE_S, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._silence_s = silence_s
        self._heartbeat_s = heartbeat_s
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._peers: dict[str, asyncio.Task[_Peer]] = {}

    async def serve(self, outbox: Outbox) -> str:
        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._serve_connection(outbox, reader, writer))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

        endpoint = f"@disagg-{outbox.epoch}"
        try:
            self._servers.append(await asyncio.start_unix_server(connected, path=_path(endpoint), backlog=_BACKLOG))
        except OSError as error:
            raise PlacementError(
                f"cannot listen on {endpoint}: {error.strerror}", key="kv.carrier", value="shm", expected="a fresh epoch"
            ) from error
        return endpoint

    async def pull(self, endpoint: str, transfer: Transfer, sink: Sink) -> None:
        box = await self._map(endpoint, transfer)
        reader, writer = await self._connect(endpoint, transfer)
        try:
            writer.write(_framed(pull_request(transfer)))
            entry = _PeerEntry(box)
            complete = False
            while not complete:
                header = await self._read(reader, transfer)
                if isinstance(header, Failed):
                    raise_failed(header)
                complete = await sink.receive(header, entry.payload(header))
            writer.write(_framed(Ack(transfer.transfer_id)))
        except OSError as error:
            raise _lost(transfer, error.strerror or str(error)) from error
        finally:
            await _close(writer)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()
        peers, self._peers = list(self._peers.values()), {}
        for handshake in peers:
            handshake.cancel()
        mapped = await asyncio.gather(*peers, return_exceptions=True)
        ended = [*self._connections, *(peer.watcher for peer in mapped if isinstance(peer, _Peer))]
        for task in ended:
            task.cancel()
        if ended:
            await asyncio.wait(ended)

    # source side

    async def _serve_connection(self, outbox: Outbox, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _peer_uid(writer) != os.getuid():
                raise TransferCorruptError("a peer of another user")
            async with asyncio.timeout(self._silence_s):
                request = await _read(reader)
            match request:
                case Hello():
                    _send_box(writer, outbox)
                    await reader.read(1)  # held open for as long as the peer keeps the mapping
                case Pull():
                    with outbox.reader(request) as entry_reader:
                        await self._serve_pull(entry_reader, reader, writer)
                case _:
                    raise TransferCorruptError(f"unexpected {type(request).__name__}")
        except TransferCorruptError as error:
            outbox.counters.garbage += 1
            log.warning("shm: closed a connection: %s", error.message)
        except (OSError, EOFError, TimeoutError):
            pass  # the peer is gone; its reader has been let go
        finally:
            await _close(writer)

    async def _serve_pull(self, entry_reader: Reader, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send until End or an error while listening for Ack or the connection's end.

        After End there is no deadline but the peer's life: it may be waiting for inbox room, and its death closes the connection.
        """
        sender = asyncio.ensure_future(self._send(entry_reader, writer))
        answer = asyncio.ensure_future(_read(reader))
        try:
            await asyncio.wait({sender, answer}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                sent_all = sender.result()
                await asyncio.wait({answer}, timeout=None if sent_all else self._silence_s)
            if answer.done() and isinstance(answer.result(), Ack):
                entry_reader.acknowledge()
        finally:
            sender.cancel()
            answer.cancel()
            await asyncio.wait({sender, answer})
            for task in (sender, answer):
                if not task.cancelled():
                    task.exception()

    async def _send(self, entry_reader: Reader, writer: asyncio.StreamWriter) -> bool:
        """Send headers; True when all were sent, False when an error was sent instead."""
        header: Header
        try:
            while True:
                header = await entry_reader.next(self._heartbeat_s)
                writer.write(_framed(header))
                await writer.drain()
                if isinstance(header, End):
                    return True
        except DisaggError as error:
            writer.write(_framed(failed(error)))
            return False

    # puller side

    async def _map(self, endpoint: str, transfer: Transfer) -> memoryview:
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

    async def _handshake(self, endpoint: str, transfer: Transfer) -> _Peer:
        reader, writer = await self._connect(endpoint, transfer)
        try:
            async with asyncio.timeout(self._silence_s):
                box = await _receive_box(writer, transfer)
        except (OSError, TimeoutError, EOFError, TransferCorruptError, ConfigError) as error:
            await _close(writer)
            raise _lost(transfer, f"no box: {error}") from error
        except BaseException:
            await _close(writer)
            raise

        async def watch() -> None:
            try:
                await reader.read(1)
            except OSError:
                pass
            finally:
                self._peers.pop(endpoint, None)
                await _close(writer)

        return _Peer(box, asyncio.ensure_future(watch()))

    async def _connect(self, endpoint: str, transfer: Transfer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            reader, writer = await asyncio.open_unix_connection(sock=_connected(endpoint))
        except OSError as error:
            raise _lost(transfer, f"nobody listens at {endpoint}") from error
        if _peer_uid(writer) != os.getuid():
            await _close(writer)
            raise TransferFencedError(f"{endpoint} belongs to another user")
        return reader, writer

    async def _read(self, reader: asyncio.StreamReader, transfer: Transfer) -> Header:
        try:
            async with asyncio.timeout(self._silence_s):
                return await _read(reader)
        except TimeoutError:
            raise _lost(transfer, f"silent for {self._silence_s} s") from None
        except EOFError:
            raise _lost(transfer, "the connection closed") from None


class _Peer:
    """A peer's mapped outbox, for as long as `watcher` sees it alive."""

    def __init__(self, box: memoryview, watcher: asyncio.Task[None]) -> None:
        self.box = box
        self.watcher = watcher


class _PeerEntry:
    """Where one transfer's frames lie in the peer's box."""

    def __init__(self, box: memoryview) -> None:
        self._box = box
        self._opened: Opened | None = None

    def payload(self, header: Header) -> Sequence[memoryview]:
        """The bytes of a frame; nothing for other headers. Raises TransferCorruptError outside the entry."""
        if isinstance(header, Opened):
            self._opened = header
        if not isinstance(header, Frame):
            return ()
        if self._opened is None:
            raise TransferCorruptError("a frame before Opened")
        start = self._opened.box_offset + self._opened.layout.offset(self._opened.num_tokens, header.rank, header.first_block)
        end = start + header.num_bytes
        if end > len(self._box):
            raise TransferCorruptError(f"a frame at {start}..{end} of a box of {len(self._box)} bytes")
        return [self._box[start:end]]


def _path(endpoint: str) -> str:
    return "\0" + endpoint.removeprefix("@")


def _connected(endpoint: str) -> socket.socket:
    """A local connection is made or refused at once. Made here, because uvloop (on which Ray runs actors) connects to no abstract name."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(_path(endpoint))
    except OSError:
        sock.close()
        raise
    return sock


def _lost(transfer: Transfer, why: str) -> TransferError:
    return TransferError(f"worker {transfer.source.worker} was lost during transfer {transfer.transfer_id}: {why}")


def _framed(header: Header) -> bytes:
    data = pack(header)
    return _LENGTH.pack(len(data)) + data


async def _read(reader: asyncio.StreamReader) -> Header:
    """One header. Raises EOFError (asyncio.IncompleteReadError) at the connection's end, TransferCorruptError on garbage."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MAX_HEADER_BYTES:
        raise TransferCorruptError(f"a header of {length} bytes")
    return unpack(await reader.readexactly(length))


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _send_box(writer: asyncio.StreamWriter, outbox: Outbox) -> None:
    fd = outbox.box.open_read_only()
    try:
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as raw:
            socket.send_fds(raw, [_framed(Mapped(outbox.epoch, outbox.box.num_bytes))], [fd])
    finally:
        os.close(fd)


async def _receive_box(writer: asyncio.StreamWriter, transfer: Transfer) -> memoryview:
    """Say Hello and map the box whose descriptor comes back. asyncio's streams drop descriptors, so the transport is paused."""
    transport: Any = writer.transport
    transport.pause_reading()
    writer.write(_framed(Hello(transfer.source.epoch)))
    loop = asyncio.get_running_loop()
    with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as raw:
        readable = loop.create_future()
        loop.add_reader(raw.fileno(), lambda: None if readable.done() else readable.set_result(None))
        try:
            await readable
        finally:
            loop.remove_reader(raw.fileno())
        data, fds, _, _ = socket.recv_fds(raw, MAX_HEADER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if len(fds) != 1 or len(data) <= _LENGTH.size:
            raise TransferCorruptError(f"{len(fds)} descriptors in the answer to Hello")
        header = unpack(data[_LENGTH.size :])
        if not isinstance(header, Mapped) or header.epoch != transfer.source.epoch:
            raise TransferCorruptError(f"not the box of epoch {transfer.source.epoch}")
        box = attach(fds[0], header.num_bytes)
    finally:
        for fd in fds:
            os.close(fd)
    transport.resume_reading()
    return box


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
