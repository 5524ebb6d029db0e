"""A connection between peers: what is heard on it, and what the event loop pays for it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from disagg.kv.carriers.stream import Connection
from disagg.kv.frames import Ack, Hello

Pair = tuple[Connection, Connection]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    sockets = socket.socketpair()
    for sock in sockets:
        sock.setblocking(False)
    ours, theirs = [Connection(sock, 5.0) for sock in sockets]
    yield ours, theirs
    ours.close()
    theirs.close()


async def test_only_what_is_said_after_it_is_heard(pair: Pair) -> None:
    ours, theirs = pair
    heard: list[bool] = []

    async def receive_and_watch() -> None:
        assert await ours.receive() == Hello("e")
        ours.watch(lambda: heard.append(True))

    receiving = asyncio.create_task(receive_and_watch())
    await asyncio.sleep(0)
    await theirs.send(Hello("e"))
    await receiving
    await asyncio.sleep(0.02)
    assert not heard
    theirs.close()
    await asyncio.sleep(0.02)
    assert heard
    ours.unwatch()


async def test_bytes_that_nobody_waits_for_do_not_keep_the_event_loop_busy(pair: Pair) -> None:
    ours, theirs = pair
    await theirs.send(Hello("e"))
    assert await ours.receive() == Hello("e")
    waiting = asyncio.create_task(ours.receive())
    await asyncio.sleep(0)
    await theirs.send(Hello("f"))
    assert await waiting == Hello("f")
    await theirs.send(Ack("t"))
    await asyncio.sleep(0.02)
    assert not asyncio.get_running_loop().remove_reader(ours.sock.fileno())
    assert await ours.receive() == Ack("t")
    with pytest.raises(TimeoutError):
        await ours.receive(timeout_s=0.01)
    waiting = asyncio.create_task(ours.receive())
    await asyncio.sleep(0)
    await theirs.send(Hello("g"))
    assert await waiting == Hello("g")
