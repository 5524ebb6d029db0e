"""A whole gateway with simulated workers in this process: text in and out, losses, cancels at random, and nothing left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from disagg.client import AsyncClient
from disagg.config import Topology
from disagg.errors import ConfigError, DisaggError, NoWorkerError, PlacementError, RejectedError
from disagg.front.gateway import Gateway
from disagg.front.text import SyntheticTokenizer
from disagg.types import Phase, Role, Sampling
from tests.builders import Cluster, sim_topology

TEXT = SyntheticTokenizer().decode


@dataclass(frozen=True)
class Served:
    """A gateway, its workers, and a client of it."""

    gateway: Gateway
    cluster: Cluster
    client: AsyncClient

    def expected(self, prompt: list[int], max_tokens: int) -> tuple[int, ...]:
        """The right greedy answer."""
        request = self.cluster.request(prompt, sampling=Sampling(max_tokens=max_tokens, temperature=0.0))
        return self.cluster.expected(request)


def on_free_port(topology: Topology) -> Topology:
    return topology.model_copy(update={"gateway": topology.gateway.model_copy(update={"port": 0, "http_port": 0})})


@asynccontextmanager
async def served(topology: Topology, *, workers: bool = True) -> AsyncIterator[Served]:
    """Leaving asserts that nothing is left in the gateway or any worker."""
    topology = on_free_port(topology)
    gateway = await Gateway.start(topology, None)
    cluster = Cluster(topology, gateway.pool, gateway.coordinator)
    try:
        if workers:
            for role, pool in topology.active_pools().items():
                for _ in range(pool.count):
                    await cluster.add(role)
        async with AsyncClient(gateway.endpoint) as client:
            yield Served(gateway, cluster, client)
        await cluster.settle()
        cluster.assert_empty()
    finally:
        await gateway.close()
        await cluster.close()


@pytest.mark.parametrize("mode", ["disagg", "colocated"])
async def test_the_answer_is_right_in_tokens_and_text(mode: str) -> None:
    async with served(sim_topology(mode=mode)) as s:
        answer = await s.client.generate("a prompt of text", max_tokens=12, temperature=0.0)
        expected = s.expected(list(b"a prompt of text"), 12)
        assert answer.token_ids == expected
        assert answer.text == TEXT(expected)
        same = answer.usage.prefill_worker == answer.usage.decode_worker
        assert same == (mode == "colocated")
        assert answer.usage.decode_s >= 0
        assert s.gateway.coordinator.ended == {Phase.FINISHED: 1}
        info = await s.client.model_info()
        assert (info.mode, info.max_model_len) == (mode, 8192)
        assert sum(len(pool.workers) for pool in info.pools) == 2


async def test_stop_string_frees_everything_and_counts_as_finished() -> None:
    async with served(sim_topology(speed=1.0)) as s:
        expected = s.expected([5, 6, 7], 400)
        words = [TEXT([token]).strip() for token in expected]
        at = next(i for i in range(5, 400) if words[i] not in TEXT(expected[:i]))
        answer = await s.client.generate([5, 6, 7], max_tokens=400, temperature=0.0, stop=[words[at]])
        assert answer.token_ids == expected[: at + 1]
        assert answer.text == TEXT(expected[:at])
        assert s.gateway.coordinator.ended == {Phase.FINISHED: 1}


async def test_64_streams_at_once_are_all_right() -> None:
    async with served(sim_topology(prefill=2, decode=2)) as s, asyncio.timeout(60):
        prompts = [[3 + i, *range(10, 10 + i)] for i in range(64)]
        answers = await asyncio.gather(*(s.client.generate(p, max_tokens=30, temperature=0.0) for p in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == s.expected(prompt, 30)
            assert answer.text == TEXT(answer.token_ids)


async def test_cancels_at_random_moments_leave_nothing() -> None:
    """120 requests, a third of them cancelled while queued, prefilling, transferring or decoding; then an answer is right."""
    rng = random.Random(3)
    topology = sim_topology(speed=4.0, kv={"delay_s": 0.01}, admission={"max_prefills_per_worker": 1})

    async with served(topology) as s, asyncio.timeout(100):

        async def one(number: int) -> None:
            prompt = [rng.randrange(3, 30_000) for _ in range(rng.randrange(1, 600))]
            length = rng.randrange(1, 40)
            ask = asyncio.ensure_future(s.client.generate(prompt, max_tokens=length, temperature=0.0))
            if number % 3:
                assert (await ask).token_ids == s.expected(prompt, length)
                return
            await asyncio.wait({ask}, timeout=rng.random() * 0.3)
            ask.cancel()
            await asyncio.wait({ask})

        await asyncio.gather(*(one(n) for n in range(120)))
        await s.cluster.settle()
        s.cluster.assert_empty()
        assert (await s.client.generate([9, 9, 9], max_tokens=5, temperature=0.0)).token_ids == s.expected([9, 9, 9], 5)


async def test_health_and_errors_without_workers() -> None:
    topology = sim_topology(admission={"worker_timeout_s": 0.5})
    async with served(topology, workers=False) as s, grpc.aio.insecure_channel(s.gateway.endpoint) as channel, asyncio.timeout(60):
        health = health_pb2_grpc.HealthStub(channel)
        ask = health_pb2.HealthCheckRequest(service="")
        assert (await health.Check(ask)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(NoWorkerError):
            await s.client.generate([1])
        # With workers it serves, and after a loss it says so.
        await s.cluster.add(Role.PREFILL)
        name = await s.cluster.add(Role.DECODE)
        assert (await health.Check(ask)).status == health_pb2.HealthCheckResponse.SERVING
        assert (await s.client.generate([4, 5], max_tokens=3, temperature=0.0)).token_ids == s.expected([4, 5], 3)
        await s.cluster.kill(name)
        await s.gateway.pool.wait_lost(name)
        assert (await health.Check(ask)).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_deadline_over_while_queued_is_a_typed_error() -> None:
    topology = sim_topology(speed=0.02, admission={"max_prefills_per_worker": 1})
    async with served(topology) as s, asyncio.timeout(60):
        first = s.client.stream(list(range(100, 4000)), max_tokens=2, temperature=0.0)
        async with aclosing(first):
            task = asyncio.ensure_future(anext(first))
            while not s.gateway.coordinator.open_runs:
                await s.gateway.pool.changes.next().wait()
            with pytest.raises(RejectedError) as caught:
                await s.client.generate([1, 2], max_tokens=2, timeout_s=0.5)
            assert caught.value.retry_after_s > 0
            task.cancel()
            await asyncio.wait({task})


async def test_closing_ends_running_requests_with_a_typed_error() -> None:
    async with served(sim_topology(speed=0.5)) as s, asyncio.timeout(60):
        parts = s.client.stream([1, 2, 3], max_tokens=8000, temperature=0.0)
        await anext(parts)
        await s.gateway.close(0.0)
        with pytest.raises(DisaggError):
            async for _ in parts:
                pass


async def test_start_refuses_what_cannot_be_served() -> None:
    gateway = await Gateway.start(on_free_port(sim_topology()), None)
    try:
        port = int(gateway.endpoint.rsplit(":", 1)[1])
        taken = sim_topology()
        taken = taken.model_copy(update={"gateway": taken.gateway.model_copy(update={"port": port})})
        with pytest.raises(PlacementError, match=str(port)):
            await Gateway.start(taken, None)
    finally:
        await gateway.close()
    real = sim_topology()
    real = real.model_copy(update={"engine": real.engine.model_copy(update={"kind": "vllm"})})
    with pytest.raises(ConfigError):
        await Gateway.start(real, None)
