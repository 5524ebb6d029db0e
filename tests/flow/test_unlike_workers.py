"""Pools whose workers keep their KV in unlike ways: bridged where that is possible, refused when a worker joins where it is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from disagg.config import Topology
from disagg.errors import LayoutMismatchError
from disagg.types import Role
from tests.builders import cluster, sim_topology


def topology(decode: dict[str, Any], mode: str = "disagg", carrier: str = "auto", **both: Any) -> Topology:
    """`decode`: settings of the decode pool alone."""
    plain = sim_topology(mode=mode, decode=2, carrier=carrier, **{"shape": "llama-3.1-8b", **both}).model_dump()
    plain["pools"]["decode"]["simulated"] = decode
    return Topology.model_validate(plain)


UNLIKE = {"tp": 2, "block_tokens": 48, "dtype": "fp8", "kv_bytes_per_token": 32}


@pytest.mark.parametrize("carrier", ["shm", "grpc"])
@pytest.mark.parametrize("mode", ["disagg", "adaptive"])
async def test_unlike_block_sizes_ranks_and_dtypes_give_the_right_answers(mode: str, carrier: str) -> None:
    async with cluster(topology(UNLIKE, mode, carrier, tp=4)) as c:
        for length in (1, 47, 48, 100, 700):
            await c.ask_right(c.request(length))
        assert sum(c.worker(name).inbox.counters.bytes for name in c.workers) > 0


async def test_a_prefix_that_the_decode_worker_has_does_not_travel_again() -> None:
    async with cluster(topology({"block_tokens": 32}, tp=1)) as c:
        await c.ask_right(c.request(list(range(640)), max_tokens=4))
        inboxes = [c.worker(f"decode-{i}").inbox.counters for i in range(2)]
        first = sum(i.bytes for i in inboxes)
        for i in range(4):  # on two workers: at least three of these find the prefix
            await c.ask_right(c.request([*range(640), 7000 + i], max_tokens=4))
        assert sum(i.saved_bytes for i in inboxes) >= 3 * first
        assert sum(i.bytes for i in inboxes) < 2.1 * first


@pytest.mark.parametrize("mode", ["disagg", "adaptive"])
async def test_a_worker_that_cannot_exchange_kv_does_not_join(mode: str) -> None:
    settings = {"block_tokens": 32, "kv_bytes_per_token": 4}  # too few bytes to tell heads apart
    async with cluster(topology(settings, mode, tp=1, kv_bytes_per_token=4), start_workers=False) as c:
        await c.add(Role.PREFILL)
        with pytest.raises(LayoutMismatchError, match=r"no KV can move from worker .*block_tokens: (16 != 32|32 != 16)"):
            await c.add(Role.DECODE)
        assert set(c.pool.members) == {"prefill-0"}


async def test_a_worker_is_checked_against_one_that_joins_anew_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"block_tokens": 32, "kv_bytes_per_token": 4}
    async with cluster(topology(settings, tp=1, kv_bytes_per_token=4), start_workers=False) as c:
        await c.add(Role.PREFILL)
        old, closing, held = c.pool.members["prefill-0"].worker, asyncio.Event(), asyncio.Event()
        c.killed.append(c.workers["prefill-0"])
        close = old.close

        async def slowly() -> None:
            closing.set()
            await held.wait()
            await close()

        monkeypatch.setattr(old, "close", slowly)
        again = asyncio.create_task(c.add(Role.PREFILL, "prefill-0"))
        try:
            await asyncio.wait_for(closing.wait(), 20)
            with pytest.raises(LayoutMismatchError, match="no KV can move"):
                await c.add(Role.DECODE)
        finally:
            held.set()
            await again
        assert set(c.pool.members) == {"prefill-0"}


async def test_quantised_frames_need_numbers() -> None:
    async with cluster(sim_topology(kv={"wire_dtype": "int8"}), start_workers=False) as c:
        await c.add(Role.PREFILL)
        with pytest.raises(LayoutMismatchError, match=r"kv\.wire_dtype int8 needs a cache of bfloat16"):
            await c.add(Role.DECODE)
