"""The engine contract on engine `simulated`: one rank and several, timed or not, with room or without, over plain memory and real boxes."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from disagg.config import SimulatedSettings
from disagg.engine.simulated import SimulatedEngine, start_simulated_engine
from disagg.engine.simulated_model import expected_tokens
from disagg.kv.layout import hash_tokens
from disagg.types import Request, Transfer, new_id
from tests.contracts.engine_contract import EngineContract, Rig
from tests.fake_entries import FakeInboxEntry, FakeOutboxEntry
from tests.kv_rig import rig as kv_rig

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


Engines = tuple[SimulatedEngine, SimulatedEngine, SimulatedEngine]


@pytest.fixture
async def engines(settings: SimulatedSettings) -> AsyncIterator[Engines]:
    started = [await start_simulated_engine(settings, name) for name in ("prefill", "decode", "colocated")]
    yield started[0], started[1], started[2]
    for engine in started:
        await engine.close()


def rig_of(engines: Engines, **kv: Any) -> Rig:
    """A rig of simulated engines, all but its KV path."""
    settings = engines[0].settings
    fresh = itertools.count(1)

    def prompt(length: int) -> tuple[int, ...]:
        seed = next(fresh)
        return tuple((seed * 7919 + 31 * i * i + i) % settings.vocab_size for i in range(length))

    async def expected(request: Request) -> tuple[int, ...]:
        sampling, prior = request.sampling, request.prior_output
        return expected_tokens(settings, request.prompt_token_ids, sampling.max_tokens, sampling, prior)

    return Rig(
        *engines,
        prompt=prompt,
        expected=expected,
        vocab_size=settings.vocab_size,
        max_model_len=settings.max_model_len,
        chunk_tokens=settings.max_num_batched_tokens,
        **kv,
    )


class TestOverPlainMemory(EngineContract):
    @pytest.fixture
    def rig(self, engines: Engines) -> Rig:
        async def open_entry(request: Request) -> FakeOutboxEntry:
            return FakeOutboxEntry(engines[0].layout, request.num_context_tokens, request.request_id)

        async def move(request: Request, entry: FakeOutboxEntry) -> FakeInboxEntry:
            return entry.to_inbox()

        async def assert_empty() -> None:
            for engine in engines:
                engine.assert_empty()

        return rig_of(engines, open=open_entry, move=move, is_ended=lambda entry: entry.is_ended, assert_empty=assert_empty)


class TestOverBoxes(EngineContract):
    """With the real outbox, inbox and carriers: what the engines write and read is mapped memory, and every byte of it comes free again."""

    @pytest.fixture(params=["one-rank", "four-ranks", "big-kv"])
    def settings(self, request: pytest.FixtureRequest) -> SimulatedSettings:
        return SimulatedSettings(max_num_batched_tokens=64, **{"max_model_len": 4096, **VARIANTS[request.param]})

    @pytest.fixture(params=["shm", "grpc"])
    async def rig(self, request: pytest.FixtureRequest, engines: Engines) -> AsyncIterator[Rig]:
        async with kv_rig(request.param, engines[0].layout) as kv:
            opened: dict[str, Transfer] = {}

            async def open_entry(request: Request) -> Any:
                context = (*request.prompt_token_ids, *request.prior_output)
                opened[request.request_id] = transfer = Transfer(new_id(), 0, kv.address, len(context), hash_tokens(context))
                return await kv.outbox.open(transfer)

            async def move(request: Request, entry: Any) -> Any:
                transfer = opened[request.request_id]
                await kv.inbox.fetch(transfer)
                return await kv.inbox.take(transfer.transfer_id)

            async def assert_empty() -> None:
                for engine in engines:
                    engine.assert_empty()
                for transfer in opened.values():
                    kv.outbox.release(transfer.transfer_id)
                    kv.inbox.release(transfer.transfer_id)
                await kv.assert_empty()

            def is_ended(entry: Any) -> bool:
                return bool(entry.writer_ended) if hasattr(entry, "writer_ended") else not entry.is_read

            yield rig_of(engines, open=open_entry, move=move, is_ended=is_ended, assert_empty=assert_empty)
