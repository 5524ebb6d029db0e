"""Adaptive serving over simulated workers and real carriers: all kinds of pairs, right answers on each, and nothing left."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from disagg.policy import router
from disagg.types import Phase, Role
from tests.builders import cluster


def kind(prefill: str, decode: str) -> str:
    return "one" if prefill == decode else f"{prefill.partition('-')[0]} to {decode.partition('-')[0]}"


async def test_many_at_once_use_all_workers_and_are_all_right() -> None:
    async with cluster(mode="adaptive", prefill=2, decode=2, speed=20) as c:
        answers = await asyncio.gather(*(c.ask_right(c.request(1 + 97 * i % 3000, 1 + i % 30)) for i in range(120)))
        kinds = Counter(kind(a.run.route.prefill, a.run.route.decode) for a in answers if a.run.route)
        assert kinds["prefill to decode"] > 0
        assert kinds["one"] > 0
        assert len({a.run.route.prefill for a in answers if a.run.route}) == 4
        assert c.coordinator.ended == {Phase.FINISHED: 120}


WAYS = [("prefill-0", "decode-0"), ("decode-0", "prefill-0"), ("prefill-0", "prefill-0"), ("decode-0", "decode-0")]


@pytest.mark.parametrize(("source", "sink"), WAYS)
async def test_any_worker_may_take_either_leg(source: str, sink: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wanted(pairs: Sequence[router.Pair]) -> router.Pair:
        return next(p for p in pairs if (p.first.worker.name, p.second.worker.name) == (source, sink))

    monkeypatch.setattr(router, "_fair", wanted)
    async with cluster(mode="adaptive") as c:
        for prompt in (1, 33, 600):
            answer = await c.ask_right(c.request(prompt, 12))
            assert answer.run.route is not None
            assert (answer.run.route.prefill, answer.run.route.decode) == (source, sink)


async def test_one_worker_left_serves_alone() -> None:
    async with cluster(mode="adaptive") as c:
        await c.kill("prefill-0")
        await c.pool.wait_lost("prefill-0")
        answers = await asyncio.gather(*(c.ask_right(c.request(50, 5)) for _ in range(8)))
        assert {a.run.route.prefill for a in answers if a.run.route} == {"decode-0"}
        await c.add(Role.PREFILL, "prefill-0")
        await c.ask_right(c.request(50, 5))


async def test_a_cancelled_prefill_leaves_nothing_on_either_side() -> None:
    async with cluster(mode="adaptive", prefill=1, decode=1, speed=2) as c:
        tasks = [asyncio.create_task(c.ask_right(c.request(2000, 50))) for _ in range(6)]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await c.settle()
        await c.ask_right(c.request(100, 5))
