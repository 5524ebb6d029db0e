"""Our questions to vLLM's prefix cache find exactly what vLLM's own lookup would, asked over the channel to a process that holds one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("vllm")

from disagg.engine import vllm_channel
from disagg.engine.vllm_channel import ADDRESS_ENV, WorkerChannel
from disagg.engine.vllm_ledger import EntryLedger
from disagg.kv.box import Box

WAIT_S = 60.0

ENGINE = """
    import sys, time
    from types import SimpleNamespace
    from disagg.engine.vllm_channel import answer_lookups, hold_lifeline
    from disagg.engine.vllm_prefix import PrefixLookup
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    pool = BlockPool(100, True, 4)
    for salt, first in ((None, 0), ("salted", 1000)):
        request = Request("r", list(range(first, first + 42)), SamplingParams(), None, cache_salt=salt,
                          block_hasher=get_request_block_hasher(4, hash_fn))
        pool.cache_full_blocks(request, pool.get_new_blocks(11), 0, 10, 4, 0)
    hold_lifeline()
    answer_lookups(PrefixLookup(pool, SimpleNamespace(block_size=4, prefix_caching_hash_algo="sha256")))
    time.sleep(600)
"""


def start_engine(address: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(ENGINE)], env={**os.environ, ADDRESS_ENV: address})


async def test_what_is_cached_is_found_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = EntryLedger()
    channel = WorkerChannel(Box(8192, "out"), Box(8192, "in"), ledger)
    channel.open()
    assert await channel.cached_blocks(range(42), 4, "") == 0, "nobody to ask yet"
    process = start_engine(channel.address)
    try:
        async with asyncio.timeout(WAIT_S):
            while not any(peer.answers_lookups for peer in channel._peers):  # noqa: ASYNC110 (no event says so)
                await asyncio.sleep(0.02)
        for part in (8192, 12):  # in one question, and in several
            monkeypatch.setattr(vllm_channel, "LOOKUP_TOKENS", part)
            assert await channel.cached_blocks(range(42), 4, "") == 10
            assert await channel.cached_blocks(range(23), 4, "") == 5
            assert await channel.cached_blocks([*range(20), 7, *range(21, 42)], 4, "") == 5
            assert await channel.cached_blocks(range(1, 42), 4, "") == 0
            assert await channel.cached_blocks(range(3), 4, "") == 0
            assert await channel.cached_blocks(range(42), 4, "salted") == 0
            assert await channel.cached_blocks(range(1000, 1042), 4, "salted") == 10
            assert await channel.cached_blocks(range(1000, 1042), 4, "") == 0
        process.kill()
        await asyncio.wait_for(ledger.dead.wait(), WAIT_S)
        assert await channel.cached_blocks(range(42), 4, "") == 0
    finally:
        process.kill()
        process.communicate()
        channel.close()
