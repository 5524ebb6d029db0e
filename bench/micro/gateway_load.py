"""Load through one or several gateways over simulated workers of zero step time: what the serving path itself costs.

Each worker, each gateway and each client is a process of its own, as in a deployment. `measure` starts them, has the clients stream
answers of OUTPUT_TOKENS tokens, CLIENTS at a time, and ends them. Clients cost as little as possible (grpc_wire.py): they count messages
and read the usage at the end, and leave the tokens in between undecoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.micro.grpc_wire import Connection
from disagg.config import Topology, parse_topology
from disagg.launch.heap import settle_heap
from disagg.pb import inference_pb2 as pb
from disagg.slo import percentile
from disagg.types import Role

CLIENTS = 32
OUTPUT_TOKENS = 32
PROMPT = tuple(range(3, 67))
METHOD = "/disagg.v1.Inference/Generate"
WARM_SHARE = 0.1  # of the requests, which are not counted


@dataclass(frozen=True)
class Load:
    """What came of it. `cpu_ms_per_request`: user and system time by kind of process, all processes of a kind together."""

    ttft_ms: tuple[float, ...]
    requests_per_s: float
    messages_per_request: float
    cpu_ms_per_request: dict[str, float]

    def ttft(self) -> dict[str, float]:
        return {"added_ttft_ms_p50": percentile(self.ttft_ms, 50) or 0.0, "added_ttft_ms_p99": percentile(self.ttft_ms, 99) or 0.0}


def topology(prefill: int, decode: int, speed: float, decode_speed: float | None = None) -> Topology:
    """Simulated workers; `speed` 0: steps take no time. `decode_speed`: where decode workers have another."""
    settings = {"speed": speed, "kv_cache_tokens": 1 << 20, "eos_mean_tokens": 1_000_000, "enable_prefix_caching": False}
    decode_settings = {} if decode_speed is None else {"simulated": {"speed": decode_speed}}
    return parse_topology(
        {
            "model": "simulated",
            "engine": {"kind": "simulated", "simulated": settings},
            "pools": {"prefill": {"count": prefill}, "decode": {"count": decode, **decode_settings}},
            "kv": {"outbox_gib": 0.03, "inbox_gib": 0.03},
            "gateway": {"port": 0, "http_port": None},
            "admission": {"max_queued_requests": 100_000},
            "slo_classes": [{"name": "default", "ttft_ms": 60_000, "tpot_ms": 1000}],
        }
    )


async def measure(requests: int, gateways: int = 1, client_processes: int = 2, decode_speed: float = 0.0) -> Load:
    """`requests` answers in all, CLIENTS at a time, spread over the client processes and these over the gateways.

    With `decode_speed` 0 all steps take no time and the processes are busy without a pause: what can be had at most. Otherwise only prefill
    takes no time, and decode steps last as long as a real engine's, divided by it: CLIENTS requests are under way, and nobody is saturated.
    """
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(part("worker", role, str(decode_speed))) for role in (Role.PREFILL, Role.DECODE)]
        targets = json.dumps([json.loads(await answer(w)) for w in workers])
        doors = [await stack.enter_async_context(part("gateway", targets)) for _ in range(gateways)]
        endpoints = [await answer(door) for door in doors]
        share = (requests // client_processes, CLIENTS // client_processes)
        clients = [
            await stack.enter_async_context(part("client", endpoints[index % gateways], *map(str, share)))
            for index in range(client_processes)
        ]
        for client in clients:
            await answer(client)  # warm
        kinds = {"prefill worker": workers[:1], "decode worker": workers[1:], "gateways": doors, "clients": clients}
        before = {kind: sum(cpu_s(p.pid) for p in processes) for kind, processes in kinds.items()}
        for client in clients:
            assert client.stdin is not None
            client.stdin.write(b"\n")
        found = [json.loads(await answer(client)) for client in clients]
        spent = {kind: sum(cpu_s(p.pid) for p in processes) - before[kind] for kind, processes in kinds.items()}
    total = sum(f["requests"] for f in found)
    return Load(
        ttft_ms=tuple(ms for f in found for ms in f["ttft_ms"]),
        requests_per_s=sum(f["requests"] / f["took_s"] for f in found),
        messages_per_request=sum(f["messages"] for f in found) / total,
        cpu_ms_per_request={kind: 1e3 * seconds / total for kind, seconds in spent.items()},
    )


@asynccontextmanager
async def part(
    name: str, *args: str, module: str = "bench.micro.gateway_load", env: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """One of the processes; ended when left. `env`: besides this process's."""
    command = [sys.executable, "-m", module, name, *args]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 26, env={**os.environ, **(env or {})})
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def answer(process: asyncio.subprocess.Process) -> str:
    """The next line that a part prints."""
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 600)
    assert line, "a part of the measurement ended early"
    return line.decode().strip()


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- the parts


async def serve_worker(role: str, decode_speed: str) -> None:
    """One worker, until standard input ends."""
    from disagg.serving.start import start_worker

    server = await start_worker(topology(1, 1, 0.0, float(decode_speed)), Role(role), role)
    settle_heap()
    say(json.dumps([role, role, server.target]))
    await asyncio.to_thread(os.read, 0, 1)
    await server.close()


async def serve_gateway(targets: str) -> None:
    """One gateway over the workers, until standard input ends."""
    from disagg.front.gateway import Gateway

    gateway = await Gateway.start(topology(1, 1, 0.0), None)
    for name, role, target in json.loads(targets):
        await gateway.pool.join(name, Role(role), target)
    settle_heap()
    say(gateway.endpoint)
    await asyncio.to_thread(os.read, 0, 1)
    await gateway.close()


async def ask(endpoint: str, requests: str, streams: str) -> None:
    """Warm up, wait for a line, ask, and say what came."""
    sampling = pb.SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0.0)
    body = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling).SerializeToString()
    connection = await Connection.open(endpoint, METHOD)
    await streamed(connection, body, max(8, int(int(requests) * WARM_SHARE)), int(streams))
    say("warm")
    await asyncio.to_thread(sys.stdin.readline)
    say(json.dumps(await streamed(connection, body, int(requests), int(streams))))
    await asyncio.to_thread(sys.stdin.readline)  # until its CPU time is read
    connection.close()


async def streamed(connection: Connection, body: bytes, requests: int, streams: int) -> dict[str, Any]:
    """That many answers, `streams` at a time; each is checked to be whole."""
    ttft_ms: list[float] = []
    messages = 0
    left = iter(range(requests))

    async def client() -> None:
        nonlocal messages
        for _ in left:
            began_s = time.perf_counter()
            answer = connection.call(body)
            await answer.first
            ttft_ms.append((time.perf_counter() - began_s) * 1e3)
            await answer.end
            messages += answer.num_messages
            num_tokens = pb.GenerateResponse.FromString(answer.last).usage.output_tokens
            assert num_tokens == OUTPUT_TOKENS, f"an answer of {num_tokens} tokens"

    began_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(streams)))
    return {"requests": requests, "took_s": time.perf_counter() - began_s, "messages": messages, "ttft_ms": ttft_ms}


def say(line: str) -> None:
    """To the process that started this one."""
    print(line, flush=True)


def run(work: Coroutine[Any, Any, None]) -> None:
    """On uvloop where it is installed, as Ray runs workers and gateways."""
    try:
        import uvloop
    except ModuleNotFoundError:
        asyncio.run(work)
    else:
        uvloop.run(work)


PARTS = {"worker": serve_worker, "gateway": serve_gateway, "client": ask}

if __name__ == "__main__":
    run(PARTS[sys.argv[1]](*sys.argv[2:]))
