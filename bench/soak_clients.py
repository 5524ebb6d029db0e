"""Streaming clients that are killed at random, against a gateway with simulated workers: does anything leak?

    python -m bench.soak_clients --seconds 120 --clients 256 [--door http]

A server process holds the gateway and the workers. Client processes hold the clients; each client streams, and is cut off at a random time
(the stream closed, or its connection); each process is killed by SIGKILL at random times and made anew. Prints one JSON object: memory,
open files and tasks of the server over the run, and what was left at its end. Exit status 1 when something leaked: memory that grows over
the second half, or files, tasks, requests or KV that are there when all clients are gone and were not before the first came.
`--door http`: OpenAI's API by vLLM's server (needs vLLM and the small model) instead of gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from disagg.client import AsyncClient
from disagg.errors import DisaggError
from disagg.front.gateway import Gateway
from tests.builders import Cluster, sim_topology

CLIENTS_PER_PROCESS = 64
MEAN_LIFE_S = 2.0  # of one stream
KILLS_PER_S = 0.1  # of whole client processes
SAMPLE_S = 1.0
GROWTH_ALLOWED = 0.05
MORE_ALLOWED = 8  # files and tasks: gRPC's own pollers, threads' pipes
WARM_S, GONE_S = 10.0, 5.0  # the second: for connections to be found dead
DRAIN_S = 120.0
ANSWER_TIMEOUT_S = 300.0
MAX_TOKENS = 2000
SHAPE: dict[str, Any] = {"prefill": 2, "decode": 2, "speed": 0.3, "admission": {"worker_timeout_s": 30.0}}
LINE_LIMIT = 1 << 20
KINDS_SHOWN = 5  # of tasks that are left


async def serve(door: str) -> None:
    """The server's process: says where it listens, then answers each line on standard input with its counts; the last line ends it."""
    async with _http() if door == "http" else _grpc() as (address, cluster):
        print(json.dumps({"endpoint": address}), flush=True)
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while (line := (await lines.readline()).decode().strip()) == "count":
            print(json.dumps({"tasks": len(asyncio.all_tasks()), "open": len(cluster.coordinator.open_runs)}), flush=True)
        if line == "end":
            left = await _left(cluster)
            ended = {str(phase): count for phase, count in cluster.coordinator.ended.items()}
            kinds = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
            most = dict(kinds.most_common(KINDS_SHOWN))
            print(json.dumps({"left": left, "ended": ended, "tasks": kinds.total(), "most_tasks": most}), flush=True)
            await lines.readline()


async def _left(cluster: Cluster) -> str:
    """What is still there when all clients are gone and no more tasks end; empty when nothing is. A busy server has a queue to work off."""
    left, tasks, end_s = "", 0, time.monotonic() + DRAIN_S
    while time.monotonic() < end_s and (left or len(asyncio.all_tasks()) != tasks):
        tasks = len(asyncio.all_tasks())
        await cluster.settle()
        try:
            cluster.assert_empty()
            left = ""
        except AssertionError as error:
            left = str(error) or "something"
        await asyncio.sleep(GONE_S)
    return left


@asynccontextmanager
async def _grpc() -> AsyncIterator[tuple[str, Cluster]]:
    topology = sim_topology(**SHAPE)
    topology = topology.model_copy(update={"gateway": topology.gateway.model_copy(update={"port": 0, "http_port": 0})})
    gateway = await Gateway.start(topology, None)
    cluster = Cluster(topology, gateway.pool, gateway.coordinator)
    for role, pool in topology.active_pools().items():
        for _ in range(pool.count):
            await cluster.add(role)
    yield gateway.endpoint, cluster
    await gateway.close()
    await cluster.close()


@asynccontextmanager
async def _http() -> AsyncIterator[tuple[str, Cluster]]:
    from disagg.models import get_model
    from tests.openai_rig import door

    async with door(get_model("smollm2-135m"), check_empty=False, **SHAPE) as d:
        yield f"127.0.0.1:{d.port}", d.cluster


async def stream_for_ever(door: str, address: str, seed: int) -> None:
    """One client process: clients that begin, and are cut off."""
    one = _http_client if door == "http" else _grpc_client
    await asyncio.gather(*(one(address, random.Random(seed * 1000 + i)) for i in range(CLIENTS_PER_PROCESS)))


def _prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 30_000) for _ in range(rng.randrange(1, 400))]


async def _grpc_client(address: str, rng: random.Random) -> None:
    client = AsyncClient(address)
    while True:
        stream = client.stream(_prompt(rng), max_tokens=MAX_TOKENS, ignore_eos=True)
        try:
            async with asyncio.timeout(rng.expovariate(1 / MEAN_LIFE_S)):
                async for _ in stream:
                    pass
        except (TimeoutError, DisaggError):
            if rng.random() < 0.8:
                await stream.aclose()
            else:
                await client.close()
                client = AsyncClient(address)


async def _http_client(address: str, rng: random.Random) -> None:
    """Its connection is closed in the middle, now and then before the request is whole."""
    host, _, port = address.partition(":")
    while True:
        fields = {"model": "smollm2-135m", "prompt": _prompt(rng), "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
        body = json.dumps(fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer = None
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(rng.expovariate(1 / MEAN_LIFE_S)):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(head.encode() + body[: len(body) if rng.random() < 0.95 else rng.randrange(len(body))])
                while await reader.read(1 << 16):
                    pass
        if writer is not None:
            writer.transport.abort() if rng.random() < 0.5 else writer.close()
        else:
            await asyncio.sleep(0.1)


async def main(seconds: float, clients: int, door: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.soak_clients", "--door", door]
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(*command, "--serve", stdin=pipe, stdout=pipe, limit=LINE_LIMIT)
    assert server.stdout is not None

    async def ask(line: str) -> dict[str, Any]:
        assert server.stdin is not None
        server.stdin.write(f"{line}\n".encode())
        await server.stdin.drain()
        return await answer()

    async def answer() -> dict[str, Any]:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while not (line := await server.stdout.readline()).startswith(b"{"):  # type: ignore[union-attr]
                assert line, "the server has ended"
            return dict(json.loads(line))

    address = (await answer())["endpoint"]
    warm = await _crowd(command, address, 99)  # what the first requests make once, threads and connections between workers, is no leak
    await asyncio.sleep(WARM_S)
    warm.kill()
    await warm.wait()
    await asyncio.sleep(GONE_S)
    before = {**await ask("count"), **_process(server.pid)}
    samples: list[dict[str, float]] = []
    killed = 0
    crowd = [await _crowd(command, address, i) for i in range(clients // CLIENTS_PER_PROCESS)]
    end_s = time.monotonic() + seconds
    rng = random.Random(1)
    while time.monotonic() < end_s:
        await asyncio.sleep(SAMPLE_S)
        samples.append({**await ask("count"), **_process(server.pid)})
        if rng.random() < KILLS_PER_S * SAMPLE_S:
            victim = rng.randrange(len(crowd))
            crowd[victim].send_signal(signal.SIGKILL)
            await crowd[victim].wait()
            crowd[victim] = await _crowd(command, address, 100 + len(samples))
            killed += CLIENTS_PER_PROCESS
    for process in crowd:
        process.kill()
        await process.wait()
    last = await ask("end")
    last |= _process(server.pid)
    assert server.stdin is not None
    server.stdin.close()
    await server.wait()
    return _report(before, samples, last, killed)


async def _crowd(command: list[str], address: str, seed: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(*command, "--stream", address, "--seed", str(seed), stderr=asyncio.subprocess.DEVNULL)


def _process(pid: int) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    rss_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return {"rss_mib": rss_kib / 1024, "files": len(list(Path(f"/proc/{pid}/fd").iterdir()))}


def _report(before: dict[str, Any], samples: list[dict[str, float]], last: dict[str, Any], killed: int) -> dict[str, Any]:
    """Means over the third and the last quarter: memory is flat over the second half when they are alike.

    Files and tasks follow the number of open streams, so they are compared where there are none: before the first client and after
    the last.
    """
    quarter = max(1, len(samples) // 4)
    third, fourth = samples[-2 * quarter : -quarter], samples[-quarter:]
    means = {name: [sum(s[name] for s in part) / len(part) for part in (third, fourth)] for name in samples[0]}
    earlier, later = means["rss_mib"]
    leaks = ["memory"] if later > earlier * (1 + GROWTH_ALLOWED) else []
    leaks += [name for name in ("files", "tasks") if last[name] > before[name] + MORE_ALLOWED]
    leaks += ["KV or requests"] if last["left"] else []
    return {
        "third_and_last_quarter": {name: [round(v, 1) for v in pair] for name, pair in means.items()},
        "memory_growth": round(later / earlier - 1, 4),
        "requests": last["ended"],
        "clients_killed_with_their_process": killed,
        "before_and_after": {name: [before[name], last[name]] for name in ("files", "tasks")},
        "left": last["left"],
        "most_tasks_left": last["most_tasks"],
        "leaks": leaks,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--door", choices=("grpc", "http"), default="grpc")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stream", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        asyncio.run(serve(chosen.door))
    elif chosen.stream:
        asyncio.run(stream_for_ever(chosen.door, chosen.stream, chosen.seed))
    else:
        report = asyncio.run(main(chosen.seconds, chosen.clients, chosen.door))
        print(json.dumps(report, indent=2))
        sys.exit(1 if report["leaks"] else 0)
