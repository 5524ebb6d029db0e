"""Copies between a paged cache and a box entry: exact for every cache layout that keeps a block together, refused for the others."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import xxhash

torch = pytest.importorskip("torch")

from disagg.engine.vllm_memory import CacheBlocks, RankBoxes  # noqa: E402 (needs torch)
from disagg.engine.vllm_plan import Copy  # noqa: E402
from disagg.errors import ConfigError  # noqa: E402
from disagg.kv.layout import KvLayout  # noqa: E402

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 12, 2, 32, 16
# Names as vLLM's: the physical order of (L)ayer, (B)lock, (H)ead, tokens (N), (C)ontent.
ORDERS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "BLHNC": (1, 0, 2, 3, 4), "BLNHC": (1, 0, 3, 2, 4)}
SCATTERED_BY_HEAD = {"LHBNC": (0, 2, 1, 3, 4), "BHLNC": (1, 2, 0, 3, 4)}


def caches(order: tuple[int, ...], seed: int) -> dict[str, Any]:
    """Per-layer views [blocks, heads, tokens, content] of random bytes that lie in `order`."""
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
    generator = torch.Generator().manual_seed(seed)
    physical = torch.randint(-30000, 30000, [shape[d] for d in order], dtype=torch.int16, generator=generator).view(torch.bfloat16)
    logical = physical.permute([order.index(d) for d in range(5)])
    return {f"layer.{i}": logical[i] for i in range(LAYERS)}


LAYOUT = KvLayout("m", "b", "bfloat16", TOKENS, LAYERS, HEADS * TOKENS * CONTENT * 2, num_ranks=2)


def boxes(kv: dict[str, Any], rank: int = 0) -> tuple[RankBoxes, mmap.mmap, mmap.mmap, list[Any]]:
    sent: list[Any] = []
    outbox, inbox = mmap.mmap(-1, 1 << 20), mmap.mmap(-1, 1 << 20)
    return RankBoxes(CacheBlocks.of(kv, BLOCKS), LAYOUT, rank, outbox, inbox, sent.extend), outbox, inbox, sent


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("ids", [(4, 5, 6), (9, 0, 3), (7,)], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_round_trip_is_exact_and_touches_nothing_else(order: tuple[int, ...], ids: tuple[int, ...], rank: int) -> None:
    source, target = caches(order, 1), caches(order, 2)
    before = {name: layer.clone() for name, layer in target.items()}
    out, outbox, _, sent = boxes(source, rank)
    into, _, inbox, _ = boxes(target, rank)
    num_tokens = 5 * TOKENS
    staged = Copy("t", 4096, num_tokens, 1, ids)
    placed = out.stage([staged])
    out.finish_step(lambda: [("staged", *frame) for frame in out.frames(placed)])
    inbox[:] = outbox[:]
    landing = tuple(reversed(range(BLOCKS)))[: len(ids)]
    into.load([Copy("t", 4096, num_tokens, 1, landing)])
    for name, layer in target.items():
        for block in range(BLOCKS):
            expected = source[name][ids[landing.index(block)]] if block in landing else before[name][block]
            assert torch.equal(layer[block].view(torch.int16), expected.view(torch.int16))
    slab = LAYERS * HEADS * TOKENS * CONTENT * 2
    start = 4096 + (rank * 5 + 1) * slab
    frames = [(1, len(ids))]
    digests = [xxhash.xxh3_64_intdigest(outbox[start + (b - 1) * slab : start + (b - 1 + n) * slab]) for b, n in frames]
    assert sent == [("staged", "t", b, n, digest) for (b, n), digest in zip(frames, digests, strict=True)]


@pytest.mark.parametrize("order", SCATTERED_BY_HEAD.values(), ids=SCATTERED_BY_HEAD.keys())
def test_a_cache_that_scatters_blocks_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="in one piece"):
        CacheBlocks.of(caches(order, 1), BLOCKS)


def test_state_that_is_not_blocks_is_refused() -> None:
    kv = caches(ORDERS["LBHNC"], 1)
    with pytest.raises(ConfigError, match=r"layer\.9"):
        CacheBlocks.of({**kv, "layer.9": torch.zeros(BLOCKS + 1, 8)}, BLOCKS)
    with pytest.raises(ConfigError, match="unlike cache sizes"):
        CacheBlocks.of({**kv, "layer.9": torch.zeros(BLOCKS, 8)}, BLOCKS)


def test_layers_that_share_a_cache_count_once() -> None:
    kv = caches(ORDERS["LBHNC"], 1)
    assert len(CacheBlocks.of({**kv, "shared": kv["layer.0"]}, BLOCKS).layers) == LAYERS


@pytest.mark.parametrize(
    "copy",
    [
        Copy("t", 1 << 20, 32, 0, (1,)),
        Copy("t", -8, 32, 0, (1,)),
        Copy("t", 4, 32, 0, (1,)),
        Copy("t", 0, 32, 0, (1, 2)),
        Copy("t", 0, 32, 1, (1,)),
        Copy("t", 0, 32, 0, ()),
        Copy("t", 0, 1 << 30, 0, (1,)),
    ],
    ids=str,
)
def test_what_does_not_lie_in_the_box_is_seen_before_memory_is_touched(copy: Copy) -> None:
    rank_boxes, *_ = boxes(caches(ORDERS["LBHNC"], 1))
    assert not rank_boxes.can_load(copy)
    assert not rank_boxes.can_stage(copy)
    assert rank_boxes.can_load(Copy("t", 0, 33, 1, (1,)))
