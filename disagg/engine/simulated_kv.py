"""The simulated engine's KV as bytes in box entries: numbers, heads and ranks laid out as a real engine's, re-sharded and converted. Pure.

    codes      [tokens, kv heads, 2, head_dim] numbers of one byte, what the next token is drawn from
    stored     a number c of cache dtype `simulated-fp8` is the byte c; of `simulated-bf16` the bytes -34 c and 7 c (mod 256), and the pair
               (a, b) is read as a + 5 b: one damaged byte always changes the number, as do swapped ones
    blocks     [ranks, tokens, heads of the rank, 2, head_dim] stored numbers; a last block's tail is zero
    tokens     [shards, tokens, 2, heads of the shard, head_dim] stored numbers

Where the bytes of a token do not divide into heads the layout is opaque: codes are then the bytes themselves, an equal part for each rank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disagg.kv.form import TOKENS, head_parts
from disagg.kv.layout import KvLayout

Codes = NDArray[np.uint8]  # [tokens, numbers of a token]
Stored = NDArray[np.uint8]  # [ranks of an entry, tokens, bytes of a token on one rank]

BF16 = "simulated-bf16"
_PAIR = np.dtype("<u2")
_PAIRS = np.array([-34 * c % 256 | 7 * c % 256 << 8 for c in range(256)], _PAIR)  # by number


def to_entry(codes: Codes, cache: KvLayout, entry: KvLayout, form: str) -> Stored:
    """What an engine with layout `cache` writes for these tokens into an entry of geometry `entry`."""
    shards = codes.reshape(len(codes), cache.num_shards, -1).swapaxes(0, 1)
    if form == TOKENS:
        heads = shards.reshape(cache.num_shards, len(codes), cache.shard_heads, 2, cache.head_dim)
        return _store(heads.swapaxes(2, 3).reshape(cache.num_shards, len(codes), -1), entry.dtype)
    if cache.num_shards < cache.num_ranks:  # the others hold copies
        shards = shards[[cache.shard_of(rank) for rank in range(cache.num_ranks)]]
    return _store(shards, cache.dtype)


def from_entry(stored: Stored, cache: KvLayout, entry: KvLayout, form: str) -> Codes:
    """What an engine with layout `cache` has after loading these tokens: every rank takes its heads, wherever they lie."""
    numbers = _load(stored, entry.dtype)
    num_tokens = stored.shape[1]
    if form != TOKENS:
        if cache.num_shards < cache.num_ranks:
            numbers = numbers[[rank for rank in range(cache.num_ranks) if cache.is_first_copy(rank)]]
        return np.ascontiguousarray(numbers.swapaxes(0, 1)).reshape(num_tokens, -1)
    shards = numbers.reshape(entry.num_ranks, num_tokens, 2, entry.shard_heads, entry.head_dim).swapaxes(2, 3)
    mine = np.empty((num_tokens, cache.num_shards, cache.shard_heads, 2, cache.head_dim), np.uint8)
    for rank in range(cache.num_ranks):
        shard = cache.shard_of(rank)
        for part in head_parts(entry, shard * cache.shard_heads, cache.shard_heads):
            theirs = shards[part.shard, :, part.start : part.start + part.num_heads]
            mine[:, shard, part.at : part.at + part.num_heads] = theirs
    return mine.reshape(num_tokens, -1)


def _store(codes: Stored, dtype: str) -> Stored:
    return _PAIRS.take(codes).view(np.uint8) if dtype == BF16 else codes


def _load(stored: Stored, dtype: str) -> Stored:
    if dtype != BF16:
        return stored
    pairs = stored.view(_PAIR)
    numbers = pairs >> 8
    numbers *= 5
    numbers += pairs
    return numbers.astype(np.uint8)  # of which the lower byte counts
