"""What the router and the gateway cost.

    python -m bench.micro.router [--json] [--requests 3000]

decision_us_p50      one decision (a grant) of the dispatcher: 64 workers, 1,000 requests waiting
routes_per_s         whole lives of requests through the dispatcher, in one process: submit, decide, first token, arrived, decoding, end
added_ttft_ms_*      what clients see as TTFT through gRPC door, coordinator and worker RPC, over simulated workers of zero step time, with
                     `clients` requests at a time. All of it is overhead: the engines take none
gateway_tokens_per_s tokens streamed to those clients, answers of 32 tokens

Workers, gateway and clients are processes of their own, as in a deployment; on few cores they compete, so the machine must be quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from disagg.config import Topology, parse_topology
from disagg.policy.dispatch import Dispatcher
from disagg.policy.priors import priors_of
from disagg.slo import percentile
from disagg.types import EngineState, Mode, ModelInfo, Request, Role, Sampling

CLIENTS = 32
OUTPUT_TOKENS = 32
PROMPT = tuple(range(3, 67))
STATE = EngineState("e", free_kv_tokens=1 << 20, total_kv_tokens=1 << 20, outbox_total_bytes=1 << 30, inbox_total_bytes=1 << 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=3000, help="requests through the gateway")
    parser.add_argument("--part", choices=("workers", "clients"), help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part == "workers":
        asyncio.run(serve_workers())
        return
    if given.part == "clients":
        print(json.dumps(asyncio.run(ask(given.endpoint, given.requests))))
        return
    result = {"decision_us_p50": decision_us(), "routes_per_s": routes_per_s(), **asyncio.run(through_gateway(given.requests))}
    if given.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:22s} {value:10.1f}")


# ---- the dispatcher alone


def topology(prefill: int, decode: int, speed: float) -> Topology:
    settings = {"speed": speed, "kv_cache_tokens": 1 << 20, "eos_mean_tokens": 1_000_000}
    return parse_topology(
        {
            "model": "simulated",
            "engine": {"kind": "simulated", "simulated": settings},
            "pools": {"prefill": {"count": prefill}, "decode": {"count": decode}},
            "kv": {"outbox_gib": 0.03, "inbox_gib": 0.03},
            "gateway": {"port": 0, "http_port": None},
            "admission": {"max_queued_requests": 100_000},
            "slo_classes": [{"name": "default", "ttft_ms": 60_000, "tpot_ms": 1000}],
        }
    )


def dispatcher(workers: int) -> Dispatcher:
    t = topology(workers // 2, workers // 2, 1.0)
    model = ModelInfo("m", 32_768, 32_000, 64)
    d = Dispatcher(Mode.DISAGG, model, t.slo_classes, t.admission, priors_of(t))
    for index in range(workers):
        d.join(f"w{index}", Role.PREFILL if index % 2 else Role.DECODE, "host", STATE, 0.0)
    return d


def request(number: int, now_s: float) -> Request:
    return Request(f"r{number}", PROMPT * 16, Sampling(max_tokens=300), "default", arrival_s=now_s)


def decision_us(workers: int = 64, waiting: int = 1000, decisions: int = 500) -> float:
    """Median microseconds of `decide` when one worker has just become free."""
    d, now_s = dispatcher(workers), 10.0
    running = []
    for number in range(waiting + workers):
        d.submit(request(number, now_s), now_s)
        running += [grant.key for grant in d.decide(now_s).grants] if number < workers else []
    running += [grant.key for grant in d.decide(now_s).grants]
    taken_us = []
    for number in range(decisions):
        now_s += 1e-3
        key = running.pop(0)
        d.first_token(key, now_s)
        d.end(key, now_s, is_whole=True)
        d.submit(request(10_000 + number, now_s), now_s)
        began = time.perf_counter()
        grants = d.decide(now_s).grants
        if len(grants) == 1:
            taken_us.append((time.perf_counter() - began) * 1e6)
        running += [grant.key for grant in grants]
    return percentile(taken_us, 50) or 0.0


def routes_per_s(workers: int = 64, routes: int = 3000) -> float:
    """Requests per second of one process's dispatcher."""
    d, now_s = dispatcher(workers), 10.0
    began = time.perf_counter()
    for number in range(routes):
        now_s += 1e-3
        d.submit(request(number, now_s), now_s)
        for grant in d.decide(now_s).grants:
            d.first_token(grant.key, now_s)
            d.arrived(grant.key, now_s)
            d.decoding(grant.key, now_s)
            d.end(grant.key, now_s, is_whole=True)
    return routes / (time.perf_counter() - began)


# ---- through the gateway


async def through_gateway(requests: int) -> dict[str, float]:
    from disagg.front.gateway import Gateway

    t = topology(1, 1, 0.0)
    async with part("workers") as workers:
        assert workers.stdout is not None
        targets = json.loads(await asyncio.wait_for(workers.stdout.readline(), 60))
        gateway = await Gateway.start(t, None)
        try:
            for name, role, target in targets:
                await gateway.pool.join(name, Role(role), target)
            async with part("clients", "--endpoint", gateway.endpoint, "--requests", str(requests)) as clients:
                assert clients.stdout is not None
                found: dict[str, float] = json.loads(await asyncio.wait_for(clients.stdout.readline(), 600))
        finally:
            await gateway.close()
    return {**found, "clients": CLIENTS}


@asynccontextmanager
async def part(name: str, *args: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """One of the other processes; ended when left."""
    command = [sys.executable, "-m", "bench.micro.router", "--part", name, *args]
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def serve_workers() -> None:
    """One prefill and one decode worker, until standard input ends."""
    from disagg.serving.start import start_worker

    t = topology(1, 1, 0.0)
    servers = [await start_worker(t, role, str(role)) for role in (Role.PREFILL, Role.DECODE)]
    print(json.dumps([[s.worker.name, s.worker.name, s.target] for s in servers]), flush=True)
    await asyncio.to_thread(os.read, 0, 1)
    for server in servers:
        await server.close()


async def ask(endpoint: str, requests: int) -> dict[str, float]:
    """`requests` answers, CLIENTS at a time; the first tenth warms up."""
    from disagg.client import AsyncClient

    left = iter(range(requests))
    ttft_ms: list[float] = []

    async def client(connection: Any) -> None:
        for number in left:
            began = time.perf_counter()
            async with aclosing(connection.stream(PROMPT, max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0.0)) as parts:
                is_first = True
                async for _ in parts:
                    if is_first and number >= requests // 10:
                        ttft_ms.append((time.perf_counter() - began) * 1e3)
                    is_first = False

    async with AsyncClient(endpoint) as connection:
        began = time.perf_counter()
        await asyncio.gather(*(client(connection) for _ in range(CLIENTS)))
        took_s = time.perf_counter() - began
    return {
        "added_ttft_ms_p50": percentile(ttft_ms, 50) or 0.0,
        "added_ttft_ms_p99": percentile(ttft_ms, 99) or 0.0,
        "gateway_tokens_per_s": requests * OUTPUT_TOKENS / took_s,
    }


if __name__ == "__main__":
    main()
