"""Caches of unlike block sizes, ranks, orders and dtypes, through a box in every form: each token's numbers arrive, and nothing else.

The kernels for GPUs run in Triton's interpreter, against the same references (tests/kernel_checks.py).
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from disagg.engine.vllm_memory import CacheBlocks, RankBoxes  # noqa: E402 (needs torch)
from disagg.engine.vllm_plan import Copy  # noqa: E402
from disagg.kv.form import agree, entry_layout  # noqa: E402
from disagg.kv.frames import Coverage  # noqa: E402
from disagg.kv.layout import KvLayout, Packing  # noqa: E402
from disagg.kv.tensors.quantise import LIMIT, decode_rows, dequantise, encode_rows, quantise  # noqa: E402
from disagg.kv.tensors.token_copy import Slots  # noqa: E402

LAYERS, HEADS, DIM, BLOCKS = 2, 4, 8, 40


class Side:
    """The ranks of one engine: caches [blocks, heads, block_tokens, 2 x DIM] with known numbers, and what the test expects of them."""

    def __init__(self, block_tokens: int, ranks: int, order: str, dtype: str, packing: Packing = Packing.TOKENS) -> None:
        wide = KvLayout("m", "b", dtype, block_tokens, LAYERS, 1, ranks, HEADS, DIM, packing)
        self.layout = replace(wide, block_bytes=wide.shard_heads * block_tokens * 2 * DIM * getattr(torch, dtype).itemsize)
        shape = (BLOCKS, wide.shard_heads, block_tokens, 2 * DIM)
        place = [0, 2, 1, 3] if order == "NHD" else [0, 1, 2, 3]
        self.caches = [
            {f"l{i}": torch.zeros([shape[d] for d in place], dtype=getattr(torch, dtype)).permute(place) for i in range(LAYERS)}
            for _ in range(ranks)
        ]
        self.memory = mmap.mmap(-1, 1 << 20)
        self.sent: list[Any] = []
        self.ranks = [
            RankBoxes(CacheBlocks.of(cache, BLOCKS), self.layout, rank, self.memory, self.memory, self.sent.extend)
            for rank, cache in enumerate(self.caches)
        ]

    def blocks_of(self, num_tokens: int, start: int) -> tuple[int, ...]:
        """Scattered block ids for that many tokens."""
        return tuple((start + 7 * i) % BLOCKS for i in range(-(-num_tokens // self.layout.block_tokens)))

    def write(self, numbers: Any, block_ids: tuple[int, ...]) -> None:
        """`numbers` [tokens, LAYERS, 2, HEADS, DIM] into every rank's cache."""
        tokens = torch.arange(len(numbers))
        blocks = torch.tensor(block_ids)[tokens // self.layout.block_tokens]
        for rank, cache in enumerate(self.caches):
            heads = self.layout.shard_heads
            first = self.layout.shard_of(rank) * heads
            for layer in range(LAYERS):
                mine = numbers[:, layer, :, first : first + heads]
                cache[f"l{layer}"][blocks, :, tokens % self.layout.block_tokens] = mine.transpose(1, 2).flatten(2).to(cache["l0"].dtype)

    def read(self, num_tokens: int, block_ids: tuple[int, ...], rank: int) -> Any:
        """[tokens, LAYERS, 2, heads of the rank, DIM] floats."""
        slots = Slots.of(block_ids, self.layout.block_tokens, num_tokens, torch.device("cpu"))
        layers = [self.caches[rank][f"l{i}"].float()[slots.blocks, :, slots.slots] for i in range(LAYERS)]
        return torch.stack(layers, 1).unflatten(-1, (2, DIM)).transpose(2, 3)


SIDE = st.tuples(st.sampled_from([2, 8, 12]), st.sampled_from([1, 2, 4, 8]), st.sampled_from(["NHD", "HND"]))


@settings(max_examples=80, deadline=None)
@given(
    SIDE,
    SIDE,
    st.sampled_from([("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "bfloat16")]),
    st.integers(1, 60),
    st.integers(0, 5),
    st.sampled_from(["stored", "int8", "fp8"]),
)
def test_every_number_arrives_where_it_belongs(p: Any, d: Any, dtypes: tuple[str, str], tokens: int, skip: int, wire: Any) -> None:
    source, sink = Side(*p, dtypes[0]), Side(*d, dtypes[1])
    generator = torch.Generator().manual_seed(tokens)
    numbers = torch.randn((tokens, LAYERS, 2, HEADS, DIM), generator=generator).to(torch.bfloat16).float()
    form = agree(source.layout, sink.layout, wire)
    if form.startswith("blocks"):
        return  # test_vllm_memory, and the test below
    entry = entry_layout(source.layout, form)
    source_ids, sink_ids = source.blocks_of(tokens, 3), sink.blocks_of(tokens, 11)
    source.write(numbers, source_ids)
    coverage = Coverage(entry, tokens)
    for rank, boxes in enumerate(source.ranks):
        for first in range(len(source_ids)):  # a step for each block
            copy = Copy("t", 64, tokens, first, source_ids[first : first + 1], 0, form, entry)
            assert boxes.can_stage(copy)
            for _, unit, count, _ in boxes.frames(boxes.stage([copy])):
                shard = source.layout.shard_of(rank)
                assert coverage.fault(shard, unit, count) is None
                assert coverage.count(shard, unit, count) == 0
                coverage.add(shard, unit, count)
    assert coverage.is_complete
    known = min(skip * sink.layout.block_tokens, tokens // sink.layout.block_tokens * sink.layout.block_tokens)
    rest = entry.rank_bytes(tokens - known)
    for shard in range(entry.num_ranks):  # what a carrier does
        end = 64 + (shard + 1) * entry.rank_bytes(tokens)
        sink.memory[64 + shard * rest : 64 + (shard + 1) * rest] = source.memory[end - rest : end]
    first = known // sink.layout.block_tokens
    if first < len(sink_ids):
        copy = Copy("t", 64, tokens, first, sink_ids[first:], known, form, entry)
        for boxes in sink.ranks:
            assert boxes.can_load(copy)
            boxes.load([copy])
    stored = numbers.to(getattr(torch, dtypes[0]))
    there = getattr(torch, dtypes[1])  # codes become the sink's numbers at once, not rounded to the source's first
    arrived = (stored.to(there) if wire == "stored" else dequantise(*quantise(stored, wire), wire, there)).float()
    arrived[:known] = 0.0
    for rank in range(sink.layout.num_ranks):
        at = sink.layout.shard_of(rank) * sink.layout.shard_heads
        got = sink.read(tokens, sink_ids, rank)
        want = arrived[:, :, :, at : at + sink.layout.shard_heads]
        assert torch.allclose(got, want, rtol=2**-8, atol=0) if wire != "stored" else torch.equal(got, want)
        unused = [block for block in range(BLOCKS) if block not in sink_ids[first:]]
        for layer in sink.caches[rank].values():
            assert not layer[unused].any(), "a block of somebody else"


@pytest.mark.parametrize("wire", ["int8", "fp8"])
def test_blocks_whose_inside_is_not_known_are_quantised_by_head(wire: str) -> None:
    source, sink = (Side(8, 2, "HND", "bfloat16", Packing.HEADS) for _ in range(2))
    numbers = torch.randn((20, LAYERS, 2, HEADS, DIM), generator=torch.Generator().manual_seed(1))
    ids, landing = source.blocks_of(20, 0), sink.blocks_of(20, 5)
    source.write(numbers, ids)
    form = f"blocks/{wire}"
    entry = entry_layout(source.layout, form)
    for rank in range(2):
        copy = Copy("t", 0, 20, 0, ids, 0, form, entry)
        assert source.ranks[rank].stage([copy])
    sink.memory[:] = source.memory[:]
    for rank in range(2):
        sink.ranks[rank].load([replace(copy, block_ids=landing)])
        got, want = sink.read(20, landing, rank), source.read(20, ids, rank)
        limit = want.abs().max() / LIMIT[wire] if wire == "int8" else want.abs() / 14
        assert ((got - want).abs() <= limit).all()
        assert (got - want).abs().max() > 0


@pytest.mark.parametrize("wire", ["int8", "fp8"])
def test_quantising_keeps_zeros_largest_numbers_and_tiny_ones(wire: str) -> None:
    rows = torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.0, 0.5], [3e38, -3e38, 0.0], [1e-30, 0.0, -1e-30]], dtype=torch.bfloat16)
    codes, scales = quantise(rows, wire)
    back = dequantise(codes, scales, wire, torch.bfloat16)
    assert back.isfinite().all()
    assert torch.allclose(back.float(), rows.float(), rtol=0.04, atol=0)


def test_the_kernels_equal_their_references() -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernel_checks.py"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout[-3000:]
    assert "7 passed" in result.stdout


def test_rows_of_strided_entries_are_encoded_in_place() -> None:
    rows = torch.zeros((5, 2, 36), dtype=torch.uint8)
    numbers = torch.randn((5, 2, 16), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    encode_rows(numbers, rows[:, 1], "int8")
    assert rows[:, 0].sum() == 0
    assert torch.allclose(decode_rows(rows[:, 1], 2, "int8", torch.bfloat16).float(), numbers.float(), atol=0.02)
