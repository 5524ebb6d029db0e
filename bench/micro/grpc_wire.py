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

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
LARGEST_WINDOW = 2**31 - 1
_PREFIX = struct.Struct(">BI")  # of a gRPC message: compressed or not, length


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
        while len(self.rest) >= _PREFIX.size:
            length = _PREFIX.size + _PREFIX.unpack_from(self.rest)[1]
            if len(self.rest) < length:
                return
            self.num_messages += 1
            self.last = bytes(self.rest[_PREFIX.size : length])
            del self.rest[:length]
            if not self.first.done():
                self.first.set_result(None)


class Connection(asyncio.Protocol):
    """One connection, any number of calls at a time."""

    def __init__(self, path: str, authority: str) -> None:
        headers = [b"\x83\x86", _named(4, path), _named(1, authority), _named(31, "application/grpc"), _text("te"), _text("trailers")]
        headers.insert(4, b"\x00")  # `te` has no number: name and value follow
        self._headers = b"".join(headers)
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
        window = _frame(SETTINGS, 0, 0, struct.pack(">HI", 4, LARGEST_WINDOW))
        whole = _frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", LARGEST_WINDOW - 65_535))
        transport.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + window + whole)

    def call(self, body: bytes) -> Answer:
        """Send one request; its answer comes by and by."""
        loop = asyncio.get_running_loop()
        stream_id, self._next_id = self._next_id, self._next_id + 2
        answer = self._answers[stream_id] = Answer(loop.create_future(), loop.create_future())
        data = _PREFIX.pack(0, len(body)) + body
        self._transport.write(_frame(HEADERS, END_HEADERS, stream_id, self._headers) + _frame(DATA, END_STREAM, stream_id, data))
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
            self._transport.write(_frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self._transport.write(_frame(PING, ACK, 0, payload))
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


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + struct.pack(">BBI", kind, flags, stream_id) + payload


def _text(text: str) -> bytes:
    """A short string of HPACK (RFC 7541), not Huffman-coded."""
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()


def _named(index: int, value: str) -> bytes:
    """A header whose name has a number in HPACK's static table, and which is not to be remembered."""
    prefix = bytes([index]) if index < 15 else bytes([15, index - 15])
    return prefix + _text(value)
