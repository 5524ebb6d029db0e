"""In which form two workers exchange KV, and that no re-sharding, conversion or left-out prefix ever changes an answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disagg.config import SimulatedSettings
from disagg.engine.simulated import SimulatedEngine
from disagg.engine.simulated_model import expected_tokens
from disagg.engine.simulated_settings import simulated_layout
from disagg.errors import LayoutMismatchError, TransferFencedError
from disagg.kv.box import Box
from disagg.kv.carriers.loopback import LoopbackCarrier
from disagg.kv.form import agree, check_entry, entry_layout, head_parts
from disagg.kv.inbox import Inbox
from disagg.kv.layout import KvLayout, Packing, hash_tokens
from disagg.kv.outbox import Outbox
from disagg.types import KvAddress, Request, Sampling, Transfer, new_id

# Llama-3.1-8B on GPUs, and on a CPU.
GPU = KvLayout("llama", "FLASH_ATTN", "bfloat16/auto", 16, 32, 16 * 8 * 256 * 2, 1, 8, 128, Packing.TOKENS)
CPU = replace(GPU, backend="CPU_ATTN", packing=Packing.HEADS)
OPAQUE = replace(GPU, backend="NEW_ATTN", kv_heads=0, head_dim=0, packing=Packing.OPAQUE)


def larger_blocks(layout: KvLayout) -> KvLayout:
    return replace(layout, block_tokens=2 * layout.block_tokens, block_bytes=2 * layout.block_bytes)


def more_ranks(layout: KvLayout, ranks: int) -> KvLayout:
    wider = replace(layout, num_ranks=ranks)
    return replace(wider, block_bytes=layout.block_bytes * wider.shard_heads // layout.shard_heads)


@pytest.mark.parametrize("layout", [GPU, CPU, OPAQUE], ids=["gpu", "cpu", "opaque"])
def test_equal_caches_exchange_blocks(layout: KvLayout) -> None:
    assert agree(layout, layout) == "blocks"
    assert entry_layout(layout, "blocks") == layout


@pytest.mark.parametrize("sink", [larger_blocks(GPU), more_ranks(GPU, 2), more_ranks(GPU, 16), replace(GPU, backend="FLASHINFER")])
def test_unlike_caches_whose_tokens_can_be_addressed_exchange_tokens(sink: KvLayout) -> None:
    assert agree(GPU, sink) == agree(sink, GPU) == "tokens"
    for source in (GPU, sink):
        check_entry(GPU, entry_layout(source, "tokens"), "tokens")


@pytest.mark.parametrize(
    ("source", "sink", "why"),
    [
        (CPU, larger_blocks(CPU), r"block_tokens: 16 != 32.*CPU_ATTN does not keep tokens apart"),
        (OPAQUE, larger_blocks(OPAQUE), "NEW_ATTN"),
        (GPU, CPU, "CPU_ATTN"),
        (GPU, replace(GPU, model="another", block_tokens=32), "model: llama != another"),
        (GPU, replace(GPU, kv_heads=4), "kv_heads: 8 != 4"),
        (GPU, replace(larger_blocks(GPU), dtype="uint8/nvfp4"), "uint8"),
    ],
)
def test_the_rest_is_refused_with_what_differs(source: KvLayout, sink: KvLayout, why: str) -> None:
    with pytest.raises(LayoutMismatchError, match=why):
        agree(source, sink)


def test_quantised_forms_are_about_half_as_large() -> None:
    for layout, form in ((GPU, "tokens/int8"), (CPU, "blocks/fp8")):
        assert agree(layout, layout if form.startswith("blocks") else larger_blocks(layout), form.partition("/")[2]) == form  # type: ignore[arg-type]
        share = entry_layout(layout, form).entry_bytes(64) / layout.entry_bytes(64)
        assert 0.5 < share < 0.51
    assert agree(GPU, GPU, "int8") == "blocks/int8"
    eight = replace(GPU, dtype="float8_e4m3fn/fp8", block_bytes=GPU.block_bytes // 2)
    assert agree(eight, eight, "fp8") == "blocks", "one-byte numbers are as small already"
    for layout in (OPAQUE, simulated_layout(SimulatedSettings())):
        with pytest.raises(LayoutMismatchError, match=r"kv\.wire_dtype fp8"):
            agree(layout, layout, "fp8")


@pytest.mark.parametrize(
    ("change", "form"),
    [
        ({"num_ranks": 3}, "tokens"),
        ({"num_ranks": 1 << 40}, "tokens"),
        ({"dtype": "int8"}, "tokens"),
        ({"dtype": "complex64"}, "tokens"),
        ({"block_bytes": 8}, "tokens"),
        ({"block_tokens": 2}, "tokens"),
        ({"dtype": "bfloat16"}, "tokens/fp8"),
        ({"num_layers": 1}, "blocks"),
        ({}, "nonsense"),
        ({}, "tokens/int3"),
    ],
)
def test_an_entry_that_is_not_what_was_agreed_is_refused(change: dict[str, Any], form: str) -> None:
    entry = replace(entry_layout(GPU, form if form in ("blocks", "tokens", "tokens/fp8") else "tokens"), **change)
    with pytest.raises(LayoutMismatchError):
        check_entry(GPU, entry, form)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_every_head_is_taken_once_from_where_it_lies(shards: int, ranks: int) -> None:
    entry = entry_layout(more_ranks(GPU, shards), "tokens")
    mine = 8 // ranks
    for rank in range(ranks):
        parts = head_parts(entry, rank * mine, mine)
        assert [p.at for p in parts] == [sum(q.num_heads for q in parts[:i]) for i in range(len(parts))]
        heads = [p.shard * entry.shard_heads + p.start + i for p in parts for i in range(p.num_heads)]
        assert heads == list(range(rank * mine, (rank + 1) * mine))


class Pair:
    """Two simulated engines and the KV path between them, without workers."""

    def __init__(self, p: SimulatedSettings, d: SimulatedSettings) -> None:
        self.p, self.d = SimulatedEngine(p, "p"), SimulatedEngine(d, "d")
        self.boxes = [Box(1 << 20, "out"), Box(1 << 20, "in")]
        self.carrier = LoopbackCarrier()
        self.outbox = Outbox(self.boxes[0], self.p.layout, new_id())
        self.inbox = Inbox(self.boxes[1], self.d.layout, {"loopback": self.carrier}, "host")

    async def run(self, request: Request, first_token: int | None = None) -> tuple[int, ...]:
        """The answer of prefill on one and decode on the other. `first_token`: as if the decode engine had said so."""
        endpoint = await self.carrier.serve(self.outbox)
        address = KvAddress("p", self.outbox.epoch, "host", (("loopback", endpoint),))
        tokens = request.prompt_token_ids
        form = agree(self.p.layout, self.d.layout)
        known = await self.d.cached_tokens(request) if first_token is None else first_token
        transfer = Transfer(new_id(), 0, address, len(tokens), hash_tokens(tokens), form, known)
        fetch = asyncio.ensure_future(self.inbox.fetch(transfer))
        first = await self.p.prefill(request, await self.outbox.open(transfer))
        await fetch
        entry = await self.inbox.take(transfer.transfer_id)
        rest = [t.token_id async for c in self.d.decode(request, first, entry) for t in c.tokens]
        return (first.first.token_id, *rest)

    async def close(self) -> None:
        for part in (self.p, self.d, self.outbox, self.inbox):
            part.assert_empty()
        await self.inbox.close()
        await self.carrier.close()
        for engine in (self.p, self.d):
            await engine.close()
        for box in self.boxes:
            box.close()


def engine_settings(**values: Any) -> SimulatedSettings:
    dtype = values.pop("dtype", "bf16")
    base = {"speed": 0, "shape": "llama-3.1-8b", "kv_cache_tokens": 4096, "max_num_batched_tokens": 48, "eos_mean_tokens": 1 << 20}
    return SimulatedSettings.model_validate({**base, "dtype": dtype, "kv_bytes_per_token": 64 if dtype == "bf16" else 32, **values})


def request_of(prompt: list[int]) -> Request:
    return Request(new_id(), tuple(prompt), Sampling(max_tokens=5, temperature=0.0, ignore_eos=True))


SIDE = st.fixed_dictionaries(
    {"block_tokens": st.sampled_from([1, 4, 16, 24]), "tp": st.sampled_from([1, 2, 4, 8, 16]), "dtype": st.sampled_from(["bf16", "fp8"])}
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SIDE, SIDE, st.lists(st.integers(0, 999), min_size=1, max_size=150), st.integers(0, 150))
def test_any_two_engines_of_one_model_give_the_right_answer(p: Any, d: Any, prompt: list[int], warm: int) -> None:
    """Block sizes, ranks (1 -> 2, 2 -> 1, 2 -> 4, replicated heads), dtypes, lengths, and a prefix of any length that decode has."""

    async def run() -> None:
        pair = Pair(engine_settings(**p), engine_settings(**d))
        if prompt[:warm]:
            async for _ in pair.d.generate(request_of(prompt[:warm])):
                pass
        request = request_of(prompt)
        known = await pair.d.cached_tokens(request)
        assert known <= len(prompt)
        assert known >= len(prompt[:warm]) // d["block_tokens"] * d["block_tokens"]
        assert await pair.run(request) == expected_tokens(pair.p.settings, prompt, 5, request.sampling)
        layout = entry_layout(pair.p.layout, agree(pair.p.layout, pair.d.layout))
        assert pair.inbox.counters.saved_bytes == layout.entry_bytes(len(prompt)) - layout.entry_bytes(len(prompt) - known)
        await pair.close()

    asyncio.run(run())


async def test_a_prefix_that_was_evicted_meanwhile_is_computed_again() -> None:
    d = engine_settings(block_tokens=16, kv_cache_tokens=160)
    pair = Pair(engine_settings(), d)
    prompt = list(range(100))
    async for _ in pair.d.generate(request_of(prompt)):
        pass
    known = await pair.d.cached_tokens(request_of(prompt))
    assert known == 96
    async for _ in pair.d.generate(request_of([7] * 150)):
        pass
    assert await pair.d.cached_tokens(request_of(prompt)) < known
    assert await pair.run(request_of(prompt), first_token=known) == expected_tokens(d, prompt, 5, request_of(prompt).sampling)
    await pair.close()


async def test_a_pull_from_inside_a_block_is_refused() -> None:
    pair = Pair(engine_settings(), engine_settings())
    with pytest.raises(TransferFencedError, match="cannot be read from token 5 on"):
        await pair.run(request_of(list(range(40))), first_token=5)
    for transfer_id in list(pair.outbox._entries):
        pair.outbox.release(transfer_id)
    await pair.close()
