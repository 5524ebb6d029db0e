"""The line between a worker and its engine's processes, with a plain Python process in the engine's place."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from disagg.engine.vllm_channel import ADDRESS_ENV, WorkerChannel
from disagg.engine.vllm_ledger import EntryLedger
from disagg.errors import EngineError
from disagg.kv.box import Box
from disagg.kv.layout import KvLayout
from tests.fake_entries import FakeInboxEntry, FakeOutboxEntry

LAYOUT = KvLayout("model", "backend", "dtype", 32, 2, 64)
WAIT_S = 30.0

ENGINE = """
    import os, sys, time
    from disagg.engine.vllm_channel import ADDRESS_ENV, RankChannel, hold_lifeline
    hold_lifeline()
    channel = RankChannel(0, os.environ[ADDRESS_ENV])
    channel.outbox[:5] = b"hello"
    channel.hello(dict(model="model", backend="backend", dtype="dtype", block_tokens=32, num_layers=2, block_bytes=64, num_ranks=1))
    if channel.inbox[:4] == b"read":
        channel.send_events([("read_ended", "in")] * 1200)
    sys.stdout.write("ready\\n"); sys.stdout.flush()
    time.sleep(600)
"""


def start_engine(address: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, ADDRESS_ENV: address}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(ENGINE)], env=env, stdout=subprocess.PIPE)


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (the fakes set no events)
            await asyncio.sleep(0.01)


@pytest.fixture
async def worker() -> Any:
    ledger = EntryLedger()
    channel = WorkerChannel(Box(8192, "out"), Box(8192, "in"), ledger)
    channel.open()
    yield channel, ledger
    channel.close()


async def test_boxes_are_shared_and_events_come_in_order(worker: Any) -> None:
    channel, ledger = worker
    channel.inbox.buffer[:4] = b"read"
    ledger.on_hello(0, {**{f: getattr(LAYOUT, f) for f in LAYOUT.__dataclass_fields__}})
    entry = FakeInboxEntry(LAYOUT, 5, bytes(LAYOUT.entry_bytes(5)), "in")
    ledger.open_read(entry)
    process = start_engine(channel.address)
    try:
        await until(lambda: entry.is_ended and ledger.ignored == 1199)
        assert bytes(channel.outbox.buffer[:5]) == b"hello"
        assert channel.process_ids == {process.pid}
    finally:
        process.kill()
        process.communicate()


async def test_a_killed_engine_is_noticed_and_its_entries_are_ended(worker: Any) -> None:
    channel, ledger = worker
    process = start_engine(channel.address)
    try:
        await asyncio.wait_for(ledger.ready.wait(), WAIT_S)
        entry = FakeOutboxEntry(LAYOUT, 5, "out")
        ledger.open_write(entry)
        with pytest.raises(EngineError, match="under way"):
            ledger.open_write(entry)
        process.send_signal(signal.SIGKILL)
        await asyncio.wait_for(ledger.dead.wait(), WAIT_S)
        await until(lambda: entry.is_ended and ledger.num_open == 0)
    finally:
        process.kill()
        process.communicate()


HELPER = "from disagg.engine.vllm_channel import hold_lifeline; hold_lifeline()"


async def test_a_helper_process_that_ends_while_the_engine_starts_is_no_loss(worker: Any) -> None:
    """vLLM looks at a model's class in a process that ends, when its cache does not know it yet."""
    channel, ledger = worker
    env = {**os.environ, ADDRESS_ENV: channel.address}
    helper = await asyncio.create_subprocess_exec(sys.executable, "-c", HELPER, env=env)
    assert await asyncio.wait_for(helper.wait(), WAIT_S) == 0
    process = start_engine(channel.address)
    try:
        await asyncio.wait_for(ledger.ready.wait(), WAIT_S)
        assert not ledger.dead.is_set()
        helper = await asyncio.create_subprocess_exec(sys.executable, "-c", HELPER, env=env)
        await asyncio.wait_for(ledger.dead.wait(), WAIT_S)  # once it serves, every process counts
        assert await helper.wait() == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", ["bye", "closed"])
async def test_an_engine_does_not_outlive_its_worker(worker: Any, how: str) -> None:
    channel, ledger = worker
    process = start_engine(channel.address)
    try:
        await asyncio.wait_for(ledger.ready.wait(), WAIT_S)
        channel.dismiss() if how == "bye" else channel.close()
        assert await asyncio.to_thread(process.wait, WAIT_S) == (0 if how == "bye" else 1)
    finally:
        process.kill()
        process.communicate()


async def test_an_engine_whose_worker_is_gone_does_not_start(worker: Any) -> None:
    process = start_engine("disagg-engine-nobody")
    assert await asyncio.to_thread(process.wait, WAIT_S) == 1
    process.communicate()


async def test_late_and_unknown_events_are_counted_and_change_nothing() -> None:
    ledger = EntryLedger()
    ledger.on_hello(0, {**{f: getattr(LAYOUT, f) for f in LAYOUT.__dataclass_fields__}})
    entry = FakeOutboxEntry(LAYOUT, 5, "out")
    ledger.open_write(entry)
    ledger.on_events(0, [("read_ended", "out"), ("staged", "other", 0, 1, 7), ("write_ended", "out"), ("staged", "out", 0, 1, 7)])
    assert entry.is_ended
    assert entry.frames == []
    assert ledger.ignored == 3


async def test_every_rank_must_end_an_entry() -> None:
    ledger = EntryLedger()
    two = {**{f: getattr(LAYOUT, f) for f in LAYOUT.__dataclass_fields__}, "num_ranks": 2}
    ledger.on_hello(1, two)
    assert not ledger.ready.is_set()
    ledger.on_hello(0, two)
    assert ledger.ready.is_set()
    entry = FakeInboxEntry(LAYOUT, 5, bytes(LAYOUT.entry_bytes(5)), "in")
    ledger.open_read(entry)
    ledger.on_events(1, [("read_ended", "in"), ("read_ended", "in")])
    assert not entry.is_ended
    ledger.on_events(0, [("read_ended", "in")])
    assert entry.is_ended


async def test_an_engine_dies_with_the_task_that_hands_on_its_outputs() -> None:
    """vLLM's own ends after any exception, and its process goes on: nobody else would notice."""
    ledger, failed = EntryLedger(), asyncio.Event()
    ledger.die_with(asyncio.create_task(failed.wait()))
    await asyncio.sleep(0)
    assert not ledger.dead.is_set()
    failed.set()
    await asyncio.wait_for(ledger.dead.wait(), WAIT_S)
