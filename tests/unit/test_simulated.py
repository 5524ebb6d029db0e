"""What the simulated engine adds to the engine contract: its KV shows every fault, its clock is the roofline's, it dies on demand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from disagg.config import SimulatedSettings
from disagg.engine.simulated import SimulatedEngine, start_simulated_engine
from disagg.engine.simulated_model import SimulatedModel, expected_tokens
from disagg.engine.simulated_settings import simulated_model_info
from disagg.errors import ConfigError, EngineError, LayoutMismatchError, TransferCorruptError, TransferFencedError
from disagg.types import FinishReason, Prefilled, Request, Sampling, Token, new_id
from tests.fake_entries import FakeInboxEntry, FakeOutboxEntry

GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = tuple(range(100, 170))


def request_of(prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> Request:
    return Request(new_id(), prompt, Sampling(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}))


async def engine_of(**settings: Any) -> SimulatedEngine:
    return await start_simulated_engine(SimulatedSettings(**{"speed": 0, "max_num_batched_tokens": 64, **settings}), "sim")


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    engine = await engine_of()
    yield engine
    engine.assert_empty()
    await engine.close()


async def staged(engine: SimulatedEngine, request: Request) -> tuple[Prefilled, FakeInboxEntry]:
    entry = FakeOutboxEntry(engine.layout, request.num_context_tokens)
    return await engine.prefill(request, entry), entry.to_inbox()


async def decoded(engine: SimulatedEngine, request: Request, prefilled: Prefilled, inbox: FakeInboxEntry) -> tuple[int, ...]:
    return tuple([c.tokens[0].token_id async for c in engine.decode(request, prefilled, inbox)])


async def generated(engine: SimulatedEngine, request: Request) -> tuple[int, ...]:
    return tuple([c.tokens[0].token_id async for c in engine.generate(request)])


# The KV shows every fault


async def test_any_flipped_byte_of_kv_changes_the_answer(engine: SimulatedEngine) -> None:
    request = request_of()
    layout = engine.layout
    want = expected_tokens(engine.settings, PROMPT, 8, GREEDY)[1:]
    meaningful = len(PROMPT) * engine.settings.kv_bytes_per_token
    changed = 0
    for at in range(0, layout.entry_bytes(len(PROMPT)), 97):
        first, inbox = await staged(engine, request)
        inbox.contents[at] ^= 1
        answer = await decoded(engine, request, first, inbox)
        rank_at = at % layout.rank_bytes(len(PROMPT))
        is_tail = rank_at >= len(PROMPT) * layout.block_bytes // layout.block_tokens
        assert (answer == want) == is_tail, f"byte {at}"
        changed += answer != want
    assert changed >= meaningful // 97 - 8


async def test_swapped_lost_and_stale_blocks_change_the_answer(engine: SimulatedEngine) -> None:
    request = request_of()
    want = expected_tokens(engine.settings, PROMPT, 8, GREEDY)[1:]
    size = engine.layout.slab_bytes
    _, other = await staged(engine, request_of(tuple(range(200, 270))))
    first, good = await staged(engine, request)
    stale, lost, swapped = bytearray(good.contents), bytearray(good.contents), bytearray(good.contents)
    stale[size : 2 * size] = other.contents[size : 2 * size]
    lost[size : 2 * size] = bytes(size)
    swapped[: 2 * size] = good.contents[size : 2 * size] + good.contents[:size]
    for contents in (stale, lost, swapped):
        assert await decoded(engine, request, first, FakeInboxEntry(engine.layout, len(PROMPT), contents)) != want
    assert await decoded(engine, request, first, good) == want


def test_kv_of_a_token_depends_on_all_tokens_before_it() -> None:
    model = SimulatedModel(SimulatedSettings())
    base = model.extend(model.new_state(), PROMPT)
    for at in (0, 1, len(PROMPT) - 1):
        rows = model.extend(model.new_state(), (*PROMPT[:at], 7, *PROMPT[at + 1 :]))
        assert (rows[:at] == base[:at]).all()
        assert (rows[at:] != base[at:]).any(axis=1).all()
    swapped = model.extend(model.new_state(), (PROMPT[1], PROMPT[0], *PROMPT[2:]))
    assert (swapped[:2] != base[:2]).any(axis=1).all()


def test_kv_does_not_depend_on_the_chunks_it_was_made_in() -> None:
    model = SimulatedModel(SimulatedSettings(kv_bytes_per_token=52))
    whole, parts = model.new_state(), model.new_state()
    rows = model.extend(whole, PROMPT)
    assert rows.shape == (len(PROMPT), 52)
    for start in range(0, len(PROMPT), 9):
        assert (model.extend(parts, PROMPT[start : start + 9]) == rows[start : start + 9]).all()
    assert (parts.digest, parts.running, parts.num_tokens) == (whole.digest, whole.running, whole.num_tokens)


@pytest.mark.parametrize("kv_bytes", [4, 8, 20, 52, 64, 128, 256, 264, 2048])
def test_a_token_alone_has_the_kv_that_it_has_among_others(kv_bytes: int) -> None:
    model = SimulatedModel(SimulatedSettings(kv_bytes_per_token=kv_bytes))
    whole, parts = model.new_state(), model.new_state()
    for token_id in PROMPT:
        model.extend(whole, [token_id])
        model.extend_by_one(parts, token_id)
        assert (parts.digest, parts.running, parts.num_tokens) == (whole.digest, whole.running, whole.num_tokens)


async def test_nothing_of_an_earlier_transfer_leaves_in_the_tail_of_the_last_block(engine: SimulatedEngine) -> None:
    request = request_of(PROMPT[:17])
    entries = [FakeOutboxEntry(engine.layout, 17, fill=fill) for fill in (0x11, 0xEE)]
    for entry in entries:
        await engine.prefill(request, entry)
    assert entries[0].to_inbox().contents == entries[1].to_inbox().contents


# Sampling


async def test_answers_end_by_themselves_and_ignore_eos_goes_on() -> None:
    settings = SimulatedSettings(speed=0, eos_mean_tokens=6)
    engine = await start_simulated_engine(settings, "sim")
    lengths = []
    for seed in range(40):
        prompt = tuple(range(seed, seed + 20))
        ends = await generated(engine, request_of(prompt, max_tokens=64, ignore_eos=False))
        goes_on = await generated(engine, request_of(prompt, max_tokens=64))
        assert len(goes_on) == 64
        assert ends == goes_on[: len(ends)]
        assert (ends[-1] == settings.eos_token_id) == (len(ends) < 64)
        assert settings.eos_token_id not in ends[:-1]
        lengths.append(len(ends))
    assert 3 < sum(lengths) / len(lengths) < 12
    await engine.close()


async def test_first_token_that_is_eos_ends_at_the_prefill() -> None:
    settings = SimulatedSettings(speed=0, eos_mean_tokens=1)
    engine = await start_simulated_engine(settings, "sim")
    request = request_of(ignore_eos=False)
    first, inbox = await staged(engine, request)
    assert (first.first.token_id, first.finish) == (settings.eos_token_id, FinishReason.STOP)
    assert await decoded(engine, request, first, inbox) == ()
    assert inbox.is_ended
    engine.assert_empty()
    # Where every token is EOS, min_tokens still finds others.
    assert await generated(engine, request_of(ignore_eos=False, min_tokens=3)) != (settings.eos_token_id,)
    await engine.close()


def test_a_seed_matters_only_when_sampling() -> None:
    settings = SimulatedSettings()
    answers = {
        (temperature, seed): expected_tokens(settings, PROMPT, 12, Sampling(temperature=temperature, seed=seed, ignore_eos=True))
        for temperature in (0.0, 1.0)
        for seed in (None, 1, 2, -1, 1 << 70)
    }
    assert len({answers[0.0, seed] for seed in (None, 1, 2)} | {answers[1.0, None]}) == 1
    assert len(set(answers.values())) == 5


def test_tokens_spread_over_the_vocabulary() -> None:
    settings = SimulatedSettings(vocab_size=50, eos_mean_tokens=1 << 30)
    seen = set(expected_tokens(settings, (1, 2, 3), 1000, GREEDY))
    assert seen == set(range(50)) - {settings.eos_token_id}


# Staging


async def test_frames_leave_while_the_prompt_is_still_running() -> None:
    engine = await engine_of(speed=1, max_num_batched_tokens=32)
    request = request_of(tuple(range(200)))
    entry = FakeOutboxEntry(engine.layout, 200)
    task = asyncio.create_task(engine.prefill(request, entry))
    seen = set()
    while not task.done():
        seen.add(max((first + count for _, first, count, _ in entry.frames), default=0))
        await asyncio.sleep(0.001)
    assert len(seen) > 2, "the frames came all at once"
    assert max(seen) < engine.layout.num_blocks(200) or entry.is_whole
    await task
    engine.assert_empty()
    await engine.close()


async def test_a_fault_of_the_outbox_fails_only_its_own_request(engine: SimulatedEngine) -> None:
    class Fenced(FakeOutboxEntry):
        def stage(self, rank: int, first_block: int, num_blocks: int, digest: int) -> None:
            raise TransferFencedError("fenced")

    entry = Fenced(engine.layout, len(PROMPT))
    bad = asyncio.create_task(engine.prefill(request_of(), entry))
    good = asyncio.create_task(generated(engine, request_of()))
    with pytest.raises(TransferFencedError):
        await bad
    assert entry.is_ended
    assert await good == expected_tokens(engine.settings, PROMPT, 8, GREEDY)


async def test_kv_of_another_layout_or_length_is_refused(engine: SimulatedEngine) -> None:
    request = request_of()
    first, inbox = await staged(engine, request)
    other = await engine_of(block_tokens=32)
    with pytest.raises(LayoutMismatchError, match="block_tokens: 32 != 16"):
        await decoded(other, request, first, inbox)
    assert inbox.is_ended
    _, short = await staged(engine, request_of(PROMPT[:-1]))
    with pytest.raises(TransferCorruptError, match="69 tokens, the request has 70"):
        await decoded(engine, request, first, short)
    assert short.is_ended
    entry = FakeOutboxEntry(other.layout, len(PROMPT))
    with pytest.raises(LayoutMismatchError):
        await engine.prefill(request, entry)
    assert entry.is_ended
    await other.close()


# Room


async def test_preempted_requests_compute_again_and_are_right() -> None:
    engine = await engine_of(kv_cache_tokens=320, max_num_batched_tokens=32, max_model_len=256)
    prompts = [tuple(range(i, i + 40 + i)) for i in range(12)]

    async def both(prompt: tuple[int, ...]) -> tuple[int, ...]:
        request = request_of(prompt, max_tokens=60)
        first, inbox = await staged(engine, request)
        return (first.first.token_id, *await decoded(engine, request, first, inbox))

    answers = await asyncio.gather(*map(both, prompts), *(generated(engine, request_of(p, max_tokens=60)) for p in prompts))
    for prompt, answer in zip([*prompts, *prompts], answers, strict=True):
        assert answer == expected_tokens(engine.settings, prompt, 60, GREEDY)
    assert engine.state().preemptions > 0
    engine.assert_empty()
    await engine.close()


async def test_a_preempted_prefill_keeps_what_it_announced() -> None:
    """Its second run has other chunk sizes, so a chunk may straddle the announced blocks and the rest."""
    preemptions = 0
    for length in range(60, 90, 3):
        caches = length % 2 == 0
        engine = await engine_of(kv_cache_tokens=160, max_num_batched_tokens=8, max_model_len=160, enable_prefix_caching=caches)
        alone = await engine_of(max_num_batched_tokens=8)
        chat = engine.generate(request_of(tuple(range(72)), max_tokens=24))
        await anext(chat)
        request = request_of(tuple(range(length)), max_tokens=1)
        (first, inbox), (want, reference) = await asyncio.gather(staged(engine, request), staged(alone, request))
        await chat.aclose()
        assert (first.first, inbox.contents) == (want.first, reference.contents)
        preemptions += engine.state().preemptions
        engine.assert_empty()
        await engine.close()
        await alone.close()
    assert preemptions > 3


async def test_a_cached_prefix_is_told_and_changes_no_byte(engine: SimulatedEngine) -> None:
    cold = await engine_of(enable_prefix_caching=False)
    for length, want in ((70, 0), (70, 64), (64, 48), (65, 64), (90, 64)):  # at least one token is computed
        request = request_of(tuple(range(100, 100 + length)))
        (first, inbox), (other, reference) = [await staged(e, request) for e in (engine, cold)]
        assert (first.cached_tokens, other.cached_tokens) == (want, 0), length
        assert inbox.contents == reference.contents
        answer = (first.first.token_id, *await decoded(engine, request, first, inbox))
        assert answer == expected_tokens(engine.settings, request.prompt_token_ids, 8, GREEDY)
    chunks = [c async for c in engine.generate(request)]
    assert [c.cached_tokens for c in chunks] == [80, *[0] * 7]
    assert tuple([c.tokens[0].token_id for c in chunks]) == answer
    salted = replace(request, cache_salt="other")
    assert [(await staged(engine, salted))[0].cached_tokens for _ in range(2)] == [0, 80]
    await cold.close()


async def test_a_decode_that_waits_for_room_keeps_its_inbox_until_it_is_loaded() -> None:
    engine = await engine_of(speed=20, max_num_seqs=1, max_num_batched_tokens=512)
    running = engine.generate(request_of(max_tokens=30))
    await anext(running)
    request = request_of()
    _, inbox = await staged(await engine_of(), request)
    first = Prefilled(Token(7))
    waiting = engine.decode(request, first, inbox)
    task = asyncio.create_task(anext(waiting))
    await asyncio.sleep(0)
    await anext(running)
    assert engine.state().waiting_requests == 1
    assert not inbox.is_ended
    await running.aclose()
    await task
    assert inbox.is_ended
    await waiting.aclose()
    engine.assert_empty()
    await engine.close()


# Time


async def test_time_is_the_rooflines_and_the_slow_factors() -> None:
    """Never faster than the model says: the engine may be late on a busy machine, so only lower bounds and ratios hold."""
    engine = await engine_of(speed=4, max_num_batched_tokens=2048)
    request = request_of(tuple(range(1000)), max_tokens=20)
    model_s = engine._steps.prefill_s(1000) + sum(engine._steps.decode_step_s(1, 1000 + i) for i in range(1, 20))
    began = time.monotonic()
    await generated(engine, request)
    plain_s = time.monotonic() - began
    assert plain_s >= 0.95 * model_s / 4
    engine.slow_factor = 4.0
    began = time.monotonic()
    await generated(engine, request_of(tuple(range(1, 1001)), max_tokens=20))  # other tokens: nothing of it is cached
    assert time.monotonic() - began >= 0.95 * model_s
    assert engine.num_steps == 40
    await engine.close()


async def test_an_idle_engine_has_no_task(engine: SimulatedEngine) -> None:
    await generated(engine, request_of())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("simulated-engine")]


async def test_a_prefill_holds_up_the_decodes_beside_it() -> None:
    """The interference that disaggregation removes: with a prompt beside it, a decode's gap is a multiple of its usual one."""
    engine = await engine_of(speed=10, max_num_batched_tokens=8192)
    chat = engine.generate(request_of(max_tokens=60))
    gaps, last = [], None
    document: asyncio.Task[tuple[int, ...]] | None = None
    async for _ in chat:
        now = time.monotonic()
        gaps += [now - last] if last is not None else []
        last = now
        if len(gaps) == 20:
            document = asyncio.create_task(generated(engine, request_of(tuple(range(8000)), max_tokens=1)))
    assert document is not None
    await document
    assert max(gaps[20:24]) > 5 * sorted(gaps[:20])[10]
    await engine.close()


# Death


async def test_death_fails_what_runs_and_what_comes() -> None:
    engine = await engine_of(speed=1)
    request = request_of(tuple(range(100)))
    entry = FakeOutboxEntry(engine.layout, 100)
    tasks = [asyncio.create_task(generated(engine, request)) for _ in range(3)] + [asyncio.create_task(engine.prefill(request, entry))]
    watcher = asyncio.create_task(engine.wait_dead())
    await asyncio.sleep(0)
    assert engine.is_alive
    engine.die()
    assert not engine.is_alive
    async with asyncio.timeout(60):
        await watcher
        failures = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(f, EngineError) for f in failures)
    assert entry.is_ended
    inbox = FakeInboxEntry(engine.layout, 100, bytes(engine.layout.entry_bytes(100)))
    first = Prefilled(Token(7))
    for call in (generated(engine, request), decoded(engine, request, first, inbox)):
        with pytest.raises(EngineError, match="dead"):
            await call
    assert inbox.is_ended
    engine.assert_empty()
    await engine.close()
    await engine.close()


async def test_close_ends_what_runs() -> None:
    engine = await engine_of(speed=1)
    task = asyncio.create_task(generated(engine, request_of()))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task
    engine.assert_empty()


async def test_a_fault_inside_a_step_kills_the_engine_loudly(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await engine_of()

    def broken(*_: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(engine._model, "draw", broken)
    with pytest.raises(EngineError, match="boom"):
        await generated(engine, request_of())
    assert not engine.is_alive
    assert "failed in a step" in caplog.text
    engine.assert_empty()


# Settings


@pytest.mark.parametrize(
    ("settings", "key", "text"),
    [
        ({"tp": 1}, "simulated.tp", "tp 2 would fit"),
        ({"gpu": "rtx-4090", "shape": "llama-3.1-405b", "tp": 8}, "simulated.tp", "larger device"),
        ({"kv_bytes_per_token": 66}, "simulated.kv_bytes_per_token", r"a multiple of tp \(4\)"),
        ({"kv_cache_tokens": 15}, "simulated.kv_cache_tokens", "one block"),
        ({"eos_token_id": 32000}, "simulated.eos_token_id", "below vocab_size"),
        ({"gpu": "h1000"}, "gpu", "h100"),
        ({"shape": "llama-3.1-71b"}, "shape", "llama-3.1-70b"),
        ({"tp": 3, "kv_bytes_per_token": 63}, "tp", r"\[1, 2, 4, 8"),
    ],
)
async def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        await engine_of(**settings)
    assert refused.value.key == key


async def test_model_info_is_what_the_engine_accepts() -> None:
    settings = SimulatedSettings(speed=0, kv_cache_tokens=100, max_model_len=4096)
    info = simulated_model_info(settings, "m")
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (96, 32000, (2,))
    engine = await start_simulated_engine(settings, "sim")
    assert len(await generated(engine, request_of(PROMPT, max_tokens=26))) == 26
    assert engine.state().total_kv_tokens == 96
    await engine.close()
