"""Strangers at the KV port by the thousand: descriptors and memory stay bounded, live transfers go on, and all is given back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.kv.carriers.grpc import _MAX_CONNECTIONS
from disagg.kv.carriers.pulls import MAX_STRANGERS
from tests.kv_rig import CARRIERS, LAYOUT, Rig, rig, until

NUM_STRANGERS = 10_000
ALLOWED = {"grpc": _MAX_CONNECTIONS}
SPARE = 100  # descriptors of the transfers under way, and of what gRPC opens
MAX_GROWTH_BYTES = 400 << 20  # of this process, which holds both ends of all connections


@pytest.fixture
def descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < NUM_STRANGERS + _MAX_CONNECTIONS + 1000:
        pytest.skip(f"only {hard} file descriptors are allowed here")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("kind", sorted(CARRIERS.keys() - {"loopback"}))
@pytest.mark.usefixtures("descriptors")
async def test_ten_thousand_strangers(kind: str) -> None:
    """A third says nothing, a third half of a header and then a byte now and then, a third closes its half at once."""
    async with rig(kind) as r:
        await r.move(r.transfer(50))
        before, memory_bytes = num_descriptors(), resident_bytes()
        strangers: list[socket.socket] = []
        moving = asyncio.create_task(move_until_cancelled(r))
        try:
            for number in range(NUM_STRANGERS):
                strangers.append(await stranger(r.address.endpoints[0][1].partition("/")[0], number % 3))
                if number % 25 == 0:
                    await asyncio.sleep(0.002)
            for each in strangers[1::30]:
                with contextlib.suppress(OSError):  # it has been closed
                    each.send(b"x")
            await until(lambda: num_descriptors() - before - len(strangers) <= ALLOWED.get(kind, MAX_STRANGERS) + SPARE)
            assert resident_bytes() - memory_bytes < MAX_GROWTH_BYTES
            written, read = await r.move(r.transfer(50))
            assert read == written
            assert not moving.done(), moving.exception()
            assert kind == "grpc" or r.outbox.counters.turned_away + r.outbox.counters.garbage > 0
        finally:
            for each in strangers:
                each.close()
            moving.cancel()
            num_moved = (await asyncio.gather(moving, return_exceptions=True))[0]
        await until(lambda: num_descriptors() <= before + SPARE)
        assert isinstance(num_moved, asyncio.CancelledError), num_moved
        assert r.inbox.counters.completed > 2


async def test_strangers_leave_descriptors_for_peers_where_few_are_allowed() -> None:
    """They took all that a process may have, for as long as they were let: neither side of a pull could connect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers: list[socket.socket] = []
    # Both ends of each stranger's connection count here: allowed are those that are ours, a quarter for theirs, and some for the transfer.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * (num_descriptors() + 150)), hard))
    try:
        async with rig("tcp") as r:
            for _ in range(num_descriptors() + 130):
                strangers.append(await stranger(r.address.endpoints[0][1], 0))
                await asyncio.sleep(0.001)
            written, read = await r.move(r.transfer(50))
            assert read == written
            assert r.outbox.counters.turned_away > 0
            for each in strangers:
                each.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def move_until_cancelled(r: Rig) -> None:
    while True:
        transfer = r.transfer(4 * LAYOUT.block_tokens)
        try:
            written, read = await r.move(transfer)
        finally:
            r.outbox.release(transfer.transfer_id)
            r.inbox.release(transfer.transfer_id)
        assert read == written


async def stranger(endpoint: str, kind: int) -> socket.socket:
    """A connection that is none of a peer's."""
    is_unix = endpoint.startswith("@")
    sock = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
    sock.setblocking(False)
    host, _, port = endpoint.rpartition(":")
    while True:
        try:
            sock.connect("\0" + endpoint[1:] if is_unix else (host, int(port)))
        except BlockingIOError:
            if is_unix:  # the backlog is full
                await asyncio.sleep(0.001)
                continue
        break
    with contextlib.suppress(OSError):  # not connected yet, or turned away already
        if kind == 1:
            sock.send(random.Random(kind).randbytes(3))
        elif kind == 2:
            sock.shutdown(socket.SHUT_WR)
    return sock


def num_descriptors() -> int:
    return sum(1 for _ in os.scandir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
