"""Tokens are coalesced under pressure and never delayed when idle; what a client waits for waits a little."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.pb import worker_pb2 as pb
from disagg.serving import pace
from disagg.serving.spans import WorkerSpans
from disagg.serving.worker_rpc_attachment import Attachment
from disagg.serving.worker_rpc_messages import request_to_wire
from disagg.types import Chunk, EngineState, Request, Token

LONG_S = 0.5


def test_an_idle_process_rests_never_and_a_busy_one_in_proportion() -> None:
    assert pace.rest_s(0.0) == pace.rest_s(0.9 * pace.FREE_S) == 0.0
    assert pace.rest_s(pace.FREE_S) == pytest.approx(pace.REST * pace.FREE_S)
    assert pace.rest_s(10.0) == pace.LONGEST_REST_S


class Idle(pace.ThreadLoad):
    """A loop with nothing else to do, whatever this machine does."""

    def share(self, now_s: float) -> float:
        return 0.0


def test_a_loop_without_a_pause_rests_though_its_writes_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = wanted_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(pace, "wanted_core_s", lambda: wanted_s)
    writer = pace.Pace(pace.ThreadLoad())
    rests_s = []
    half = (pace.EASY_SHARE + pace.BUSY_SHARE) / 2
    for busy in (0.0, 1.0, 0.0, 1.0, 1.0, half, 0.0):  # one busy look is no pressure
        now_s += 0.025
        wanted_s += busy * 0.025
        rests_s.append(writer.wrote(0.0))
    assert rests_s[:4] == [0.0] * 4
    assert rests_s[4:] == pytest.approx([pace.LONGEST_REST_S, pace.LONGEST_REST_S / 2, 0.0])


def test_a_thread_that_computes_wants_a_core_and_one_that_sleeps_does_not() -> None:
    def wanted_share(work: Callable[[], object]) -> float:
        began_s, wanted_s = time.monotonic(), pace.wanted_core_s()
        while time.monotonic() < began_s + 0.2:
            work()
        return (pace.wanted_core_s() - wanted_s) / (time.monotonic() - began_s)

    assert wanted_share(lambda: None) > 2 * wanted_share(lambda: time.sleep(0.05))


def test_a_kernel_that_does_not_count_gives_zeros(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counts = tmp_path / "schedstat"
    counts.write_text("0 0 0\n")
    monkeypatch.setattr(pace, "_COUNTS", counts)
    monkeypatch.setattr(pace, "_counts", pace._Counts())
    assert 0 < pace.wanted_core_s() <= time.thread_time()


def test_one_slow_write_is_no_pressure_many_are_and_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    writer = pace.Pace(Idle())
    assert writer.wrote(2 * pace.FREE_S) == 0.0
    for _ in range(20):
        now_s += 2 * pace.FREE_S
        rest_s = writer.wrote(2 * pace.FREE_S)
    assert rest_s > pace.REST * pace.FREE_S
    assert writer.wrote(0.0) > 0.0  # one that was quick by luck
    now_s += 20 * pace.MEMORY_S
    assert writer.wrote(0.0) == 0.0


def test_nobody_rests_for_tokens_that_come_later_than_that() -> None:
    writer = pace.Pace(Idle())
    for _ in range(40):
        rest_s = writer.wrote(10.0)
    assert rest_s == writer.wrote(10.0, 0.5 * rest_s) == writer.wrote(10.0, 1.1 * rest_s) == pace.LONGEST_REST_S
    assert writer.wrote(10.0, 2 * rest_s) == 0.0


class IdleWorker:
    """As much of a worker as frames need."""

    name = "w"

    def state(self) -> EngineState:
        return EngineState("e")

    def renew(self, owner: str) -> None:
        return None


@pytest.fixture
async def attachment(monkeypatch: pytest.MonkeyPatch) -> Attachment:
    monkeypatch.setattr(pace, "LONGEST_REST_S", LONG_S)
    worker: Any = IdleWorker()
    attachment = Attachment("g", worker, 60.0, WorkerSpans(None, "w"))
    attachment._pace = pace.Pace(Idle())
    attachment._add(1, Chunk((Token(1),)), is_urgent=True)
    await attachment.next_frame()  # has the state, which is due no more
    return attachment


async def frame_of(attachment: Attachment) -> tuple[pb.StepFrame, float]:
    began_s = time.monotonic()
    frame = await attachment.next_frame()
    return frame, time.monotonic() - began_s


async def test_after_a_quick_write_tokens_leave_at_once(attachment: Attachment) -> None:
    attachment.wrote(0.0001)
    attachment._add(1, Chunk((Token(2),)), is_urgent=False)
    frame, took_s = await frame_of(attachment)
    assert list(frame.requests[0].token_ids) == [2]
    assert took_s < LONG_S / 2


async def test_after_a_slow_write_they_wait_and_join(attachment: Attachment) -> None:
    attachment.wrote(10.0)
    for token_id in (2, 3):
        attachment._add(1, Chunk((Token(token_id),)), is_urgent=False)
    frame, took_s = await frame_of(attachment)
    assert list(frame.requests[0].token_ids) == [2, 3]
    assert took_s > LONG_S / 2


async def test_a_first_token_waits_a_part_of_the_rest_and_takes_the_others_along(attachment: Attachment) -> None:
    attachment.wrote(10.0)
    attachment._add(1, Chunk((Token(2),)), is_urgent=False)
    attachment._add(2, Chunk((Token(9),)), is_urgent=True)
    asyncio.get_running_loop().call_later(0.02, lambda: attachment._add(3, Chunk((Token(8),)), is_urgent=True))
    frame, took_s = await frame_of(attachment)
    assert [list(step.token_ids) for step in frame.requests] == [[2], [9], [8]]
    assert 0.02 < took_s < LONG_S / 2


async def test_after_a_quick_write_a_first_token_leaves_at_once(attachment: Attachment) -> None:
    attachment.wrote(0.0001)
    attachment._add(1, Chunk((Token(2),)), is_urgent=True)
    _, took_s = await frame_of(attachment)
    assert took_s < pace.URGENT_SHARE * LONG_S


class TalkingWorker(IdleWorker):
    """Its engine has a further token whenever it is asked."""

    is_alive = True

    def __init__(self) -> None:
        self.num_taken = 0

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        while True:
            self.num_taken += 1
            yield Chunk((Token(self.num_taken),))
            await asyncio.sleep(0)


async def test_under_pressure_nobody_reads_on_while_a_frame_is_written(attachment: Attachment) -> None:
    attachment.wrote(10.0)
    await asyncio.sleep(1.1 * LONG_S)  # it has rested
    talker: Any = TalkingWorker()
    attachment._worker = talker
    command = pb.Command(key=7)
    request_to_wire(Request("r", (1,)), command.start.request)
    attachment.perform(command)
    frame = await attachment.next_frame()
    assert list(frame.requests[0].token_ids) == [1]
    for _ in range(20):
        await asyncio.sleep(0)
    assert talker.num_taken == 2  # it belongs to the next frame
    await asyncio.sleep(1.1 * LONG_S)  # but not for ever
    assert talker.num_taken > 3
    await attachment.close()
