"""One request's way over simulated workers, real gRPC and real carriers: right answers, in every mode and at every length."""

from __future__ import annotations

import asyncio

import pytest

from disagg.types import Phase
from tests.builders import cluster

CARRIERS = ("shm", "grpc")


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_answers_are_right_at_every_length(carrier: str) -> None:
    async with cluster(carrier=carrier) as c:
        for length in (1, 5, 15, 16, 17, 31, 32, 33, 200, 2047, 2048, 2049, 3000):
            for max_tokens in (1, 2, 7):
                answer = await c.ask_right(c.request(length, max_tokens))
                assert answer.run.phase is Phase.FINISHED
                assert answer.run.attempts == 1


async def test_colocated_takes_the_same_path() -> None:
    async with cluster(mode="colocated", prefill=1, decode=1) as c:
        answers = await asyncio.gather(*(c.ask_right(c.request(40 + i, 6)) for i in range(20)))
        assert {a.run.route.prefill for a in answers if a.run.route} == {"colocated-0", "colocated-1"}
        assert all(a.run.route and a.run.route.is_colocated for a in answers)
