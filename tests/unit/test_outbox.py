"""The outbox and inbox alone: what engines may do wrong, who frees what, and when."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from disagg.errors import EngineError, InvalidRequestError, TransferError, TransferFencedError
from disagg.kv.carriers.loopback import LoopbackCarrier
from disagg.kv.frames import End, Frame, Opened, Sink, Waiting, pull_request
from disagg.types import Transfer
from tests.kv_rig import LAYOUT, frames_of, rig


async def test_staging_checks_what_an_engine_says() -> None:
    async with rig("loopback") as r:
        transfer = r.transfer(40)  # 10 blocks
        entry = await r.outbox.open(transfer)
        entry.stage(0, 0, 4, 1)
        for rank, first, num in [(1, 0, 1), (0, 9, 2), (0, -1, 2), (0, 4, 0), (0, 3, 2)]:
            with pytest.raises(EngineError, match="cannot stage"):
                entry.stage(rank, first, num, 1)
        entry.stage(0, 0, 2, 1)  # again, as a whole
        assert r.outbox.counters.duplicates == 1
        assert r.outbox.counters.frames == 1
        r.outbox.release(transfer.transfer_id)
        entry.stage(0, 4, 1, 1)
        assert r.outbox.counters.late == 1
        assert r.outbox.free_bytes < r.outbox.total_bytes, "freed under the engine"
        entry.end_write()
        entry.end_write()
        r.outbox.assert_empty()


async def test_one_id_is_opened_once() -> None:
    async with rig("loopback") as r:
        transfer = r.transfer(40)
        entry = await r.outbox.open(transfer)
        with pytest.raises(TransferFencedError, match="open already"):
            await r.outbox.open(transfer)
        r.outbox.release(transfer.transfer_id)
        with pytest.raises(TransferFencedError, match="released"):
            await r.outbox.open(transfer)
        entry.end_write()


async def test_a_prompt_larger_than_the_outbox_is_refused_on_both_sides() -> None:
    async with rig("loopback", outbox_bytes=8192) as r:
        transfer = r.transfer(2000)
        fetch = asyncio.ensure_future(r.inbox.fetch(transfer))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequestError, match=r"kv\.outbox_gib"):
            await r.outbox.open(transfer)
        with pytest.raises(TransferFencedError, match=r"kv\.outbox_gib"):
            await fetch


@pytest.mark.parametrize("how", ["cancel", "release", "both", "grant-and-cancel", "grant-and-release"])
async def test_giving_up_while_waiting_for_room(how: str) -> None:
    async with rig("loopback", outbox_bytes=8192) as r:
        first, second, third = r.transfer(200), r.transfer(200), r.transfer(200)  # 6000 bytes each
        held = await r.outbox.open(first)
        opening = asyncio.ensure_future(r.outbox.open(second))
        after = asyncio.ensure_future(r.outbox.open(third))
        fetch = asyncio.ensure_future(r.inbox.fetch(second))
        await asyncio.sleep(0.01)
        assert r.outbox.free_bytes == 0
        if how.startswith("grant"):
            r.outbox.release(first.transfer_id)
            held.end_write()  # gives the room to the second
        if how in ("release", "both", "grant-and-release"):
            r.outbox.release(second.transfer_id)
        if how in ("cancel", "both", "grant-and-cancel"):
            opening.cancel()
        with pytest.raises(asyncio.CancelledError if how in ("cancel", "both", "grant-and-cancel") else TransferFencedError):
            await opening
        with pytest.raises(TransferFencedError):
            await fetch
        r.outbox.release(first.transfer_id)
        held.end_write()
        (await after).end_write()


async def test_a_reader_holds_the_bytes_until_it_leaves() -> None:
    async with rig("loopback") as r:
        transfer = r.transfer(40)
        with r.outbox.reader(pull_request(transfer)) as reader:
            assert isinstance(await reader.next(0.01), Waiting)
            written = await r.write(transfer, frame_blocks=4)
            assert isinstance(await reader.next(), Opened)
            frame = await reader.next()
            assert isinstance(frame, Frame)
            payload = reader.payload(frame)
            r.outbox.release(transfer.transfer_id)
            with pytest.raises(TransferFencedError, match="released"):
                await reader.next()
            assert r.outbox.free_bytes < r.outbox.total_bytes
            assert bytes(payload) == written[: len(payload)]
            reader.acknowledge()
            assert r.outbox.counters.acked == 0, "an acknowledgement after the end is late"
            assert r.outbox.counters.late == 1
        r.outbox.assert_empty()


async def test_two_readers_of_one_transfer_free_it_once() -> None:
    async with rig("loopback") as r:
        transfer = r.transfer(40)
        await r.write(transfer, frame_blocks=10)
        with r.outbox.reader(pull_request(transfer)) as one, r.outbox.reader(pull_request(transfer)) as two:
            for reader in (one, two):
                kinds = [type(await reader.next()) for _ in range(3)]
                assert kinds == [Opened, Frame, End]
            one.acknowledge()
            two.acknowledge()
            assert (r.outbox.counters.acked, r.outbox.counters.late) == (1, 1)
            assert r.outbox.free_bytes < r.outbox.total_bytes


async def test_acknowledged_before_the_engine_has_ended() -> None:
    async with rig("loopback") as r:
        transfer = r.transfer(40)
        await r.write(transfer, upto=len(frames_of(LAYOUT, 40, 3)))
        await r.inbox.fetch(transfer)
        (await r.inbox.take(transfer.transfer_id)).end_read()
        assert r.outbox.counters.acked == 1
        assert r.outbox.free_bytes < r.outbox.total_bytes, "freed under the engine"
        r.outbox._entries[transfer.transfer_id].end_write()


async def test_an_owner_renews_its_leases() -> None:
    async with rig("loopback", lease_s=0.3) as r:
        mine, other = r.transfer(40), r.transfer(40)
        (await r.outbox.open(other, owner="b")).end_write()  # incomplete: ends at once, without a lease
        entry = await r.outbox.open(mine, owner="a")
        for rank, first, num in frames_of(LAYOUT, 40, 10):
            entry.stage(rank, first, num, 1)
        entry.end_write()
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        while loop.time() < start_s + 0.6:
            r.outbox.renew("a")
            await asyncio.sleep(0.02)
        assert r.outbox.counters.expired == 0
        assert r.outbox.counters.incomplete == 1
        r.outbox.renew("b")
        await r.assert_empty()
        assert r.outbox.counters.expired == 1


async def test_an_owner_renews_what_waits_in_the_inbox() -> None:
    async with rig("loopback", lease_s=0.3) as r:
        mine, other = r.transfer(40), r.transfer(40)
        for transfer, owner in ((mine, "a"), (other, "b")):
            await r.write(transfer)
            await r.inbox.fetch(transfer, owner)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        while loop.time() < start_s + 0.9:
            r.inbox.renew("a")
            await asyncio.sleep(0.02)
        assert r.inbox.counters.expired == 1
        with pytest.raises(TransferFencedError, match="expired"):
            await r.inbox.take(other.transfer_id)
        (await r.inbox.take(mine.transfer_id)).end_read()


async def test_a_lost_acknowledgement_leaves_nothing_though_the_owner_renews() -> None:
    async with rig("loopback", lease_s=0.2) as r:
        transfer = r.transfer(40)
        await r.write(transfer)
        with r.outbox.reader(pull_request(transfer)) as reader:
            while not isinstance(await reader.next(), End):
                pass
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        while loop.time() < start_s + 10 and r.outbox.counters.expired == 0:
            r.outbox.renew()
            await asyncio.sleep(0.02)
        assert r.outbox.counters.expired == 1
        await r.assert_empty()


async def test_an_engine_that_reads_keeps_the_bytes_after_a_release() -> None:
    async with rig("loopback") as r:
        transfer = r.transfer(40)
        written = await r.write(transfer)
        await r.inbox.fetch(transfer)
        entry = await r.inbox.take(transfer.transfer_id)
        r.inbox.release(transfer.transfer_id)
        assert r.inbox.free_bytes < r.inbox.total_bytes, "freed under the engine"
        assert bytes(entry.view) == written
        entry.end_read()
        entry.end_read()
        r.inbox.assert_empty()
        with pytest.raises(TransferFencedError):
            await r.inbox.take(transfer.transfer_id)


async def test_cancelling_one_of_two_waiters_leaves_the_pull_to_the_other() -> None:
    async with rig("loopback") as r:
        transfer = r.transfer(40)
        fetch = asyncio.ensure_future(r.inbox.fetch(transfer))
        await asyncio.sleep(0)
        take = asyncio.ensure_future(r.inbox.take(transfer.transfer_id))
        await asyncio.sleep(0)
        fetch.cancel()
        written = await r.write(transfer)
        entry = await take
        assert bytes(entry.view) == written
        entry.end_read()


async def test_taking_what_was_never_fetched_is_an_error_at_once() -> None:
    async with rig("loopback") as r:
        with pytest.raises(TransferFencedError, match="never fetched"):
            await r.inbox.take("0" * 32)


async def test_a_carrier_with_a_bug_does_not_hang_anybody() -> None:
    class Broken:
        name = "loopback"

        async def serve(self, outbox: object) -> str:
            return ""

        async def pull(self, endpoint: str, transfer: object, sink: object) -> None:
            raise ZeroDivisionError("bug")

        async def close(self) -> None: ...

    async with rig("loopback", wrap=lambda _: Broken()) as r:
        with pytest.raises(TransferError, match="ZeroDivisionError"):
            await r.inbox.fetch(r.transfer(10))


async def test_closing_ends_everybody() -> None:
    async with rig("loopback", outbox_bytes=8192) as r:
        first, second = r.transfer(200), r.transfer(200)
        await r.outbox.open(first)
        opening = asyncio.ensure_future(r.outbox.open(second))
        fetch = asyncio.ensure_future(r.inbox.fetch(first))
        await asyncio.sleep(0.01)
        r.outbox.close()
        for ended in (opening, fetch):
            with pytest.raises(TransferError):
                await ended
        await r.inbox.close()
        with pytest.raises(TransferFencedError, match="closing"):
            await r.inbox.fetch(r.transfer(10))


async def test_a_failed_pull_is_remembered_without_what_it_saw() -> None:
    """A peer that died took its box with it: a mapping that is only remembered would keep the memory."""

    class Payload:
        pass

    seen: list[weakref.ref[Payload]] = []

    class Failing(LoopbackCarrier):
        async def pull(self, endpoint: str, transfer: Transfer, sink: Sink) -> None:
            payload = Payload()
            seen.append(weakref.ref(payload))
            raise TransferError("the connection was reset")

    async with rig("loopback", wrap=lambda _: Failing()) as r:
        transfer = r.transfer(10)
        for _ in range(2):
            with pytest.raises(TransferError, match="reset"):
                await r.inbox.fetch(transfer)
        gc.collect()
        assert [ref() for ref in seen] == [None]
