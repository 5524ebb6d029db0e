"""Headers on the wire: what is written is read, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct

import grpc.aio
import msgpack
import pytest
import xxhash

from disagg.errors import LayoutMismatchError, PlacementError, TransferCorruptError, TransferError, WorkerLostError
from disagg.kv.carriers.grpc import GrpcCarrier
from disagg.kv.carriers.shm import ShmCarrier
from disagg.kv.frames import (
    Ack,
    End,
    Failed,
    Frame,
    Header,
    Hello,
    Join,
    Mapped,
    Opened,
    Pull,
    Shown,
    Via,
    Waiting,
    Want,
    failed,
    pack,
    raise_failed,
    unpack,
)
from tests.kv_rig import LAYOUT, rig, until

HEADERS: list[Header] = [
    Pull("a" * 32, "e", 2, "h"),
    Opened("a" * 32, "e", 2, "h", 77, "blocks", LAYOUT, 4096),
    Frame("a" * 32, "e", 2, 3, 0, 5, 6, (1 << 64) - 1, 720),
    Waiting(),
    End("a" * 32, 4),
    Failed(b"{}"),
    Ack("a" * 32),
    Hello("e"),
    Mapped("e", 1 << 40),
    Shown("e", 1 << 40, b"h"),
    Join("e", "p"),
    Via("u"),
    Want("u", 3, 2, 7),
]


@pytest.mark.parametrize("header", HEADERS, ids=lambda h: type(h).__name__)
def test_what_is_written_is_read(header: Header) -> None:
    assert unpack(pack(header)) == header


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"GET / HTTP/1.1\r\n", msgpack.packb(None), msgpack.packb([]), msgpack.packb(["Nope"]), msgpack.packb(["Waiting", 1])]
    + [msgpack.packb(["End", "a", bad]) for bad in (-1, True, 1.0, "1", None, [1])]
    + [msgpack.packb([["Pull"], 1]), msgpack.packb(["Opened", "a", "e", 0, "h", 1, "blocks", ["m"], 0])],
)
def test_anything_else_is_refused(data: bytes) -> None:
    for whole in (data, data + struct.pack("<I", xxhash.xxh32_intdigest(data))):
        with pytest.raises(TransferCorruptError):
            unpack(whole)


@pytest.mark.parametrize("header", HEADERS, ids=lambda h: type(h).__name__)
def test_every_flipped_bit_is_refused(header: Header) -> None:
    data = pack(header)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TransferCorruptError):
            unpack(damaged)


def test_random_damage_never_escapes_as_another_error() -> None:
    rng = random.Random(5)
    for _ in range(5000):
        data = bytearray(pack(rng.choice(HEADERS)))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with contextlib.suppress(TransferCorruptError):
            unpack(bytes(data[: rng.randint(0, len(data))]))


def test_errors_keep_their_type_and_foreign_ones_become_transfer_errors() -> None:
    with pytest.raises(LayoutMismatchError, match="dtype"):
        raise_failed(failed(LayoutMismatchError("dtype differs")))
    with pytest.raises(TransferError, match="w9"):
        raise_failed(failed(WorkerLostError(worker="w9")))


async def test_garbage_on_the_unix_socket_is_counted_and_harms_nobody() -> None:
    rng = random.Random(6)
    samples = [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, struct.pack("<I", 5) + b"hello", struct.pack("<I", 1) + b"\xc0"]
    samples += [rng.randbytes(rng.randint(4, 300)) for _ in range(20)]
    async with rig("shm", silence_s=5.0) as r:
        assert isinstance(r.source_carrier, ShmCarrier)
        path = "\0" + r.address.endpoints[0][1].removeprefix("@")
        for data in samples:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(path)
                peer.sendall(data)
                peer.shutdown(socket.SHUT_WR)
        await until(lambda: r.outbox.counters.garbage == len(samples))
        written, read = await r.move(r.transfer(50))
        assert read == written


async def test_garbage_on_the_grpc_port_is_counted_and_harms_nobody() -> None:
    rng = random.Random(6)
    async with rig("grpc") as r:
        assert isinstance(r.source_carrier, GrpcCarrier)
        host, port = r.address.endpoints[0][1].split(":")
        for _ in range(10):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(rng.randbytes(500))
            writer.close()
            await writer.wait_closed()
        async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
            for data in (b"", b"\xff" * 100, rng.randbytes(50), struct.pack("<I", 1) + b"\xc0"):
                call = channel.stream_stream("/disagg.v1.Kv/Pull")()
                await call.write(data)
                await call.done_writing()
                assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert r.outbox.counters.garbage == 4
        written, read = await r.move(r.transfer(50))
        assert read == written


async def test_a_port_in_use_is_a_typed_error() -> None:
    async with rig("grpc") as r:
        port = int(r.address.endpoints[0][1].split(":")[1])
        carrier = GrpcCarrier(port=port)
        with pytest.raises(PlacementError, match=str(port)):
            await carrier.serve(r.outbox)
        await carrier.close()
