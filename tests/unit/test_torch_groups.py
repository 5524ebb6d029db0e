"""Payloads as tensors: what lies together is one without a copy, and keeps its memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from disagg.kv.carriers import torch_dist
from disagg.kv.carriers.torch_groups import _THREADS, DEVICES, Groups, are_together, tensor
from disagg.kv.frames import Frame
from disagg.kv.layout import FRAME_BYTES
from tests.kv_rig import LARGE, rig, until


def test_parts_that_lie_together_are_one_tensor_over_the_same_memory() -> None:
    memory = np.arange(100, dtype=np.uint8)
    view = memoryview(memory)
    parts = [view[10:20], view[20:21], view[21:60]]
    whole = tensor(parts)
    assert bytes(whole.numpy()) == bytes(view[10:60])
    whole[11] = 255
    assert memory[21] == 255


def test_parts_apart_are_copied_in_order() -> None:
    view = memoryview(np.arange(100, dtype=np.uint8))
    for parts in ([view[50:60], view[10:20]], [view[0:10], view[11:12]], [view[0:10], view[9:12]]):
        assert not are_together(*parts)
        assert bytes(tensor(parts).numpy()) == b"".join(parts)


def test_a_tensor_keeps_the_memory_of_its_parts() -> None:
    memory = np.zeros(64, dtype=np.uint8)
    gone = weakref.ref(memory)
    view = memoryview(memory)
    whole = tensor([view[:32], view[32:]])
    del memory, view
    gc.collect()
    assert gone() is not None
    del whole
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("num_frames", "under_way", "expected"),
    [(1, 0, [1]), (2, 0, [1, 1]), (4, 0, [2, 2]), (31, 0, [4, 4]), (3, 1, [3]), (9, 1, [4])],
)
async def test_what_is_announced_is_shared_by_the_connections(num_frames: int, under_way: int, expected: list[int]) -> None:
    """A transfer of 16 MB was one receive, and one of two connections idle."""
    asked: list[int] = []

    async def receive(_pull_id: str, _seq: int, rooms: list[memoryview]) -> None:
        asked.append(len(rooms))

    pair: Any = SimpleNamespace(receive=receive)
    memory = memoryview(bytearray(num_frames * FRAME_BYTES))
    announced = deque(
        (Frame("t", "e", 0, i, 0, i, 1, 0, FRAME_BYTES), memory[i * FRAME_BYTES : (i + 1) * FRAME_BYTES]) for i in range(num_frames)
    )
    while announced and under_way + len(asked) < torch_dist.RECEIVES_AHEAD:
        await torch_dist._ask(pair, "p", announced, torch_dist.RECEIVES_AHEAD - under_way - len(asked)).done
    assert asked == expected


async def test_posting_waits_for_no_peer() -> None:
    """Two workers that pull from each other, each with all its waiting threads in receives, must still send."""
    groups = Groups("127.0.0.1", 30.0)
    release = threading.Event()
    stuck: Any = SimpleNamespace(wait=lambda _timeout: release.wait(30))
    waiting = [asyncio.ensure_future(groups.wait(stuck)) for _ in range(_THREADS)]
    try:
        async with asyncio.timeout(10):
            assert await groups.post(lambda number: number + 1, 1) == 2
    finally:
        release.set()
        await asyncio.gather(*waiting)
        groups.close()


async def test_a_connection_is_kept_for_the_next_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    connects = []
    real = torch_dist.connected

    async def connected(*args: Any) -> Any:
        connects.append(args)
        return await real(*args)

    monkeypatch.setattr(torch_dist, "connected", connected)
    async with rig("torch_dist", LARGE) as r:
        for _ in range(3):
            written, read = await r.move(r.transfer(40), frame_blocks=2)
            assert read == written
    assert len(connects) == 2, "one for the pair, one for the pulls"


async def test_closing_gives_back_gloos_sockets() -> None:
    """Each device has a listening socket, a pipe, and a thread; they stayed for as long as anything referred to the carrier."""
    source, puller = Groups("127.0.0.1", 30.0), Groups("127.0.0.1", 30.0)
    before = num_sockets()
    port = source.serve_store()
    pair = await asyncio.gather(source.accept("p"), puller.join("127.0.0.1", port, "p"))
    assert num_sockets() >= before + 2 * DEVICES
    del pair
    source.close()
    puller.close()
    gc.collect()
    await until(lambda: num_sockets() <= before)


def num_sockets() -> int:
    """Of this process."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += str(descriptor.readlink()).startswith("socket:")
    return found
