"""Streaming clients that are killed at random, against a gateway with simulated workers: does anything leak?

    python -m bench.soak_clients --seconds 120 --clients 256

A server process holds the gateway and the workers. Client processes hold the clients; each client streams, and is cut off at a random time
(the stream closed, or its connection); each process is killed by SIGKILL at random times and made anew. Prints one JSON object: memory,
open files and tasks of the server over the run, and what was left at its end. Exit status 1 when something leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from disagg.client import AsyncClient
from disagg.errors import DisaggError
from disagg.front.gateway import Gateway
from disagg.types import Role
from tests.builders import Cluster, sim_topology

CLIENTS_PER_PROCESS = 64
MEAN_LIFE_S = 2.0  # of one stream
KILLS_PER_S = 0.1  # of whole client processes
SAMPLE_S = 1.0
GROWTH_ALLOWED = 0.05
LINE_LIMIT = 1 << 20


async def serve() -> None:
    """The server's process: says where it listens, then answers each line on standard input with its counts; the last line ends it."""
    topology = sim_topology(prefill=2, decode=2, speed=0.3, admission={"worker_timeout_s": 30.0})
    topology = topology.model_copy(update={"gateway": topology.gateway.model_copy(update={"port": 0, "http_port": 0})})
    gateway = await Gateway.start(topology, None)
    cluster = Cluster(topology, gateway.pool, gateway.coordinator)
    for role in (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE):
        await cluster.add(role)
    print(json.dumps({"endpoint": gateway.endpoint}), flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while (line := (await lines.readline()).decode().strip()) == "count":
        print(json.dumps({"tasks": len(asyncio.all_tasks()), "open": len(gateway.coordinator.open_runs)}), flush=True)
    if line == "end":
        await cluster.settle()
        left = ""
        try:
            cluster.assert_empty()
        except AssertionError as error:
            left = str(error) or "something"
        ended = {str(phase): count for phase, count in gateway.coordinator.ended.items()}
        print(json.dumps({"left": left, "ended": ended, "tasks": len(asyncio.all_tasks())}), flush=True)
    await gateway.close()
    await cluster.close()


async def stream_for_ever(address: str, seed: int) -> None:
    """One client process: clients that begin, and are cut off."""

    async def one(rng: random.Random) -> None:
        client = AsyncClient(address)
        while True:
            stream = client.stream([rng.randrange(3, 30_000) for _ in range(rng.randrange(1, 400))], max_tokens=2000, ignore_eos=True)
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

    await asyncio.gather(*(one(random.Random(seed * 1000 + i)) for i in range(CLIENTS_PER_PROCESS)))


async def main(seconds: float, clients: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.soak_clients"]
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(*command, "--serve", stdin=pipe, stdout=pipe, limit=LINE_LIMIT)
    assert server.stdout is not None

    async def ask(line: str) -> dict[str, Any]:
        assert server.stdin is not None
        server.stdin.write(f"{line}\n".encode())
        await server.stdin.drain()
        return await answer()

    async def answer() -> dict[str, Any]:
        async with asyncio.timeout(60):
            return dict(json.loads(await server.stdout.readline()))  # type: ignore[union-attr]

    address = (await answer())["endpoint"]
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
    files_left = _process(server.pid)["files"] if server.returncode is None else 0
    await server.wait()
    return _report(samples, last, killed, files_left)


async def _crowd(command: list[str], address: str, seed: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(*command, "--stream", address, "--seed", str(seed), stderr=asyncio.subprocess.DEVNULL)


def _process(pid: int) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    rss_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return {"rss_mib": rss_kib / 1024, "files": len(list(Path(f"/proc/{pid}/fd").iterdir()))}


def _report(samples: list[dict[str, float]], last: dict[str, Any], killed: int, files_left: float) -> dict[str, Any]:
    """Means over the third and the last quarter: the second half is flat when they are alike."""
    quarter = max(1, len(samples) // 4)
    third, fourth = samples[-2 * quarter : -quarter], samples[-quarter:]
    means = {name: [sum(s[name] for s in part) / len(part) for part in (third, fourth)] for name in samples[0]}
    growth = {name: (later - earlier) / max(earlier, 1.0) for name, (earlier, later) in means.items()}
    leaks = [name for name in ("rss_mib", "files", "tasks") if growth[name] > GROWTH_ALLOWED]
    leaks += ["KV or requests"] if last["left"] else []
    return {
        "third_and_last_quarter": {name: [round(v, 1) for v in pair] for name, pair in means.items()},
        "growth": {name: round(value, 4) for name, value in growth.items()},
        "requests": last["ended"],
        "clients_killed_with_their_process": killed,
        "tasks_at_the_end": last["tasks"],
        "files_at_the_end": files_left,
        "left": last["left"],
        "leaks": leaks,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stream", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        asyncio.run(serve())
    elif chosen.stream:
        asyncio.run(stream_for_ever(chosen.stream, chosen.seed))
    else:
        report = asyncio.run(main(chosen.seconds, chosen.clients))
        print(json.dumps(report, indent=2))
        sys.exit(1 if report["leaks"] else 0)
