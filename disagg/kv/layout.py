"""How KV lies in an engine's cache, and in a box entry. Which of the two forms an entry has is agreed per pair of workers (kv/form.py).

Form `blocks`: an entry is the raw bytes of whole cache blocks, [ranks, blocks, layers, block_bytes], where `block_bytes` is one
layer's block of one tensor-parallel rank, exactly as the attention backend keeps it. The last block may be partly filled; its
tail bytes carry no meaning. A range of blocks of one rank is contiguous, so a prefill chunk is one contiguous write.

Bit-exact, and independent of what the backend does inside a block (vLLM's CPU attention packs keys there).

Form `tokens`: the same with blocks of one token, [shards, tokens, layers, 2, heads of the shard, head_dim]: what engines of unlike block
sizes, tensor-parallel degrees or cache dtypes exchange. The entry's geometry is a KvLayout as well, of `block_tokens` 1.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

FRAME_BYTES = 4 << 20  # a frame's payload stays near this: large enough to stream, small enough to interleave


class Packing(StrEnum):
    """What is known of the inside of a block.

    `opaque`: nothing. `heads`: [kv heads, K or V, a run of block_tokens x head_dim numbers in the backend's order]. `tokens`: each token's
    numbers can be addressed.
    """

    OPAQUE = "opaque"
    HEADS = "heads"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Everything that must be equal on both sides before raw blocks may move.

    `model`: a fingerprint of weights name + revision, layers, kv heads, head dim, dtype and rope. `backend`: attention backend's name.
    `dtype`: the numbers' type, and after a slash the cache's own name for it. `block_tokens`: tokens per cache block. `block_bytes`: bytes
    of one block of one layer of one rank. `kv_heads` (of the whole model) and `head_dim` are 0 where `packing` is opaque.
    """

    model: str
    backend: str
    dtype: str
    block_tokens: int
    num_layers: int
    block_bytes: int
    num_ranks: int = 1
    kv_heads: int = 0
    head_dim: int = 0
    packing: Packing = Packing.OPAQUE

    @property
    def number(self) -> str:
        """The numbers' type, without the cache's own name for it."""
        return self.dtype.partition("/")[0]

    @property
    def num_shards(self) -> int:
        """Distinct parts of the heads: ranks beyond the number of heads hold copies."""
        return min(self.num_ranks, self.kv_heads) if self.kv_heads else self.num_ranks

    @property
    def shard_heads(self) -> int:
        """KV heads that one rank holds."""
        return max(1, self.kv_heads // self.num_ranks)

    def shard_of(self, rank: int) -> int:
        """Which part of the heads `rank` holds: heads [shard x shard_heads, (shard + 1) x shard_heads)."""
        return rank * self.num_shards // self.num_ranks

    def is_first_copy(self, rank: int) -> bool:
        """Whether no lower rank holds the same heads."""
        return rank == 0 or self.shard_of(rank - 1) != self.shard_of(rank)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens (the last one may be partly filled)."""
        return -(-num_tokens // self.block_tokens)

    @property
    def slab_bytes(self) -> int:
        """Bytes of one block over all layers of one rank: the unit of an entry."""
        return self.num_layers * self.block_bytes

    def rank_bytes(self, num_tokens: int) -> int:
        """Bytes of one rank's part of an entry for `num_tokens` tokens."""
        return self.num_blocks(num_tokens) * self.slab_bytes

    def entry_bytes(self, num_tokens: int) -> int:
        """Bytes of a whole entry for `num_tokens` tokens, all ranks."""
        return self.num_ranks * self.rank_bytes(num_tokens)

    @property
    def frame_blocks(self) -> int:
        """Blocks per frame, so that a payload stays near FRAME_BYTES."""
        return max(1, FRAME_BYTES // self.slab_bytes)

    def offset(self, num_tokens: int, rank: int, block: int) -> int:
        """Byte offset of `block` of `rank` inside an entry for `num_tokens` tokens."""
        return rank * self.rank_bytes(num_tokens) + block * self.slab_bytes

    def differences(self, other: KvLayout) -> list[str]:
        """`name: mine != theirs` for each field that differs; empty when raw blocks can be exchanged."""
        if self == other:  # so it is for each transfer, and to look at each field takes longer
            return []
        return differences(self, other, [f.name for f in fields(self)])


def differences(mine: KvLayout, theirs: KvLayout, names: Sequence[str]) -> list[str]:
    """`name: mine != theirs` for each of the fields `names` that differs."""
    return [f"{n}: {getattr(mine, n)} != {getattr(theirs, n)}" for n in names if getattr(mine, n) != getattr(theirs, n)]


def hash_tokens(token_ids: Sequence[int]) -> str:
    """A 128-bit hex digest of token ids (little-endian u32 each), to refuse the KV of another prompt."""
    return hashlib.blake2b(struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=16).hexdigest()
