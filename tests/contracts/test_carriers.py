"""The contract of every carrier, with the outbox and inbox that use it: whole and right, or a typed error; and nothing left."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from disagg.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    TransferCorruptError,
    TransferError,
    TransferFencedError,
)
from disagg.kv.carrier import SlowCarrier
from disagg.kv.copy import digest
from disagg.types import Transfer
from tests.faulty_carrier import FAULTS, HARMLESS, FaultyCarrier
from tests.kv_peer import NUM_TOKENS, read_transfer
from tests.kv_rig import CARRIERS, LARGE, LAYOUT, frames_of, rig, until

BLOCK = LAYOUT.block_tokens
between_processes = pytest.mark.parametrize("kind", ["shm", "cuda_ipc", "tcp", "grpc", "torch_dist"])


@pytest.fixture(params=sorted(CARRIERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("num_tokens", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 1001])
@pytest.mark.parametrize("num_ranks", [1, 3])
async def test_every_length_arrives_whole(kind: str, num_tokens: int, num_ranks: int) -> None:
    async with rig(kind, dataclasses.replace(LAYOUT, num_ranks=num_ranks)) as r:
        written, read = await r.move(r.transfer(num_tokens))
        assert read == written
        assert len(read) == r.outbox.layout.entry_bytes(num_tokens)


async def test_frames_of_megabytes_arrive_whole(kind: str) -> None:
    async with rig(kind, LARGE) as r:
        written, read = await r.move(r.transfer(19), frame_blocks=2)
        assert read == written
        assert r.inbox.counters.bytes == r.outbox.counters.bytes == len(read)


async def test_frames_come_as_they_are_staged(kind: str) -> None:
    async with rig(kind) as r:
        transfer = r.transfer(100)
        fetch = asyncio.ensure_future(r.inbox.fetch(transfer))
        entry = await r.outbox.open(transfer)
        entry.view[:] = bytes(len(entry.view))
        frames = frames_of(LAYOUT, 100, 5)
        for i, (rank, first, num) in enumerate(frames):
            assert r.inbox.counters.frames == i
            entry.stage(rank, first, num, digest(entry.view[: num * LAYOUT.slab_bytes]))
            await until(lambda i=i: r.inbox.counters.frames > i)
        await fetch
        entry.end_write()
        (await r.inbox.take(transfer.transfer_id)).end_read()


async def test_a_reader_may_come_after_all_is_staged(kind: str) -> None:
    async with rig(kind) as r:
        transfer = r.transfer(50)
        written = await r.write(transfer)
        await r.inbox.fetch(transfer)
        entry = await r.inbox.take(transfer.transfer_id)
        assert bytes(entry.view) == written
        assert entry.view.readonly
        entry.end_read()


async def test_duplicate_fetches_share_one_pull(kind: str) -> None:
    async with rig(kind) as r:
        transfer = r.transfer(50)
        fetches = [asyncio.ensure_future(r.inbox.fetch(transfer)) for _ in range(4)]
        written = await r.write(transfer, pause=True)
        await asyncio.gather(*fetches)
        await r.inbox.fetch(transfer)
        entry = await r.inbox.take(transfer.transfer_id)
        assert bytes(entry.view) == written
        with pytest.raises(TransferFencedError, match="taken already"):
            await r.inbox.take(transfer.transfer_id)
        entry.end_read()
        await r.inbox.fetch(transfer)  # used up: done already
        with pytest.raises(TransferFencedError, match="used up"):
            await r.inbox.take(transfer.transfer_id)
        assert (r.inbox.counters.fetches, r.inbox.counters.duplicates) == (1, 5)
        assert r.outbox.counters.opened == 1


@pytest.mark.parametrize("change", ["epoch", "token_hash", "attempt"])
async def test_a_pull_of_something_else_is_refused(kind: str, change: str) -> None:
    async with rig(kind) as r:
        transfer = r.transfer(50)
        await r.write(transfer)
        wrong = {
            "epoch": dataclasses.replace(transfer, source=dataclasses.replace(transfer.source, epoch="0" * 32)),
            "token_hash": dataclasses.replace(transfer, token_hash="0" * 32),
            "attempt": dataclasses.replace(transfer, attempt=1),
        }[change]
        with pytest.raises(TransferFencedError):
            await r.inbox.fetch(wrong)
        with pytest.raises(TransferError):
            await r.inbox.take(transfer.transfer_id)
        r.outbox.release(transfer.transfer_id)


async def test_a_pull_of_other_length_is_refused(kind: str) -> None:
    async with rig(kind) as r:
        transfer = r.transfer(50)
        await r.write(transfer)
        with pytest.raises(TransferFencedError, match="other tokens"):
            await r.inbox.fetch(dataclasses.replace(transfer, num_tokens=51))
        r.outbox.release(transfer.transfer_id)


async def test_another_layout_is_refused_by_name(kind: str) -> None:
    async with rig(kind, inbox_layout=dataclasses.replace(LAYOUT, block_tokens=8, dtype="fp8")) as r:
        transfer = r.transfer(50)
        await r.write(transfer)
        with pytest.raises(LayoutMismatchError, match=r"dtype: fp8 != bf16; block_tokens: 8 != 4"):
            await r.inbox.fetch(transfer)
        r.outbox.release(transfer.transfer_id)


async def test_an_ended_transfer_is_refused_at_once(kind: str) -> None:
    async with rig(kind) as r:
        transfer = r.transfer(50)
        r.outbox.release(transfer.transfer_id)  # the release overtook the prefill
        with pytest.raises(TransferFencedError, match="released"):
            await r.outbox.open(transfer)
        with pytest.raises(TransferFencedError, match="released"):
            await r.inbox.fetch(transfer)
        assert r.outbox.counters.refused == 1


async def test_a_prefill_that_ends_too_early_fails_the_pull_at_once(kind: str) -> None:
    async with rig(kind) as r:
        transfer = r.transfer(100)
        fetch = asyncio.ensure_future(r.inbox.fetch(transfer))
        entry = await r.outbox.open(transfer)
        entry.view[:] = bytes(len(entry.view))
        entry.stage(0, 0, 2, digest(entry.view[: 2 * LAYOUT.slab_bytes]))
        entry.end_write()
        with pytest.raises(TransferError, match="2 of 25 blocks"):
            await fetch
        with pytest.raises(TransferError, match="2 of 25 blocks"):  # the same answer again
            await r.inbox.fetch(transfer)


async def test_a_prompt_larger_than_the_inbox_is_refused_with_the_size_needed(kind: str) -> None:
    async with rig(kind, inbox_bytes=8192) as r:
        transfer = r.transfer(2000)
        await r.write(transfer)
        with pytest.raises(InvalidRequestError, match=r"needs 60000 bytes but kv.inbox_gib gives 8192"):
            await r.inbox.fetch(transfer)
        r.outbox.release(transfer.transfer_id)


@pytest.mark.parametrize("upto", [None, 0, 1, 5])
@pytest.mark.parametrize("how", ["cancel", "release", "release-source"])
async def test_stopping_at_any_point_frees_everything(kind: str, upto: int | None, how: str) -> None:
    """None: before the source has opened the entry; n: after n frames."""
    async with rig(kind) as r:
        for _ in range(3):
            transfer = r.transfer(100)
            before = r.inbox.counters.frames
            fetch = asyncio.ensure_future(r.inbox.fetch(transfer))
            await asyncio.sleep(0.005)
            if upto is not None:
                await r.write(transfer, upto=upto)
                await until(lambda n=before + upto: r.inbox.counters.frames >= n)
            match how:
                case "cancel":
                    fetch.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await fetch
                case "release":
                    r.inbox.release(transfer.transfer_id)
                    with pytest.raises(TransferFencedError, match="released"):
                        await fetch
                case _:
                    r.outbox.release(transfer.transfer_id)
                    with pytest.raises(TransferFencedError, match="released"):
                        await fetch
            r.outbox.release(transfer.transfer_id)
            entry = r.outbox._entries.get(transfer.transfer_id)
            if entry is not None:  # the engine has not ended: it still owns the bytes
                assert r.outbox.free_bytes < r.outbox.total_bytes
                entry.end_write()
            await r.assert_empty()
        written, read = await r.move(r.transfer(100))
        assert read == written


async def test_random_cancels_leave_nothing(kind: str) -> None:
    rng = random.Random(7)
    async with rig(kind, LARGE, outbox_bytes=40 << 20, inbox_bytes=24 << 20) as r:

        async def one(transfer: Transfer) -> None:
            written, read = await r.move(transfer, frame_blocks=1, pause=True)
            assert read == written

        for _ in range(25):
            transfers = [r.transfer(rng.randint(1, 16)) for _ in range(3)]
            tasks = [asyncio.ensure_future(one(t)) for t in transfers]
            await asyncio.sleep(rng.random() * 0.02)
            tasks[0].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert all(t.exception() is None for t in tasks[1:])
            for t in transfers:
                r.inbox.release(t.transfer_id)
                r.outbox.release(t.transfer_id)
            await r.assert_empty()


async def test_fifty_transfers_through_boxes_for_less_than_two(kind: str) -> None:
    size = LAYOUT.entry_bytes(100)
    async with rig(kind, outbox_bytes=size * 3 // 2 + 4096, inbox_bytes=size * 3 // 2 + 4096) as r:
        results = await asyncio.gather(*[r.move(r.transfer(100), pause=i % 3 == 0) for i in range(50)])
        assert all(read == written for written, read in results)
        assert r.inbox.counters.completed == 50
        await until(lambda: r.outbox.counters.acked == 50)  # a fetch returns before its acknowledgement has come


async def test_hundreds_of_pulls_at_once(kind: str) -> None:
    async with rig(kind) as r:
        transfers = [r.transfer(20) for _ in range(300)]
        written = [await r.write(t) for t in transfers]
        await asyncio.gather(*[r.inbox.fetch(t) for t in transfers])
        for transfer, data in zip(transfers, written, strict=True):
            entry = await r.inbox.take(transfer.transfer_id)
            assert bytes(entry.view) == data
            entry.end_read()


async def test_faults_at_every_frame_end_in_the_right_bytes_or_a_typed_error(kind: str) -> None:
    """100 seeded runs over all kinds of fault and all frames, on one pair of boxes."""
    rng = random.Random(42)
    holder: list[FaultyCarrier] = []

    def wrap(inner: object) -> FaultyCarrier:
        holder.append(FaultyCarrier(inner, "delay"))  # type: ignore[arg-type]
        return holder[0]

    outcomes: dict[str, set[str]] = {fault: set() for fault in FAULTS}
    async with rig(kind, wrap=wrap) as r:
        faulty = holder[0]
        for run in range(100):
            num_tokens = rng.choice([1, BLOCK, 30, 70])
            num_frames = len(frames_of(LAYOUT, num_tokens, 3))
            faulty.fault = FAULTS[run % len(FAULTS)]
            faulty.at_frame = rng.randrange(num_frames + (faulty.fault not in ("truncate", "flip", "cut", "reorder")))
            faulty.bit = rng.randrange(1 << 20)
            faulty.stalled.clear()
            transfer = r.transfer(num_tokens)
            move = asyncio.ensure_future(r.move(transfer, pause=rng.random() < 0.2))
            if faulty.fault == "stall":
                await faulty.stalled.wait()
                move.cancel()
            try:
                written, read = await move
                assert read == written, f"{faulty.fault} at frame {faulty.at_frame} gave wrong bytes"
                outcomes[faulty.fault].add("right")
            except TransferError as error:
                outcomes[faulty.fault].add(type(error).__name__)
            except asyncio.CancelledError:
                outcomes[faulty.fault].add("cancelled")
            r.inbox.release(transfer.transfer_id)
            r.outbox.release(transfer.transfer_id)
            await r.assert_empty()
        assert faulty.num_faults == 100
    for fault in HARMLESS:
        assert outcomes[fault] == {"right"}
    assert outcomes["stall"] == {"cancelled"}
    assert outcomes["reset"] == {"TransferError"}
    for fault in ("truncate", "flip", "cut"):
        assert outcomes[fault] == {"TransferCorruptError"}, fault
    assert "TransferCorruptError" in outcomes["drop"] & outcomes["duplicate"] & outcomes["reorder"]


async def test_a_bit_that_flips_in_the_source_is_noticed(kind: str) -> None:
    async with rig(kind, LARGE) as r:
        transfer = r.transfer(12)
        written = await r.write(transfer, frame_blocks=1)
        entry = r.outbox._entries[transfer.transfer_id]
        entry.view[len(written) // 2] ^= 1
        with pytest.raises(TransferCorruptError, match="frame 1 fails its checksum"):
            await r.inbox.fetch(transfer)
        assert r.inbox.counters.corrupt == 1
        r.outbox.release(transfer.transfer_id)


async def test_a_slow_carrier_is_slow_and_right(kind: str) -> None:
    times_s = {}
    for delay_s in (0.0, 0.3):
        async with rig(kind, wrap=lambda inner, d=delay_s: SlowCarrier(inner, d, gbps=1.0)) as r:
            loop = asyncio.get_running_loop()
            start_s = loop.time()
            written, read = await r.move(r.transfer(100))
            times_s[delay_s] = loop.time() - start_s
            assert read == written
    assert times_s[0.3] >= 0.3
    assert times_s[0.0] < times_s[0.3]


async def test_nobody_listens(kind: str) -> None:
    async with rig(kind) as r:
        transfer = r.transfer(10)
        await r.source_carrier.close()
        with pytest.raises(TransferError, match="prefill-0"):
            async with asyncio.timeout(60):
                await r.inbox.fetch(transfer)


async def test_a_lease_ends_what_nobody_reads_and_spares_what_is_read(kind: str) -> None:
    async with rig(kind, lease_s=0.2) as r:
        forgotten, wanted = r.transfer(50), r.transfer(50)
        await r.write(forgotten)
        fetch = asyncio.ensure_future(r.inbox.fetch(wanted))
        entry = await r.outbox.open(wanted)  # in the engine's queue for longer than the lease
        await until(lambda: r.outbox.counters.expired == 1)
        with pytest.raises(TransferFencedError, match="expired"):
            await r.inbox.fetch(forgotten)
        await asyncio.sleep(0.25)
        assert not fetch.done()
        entry.view[:] = bytes(len(entry.view))
        for rank, first, num in frames_of(LAYOUT, 50, 3):
            entry.stage(rank, first, num, digest(entry.view[: num * LAYOUT.slab_bytes]))
        entry.end_write()
        await fetch
        await until(lambda: r.inbox.counters.expired == 1)  # complete, but nobody took it
        with pytest.raises(TransferFencedError, match="expired"):
            await r.inbox.take(wanted.transfer_id)


async def test_a_pull_of_what_is_never_opened_ends(kind: str) -> None:
    async with rig(kind, lease_s=0.1) as r:
        with pytest.raises(TransferFencedError, match="not opened within"):
            await r.inbox.fetch(r.transfer(10))


@between_processes
async def test_a_source_that_falls_silent_is_lost(kind: str) -> None:
    async with rig(kind, silence_s=0.3, heartbeat_s=30.0) as r:
        transfer = r.transfer(50)
        await r.write(transfer, upto=2)
        with pytest.raises(TransferError, match="silent"):
            await r.inbox.fetch(transfer)
        r.outbox.release(transfer.transfer_id)
        r.outbox._entries[transfer.transfer_id].end_write()


@between_processes
async def test_a_source_that_computes_for_long_is_not_silent(kind: str) -> None:
    async with rig(kind, silence_s=0.5, heartbeat_s=0.05) as r:
        transfer = r.transfer(50)
        fetch = asyncio.ensure_future(r.inbox.fetch(transfer))
        await asyncio.sleep(1.0)
        assert not fetch.done()
        await r.write(transfer)
        await fetch
        (await r.inbox.take(transfer.transfer_id)).end_read()


def test_uvloop_does_as_well(kind: str) -> None:
    """Ray's async actors run on uvloop when it is installed."""
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        async with rig(kind) as r:
            for _ in range(3):
                written, read = await r.move(r.transfer(100))
                assert read == written
            fetch = asyncio.ensure_future(r.inbox.fetch(r.transfer(100)))
            await asyncio.sleep(0.01)
            fetch.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@asynccontextmanager
async def peer(role: str, kind: str) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.kv_peer", role, kind, stdin=pipe, stdout=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        return (await process.stdout.readline()).decode()


@between_processes
async def test_kill_9_of_the_source_in_the_middle(kind: str) -> None:
    async with rig(kind) as r, peer("source", kind) as process:
        transfer = read_transfer(await line_of(process))
        fetch = asyncio.ensure_future(r.inbox.fetch(transfer))
        await until(lambda: r.inbox.counters.frames >= 3)
        process.kill()
        with pytest.raises(TransferError, match="worker peer was lost"):
            async with asyncio.timeout(60):
                await fetch
        await r.assert_empty()
        with pytest.raises(TransferError):  # and it stays lost
            await r.inbox.fetch(dataclasses.replace(transfer, transfer_id="1" * 32))
        written, read = await r.move(r.transfer(100))  # others are not harmed
        assert read == written


@between_processes
async def test_kill_9_of_the_puller_in_the_middle(kind: str) -> None:
    async with rig(kind) as r, peer("puller", kind) as process:
        transfer = r.transfer(NUM_TOKENS)
        await r.write(transfer)
        assert process.stdin is not None
        process.stdin.write(json.dumps(dataclasses.asdict(transfer)).encode() + b"\n")
        assert json.loads(await line_of(process)) == {"stalled": True}
        r.outbox.release(transfer.transfer_id)
        assert r.outbox.free_bytes < r.outbox.total_bytes, "freed under a reader"
        process.kill()
        await r.assert_empty()
