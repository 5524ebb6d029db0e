"""What vLLM's prefix cache holds of a prompt: asked before its KV is pulled, so that only the rest travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens

if TYPE_CHECKING:
    from vllm.config import CacheConfig
    from vllm.v1.core.block_pool import BlockPool


class PrefixLookup:
    """Looks into the scheduler's block pool from another thread: single lookups in a dictionary, which Python keeps whole.

    The answer may be out of date when it arrives; the planner looks again at what is really there when the request is scheduled.
    """

    def __init__(self, pool: BlockPool, config: CacheConfig) -> None:
        self._pool = pool
        self._block_tokens = int(config.block_size)
        self._hash = get_hash_fn_by_name(config.prefix_caching_hash_algo)

    def __call__(self, token_ids: Sequence[int], parent: bytes, salt: str) -> tuple[int, bytes]:
        """Full blocks of `token_ids` that are cached without a gap behind the block hashed `parent` (b"": the prompt's begin).

        Returns their number and the hash of the last one. The hashes are vLLM's own, of prompts without LoRA and multi-modal parts.
        """
        size, found = self._block_tokens, 0
        for start in range(0, len(token_ids) - size + 1, size):
            extra = (("cache_salt", salt),) if salt and not parent else None
            block = hash_block_tokens(self._hash, BlockHash(parent) if parent else None, token_ids[start : start + size], extra)
            if self._pool.get_cached_block(block, [0]) is None:
                break
            found, parent = found + 1, block
        return found, parent
