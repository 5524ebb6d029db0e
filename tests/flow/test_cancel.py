"""Clients that leave, in every phase: whatever a request held is free again, and the next answer is right."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import aclosing

import pytest

from disagg.types import Phase, Request
from tests.builders import Cluster, cluster

SLOW = {"speed": 40, "max_num_batched_tokens": 512}  # a prefill takes some tens of milliseconds
PHASES = (Phase.QUEUED, Phase.PREFILLING, Phase.TRANSFERRING, Phase.WAITING, Phase.DECODING)


async def cancel_in(c: Cluster, request: Request, phase: Phase, after_s: float = 0.0) -> bool:
    """Cancel the task that serves `request` `after_s` seconds after it is seen in `phase`; False when it never was."""
    run = c.coordinator.submit(request)

    async def serve() -> None:
        async with aclosing(run.chunks()) as chunks:
            async for _ in chunks:
                pass

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    while not task.done() and run.phase is not phase:  # noqa: ASYNC110 - a phase has no event
        await asyncio.sleep(0.001)
    seen = run.phase is phase
    if after_s:
        await asyncio.sleep(after_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert run.phase is Phase.CANCELLED or (run.phase is Phase.FINISHED and (after_s or not seen))
    return seen


@pytest.mark.parametrize("carrier", ["shm", "grpc"])
@pytest.mark.parametrize("phase", PHASES[1:])
async def test_cancel_in_each_phase(phase: Phase, carrier: str) -> None:
    # Waiting is between the KV's arrival and the first decode step: seen reliably when the step is long.
    speed = 2 if phase is Phase.WAITING else 40
    async with cluster(carrier=carrier, kv={"delay_s": 0.1}, speed=speed, max_num_batched_tokens=512) as c:
        seen = [await cancel_in(c, c.request(1000, 200), phase) for _ in range(4)]
        assert any(seen)
        await c.settle()
        c.assert_empty()
        await c.ask_right(c.request(700, 5))


async def test_cancel_while_queued() -> None:
    async with cluster(admission={"max_prefills_per_worker": 1}, **SLOW) as c:
        first = asyncio.create_task(c.ask_right(c.request(3000, 2)))
        await asyncio.sleep(0.005)
        assert await cancel_in(c, c.request(100, 2), Phase.QUEUED)
        await first
        await c.ask_right(c.request(100, 2))


@pytest.mark.parametrize("mode", ["disagg", "colocated"])
async def test_leaving_between_chunks_frees_everything(mode: str) -> None:
    async with cluster(mode=mode, speed=100) as c:  # without a clock, all tokens may have come before the second one is looked at
        for wanted in range(1, 6):
            run = c.coordinator.submit(c.request(50, 2000))
            async with aclosing(run.chunks()) as chunks:
                async for _ in chunks:
                    if run.output_tokens >= wanted:
                        break
            assert run.phase is Phase.CANCELLED
            await c.settle()
            c.assert_empty()
        await c.ask_right(c.request(50, 10))


async def test_leaving_after_the_last_chunk_is_a_finish() -> None:
    async with cluster() as c:
        run = c.coordinator.submit(c.request(50, 3))
        async with aclosing(run.chunks()) as chunks:
            async for chunk in chunks:
                if chunk.finish is not None:
                    break
        assert run.phase is Phase.FINISHED


@pytest.mark.parametrize(("mode", "seed"), [("disagg", 1), ("disagg", 2), ("colocated", 3)])
async def test_a_third_of_200_cancelled_at_random_moments_leaves_nothing(mode: str, seed: int) -> None:
    rng = random.Random(seed)
    phases: Counter[Phase] = Counter()
    workers = {"prefill": 2, "decode": 2} if mode == "disagg" else {"prefill": 1, "decode": 1}
    shape = {**workers, "box_bytes": 256 << 10, "max_model_len": 4096, "kv": {"delay_s": 0.02}, "admission": {"max_prefills_per_worker": 1}}
    async with cluster(mode=mode, **shape, **SLOW) as c:

        async def one(number: int) -> None:
            request = c.request(rng.randrange(1, 1500), rng.randrange(1, 40))
            await asyncio.sleep(rng.uniform(0, 2.0))
            if number % 3:
                await c.ask_right(request)
                return
            phase = rng.choice(PHASES)
            phases[phase] += await cancel_in(c, request, phase, rng.choice([0.0, rng.uniform(0, 0.05)]))

        await asyncio.gather(*(one(i) for i in range(200)))
        await c.settle()
        c.assert_empty()
        ended = c.coordinator.ended
        assert sum(ended.values()) == 200
        assert ended[Phase.CANCELLED] >= 10, phases
        await c.ask_right(c.request(1000, 10))
