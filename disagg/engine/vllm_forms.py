"""Copies between a rank's cache and entries of any form (kv/form.py): where an entry's bytes lie, and the conversion on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from disagg.engine.vllm_plan import Copy
from disagg.kv.form import BLOCKS, TOKENS, head_parts
from disagg.kv.layout import KvLayout
from disagg.kv.tensors.quantise import decode_rows, encode_rows
from disagg.kv.tensors.token_copy import HeadRange, Slots, gather_tokens, scatter_tokens


@dataclass(frozen=True, slots=True)
class Span:
    """A copy's units of one of an entry's ranks: [first, first + count) of the entry's blocks, at byte `start` of the box."""

    first: int
    count: int
    start: int
    num_bytes: int


def span_of(copy: Copy, entry: KvLayout, rank: int, block_tokens: int) -> Span:
    """Where `copy` lies, in units of the entry's blocks (tokens, in form `tokens`). `block_tokens`: of the cache."""
    scale = block_tokens // entry.block_tokens
    first = copy.first_block * scale
    end = min(first + len(copy.block_ids) * scale, entry.num_blocks(copy.num_tokens))
    skipped = copy.first_token // entry.block_tokens
    start = copy.offset + rank * entry.rank_bytes(copy.num_tokens - copy.first_token) + (first - skipped) * entry.slab_bytes
    return Span(first, end - first, start, (end - first) * entry.slab_bytes)


def fits(copy: Copy, entry: KvLayout, box_bytes: int, block_tokens: int) -> bool:
    """Whether the copy lies inside its entry, and the entry inside a box of `box_bytes`."""
    num_blocks = -(-copy.num_tokens // block_tokens)
    skipped = copy.first_token // block_tokens
    end = copy.offset + entry.entry_bytes(copy.num_tokens - copy.first_token)
    inside = copy.offset >= 0 and end <= box_bytes and copy.offset % 8 == 0 and copy.first_token % block_tokens == 0
    return inside and skipped <= copy.first_block and 0 < len(copy.block_ids) <= num_blocks - copy.first_block


class FormCopies:
    """Gather and scatter of one rank for all forms but plain `blocks`.

    `caches`: per layer [blocks, heads, block_tokens, 2 x head_dim] as the backend views it. `rows`: per layer [blocks, block_words].
    """

    def __init__(self, caches: tuple[torch.Tensor, ...], rows: tuple[torch.Tensor, ...], layout: KvLayout, rank: int) -> None:
        self._caches = caches
        self._rows = rows
        self._layout = layout
        self._rank = rank

    def stages(self, form: str) -> bool:
        """Whether this rank writes entries of `form`: of ranks with the same heads, one does."""
        return form.partition("/")[0] == BLOCKS or self._layout.is_first_copy(self._rank)

    def entry_rank(self, form: str) -> int:
        """Which of the entry's ranks this rank writes."""
        return self._rank if form.partition("/")[0] == BLOCKS else self._layout.shard_of(self._rank)

    def gather(self, copy: Copy, entry: KvLayout, box: torch.Tensor, index: slice | torch.Tensor) -> None:
        """Cache -> box (uint8 [bytes])."""
        span = span_of(copy, entry, self.entry_rank(copy.form), self._layout.block_tokens)
        out = _units(box, span, entry)
        if copy.form.partition("/")[0] == TOKENS:
            gather_tokens(self._caches, self._slots(copy, span.count), out, entry.dtype)
            return
        device = self._rows[0].device
        rows = out if out.device == device else torch.empty_like(out, device=device)  # so that one copy brings all layers to the host
        for layer, numbers in enumerate(self._runs()):
            encode_rows(numbers[index], rows[:, layer], copy.form.partition("/")[2])
        if rows is not out:
            out.copy_(rows, non_blocking=True)

    def scatter(self, copy: Copy, entry: KvLayout, box: torch.Tensor, index: slice | torch.Tensor) -> None:
        """Box (uint8 [bytes]) -> cache."""
        if copy.form.partition("/")[0] == TOKENS:
            heads = self._layout.shard_heads
            for part in head_parts(entry, self._layout.shard_of(self._rank) * heads, heads):
                span = span_of(copy, entry, part.shard, self._layout.block_tokens)
                chosen = HeadRange(part.at, part.start, part.num_heads, entry.shard_heads)
                slots = self._slots(copy, span.count)
                scatter_tokens(_units(box, span, entry), self._caches, slots, chosen, entry.dtype)
            return
        span = span_of(copy, entry, self._rank, self._layout.block_tokens)
        source = _units(box, span, entry).to(self._rows[0].device, non_blocking=True)
        for layer, numbers in enumerate(self._runs()):
            numbers[index] = decode_rows(source[:, layer], numbers.shape[1], copy.form.partition("/")[2], numbers.dtype)

    def _runs(self) -> Iterator[torch.Tensor]:
        """Per layer [blocks, heads x 2, block_tokens x head_dim] numbers: runs of keys or values of one head, whatever their order."""
        for rows, cache in zip(self._rows, self._caches, strict=True):
            yield rows.view(cache.dtype).unflatten(1, (2 * self._layout.shard_heads, -1))

    def _slots(self, copy: Copy, num_tokens: int) -> Slots:
        return Slots.of(copy.block_ids, self._layout.block_tokens, num_tokens, self._caches[0].device)


def _units(box: torch.Tensor, span: Span, entry: KvLayout) -> torch.Tensor:
    """uint8 [units, layers, bytes]."""
    return box[span.start : span.start + span.num_bytes].view(span.count, entry.num_layers, entry.block_bytes)
