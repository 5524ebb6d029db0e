"""Boxes and the room in them: no overlap, no hole, nobody overtakes, a cancel leaves nothing."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from disagg.errors import ConfigError, InvalidRequestError
from disagg.kv.box import ALIGN_BYTES, Box, Region, Room, attach, available_memory_bytes

PAGE = ALIGN_BYTES


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_box_is_one_memory_for_all_who_map_it() -> None:
    box = Box(1 << 20, "test")
    fd = box.open_read_only()
    view = attach(fd, box.num_bytes)
    os.close(fd)
    again = os.open(box.path, os.O_RDWR)
    writable = attach(again, box.num_bytes, writable=True)
    os.close(again)
    writable[12345] = 7
    assert box.buffer[12345] == view[12345] == 7
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(PermissionError):
        os.ftruncate(box.fd, 1)  # a peer's mapping must stay whole
    box.close()
    box.close()
    assert view[12345] == 7


def test_a_box_has_no_name_in_a_file_system_and_leaves_no_descriptor() -> None:
    before, descriptors = set(Path("/dev/shm").iterdir()), num_descriptors()
    box = Box(1 << 30, "large")  # sparse: takes no time and no memory until written
    box.buffer[-1] = 1
    assert set(Path("/dev/shm").iterdir()) == before
    box.close()
    assert num_descriptors() == descriptors


@pytest.mark.parametrize("num_bytes", [0, -1, 1 << 60])
def test_an_impossible_size_is_refused(num_bytes: int) -> None:
    with pytest.raises(ConfigError, match="outbox"):
        Box(num_bytes, "outbox")
    assert available_memory_bytes() < 1 << 60


def test_a_file_of_another_size_or_kind_is_not_a_box(tmp_path: Path) -> None:
    box = Box(PAGE, "test")
    with pytest.raises(ConfigError, match="4096 bytes"):
        attach(box.fd, 2 * PAGE)
    box.close()
    with (tmp_path / "file").open("w+b") as file, pytest.raises(ConfigError):
        attach(file.fileno(), 0)


async def test_regions_are_aligned_first_fit_and_coalesce() -> None:
    room = Room(10 * PAGE + 123, "kv.outbox_gib")
    assert room.total_bytes == 10 * PAGE
    a, b, c = [await room.reserve(n) for n in (1, PAGE + 1, 3 * PAGE)]
    assert (a, b, c) == (Region(0, PAGE), Region(PAGE, 2 * PAGE), Region(3 * PAGE, 3 * PAGE))
    room.free(b)
    assert await room.reserve(2 * PAGE) == b
    room.free(a)
    room.free(c)
    room.free(b)
    assert await room.reserve(10 * PAGE) == Region(0, 10 * PAGE)
    assert room.free_bytes == 0
    room.free(Region(0, 10 * PAGE))
    room.assert_empty()


async def test_nothing_takes_no_room_even_when_full() -> None:
    room = Room(PAGE, "kv.outbox_gib")
    full = await room.reserve(PAGE)
    assert await room.reserve(0) == Region(0, 0)
    room.free(Region(0, 0))
    room.free(full)
    room.assert_empty()


async def test_what_can_never_fit_says_what_it_needs() -> None:
    room = Room(10 * PAGE, "kv.inbox_gib")
    with pytest.raises(InvalidRequestError, match=r"needs 40961 bytes but kv\.inbox_gib gives 40960") as caught:
        await room.reserve(10 * PAGE + 1)
    assert caught.value.field == "prompt"
    room.assert_empty()


async def test_freeing_twice_is_a_bug_that_shows() -> None:
    room = Room(2 * PAGE, "kv.inbox_gib")
    region = await room.reserve(PAGE)
    room.free(region)
    with pytest.raises(AssertionError, match="not in use"):
        room.free(region)


async def test_a_small_request_does_not_overtake_a_large_one() -> None:
    room = Room(4 * PAGE, "kv.outbox_gib")
    held = [await room.reserve(2 * PAGE), await room.reserve(PAGE)]
    large = asyncio.ensure_future(room.reserve(4 * PAGE))
    small = asyncio.ensure_future(room.reserve(PAGE))  # would fit now
    await asyncio.sleep(0)
    assert room.num_waiting == 2
    room.free(held[1])
    await asyncio.sleep(0)
    assert not small.done()
    room.free(held[0])
    assert await large == Region(0, 4 * PAGE)
    room.free(large.result())
    room.free(await small)
    room.assert_empty()


async def test_a_cancelled_waiter_lets_the_next_one_go() -> None:
    room = Room(4 * PAGE, "kv.outbox_gib")
    held = await room.reserve(2 * PAGE)
    large = asyncio.ensure_future(room.reserve(4 * PAGE))
    small = asyncio.ensure_future(room.reserve(PAGE))
    await asyncio.sleep(0)
    large.cancel()
    room.free(await small)
    room.free(held)
    room.assert_empty()


async def test_a_cancel_in_the_instant_of_the_grant_leaves_no_hole() -> None:
    room = Room(PAGE, "kv.outbox_gib")
    held = await room.reserve(PAGE)
    first, second = [asyncio.ensure_future(room.reserve(PAGE)) for _ in range(2)]
    await asyncio.sleep(0)
    room.free(held)  # grants the first
    first.cancel()
    room.free(await second)
    assert first.cancelled()
    room.assert_empty()


async def test_random_use_keeps_the_invariants() -> None:
    rng = random.Random(3)
    room = Room(64 * PAGE, "kv.outbox_gib")
    order: list[int] = []
    counts = {"cancelled": 0}

    async def user(number: int, size: int, hold: int) -> None:
        region = await room.reserve(size)
        order.append(number)
        assert region.num_bytes >= size
        try:
            for _ in range(hold):
                room.check()
                await asyncio.sleep(0)
        finally:
            room.free(region)

    tasks = [asyncio.ensure_future(user(i, rng.randint(1, 40 * PAGE), rng.randint(0, 6))) for i in range(600)]
    for task in rng.sample(tasks, 200):
        for _ in range(rng.randint(0, 8)):
            await asyncio.sleep(0)
        counts["cancelled"] += task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results)
    assert counts["cancelled"] > 20
    assert order == sorted(order), "somebody overtook"
    room.assert_empty()
