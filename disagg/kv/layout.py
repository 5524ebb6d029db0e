"""How one prompt's KV lies in a box entry, and whether two engines can exchange it.

Layout `blocks`: an entry is the raw bytes of whole cache blocks, [ranks, blocks, layers, block_bytes], where `block_bytes` is one
layer's block of one tensor-parallel rank, exactly as the attention backend keeps it. The last block may be partly filled; its
tail bytes carry no meaning. A range of blocks of one rank is contiguous, so a prefill chunk is one contiguous write.

Bit-exact, and independent of what the backend does inside a block (vLLM's CPU attention packs keys there).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields

FRAME_BYTES = 4 << 20  # a frame's payload stays near this: large enough to stream, small enough to interleave


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Everything that must be equal on both sides before raw blocks may move.

    `model`: a fingerprint of weights name + revision, layers, kv heads, head dim, dtype and rope. `backend`: attention backend's name.
    `block_tokens`: tokens per cache block. `block_bytes`: bytes of one block of one layer of one rank.
    """

    model: str
    backend: str
    dtype: str
    block_tokens: int
    num_layers: int
    block_bytes: int
    num_ranks: int = 1

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
        return [
            f"{f.name}: {getattr(self, f.name)} != {getattr(other, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]


def hash_tokens(token_ids: Sequence[int]) -> str:
    """A 128-bit hex digest of token ids (little-endian u32 each), to refuse the KV of another prompt."""
    return hashlib.blake2b(struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=16).hexdigest()
