"""What vLLM's own block pool tells, in disagg's identities: a gateway that knows the prompt alone finds the same blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_events import BlockStored
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from disagg.engine.vllm_events import CacheNames
from disagg.policy.prefix_index import PrefixIndex
from disagg.prefix import block_identities, root_identity
from disagg.types import CacheChange

BLOCK = 4
BLOCKS = 12


class Engine:
    """vLLM's block pool with room for BLOCKS blocks, and a router's index that hears of it."""

    def __init__(self) -> None:
        self.hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(self.hash_fn)
        self.pool = BlockPool(BLOCKS + 1, True, BLOCK, enable_kv_cache_events=True)
        self.names, self.index = CacheNames(), PrefixIndex()
        self.index.join("w", BLOCKS)
        self.number = 0

    def compute(self, tokens: Sequence[int], salt: str | None = None) -> None:
        """One prompt is computed whole, in two steps, and its blocks are free again."""
        hasher = get_request_block_hasher(BLOCK, self.hash_fn)
        request = Request("r", list(tokens), SamplingParams(), None, cache_salt=salt, block_hasher=hasher)
        full = len(tokens) // BLOCK
        blocks = self.pool.get_new_blocks(full)
        for begin, end in ((0, full // 2), (full // 2, full)):
            self.pool.cache_full_blocks(request, blocks, begin, end, BLOCK, 0)
            self.step()
        self.pool.free_blocks(reversed(blocks))

    def step(self) -> None:
        self.number += 1
        self.index.update("w", [CacheChange(self.number, *map(tuple, found[:2]), found[2])] if any(found := self.told()) else [])

    def told(self) -> tuple[list[int], list[int], bool]:
        return self.names.translate(self.pool.take_events())

    def cached(self, tokens: Sequence[int], salt: str = "") -> int:
        return self.index.cached_blocks(block_identities(tokens, BLOCK, root_identity(salt))).get("w", 0)


def test_the_index_holds_what_the_pool_holds() -> None:
    engine = Engine()
    first, second = range(26), range(100, 127)
    engine.compute(first)
    assert engine.cached(first) == 6
    assert engine.cached([*range(10), 999, *range(11, 26)]) == 2
    assert engine.cached(first, "salted") == 0
    engine.compute(second, "salted")
    assert (engine.cached(first), engine.cached(second, "salted"), engine.cached(second)) == (6, 6, 0)
    engine.compute(range(200, 212))  # three blocks more than there is room for: the oldest prompt's tail goes
    assert (engine.cached(first), engine.cached(range(200, 212)), engine.cached(second, "salted")) == (3, 3, 6)
    assert len(engine.names) == BLOCKS
    engine.pool.reset_prefix_cache()
    engine.step()
    assert len(engine.names) == len(engine.index) == 0


def test_what_tokens_do_not_name_is_left_out() -> None:
    names = CacheNames()

    def stored(**other: object) -> BlockStored:
        given = {"block_hashes": [b"a"], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 4, "lora_id": None}
        return BlockStored(**{**given, "medium": "GPU", "lora_name": None, **other})

    for other in (
        {"lora_name": "adapter"},
        {"medium": "CPU"},
        {"group_idx": 1},
        {"token_ids": [1, 2]},
        {"extra_keys": [(("image", 0),)]},
        {"parent_block_hash": b"unknown"},
    ):
        assert names.translate([stored(**other)]) == ([], [], False), other
    assert names.translate([stored()]) == (list(block_identities([1, 2, 3, 4], 4)), [], False)
