"""Triton kernels that copy between paged caches and entries, all layers in one launch, on the current stream.

They equal their references in torch byte for byte: `token_copy.py` and `quantise.py` for tokens, plain indexing for blocks. With
TRITON_INTERPRET=1 they run on a CPU, which is how they are tested where there is no GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from disagg.kv.tensors.quantise import LIMIT

if TYPE_CHECKING:
    from disagg.kv.tensors.token_copy import HeadRange, Slots

_TYPES: dict[str, Any] = {
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float32": tl.float32,
    "float8_e4m3fn": tl.float8e4nv,
}
_CODES = {"int8": 1, "fp8": 2}
_WORDS = 2048  # of 8 bytes, per program


@triton.jit  # type: ignore[untyped-decorator]
def _gather_tokens(  # type: ignore[no-untyped-def]
    bases, blocks, slots, out, stride_block, stride_head, stride_slot, num_layers, row_bytes, limit,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, NUMBER: tl.constexpr, CODE: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """One (token, layer): its [2 x HEADS, DIM] numbers -> a row. GROUPS and WIDTH: the next powers of two."""
    token, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group, column = tl.arange(0, GROUPS), tl.arange(0, WIDTH)
    inside = (group < 2 * HEADS)[:, None] & (column < DIM)[None, :]
    cache = tl.multiple_of(tl.load(bases + layer).to(tl.pointer_type(NUMBER)), ALIGN)
    place = tl.load(blocks + token) * stride_block + tl.load(slots + token) * stride_slot
    place = place + ((group % HEADS) * stride_head)[:, None] + ((group // HEADS) * DIM)[:, None] + column[None, :]
    numbers = tl.load(cache + place, mask=inside, other=0)
    row = out + (token * num_layers + layer) * row_bytes
    at = (group * DIM)[:, None] + column[None, :]
    if CODE == 0:
        tl.store(row.to(tl.pointer_type(NUMBER)) + at, numbers, mask=inside)
    else:
        values = numbers.to(tl.float32)
        scale = tl.div_rn(tl.max(tl.abs(values), axis=1), tl.zeros([GROUPS], tl.float32) + limit)
        bits = scale.to(tl.int32, bitcast=True)  # to bfloat16, half to even
        scale = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        scale = tl.where(scale == 0, 1.0, scale)
        scaled = tl.div_rn(values, tl.broadcast_to(scale[:, None], [GROUPS, WIDTH]))
        scaled = tl.minimum(tl.maximum(scaled, -limit), limit)
        if CODE == 1:
            rounded = (scaled + 12582912.0) - 12582912.0  # 1.5 x 2^23: what is left is rounded half to even
            codes = rounded.to(tl.int8).to(tl.uint8, bitcast=True)
        else:
            codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(row + at, codes, mask=inside)
        scales = (row + 2 * HEADS * DIM).to(tl.pointer_type(tl.bfloat16))
        tl.store(scales + group, scale.to(tl.bfloat16), mask=group < 2 * HEADS)


@triton.jit  # type: ignore[untyped-decorator]
def _scatter_tokens(  # type: ignore[no-untyped-def]
    bases, blocks, slots, source, stride_block, stride_head, stride_slot, num_layers, row_bytes, first_at, first_of,
    HEADS: tl.constexpr, OF: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    NUMBER: tl.constexpr, STORED: tl.constexpr, CODE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """One (token, layer): HEADS of a row's OF heads -> the cache's heads from `first_at` on, as numbers of its own type."""
    token, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group, column = tl.arange(0, GROUPS), tl.arange(0, WIDTH)
    inside = (group < 2 * HEADS)[:, None] & (column < DIM)[None, :]
    row = source + (token * num_layers + layer) * row_bytes
    theirs = (group // HEADS) * OF + first_of + group % HEADS
    at = (theirs * DIM)[:, None] + column[None, :]
    if CODE == 0:
        numbers = tl.load(row.to(tl.pointer_type(STORED)) + at, mask=inside, other=0).to(NUMBER)
    else:
        codes = tl.load(row + at, mask=inside, other=0)
        scales = (row + 2 * OF * DIM).to(tl.pointer_type(tl.bfloat16))
        scale = tl.load(scales + theirs, mask=group < 2 * HEADS, other=0).to(tl.float32)
        signed = codes.to(tl.int8 if CODE == 1 else tl.float8e4nv, bitcast=True)
        values = signed.to(tl.float32)
        numbers = (values * scale[:, None]).to(NUMBER)
    cache = tl.multiple_of(tl.load(bases + layer).to(tl.pointer_type(NUMBER)), ALIGN)
    place = tl.load(blocks + token) * stride_block + tl.load(slots + token) * stride_slot
    place = place + ((first_at + group % HEADS) * stride_head)[:, None] + ((group // HEADS) * DIM)[:, None] + column[None, :]
    tl.store(cache + place, numbers, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_blocks(  # type: ignore[no-untyped-def]
    bases, block_ids, entry, stride, num_layers, num_words, GATHER: tl.constexpr, SIZE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A piece of one layer's block: cache -> entry, or back. Words of 8 bytes."""
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    word = tl.program_id(2) * SIZE + tl.arange(0, SIZE)
    cache = tl.multiple_of(tl.load(bases + layer).to(tl.pointer_type(tl.int64)), ALIGN) + tl.load(block_ids + row) * stride + word
    box = entry + (row * num_layers + layer) * num_words + word
    if GATHER:
        tl.store(box, tl.load(cache, mask=word < num_words), mask=word < num_words)
    else:
        tl.store(cache, tl.load(box, mask=word < num_words), mask=word < num_words)


def gather_on_device(caches: Sequence[torch.Tensor], tokens: Slots, out: torch.Tensor, dtype: str) -> None:
    """As token_copy.gather_tokens. `out` may be page-locked host memory: the rows are made on the device and copied once."""
    cache = caches[0]
    rows = out if out.device == cache.device else torch.empty(out.shape, dtype=torch.uint8, device=cache.device)
    heads, dim = cache.shape[1], cache.shape[3] // 2
    _gather_tokens[(len(tokens), len(caches))](
        _bases(caches), tokens.blocks, tokens.slots, rows, *_strides(cache), len(caches), rows.shape[2], LIMIT.get(dtype, 0.0),
        heads, dim, triton.next_power_of_2(2 * heads), triton.next_power_of_2(dim), _type(cache.dtype), _CODES.get(dtype, 0),
        _alignment(caches),
    )  # fmt: skip
    if rows is not out:
        out.copy_(rows, non_blocking=True)


def scatter_on_device(source: torch.Tensor, caches: Sequence[torch.Tensor], tokens: Slots, heads: HeadRange, dtype: str) -> None:
    """As token_copy.scatter_tokens."""
    cache = caches[0]
    rows = source.to(cache.device, non_blocking=True)
    dim = cache.shape[3] // 2
    _scatter_tokens[(len(tokens), len(caches))](
        _bases(caches), tokens.blocks, tokens.slots, rows, *_strides(cache), len(caches), rows.shape[2], heads.at, heads.start,
        heads.count, heads.of, dim, triton.next_power_of_2(2 * heads.count), triton.next_power_of_2(dim),
        _type(cache.dtype), _TYPES.get(dtype, tl.uint8), _CODES.get(dtype, 0), _alignment(caches),
    )  # fmt: skip


def gather_blocks(layers: Sequence[torch.Tensor], block_ids: torch.Tensor, out: torch.Tensor) -> None:
    """Rows `block_ids` of each layer [blocks, words] -> `out` int64 [len(block_ids), layers, words], by one launch and one copy."""
    rows = out if out.device == layers[0].device else torch.empty(out.shape, dtype=torch.int64, device=layers[0].device)
    _blocks(layers, block_ids, rows, True)
    if rows is not out:
        out.copy_(rows, non_blocking=True)


def scatter_blocks(layers: Sequence[torch.Tensor], block_ids: torch.Tensor, source: torch.Tensor) -> None:
    """`source` int64 [len(block_ids), layers, words] -> rows `block_ids` of each layer [blocks, words]."""
    _blocks(layers, block_ids, source.to(layers[0].device, non_blocking=True), False)


def _blocks(layers: Sequence[torch.Tensor], block_ids: torch.Tensor, rows: torch.Tensor, is_gather: bool) -> None:
    num_words = layers[0].shape[1]
    grid = (len(block_ids), len(layers), triton.cdiv(num_words, _WORDS))
    _copy_blocks[grid](_bases(layers), block_ids, rows, layers[0].stride(0), len(layers), num_words, is_gather, _WORDS, _alignment(layers))


def _bases(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Addresses of the layers, on their device."""
    return _addresses(tuple([t.data_ptr() for t in tensors]), tensors[0].device)


@functools.lru_cache(maxsize=16)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Kept, because bringing them to the device makes the host wait for it."""
    return torch.tensor(pointers, dtype=torch.int64, device=device)


def _alignment(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of which every layer's address is a multiple. Triton cannot know it of addresses that it loads, and without it reads and writes
    number by number.
    """
    return 16 if all(t.data_ptr() % 16 == 0 for t in tensors) else 1


def _strides(cache: torch.Tensor) -> tuple[int, int, int]:
    """Of block, head and slot, in numbers; a token's numbers of one head are one run."""
    assert cache.stride(3) == 1
    return cache.stride(0), cache.stride(1), cache.stride(2)


def _type(dtype: torch.dtype) -> Any:
    return _TYPES[str(dtype).removeprefix("torch.")]
