"""The caller's side of gRPC over HTTP/2 (RFC 9113), as much of it as a pull needs: payloads go from the socket to where they belong.

gRPC's Python client gives each message as an object of its own, after three copies; that, and not the network, was what bounded carrier
`grpc`. The source's side is gRPC's own server, and any gRPC client can speak to it.

    connection   one call at a time; a call that ended well leaves it open for the next one
    window       until a payload is asked for, the source may send HTTP/2's own 64 KiB; from then on `_WINDOW` bytes ahead
    reading      never stops for long, so that pings are answered also while a pull waits for room

Response headers are not decoded: what the source has to say of a pull it says in messages (kv/frames.py).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import cast

from disagg.errors import TransferCorruptError
from disagg.kv.frames import MAX_HEADER_BYTES, Ack, Header, pack, unpack

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS, PADDED = 0x1, 0x1, 0x4, 0x8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTING_HEADER_TABLE_SIZE, SETTING_ENABLE_PUSH, SETTING_INITIAL_WINDOW_SIZE, SETTING_MAX_FRAME_SIZE = 1, 2, 4, 5
FRAME_HEADER_BYTES = 9
MESSAGE_PREFIX = struct.Struct(">BI")  # of a gRPC message: compressed or not, length

_WINDOW = 16 << 20
_WINDOW_STEP = 4 << 20  # so many bytes are given back at once
_MAX_FRAME_BYTES = 4 << 20
_MAX_CONTROL_BYTES = 64 << 10
_SCRATCH_BYTES = 64 << 10
_MAX_STASH_BYTES = 256 << 10
_LENGTH = struct.Struct("<I")


class Http2Connection(asyncio.BufferedProtocol):
    """A connection to a gRPC server, for calls of `path` one after the other.

    Says and hears what kv.carriers.stream.Connection does, and raises the same: EOFError when the peer has closed or ended the call,
    OSError when the connection broke, TimeoutError after `silence_s` of silence, TransferCorruptError on what is not HTTP/2, gRPC or a
    header.
    """

    def __init__(self, path: str, authority: str, silence_s: float) -> None:
        self.silence_s = silence_s
        self._request = request_headers(path, authority)
        self._stream_id = -1
        self._in_call = False
        self._is_granted = False
        self._owed_bytes = 0  # received since the source was last given more to send
        self._error: Exception | None = None  # why nothing comes any more
        self._heard: Callable[[], None] | None = None

        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._frame_header = bytearray()
        self._control = bytearray()  # payload of a frame that is not DATA
        self._kind, self._flags, self._frame_stream_id, self._frame_left = SETTINGS, 0, 0, 0
        self._num_frames = 0
        self._in_place = False
        self._stash = bytearray()  # DATA that nobody has asked for yet
        self._paused = False
        self._want = memoryview(b"")  # where the next bytes of DATA belong
        self._got: asyncio.Future[None] | None = None  # `_want` is full, or nothing comes any more
        self._piece_left = 0  # bytes of payload that are left of the current message

    async def send(self, *headers: Header) -> None:
        """A message each. The first opens the call; after an Ack nothing more can be said in it."""
        if self._error is not None:
            raise self._error
        out = bytearray()
        if not self._in_call:
            self._in_call, self._is_granted = True, False
            self._stream_id += 2
            out += frame(HEADERS, END_HEADERS, self._stream_id, self._request)
        for header in headers:
            packed = pack(header)
            message = MESSAGE_PREFIX.pack(0, _LENGTH.size + len(packed)) + _LENGTH.pack(len(packed)) + packed
            out += frame(DATA, END_STREAM if isinstance(header, Ack) else 0, self._stream_id, message)
        self._transport.write(out)

    async def receive(self) -> Header:
        """The next message's header; a payload is read with `receive_into`."""
        header_bytes = await self._next_message()
        if not 0 < header_bytes <= MAX_HEADER_BYTES:
            raise TransferCorruptError(f"a header of {header_bytes} bytes")
        packed = bytearray(header_bytes)
        await self._read_into(memoryview(packed))
        return unpack(packed)

    async def receive_into(self, room: memoryview) -> None:
        """A payload, to its place. When this returns or raises, also by a cancel, nothing writes there any more."""
        self._grant()
        while len(room):
            if not self._piece_left and await self._next_message() != 0:
                raise TransferCorruptError("a payload broke off")
            num_bytes = min(self._piece_left, len(room))
            if not num_bytes:
                raise TransferCorruptError("a message without a byte")
            await self._read_into(room[:num_bytes])
            self._piece_left -= num_bytes
            room = room[num_bytes:]

    async def end_call(self) -> None:
        """Returns when the source has ended the call, too: it has the Ack."""
        if self._in_call:
            try:
                await self._read_into(memoryview(bytearray(1)))
            except EOFError:
                pass
            else:
                raise TransferCorruptError("a message after the end")
        if self._in_call:
            raise EOFError("the connection closed")

    @property
    def is_quiet(self) -> bool:
        """Open, and no call under way."""
        return self._error is None and not self._in_call

    def watch(self, closed: Callable[[], None]) -> None:
        """Be told when the connection closes, until `unwatch` or `close`."""
        self._heard = closed

    def unwatch(self) -> None:
        """Idempotent."""
        self._heard = None

    def close(self) -> None:
        """Idempotent. Whoever still waits here gets EOFError."""
        self._heard = None
        self._fail(EOFError("closed"))

    async def _next_message(self) -> int:
        """How many bytes of header the next message has; its payload is the rest."""
        if self._piece_left:
            raise TransferCorruptError(f"{self._piece_left} bytes more than the header says")
        start = bytearray(MESSAGE_PREFIX.size + _LENGTH.size)
        await self._read_into(memoryview(start))
        compressed, length = MESSAGE_PREFIX.unpack_from(start)
        header_bytes: int = _LENGTH.unpack_from(start, MESSAGE_PREFIX.size)[0]
        self._piece_left = length - _LENGTH.size - header_bytes
        if compressed or self._piece_left < 0:
            raise TransferCorruptError(f"a message of {length} bytes with a header of {header_bytes}")
        return header_bytes

    def _grant(self) -> None:
        """There is room for payloads."""
        if not self._is_granted:
            self._is_granted = True
            self._transport.write(_window_update(self._stream_id, _WINDOW))

    async def _read_into(self, room: memoryview) -> None:
        """The next bytes of the call's messages."""
        num_bytes = min(len(self._stash), len(room))
        if num_bytes:
            room[:num_bytes] = self._stash[:num_bytes]
            del self._stash[:num_bytes]
            self._take(num_bytes)
        if num_bytes == len(room):
            return
        if self._error is not None:
            raise self._error
        if not self._in_call:
            raise EOFError("the source ended the call")
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        self._want = room[num_bytes:]
        self._got = asyncio.get_running_loop().create_future()
        try:
            await self._filled(self._got)
        finally:
            self._want, self._got = memoryview(b""), None

    def _take(self, num_bytes: int) -> None:
        """Bytes have found their place; the source may send as many more."""
        self._owed_bytes += num_bytes
        if self._owed_bytes >= _WINDOW_STEP and self._is_granted and self._error is None:
            self._transport.write(_window_update(self._stream_id, self._owed_bytes) + _window_update(0, self._owed_bytes))
            self._owed_bytes = 0

    async def _filled(self, got: asyncio.Future[None]) -> None:
        """Returns when `_want` has all its bytes, however long they take, as long as some come."""
        while not got.done():
            left = len(self._want)
            await asyncio.wait({got}, timeout=self.silence_s)
            if not got.done() and len(self._want) == left:
                raise TimeoutError
        got.result()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        settings = ((SETTING_HEADER_TABLE_SIZE, 0), (SETTING_ENABLE_PUSH, 0), (SETTING_MAX_FRAME_SIZE, _MAX_FRAME_BYTES))
        said = b"".join(struct.pack(">HI", *setting) for setting in settings)
        self._transport.write(PREFACE + frame(SETTINGS, 0, 0, said) + _window_update(0, _WINDOW))

    def get_buffer(self, sizehint: int) -> memoryview:
        self._in_place = self._frame_left > 0 and self._kind == DATA and len(self._want) > 0
        return self._want[: self._frame_left] if self._in_place else self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._in_place:
                self._frame_left -= nbytes
                self._fill(nbytes)
                if not self._frame_left:
                    self._end_frame()
            else:
                self._parse(self._scratch[:nbytes])
        except TransferCorruptError as error:
            self._fail(error)

    def eof_received(self) -> bool:
        return False  # close

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or EOFError("the connection closed"))

    def _parse(self, data: memoryview) -> None:
        """Bytes from the socket, cut anywhere."""
        while len(data) and self._error is None:
            if not self._frame_left:
                missing = FRAME_HEADER_BYTES - len(self._frame_header)
                self._frame_header += data[:missing]
                data = data[missing:]
                if len(self._frame_header) == FRAME_HEADER_BYTES:
                    self._begin_frame()
                continue
            piece, data = data[: self._frame_left], data[self._frame_left :]
            self._frame_left -= len(piece)
            if self._kind == DATA:
                self._data(piece)
            else:
                self._control += piece
            if not self._frame_left:
                self._end_frame()

    def _begin_frame(self) -> None:
        length = int.from_bytes(self._frame_header[:3])
        self._kind, self._flags, stream_id = struct.unpack_from(">BBI", self._frame_header, 3)
        self._frame_stream_id = stream_id & 0x7FFFFFFF
        self._frame_header.clear()
        self._control.clear()
        self._num_frames += 1
        if self._num_frames == 1 and self._kind != SETTINGS:
            raise TransferCorruptError("the source does not speak HTTP/2")
        if length > (_MAX_FRAME_BYTES if self._kind == DATA else _MAX_CONTROL_BYTES):
            raise TransferCorruptError(f"an HTTP/2 frame of kind {self._kind} and {length} bytes")
        if self._kind == DATA and (self._frame_stream_id != self._stream_id or not self._in_call or self._flags & PADDED):
            raise TransferCorruptError("HTTP/2 data that nobody asked for, or padded")
        self._frame_left = length
        if not length:
            self._end_frame()

    def _data(self, piece: memoryview) -> None:
        num_bytes = min(len(self._want), len(piece))
        if num_bytes:
            self._want[:num_bytes] = piece[:num_bytes]
            self._fill(num_bytes)
        self._stash += piece[num_bytes:]
        if len(self._stash) > _MAX_STASH_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _fill(self, num_bytes: int) -> None:
        """So many bytes have come to the place where they are wanted."""
        self._want = self._want[num_bytes:]
        self._take(num_bytes)
        if not len(self._want) and self._got is not None and not self._got.done():
            self._got.set_result(None)

    def _end_frame(self) -> None:
        if self._kind in (DATA, HEADERS) and self._flags & END_STREAM and self._frame_stream_id == self._stream_id:
            self._end_call("the source ended the call")
        elif self._kind == RST_STREAM and self._frame_stream_id == self._stream_id:
            self._end_call(f"the source reset the call: HTTP/2 error {int.from_bytes(self._control)}")
        elif self._kind == SETTINGS and not self._flags & ACK:
            self._transport.write(frame(SETTINGS, ACK, 0, b""))
        elif self._kind == PING and not self._flags & ACK:
            self._transport.write(frame(PING, ACK, 0, bytes(self._control)))
        elif self._kind == GOAWAY:
            self._fail(EOFError(f"the source is leaving: {bytes(self._control[8:])!r}"))

    def _end_call(self, why: str) -> None:
        self._in_call = False
        if self._got is not None and not self._got.done():
            self._got.set_exception(EOFError(why))

    def _fail(self, error: Exception) -> None:
        """Nothing more comes."""
        if self._error is not None:
            return
        self._error = error
        self._transport.abort()
        if self._got is not None and not self._got.done():
            self._got.set_exception(error)
        if self._heard is not None:
            self._heard()


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """An HTTP/2 frame."""
    return len(payload).to_bytes(3) + struct.pack(">BBI", kind, flags, stream_id) + payload


def request_headers(path: str, authority: str) -> bytes:
    """The header block of a gRPC call over plain text, in HPACK (RFC 7541) without memory and without Huffman's code."""
    te = b"\x00" + _text("te") + _text("trailers")  # has no number: name and value follow
    return b"\x83\x86" + _named(4, path) + _named(1, authority) + te + _named(31, "application/grpc")


def _text(text: str) -> bytes:
    data = text.encode()
    length, rest = bytearray([min(len(data), 127)]), len(data) - 127  # an integer with a prefix of seven bits
    while rest >= 128:
        length.append(rest % 128 + 128)
        rest //= 128
    if rest >= 0:
        length.append(rest)
    return bytes(length) + data


def _named(index: int, value: str) -> bytes:
    """A header whose name has a number in HPACK's static table, and which is not to be remembered."""
    return (bytes([index]) if index < 15 else bytes([15, index - 15])) + _text(value)


def _window_update(stream_id: int, num_bytes: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, struct.pack(">I", num_bytes))
