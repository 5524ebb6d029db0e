"""Boxes are made once: a transfer takes a region of them, and no memory of its own."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import resource
import tracemalloc

import pytest

from disagg.kv.copy import digest
from tests.kv_rig import CARRIERS, LARGE, Rig, frames_of, rig

NUM_TOKENS = 40  # 15 MiB
PASSING_BYTES = {"grpc": 24 << 20}  # its messages are objects of Python; several of up to 1 MiB are under way at once
OTHERS_PASSING_BYTES = 1 << 20


@pytest.mark.parametrize("kind", sorted(CARRIERS))
async def test_transfers_take_no_memory_of_their_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = LARGE.entry_bytes(NUM_TOKENS)
    async with rig(kind, LARGE, outbox_bytes=2 * size, inbox_bytes=2 * size) as r:
        for _ in range(4):
            await move_in_place(r)
        maps: list[object] = []
        monkeypatch.setattr(mmap, "mmap", lambda *args, **_: maps.append(args))
        monkeypatch.setattr(os, "memfd_create", lambda *args: maps.append(args))
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(10):
                await move_in_place(r)
            _, peak = tracemalloc.get_traced_memory()
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert not maps
        assert peak - before < PASSING_BYTES.get(kind, OTHERS_PASSING_BYTES), f"of {10 * size} bytes moved"
        assert after - before < 256 << 10
        assert r.inbox.counters.bytes == 14 * size


async def move_in_place(r: Rig) -> None:
    """One transfer of whatever the outbox holds, without looking at it."""
    transfer = r.transfer(NUM_TOKENS)
    fetch = asyncio.ensure_future(r.inbox.fetch(transfer))
    entry = await r.outbox.open(transfer)
    for rank, first, num in frames_of(LARGE, NUM_TOKENS, 2):
        start = LARGE.offset(NUM_TOKENS, rank, first)
        entry.stage(rank, first, num, digest(entry.view[start : start + num * LARGE.slab_bytes]))
    entry.end_write()
    await fetch
    (await r.inbox.take(transfer.transfer_id)).end_read()


async def test_grpc_takes_no_fresh_pages_for_its_messages() -> None:
    size = LARGE.entry_bytes(NUM_TOKENS)
    async with rig("grpc", LARGE, outbox_bytes=2 * size, inbox_bytes=2 * size) as r:
        for _ in range(4):
            await move_in_place(r)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            await move_in_place(r)
        num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert num_faults < 10 * size / resource.getpagesize() / 4  # where each message has pages of its own: 2 to 4 for each one moved
