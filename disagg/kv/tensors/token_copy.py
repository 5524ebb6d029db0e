"""Between paged caches whose tokens can be addressed and entries of form `tokens`: one gather, one scatter, converting on the way.

    cache of a layer   [blocks, heads, block_tokens, 2 x head_dim], in whatever physical order its strides say
    entry              uint8 [tokens, layers, bytes of a row], a row being [2, heads, head_dim] numbers (then scales, when quantised)

On CUDA a Triton kernel does all layers in one launch (kernels.py); elsewhere, and as its reference, torch does one layer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from disagg.kv.tensors.quantise import decode_rows, encode_rows


@dataclass(frozen=True, slots=True)
class Slots:
    """Where consecutive tokens lie in a paged cache: `blocks` and `slots`, int64 [tokens] on the cache's device."""

    blocks: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def of(cls, block_ids: Sequence[int], block_tokens: int, num_tokens: int, device: torch.device) -> Slots:
        """Of the first `num_tokens` tokens of these blocks."""
        at = torch.arange(num_tokens, device=device)
        ids = torch.tensor(block_ids, dtype=torch.int64, device=device)
        return cls(ids[at // block_tokens], at % block_tokens)

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Heads [at, at + count) of the cache are heads [start, start + count) of an entry's rows, which have `of` heads."""

    at: int
    start: int
    count: int
    of: int


def gather_tokens(caches: Sequence[torch.Tensor], tokens: Slots, out: torch.Tensor, dtype: str) -> None:
    """Caches -> `out` uint8 [tokens, layers, bytes of a row], all heads, as numbers of the entry's `dtype`."""
    if caches[0].is_cuda:
        from disagg.kv.tensors.kernels import gather_on_device

        gather_on_device(caches, tokens, out, dtype)
        return
    for layer, cache in enumerate(caches):
        numbers = cache[tokens.blocks, :, tokens.slots].unflatten(-1, (2, -1)).transpose(1, 2)  # [tokens, 2, heads, head_dim]
        encode_rows(numbers.flatten(1, 2), out[:, layer], dtype)


def scatter_tokens(source: torch.Tensor, caches: Sequence[torch.Tensor], tokens: Slots, heads: HeadRange, dtype: str) -> None:
    """`source` uint8 [tokens, layers, bytes of a row] of the entry's `dtype` -> those heads of the caches, in the caches' own type."""
    if caches[0].is_cuda:
        from disagg.kv.tensors.kernels import scatter_on_device

        scatter_on_device(source, caches, tokens, heads, dtype)
        return
    theirs, mine = slice(heads.start, heads.start + heads.count), slice(heads.at, heads.at + heads.count)
    for layer, cache in enumerate(caches):
        numbers = decode_rows(source[:, layer], 2 * heads.of, dtype, cache.dtype).unflatten(1, (2, heads.of))
        cache[:, mine][tokens.blocks, :, tokens.slots] = numbers[:, :, theirs].transpose(1, 2).flatten(2)
