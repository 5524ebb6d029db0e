"""Payloads on their way to their places: verified in threads, few hand-overs, and nobody is in the memory when `leave` returns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from disagg.kv import verify
from disagg.kv.copy import digest
from disagg.kv.frames import Frame
from disagg.kv.verify import FRAMES_A_TURN, INLINE_BYTES, THREADS_OF_A_PULL, Payload, Verifier

LARGE = INLINE_BYTES + 1


class Copier(ThreadPoolExecutor):
    """Counts what it is given."""

    def __init__(self) -> None:
        super().__init__(2)
        self.num_jobs = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_jobs += 1
        return super().submit(fn, *args, **kwargs)


@pytest.fixture
def copier() -> Iterator[Copier]:
    with Copier() as pool:
        yield pool


def payload(seq: int, num_bytes: int = LARGE, flip: bool = False, in_place: bool = False) -> Payload:
    data = bytes([seq % 251]) * num_bytes
    room = memoryview(bytearray(data if in_place else num_bytes))
    right = digest(memoryview(data)) ^ flip
    return Payload(Frame("t", "e", 0, seq, 0, seq, 1, right, num_bytes), room, () if in_place else (memoryview(data),))


@pytest.mark.parametrize("in_place", [False, True])
async def test_all_arrive_with_few_hand_overs(copier: Copier, in_place: bool) -> None:
    frames = [payload(i, in_place=in_place) for i in range(40)]
    pull = Verifier(copier)
    busy = threading.Event()
    for _ in range(2):
        copier.submit(busy.wait)
    for each in frames:
        await pull.add(each)
    busy.set()
    await pull.settle()
    assert pull.corrupt is None
    assert (pull.num_verified, pull.verified_bytes) == (40, 40 * LARGE)
    assert all(each.room[0] == each.room[-1] == i for i, each in enumerate(frames))
    assert copier.num_jobs - 2 <= 40 // FRAMES_A_TURN + THREADS_OF_A_PULL, "a thread takes one frame after the other"


async def test_small_ones_are_verified_at_once(copier: Copier) -> None:
    pull = Verifier(copier)
    await pull.add(payload(0, INLINE_BYTES))
    assert pull.num_verified == 1
    assert copier.num_jobs == 0


@pytest.mark.parametrize("num_bytes", [INLINE_BYTES, LARGE])
async def test_a_corrupt_one_is_named_and_the_rest_is_dropped(copier: Copier, num_bytes: int) -> None:
    pull = Verifier(copier)
    for i in range(20):
        await pull.add(payload(i, num_bytes, flip=i == 3))
    await pull.settle()
    assert pull.corrupt is not None
    assert pull.corrupt.seq == 3


async def test_a_threads_error_reaches_who_waits(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(verify, "copy_and_digest", no_memory)
    pull = Verifier(copier)
    await pull.add(payload(0))
    with pytest.raises(MemoryError):
        await pull.settle()
    await pull.leave()


async def test_leaving_waits_for_the_thread_that_is_in_a_room_whatever_is_cancelled(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on = threading.Semaphore(0), threading.Event()
    seen = []

    def slow(room: memoryview, _: object) -> int:
        inside.release()
        go_on.wait(30)
        seen.append(len(room))
        return 0

    monkeypatch.setattr(verify, "copy_and_digest", slow)
    pull = Verifier(copier)
    for i in range(10):
        await pull.add(payload(i))
    for _ in range(THREADS_OF_A_PULL):
        await asyncio.to_thread(inside.acquire)
    leaving = asyncio.ensure_future(pull.leave())
    for _ in range(3):
        await asyncio.sleep(0.01)
        leaving.cancel()
    await asyncio.sleep(0.01)
    assert not leaving.done()
    go_on.set()
    await leaving
    assert len(seen) == THREADS_OF_A_PULL, "what waited was dropped"


async def test_pulls_take_turns(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long pull does not keep a short one waiting for its end."""
    done: list[str] = []
    go_on = threading.Event()
    real = verify.copy_and_digest

    def noted(room: memoryview, parts: Any) -> int:
        go_on.wait(30)
        done.append("long" if len(room) == LARGE else "short")
        return real(room, parts)

    monkeypatch.setattr(verify, "copy_and_digest", noted)
    long, short = Verifier(copier), Verifier(copier)
    for i in range(64):
        await long.add(payload(i))
    await short.add(payload(0, LARGE + 1))
    go_on.set()
    await short.settle()
    assert short.num_verified == 1
    assert done.index("short") <= 2 * FRAMES_A_TURN * THREADS_OF_A_PULL
    await long.settle()
    assert long.num_verified == 64
