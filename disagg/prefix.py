"""Identities of prompt prefixes: what says that two prompts begin alike. Standard library and xxhash only.

The identity of a block of tokens stands for the block and everything before it, as in vLLM's prefix cache:

    identity of block i = xxh3_64(its token ids as little-endian uint32, seed = identity of block i - 1)

The seed of the first block is that of the request's cache salt, so prompts of unlike salts share nothing. 64 bits: two prefixes among
ten million are confused with a chance of 3e-6, and then only a prediction is wrong (an engine's own cache has its own hashes).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash


def root_identity(salt: str = "") -> int:
    """What stands before the first block."""
    return xxhash.xxh3_64_intdigest(salt.encode()) if salt else 0


def block_identities(token_ids: Sequence[int], block_tokens: int, parent: int = 0) -> tuple[int, ...]:
    """One identity for each full block of `token_ids`, the first one following `parent` (see `root_identity`)."""
    width = 4 * block_tokens
    data = array("I", token_ids).tobytes()
    found = []
    for start in range(0, len(data) // width * width, width):
        parent = xxhash.xxh3_64_intdigest(data[start : start + width], parent)
        found.append(parent)
    return tuple(found)
