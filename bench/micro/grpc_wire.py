"""A gRPC client for load: HTTP/2 (RFC 9113) by hand, as much of it as one kind of streaming call needs.

A general client costs about as much per message as the server that is to be measured, on the same cores. This one writes a prepared
request, and of the answer it looks at frame headers and message lengths only; it keeps the last message, whose usage says whether the
answer is whole. Response headers are not decoded: a call that ends without such a message has failed.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field
from typing import Any

from disagg.kv.carriers.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MESSAGE_PREFIX,
    PING,
    PREFACE,
    RST_STREAM,
    SETTING_INITIAL_WINDOW_SIZE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    request_headers,
)

LARGEST_WINDOW = 2**31 - 1


@dataclass(slots=True)
class Answer:
    """One call's. `first` is done with the first message, `end` with the stream."""

    first: asyncio.Future[None]
    end: asyncio.Future[None]
    num_messages: int = 0
    last: bytes = b""
    rest: bytearray = field(default_factory=bytearray)

    def take(self, data: bytes) -> None:
        """Bytes of the answer, cut anywhere."""
        self.rest += data
        while len(self.rest) >= MESSAGE_PREFIX.size:
            length = MESSAGE_PREFIX.size + MESSAGE_PREFIX.unpack_from(self.rest)[1]
            if len(self.rest) < length:
                return
            self.num_messages += 1
            self.last = bytes(self.rest[MESSAGE_PREFIX.size : length])
            del self.rest[:length]
            if not self.first.done():
                self.first.set_result(None)


class Connection(asyncio.Protocol):
    """One connection, any number of calls at a time."""

    def __init__(self, path: str, authority: str) -> None:
        self._headers = request_headers(path, authority)
        self._next_id = 1
        self._answers: dict[int, Answer] = {}
        self._received = bytearray()

    @classmethod
    async def open(cls, endpoint: str, path: str) -> Connection:
        host, _, port = endpoint.rpartition(":")
        _, connection = await asyncio.get_running_loop().create_connection(lambda: cls(path, endpoint), host, int(port))
        return connection

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        window = frame(SETTINGS, 0, 0, struct.pack(">HI", SETTING_INITIAL_WINDOW_SIZE, LARGEST_WINDOW))
        whole = frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", LARGEST_WINDOW - 65_535))
        transport.write(PREFACE + window + whole)

    def call(self, body: bytes) -> Answer:
        """Send one request; its answer comes by and by."""
        loop = asyncio.get_running_loop()
        stream_id, self._next_id = self._next_id, self._next_id + 2
        answer = self._answers[stream_id] = Answer(loop.create_future(), loop.create_future())
        data = MESSAGE_PREFIX.pack(0, len(body)) + body
        self._transport.write(frame(HEADERS, END_HEADERS, stream_id, self._headers) + frame(DATA, END_STREAM, stream_id, data))
        return answer

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        at = 0
        while len(received) - at >= 9:
            length = int.from_bytes(received[at : at + 3])
            if len(received) - at < 9 + length:
                break
            kind, flags, stream_id = struct.unpack_from(">BBI", received, at + 3)
            self._take(kind, flags, stream_id, bytes(received[at + 9 : at + 9 + length]))
            at += 9 + length
        del received[:at]

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        answer = self._answers.get(stream_id)
        if kind == DATA and answer is not None:
            answer.take(payload)
        if (kind in (DATA, HEADERS) and flags & END_STREAM) or kind == RST_STREAM:
            self._end(stream_id)
        elif kind == SETTINGS and not flags & ACK:
            self._transport.write(frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self._transport.write(frame(PING, ACK, 0, payload))
        elif kind == GOAWAY:
            self.connection_lost(None)

    def _end(self, stream_id: int) -> None:
        answer = self._answers.pop(stream_id, None)
        for waited in (answer.first, answer.end) if answer is not None else ():
            if not waited.done():
                waited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        for stream_id in list(self._answers):
            self._end(stream_id)

    def close(self) -> None:
        self._transport.close()
