"""The puller's side of gRPC over HTTP/2, against a peer that says exactly what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import struct
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import grpc.aio
import pytest

from disagg.errors import TransferCorruptError
from disagg.kv.carriers import http2
from disagg.kv.carriers.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Http2Connection,
    frame,
)
from disagg.kv.frames import Ack, Header, Pull, Waiting, pack
from tests.kv_rig import LARGE, rig, until

PULL = Pull("a" * 32, "e", 0, "h")
SETTINGS_FRAME = frame(SETTINGS, 0, 0, b"")


@dataclass
class Peer:
    """The source's end of one connection."""

    connection: Http2Connection
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def say(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def hear(self) -> tuple[int, int, int, bytes]:
        """The puller's next frame: kind, flags, stream, payload."""
        head = await self.reader.readexactly(http2.FRAME_HEADER_BYTES)
        kind, flags, stream_id = struct.unpack_from(">BBI", head, 3)
        return kind, flags, stream_id, await self.reader.readexactly(int.from_bytes(head[:3]))

    async def hear_kind(self, wanted: int) -> tuple[int, int, bytes]:
        """The next frame of kind `wanted`; others are passed over."""
        while True:
            kind, flags, stream_id, payload = await self.hear()
            if kind == wanted:
                return flags, stream_id, payload


@contextlib.asynccontextmanager
async def peer(silence_s: float = 20.0) -> AsyncIterator[Peer]:
    """A connection in a call whose Pull has been heard."""
    arrived: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    server = await asyncio.start_server(lambda r, w: arrived.put_nowait((r, w)), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = Http2Connection("/s/m", f"127.0.0.1:{port}", silence_s)
    await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", port)
    reader, writer = await arrived.get()
    try:
        assert await reader.readexactly(len(http2.PREFACE)) == http2.PREFACE
        await connection.send(PULL)
        yield Peer(connection, reader, writer)
    finally:
        connection.close()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        server.close()
        await server.wait_closed()


def message(header: Header | None, payload: bytes = b"") -> bytes:
    packed = b"" if header is None else pack(header)
    return http2.MESSAGE_PREFIX.pack(0, 4 + len(packed) + len(payload)) + struct.pack("<I", len(packed)) + packed + payload


def data_frames(stream: bytes, cuts: Iterable[int]) -> bytes:
    """`stream` in DATA frames that end at `cuts`."""
    edges = [0, *sorted(cuts), len(stream)]
    return b"".join(frame(DATA, 0, 1, stream[a:b]) for a, b in itertools.pairwise(edges))


@pytest.mark.parametrize("seed", range(20))
async def test_messages_are_whole_however_frames_and_reads_cut_them(seed: int) -> None:
    rng = random.Random(seed)
    first, second = rng.randbytes(rng.randint(1, 40_000)), rng.randbytes(rng.randint(1, 20_000))
    stream = message(Waiting()) + message(PULL, first) + message(None, second) + message(Waiting())
    said = SETTINGS_FRAME + data_frames(stream, (rng.randrange(len(stream)) for _ in range(rng.randint(0, 30))))
    async with peer() as p:

        async def say() -> None:
            for start in range(0, len(said), step := rng.choice((7, 1000, 70_000)) if len(said) < 30_000 else 9000):
                p.say(said[start : start + step])
                await asyncio.sleep(0)

        saying = asyncio.ensure_future(say())
        assert await p.connection.receive() == Waiting()
        assert await p.connection.receive() == PULL
        room = bytearray(len(first) + len(second))
        await p.connection.receive_into(memoryview(room))
        assert room == first + second
        assert await p.connection.receive() == Waiting()
        await saying


async def test_a_call_that_ended_well_leaves_the_connection_for_the_next_one() -> None:
    async with peer() as p:
        p.say(SETTINGS_FRAME, frame(HEADERS, END_HEADERS, 1, b"\x88"))
        for stream_id in (1, 3):
            kept = p.connection
            _, heard_id, opened = await p.hear_kind(DATA)
            assert (heard_id, opened) == (stream_id, message(PULL))
            p.say(frame(DATA, 0, stream_id, message(Waiting())))
            assert await kept.receive() == Waiting()
            await kept.send(Ack("a"))
            flags, _, _ = await p.hear_kind(DATA)
            assert flags & END_STREAM
            assert not kept.is_quiet
            p.say(frame(HEADERS, END_HEADERS | END_STREAM, stream_id, b"\x88"))
            await kept.end_call()
            assert kept.is_quiet
            if stream_id == 1:
                await kept.send(PULL)


async def test_pings_are_answered_while_a_pull_waits_for_room() -> None:
    async with peer() as p:
        p.say(SETTINGS_FRAME, frame(DATA, 0, 1, message(Waiting()) * 1000), frame(PING, 0, 0, b"12345678"))
        assert await p.connection.receive() == Waiting()  # and now the puller is busy elsewhere
        assert (await p.hear_kind(PING))[0::2] == (ACK, b"12345678")


async def test_the_source_may_send_payloads_only_once_there_is_room() -> None:
    async with peer() as p:
        p.say(SETTINGS_FRAME, frame(DATA, 0, 1, message(PULL, b"x" * 10)))
        assert await p.connection.receive() == PULL
        while (heard := await p.hear())[0] != SETTINGS or not heard[1] & ACK:
            assert heard[0] != WINDOW_UPDATE or heard[2] == 0
        await p.connection.receive_into(memoryview(bytearray(10)))
        _, stream_id, more = await p.hear_kind(WINDOW_UPDATE)
        assert (stream_id, more) == (1, struct.pack(">I", http2._WINDOW))


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", TransferCorruptError),
        (SETTINGS_FRAME + frame(DATA, PADDED, 1, b"\x01ab"), TransferCorruptError),
        (SETTINGS_FRAME + frame(DATA, 0, 7, b"abc"), TransferCorruptError),
        (SETTINGS_FRAME + (http2._MAX_CONTROL_BYTES + 1).to_bytes(3) + struct.pack(">BBI", HEADERS, 0, 1), TransferCorruptError),
        (SETTINGS_FRAME + (http2._MAX_FRAME_BYTES + 1).to_bytes(3) + struct.pack(">BBI", DATA, 0, 1), TransferCorruptError),
        (SETTINGS_FRAME + frame(DATA, 0, 1, b"\x01" + message(Waiting())[1:]), TransferCorruptError),  # compressed
        (SETTINGS_FRAME + frame(DATA, 0, 1, http2.MESSAGE_PREFIX.pack(0, 2) + b"\xff" * 4), TransferCorruptError),
        (SETTINGS_FRAME + frame(DATA, 0, 1, message(None, b"payload")), TransferCorruptError),  # without a header before it
        (SETTINGS_FRAME + frame(RST_STREAM, 0, 1, struct.pack(">I", 8)), EOFError),
        (SETTINGS_FRAME + frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x88"), EOFError),
        (SETTINGS_FRAME + frame(GOAWAY, 0, 0, struct.pack(">II", 1, 0) + b"bye"), EOFError),
    ],
)
async def test_what_is_no_answer_is_a_typed_error(said: bytes, error: type[Exception]) -> None:
    async with peer() as p:
        p.say(said)
        with pytest.raises(error):
            await p.connection.receive()


async def test_a_message_longer_or_shorter_than_its_frame_is_refused() -> None:
    for payload, rest in ((b"x" * 11, b""), (b"x" * 9, message(Waiting())), (b"", message(None))):
        async with peer() as p:
            p.say(SETTINGS_FRAME, frame(DATA, 0, 1, message(PULL, payload) + rest))
            assert await p.connection.receive() == PULL
            with pytest.raises(TransferCorruptError):  # noqa: PT012 - by the one or by the other
                await p.connection.receive_into(memoryview(bytearray(10)))
                await p.connection.receive()


async def test_silence_and_a_closed_connection_are_noticed() -> None:
    async with peer(silence_s=0.05) as p:
        with pytest.raises(TimeoutError):
            await p.connection.receive()
    async with peer() as p:
        heard = []
        p.connection.watch(lambda: heard.append(True))
        p.writer.close()
        with pytest.raises((EOFError, OSError)):
            await p.connection.receive()
        assert heard
        assert not p.connection.is_quiet


async def test_nothing_writes_after_a_cancel() -> None:
    async with peer() as p:
        p.say(SETTINGS_FRAME, frame(DATA, 0, 1, message(PULL, b"y" * 1000)[:500]))
        assert await p.connection.receive() == PULL
        room = bytearray(1000)
        reading = asyncio.ensure_future(p.connection.receive_into(memoryview(room)))
        await until(lambda: room[0] == ord("y"))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        before = bytes(room)
        p.say(frame(DATA, 0, 1, b"z" * 400), frame(PING, 0, 0, b"12345678"))
        await p.hear_kind(PING)
        assert room == before


@pytest.mark.parametrize("length", [1, 126, 127, 128, 253, 254, 255, 256, 16_000])
async def test_a_long_host_name_reaches_grpc_as_it_is(length: int) -> None:
    """gRPC's own server decodes what `request_headers` writes."""
    seen = []

    class Interceptor(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: object, details: grpc.HandlerCallDetails) -> None:
            seen.append(details.method)

    server = grpc.aio.server(interceptors=[Interceptor()], options=[("grpc.max_metadata_size", 1 << 16)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    path = "/" + "p" * length
    connection = Http2Connection(path, "h", 20.0)
    await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", port)
    try:
        await connection.send(PULL)
        with pytest.raises(EOFError):
            await connection.receive()
        assert seen == [path]
    finally:
        connection.close()
        await server.stop(None)


async def test_grpcs_own_client_can_pull_from_a_source() -> None:
    async with rig("grpc", LARGE) as r:
        transfer = r.transfer(9)
        written = await r.write(transfer)
        options = [("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(r.address.endpoints[0][1], options=options) as channel:
            call = channel.stream_stream("/disagg.v1.Kv/Pull")()
            await call.write(message(Pull(transfer.transfer_id, r.outbox.epoch, 0, transfer.token_hash))[5:])
            payload = bytearray()
            while len(payload) < len(written):
                got = await call.read()
                payload += got[4 + struct.unpack_from("<I", got)[0] :]
            assert bytes(payload) == written
            await call.read()
            await call.write(message(Ack(transfer.transfer_id))[5:])
            await call.done_writing()
            assert await call.code() == grpc.StatusCode.OK


def test_no_socket_is_left_of_a_pull_that_was_cancelled_while_connecting() -> None:
    """The listener's backlog is full: the connection is not made."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as filled:

        async def main() -> None:
            for _ in range(4):
                sock = filled.enter_context(socket.socket())
                sock.setblocking(False)
                sock.connect_ex(listener.getsockname())
            async with rig("grpc", silence_s=20.0) as r:
                port = listener.getsockname()[1]
                pull = asyncio.ensure_future(r.carrier.pull(f"127.0.0.1:{port}", r.transfer(8), None))  # type: ignore[arg-type]
                await asyncio.sleep(0.05)
                pull.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await pull

        asyncio.run(main())
