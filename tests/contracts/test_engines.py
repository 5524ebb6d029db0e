"""The engine contract on engine `simulated`, with one rank and several, in speed and slow, with room and without."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from disagg.config import SimulatedSettings
from disagg.engine.simulated import SimulatedEngine, start_simulated_engine
from disagg.engine.simulated_model import expected_tokens
from disagg.types import Request
from tests.contracts.engine_contract import EngineContract, Rig
from tests.fake_entries import FakeInboxEntry, FakeOutboxEntry

VARIANTS: dict[str, dict[str, Any]] = {
    "one-rank": {"tp": 1, "gpu": "h200", "shape": "llama-3.1-8b", "speed": 0},
    "four-ranks": {"tp": 4, "speed": 0},
    "timed": {"tp": 2, "gpu": "h200", "speed": 50},
    "little-room": {"tp": 4, "speed": 0, "kv_cache_tokens": 512, "max_model_len": 512},
    "big-kv": {"tp": 2, "gpu": "h200", "speed": 0, "kv_bytes_per_token": 1 << 14, "block_tokens": 32},
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def settings(request: pytest.FixtureRequest) -> SimulatedSettings:
    return SimulatedSettings(max_num_batched_tokens=64, **{"max_model_len": 4096, **request.param})


@pytest.fixture
async def rig(settings: SimulatedSettings) -> AsyncIterator[Rig]:
    names = ("prefill", "decode", "colocated")
    engines: list[SimulatedEngine] = [await start_simulated_engine(settings, name) for name in names]
    fresh = itertools.count(1)

    def prompt(length: int) -> tuple[int, ...]:
        seed = next(fresh)
        return tuple((seed * 7919 + 31 * i * i + i) % settings.vocab_size for i in range(length))

    async def expected(request: Request) -> tuple[int, ...]:
        sampling, prior = request.sampling, request.prior_output
        return expected_tokens(settings, request.prompt_token_ids, sampling.max_tokens, sampling, prior)

    async def open_entry(request: Request) -> FakeOutboxEntry:
        return FakeOutboxEntry(engines[0].layout, request.num_context_tokens, request.request_id)

    async def move(request: Request, entry: FakeOutboxEntry) -> FakeInboxEntry:
        return entry.to_inbox()

    async def assert_empty() -> None:
        await asyncio.sleep(0)
        for engine in engines:
            engine.assert_empty()

    yield Rig(
        *engines,
        prompt=prompt,
        expected=expected,
        open=open_entry,
        move=move,
        is_ended=lambda entry: entry.is_ended,
        assert_empty=assert_empty,
        vocab_size=settings.vocab_size,
        max_model_len=settings.max_model_len,
        chunk_tokens=settings.max_num_batched_tokens,
    )
    for engine in engines:
        await engine.close()


class TestSimulatedEngine(EngineContract):
    pass
