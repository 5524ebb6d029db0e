"""Between paged caches whose tokens can be addressed and entries of form `tokens`: one gather, one scatter, converting on the way.

    cache of a layer   [blocks, heads, block_tokens, 2 x head_dim], in whatever physical order its strides say
    entry              uint8 [tokens, layers, bytes of a row], a row being [2, heads, head_dim] numbers (then scales, when quantised)

On CUDA a Triton kernel does all layers in one launch (kernels.py); elsewhere, and as its reference, torch does one layer at a time.
GPUs before compute capability 8.9 have no conversion to fp8 that Triton could use: there, too, torch does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from disagg.kv.tensors.quantise import decode_rows, encode_rows

_FP8 = {"fp8", "float8_e4m3fn"}


def on_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [len(numbers)]. To a GPU from page-locked memory: a copy from other memory would wait for the step under way."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int64)
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Slots:
    """Where consecutive tokens lie in a paged cache: `blocks` and `slots`, int64 [tokens] on the cache's device."""

    blocks: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def of(cls, block_ids: Sequence[int], block_tokens: int, num_tokens: int, device: torch.device) -> Slots:
        """Of the first `num_tokens` tokens of these blocks."""
        at = torch.arange(num_tokens, device=device)
        ids = on_device(block_ids, device)
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
    if has_kernel(caches[0].device, dtype):
        from disagg.kv.tensors.kernels import gather_on_device

        gather_on_device(caches, tokens, out, dtype)
    else:
        gather_by_layer(caches, tokens, out, dtype)


def gather_by_layer(caches: Sequence[torch.Tensor], tokens: Slots, out: torch.Tensor, dtype: str) -> None:
    """As `gather_tokens`, in torch."""
    rows = out if out.device == caches[0].device else torch.empty_like(out, device=caches[0].device)
    for layer, cache in enumerate(caches):
        numbers = cache[tokens.blocks, :, tokens.slots].unflatten(-1, (2, -1)).transpose(1, 2)  # [tokens, 2, heads, head_dim]
        encode_rows(numbers.flatten(1, 2), rows[:, layer], dtype)
    if rows is not out:
        out.copy_(rows, non_blocking=True)


def scatter_tokens(source: torch.Tensor, caches: Sequence[torch.Tensor], tokens: Slots, heads: HeadRange, dtype: str) -> None:
    """`source` uint8 [tokens, layers, bytes of a row] of the entry's `dtype` -> those heads of the caches, in the caches' own type."""
    if has_kernel(caches[0].device, dtype):
        from disagg.kv.tensors.kernels import scatter_on_device

        scatter_on_device(source, caches, tokens, heads, dtype)
    else:
        scatter_by_layer(source, caches, tokens, heads, dtype)


def scatter_by_layer(source: torch.Tensor, caches: Sequence[torch.Tensor], tokens: Slots, heads: HeadRange, dtype: str) -> None:
    """As `scatter_tokens`, in torch."""
    rows = source.to(caches[0].device, non_blocking=True)
    theirs, mine = slice(heads.start, heads.start + heads.count), slice(heads.at, heads.at + heads.count)
    for layer, cache in enumerate(caches):
        numbers = decode_rows(rows[:, layer], 2 * heads.of, dtype, cache.dtype).unflatten(1, (2, heads.of))
        cache[:, mine][tokens.blocks, :, tokens.slots] = numbers[:, :, theirs].transpose(1, 2).flatten(2)


def has_kernel(device: torch.device, dtype: str) -> bool:
    """Whether entries of `dtype` have a kernel on that device."""
    return device.type == "cuda" and (dtype not in _FP8 or torch.cuda.get_device_capability(device) >= (8, 9))
