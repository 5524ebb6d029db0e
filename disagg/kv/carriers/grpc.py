"""Carrier `grpc`: peers anywhere. One bidirectional stream per pull; bytes go as raw messages, without protobuf.

The source is gRPC's own server; the puller's side of the wire is http2.py.

    message = u32 header length + header + payload piece      (a long payload goes on in messages of header length 0)

The puller sends Pull, reads until End, and sends Ack on the same stream.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from disagg.errors import DisaggError, TransferCorruptError
from disagg.kv.carriers.http2 import Http2Connection
from disagg.kv.carriers.pulls import in_place, lost, not_listening, of_descriptors, pull
from disagg.kv.carriers.stream import KeptConnections
from disagg.kv.carriers.tcp import connected_socket
from disagg.kv.frames import (
    HEARTBEAT_S,
    MAX_HEADER_BYTES,
    SILENCE_S,
    Ack,
    End,
    Frame,
    Header,
    Pull,
    Sink,
    failed,
    pack,
    unpack,
)
from disagg.kv.outbox import Outbox, Reader
from disagg.types import Transfer

log = logging.getLogger(__name__)

SERVICE = "disagg.v1.Kv"
_METHOD = "Pull"
PIECE_BYTES = 2 << 20  # a message: it is copied twice on its way into gRPC, and the event loop stands still for that
_LENGTH = struct.Struct("<I")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_MAX_CONNECTIONS = 4096
_HANDSHAKE_S = 5  # who has not spoken HTTP/2 by then is no peer
_KEPT_BYTES = 64 << 20  # freed memory at the end of a heap that glibc does not give back
_IDLE_S = 600  # a connection without a call for so long is closed; the next pull makes a new one
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_HEADER_BYTES + 64),  # a puller sends headers only
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),  # without a byte; bytes that are no answer are bytes, too
    ("grpc.http2.ping_timeout_ms", 5000),  # without the answer
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.so_reuseport", 0),  # a port in use must be an error
    ("grpc.server_handshake_timeout_ms", 1000 * _HANDSHAKE_S),
    ("grpc.max_connection_idle_ms", 1000 * _IDLE_S),
]


class GrpcCarrier:
    """Serves on `host`:`port` (0: a free one), the host name that peers are told.

    `silence_s`: how long a source may say nothing before it counts as lost.
    """

    name = "grpc"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        silence_s: float = SILENCE_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        _keep_freed_memory()
        self._host = host
        self._port = port
        self._silence_s = silence_s
        self._heartbeat_s = heartbeat_s
        self._servers: list[grpc.aio.Server] = []
        self._kept: KeptConnections[Http2Connection] = KeptConnections()

    async def serve(self, outbox: Outbox) -> str:
        async def pull(_: AsyncIterator[bytes], context: Any) -> None:
            await self._serve_pull(outbox, context)

        bound = ("grpc.max_allowed_incoming_connections", of_descriptors(1 / 2, _MAX_CONNECTIONS))
        server = grpc.aio.server(options=[*_OPTIONS, bound])
        handler: Any = grpc.stream_stream_rpc_method_handler(pull)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {_METHOD: handler}),))
        try:
            port = server.add_insecure_port(f"{self._host}:{self._port}")
        except RuntimeError as error:
            raise not_listening(self._host, self._port, str(error)) from error
        await server.start()
        self._servers.append(server)
        return f"{self._host}:{port}"

    async def pull(self, endpoint: str, transfer: Transfer, sink: Sink) -> None:
        source = transfer.source
        connection = self._kept.take(source.worker, endpoint, source.epoch) or await self._connect(endpoint, transfer)
        try:
            await pull(connection, transfer, sink, in_place(connection, sink))
            await connection.end_call()
        except (EOFError, OSError) as error:
            connection.close()
            raise lost(transfer, "the acknowledgement was not answered") from error
        except BaseException:
            connection.close()
            raise
        self._kept.keep(source.worker, endpoint, source.epoch, connection)

    async def close(self) -> None:
        self._kept.close()
        servers, self._servers = self._servers, []
        for server in servers:
            await server.stop(grace=None)

    async def _serve_pull(self, outbox: Outbox, context: Any) -> None:
        try:
            request = await self._request(context)
        except (TransferCorruptError, TimeoutError) as error:
            outbox.counters.garbage += 1
            log.warning("grpc: refused a stream: %r", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "expected a Pull header")
            return
        with outbox.reader(request) as reader:
            try:
                await self._send(reader, context)
            except DisaggError as error:
                await context.write(_message(failed(error)))
                return
            answer = await context.read()
            if isinstance(answer, bytes) and isinstance(_split(answer)[0], Ack):
                reader.acknowledge()

    async def _request(self, context: Any) -> Pull:
        async with asyncio.timeout(self._silence_s):
            message = await context.read()
        header = _split(message)[0] if isinstance(message, bytes) else None
        if not isinstance(header, Pull):
            raise TransferCorruptError(f"unexpected {type(header).__name__}")
        return header

    async def _send(self, reader: Reader, context: Any) -> None:
        """Everything from Opened to End."""
        header: Header | None = None
        while not isinstance(header, End):
            header = await reader.next(self._heartbeat_s)
            payload = reader.payload(header) if isinstance(header, Frame) else b""
            await context.write(_message(header, payload[:PIECE_BYTES]))
            for start in range(PIECE_BYTES, len(payload), PIECE_BYTES):
                await context.write(_message(None, payload[start : start + PIECE_BYTES]))

    async def _connect(self, endpoint: str, transfer: Transfer) -> Http2Connection:
        sock = await connected_socket(endpoint, transfer, self._silence_s)
        connection = Http2Connection(f"/{SERVICE}/{_METHOD}", endpoint, self._silence_s)
        try:
            await asyncio.get_running_loop().create_connection(lambda: connection, sock=sock)
        except BaseException:
            sock.close()
            raise
        return connection


def _keep_freed_memory() -> None:
    """Have glibc use the memory of one message for the next, in this whole process.

    As it comes, it returns so large a block to the system when it is freed, and each message costs as many page faults as it has pages:
    more than all its copies. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 8 * PIECE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _message(header: Header | None, payload: memoryview | bytes = b"") -> bytes:
    packed = b"" if header is None else pack(header)
    return b"".join((_LENGTH.pack(len(packed)), packed, payload))


def _split(message: bytes) -> tuple[Header, memoryview]:
    """Header and payload piece of a message. Raises TransferCorruptError."""
    view = memoryview(message)
    if len(view) < _LENGTH.size:
        raise TransferCorruptError(f"a message of {len(view)} bytes")
    end = _LENGTH.size + _LENGTH.unpack_from(view)[0]
    if end > len(view):
        raise TransferCorruptError(f"a header of {end} bytes in a message of {len(view)}")
    return unpack(view[_LENGTH.size : end]), view[end:]
