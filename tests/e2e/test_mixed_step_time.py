"""`mixed_step_ms` on a real engine: a prompt beside a running answer takes as many tokens of a step as fit the time."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from disagg.engine.vllm_engine import VllmEngine, start_vllm_engine
from disagg.kv.box import Box
from disagg.types import StepRecord
from tests.machine import QUICK_ARGS
from tests.vllm_rig import assert_equal_or_near_tie, drain, fresh_prompt, request_of

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

CHUNK_TOKENS, PROMPT_TOKENS = 512, 1200
TIGHT_MS = 1.0  # less than any step takes: prompts may stretch a step of decodes by a quarter


async def test_steps_beside_an_answer_keep_to_the_time(quick_model: Path) -> None:
    args = {**QUICK_ARGS, "max_num_batched_tokens": CHUNK_TOKENS, "max_model_len": 2048, "max_num_seqs": 4, "mixed_step_ms": TIGHT_MS}
    engine = await start_vllm_engine(str(quick_model), args, Box(1 << 20, "outbox"), Box(1 << 20, "inbox"), "timed", [0])
    try:
        assert engine.state().mixed_step_s == TIGHT_MS / 1e3
        prompt = fresh_prompt(PROMPT_TOKENS)
        for _ in range(2):  # it learns what its steps take
            steps, _ = await beside(engine, fresh_prompt(PROMPT_TOKENS))
        steps, answer = await beside(engine, prompt)
        alone = request_of(prompt, max_tokens=4)
        assert_equal_or_near_tie(answer, (await drain(engine.generate(alone)))[0])
        assert (
            next(s.prefill_tokens for s in engine.state().steps[::-1] if s.prefill_tokens) < CHUNK_TOKENS
        )  # the rest of it, cached or not
    finally:
        await engine.close()
    mixed = [s for s in steps if s.prefill_tokens and s.decode_requests]
    lone_s = statistics.median(s.seconds for s in steps if not s.prefill_tokens)
    assert len(mixed) > 2 * PROMPT_TOKENS / CHUNK_TOKENS
    assert statistics.median(s.seconds for s in mixed) < 2 * lone_s, (mixed, lone_s)


async def beside(engine: VllmEngine, prompt: tuple[int, ...]) -> tuple[list[StepRecord], list]:  # type: ignore[type-arg]
    """A prompt while another request decodes to its end and beyond: the steps, and its answer."""
    seen: dict[int, StepRecord] = {}

    async def watch() -> None:
        while True:
            seen.update((s.number, s) for s in engine.state().steps if s.number > known)
            await asyncio.sleep(0.01)

    known = max((s.number for s in engine.state().steps), default=0)
    watching = asyncio.create_task(watch())
    running = engine.generate(request_of(fresh_prompt(40), max_tokens=400))
    await anext(running)  # type: ignore[call-overload]
    rest = asyncio.create_task(drain(running))
    answer, _ = await drain(engine.generate(request_of(prompt, max_tokens=4)))
    await asyncio.sleep(0.5)
    rest.cancel()
    await asyncio.gather(rest, return_exceptions=True)
    watching.cancel()
    return list(seen.values()), answer
