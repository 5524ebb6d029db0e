"""The doors with real engines: other people's clients run to their end, what they measure is what we measure, and what a token costs.

    python -m bench.doors_real [--requests 24] [--rate 1.5] [--peer] [--json]

One prefill and one decode worker (SmolLM2-135M on CPU), each on a core; workers and gateway are processes of their own. The same load,
random prompts of 64 tokens and answers of 32, comes from vLLM's own benchmark (`vllm.benchmarks.serve`: /v1/completions and chat), from the
openai package (streaming), and over gRPC. Each row: requests that failed; TTFT and TPOT (mean ms) as the client reports them and as the
gateway logged the same requests; CPU of the gateway process per 1,000 answer tokens. `--peer`: vLLM's own server, one engine, beside it;
its CPU is that of the API server process, without the engine's. Needs vLLM and the openai package.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.micro.gateway_load import answer, cpu_s, say
from disagg.config import Topology, parse_topology
from disagg.cpu import fastest_dtype
from disagg.types import Role

MODEL = "smollm2-135m"
INPUT_TOKENS, OUTPUT_TOKENS = 64, 32
ARGS = {
    "dtype": fastest_dtype(),
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 256 << 20,
}
VLLM_BENCH = """
import argparse, asyncio, sys
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
asyncio.run(serve.main_async(parser.parse_args()))
"""


@dataclass(frozen=True)
class Row:
    """One client's run. Times in ms, means over its requests; `ours_*` None where the server is not ours."""

    client: str
    completed: int
    failed: int
    ttft_ms: float
    tpot_ms: float
    ours_ttft_ms: float | None
    ours_tpot_ms: float | None
    front_cpu_ms_per_1000_tokens: float

    @property
    def agrees(self) -> bool:
        """Within 5 % or 3 ms."""
        pairs = ((self.ttft_ms, self.ours_ttft_ms), (self.tpot_ms, self.ours_tpot_ms))
        return all(ours is None or abs(theirs - ours) <= max(3.0, 0.05 * ours) for theirs, ours in pairs)


def topology() -> Topology:
    return parse_topology(
        {
            "model": MODEL,
            "engine": {"args": ARGS},
            "pools": {"prefill": {"count": 1}, "decode": {"count": 1}},
            "gateway": {"port": 0, "http_port": 0},
            "slo_classes": [{"name": "default", "ttft_ms": 60_000, "tpot_ms": 2000}],
        }
    )


# ---- the parts


async def serve_workers() -> None:
    from disagg.models import get_model
    from disagg.serving.start import start_worker

    folder = str(get_model(MODEL))
    servers = [await start_worker(topology(), role, role, folder, cores=[core]) for core, role in enumerate((Role.PREFILL, Role.DECODE))]
    say(json.dumps([[s.worker.name, s.worker.name, s.target] for s in servers]))
    await asyncio.to_thread(os.read, 0, 1)
    for server in servers:
        await server.close()


async def serve_gateway(targets: str, log_file: str) -> None:
    from disagg.front.gateway import Gateway
    from disagg.models import get_model

    requests = logging.getLogger("disagg.requests")
    requests.setLevel(logging.INFO)
    requests.addHandler(logging.FileHandler(log_file))
    gateway = await Gateway.start(topology(), str(get_model(MODEL)))
    for name, role, target in json.loads(targets):
        await gateway.pool.join(name, Role(role), target)
    say(json.dumps([gateway.endpoint, gateway.http_endpoint]))
    await asyncio.to_thread(os.read, 0, 1)
    await gateway.close()


@asynccontextmanager
async def process(*command: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Ended when left; asked to first, because its engines have processes of their own."""
    pipe = asyncio.subprocess.PIPE
    started = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 24, **options)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.terminate()
        try:
            await asyncio.wait_for(started.wait(), 20)
        except TimeoutError:
            started.kill()
            await started.wait()


# ---- the clients: each returns (completed, failed, mean TTFT ms, mean TPOT ms)

Figures = tuple[int, int, float, float]


async def vllm_bench(base_url: str, endpoint: str, requests: int, rate: float, folder: str) -> Figures:
    backend = "openai-chat" if "chat" in endpoint else "openai"
    with tempfile.TemporaryDirectory() as where:
        options = {
            "backend": backend,
            "base-url": base_url,
            "endpoint": endpoint,
            "model": MODEL,
            "tokenizer": folder,
            "dataset-name": "random",
            "random-input-len": INPUT_TOKENS,
            "random-output-len": OUTPUT_TOKENS,
            "num-prompts": requests,
            "request-rate": rate,
            "result-dir": where,
            "result-filename": "r.json",
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        async with process(
            sys.executable, "-c", VLLM_BENCH, *flags, "--ignore-eos", "--save-result", stderr=asyncio.subprocess.STDOUT
        ) as run:
            assert run.stdout is not None
            said = await asyncio.wait_for(run.stdout.read(), 300)
        file = Path(where) / "r.json"
        assert file.exists(), said.decode()[-3000:]
        found = json.loads(file.read_text())
    return found["completed"], requests - found["completed"], found["mean_ttft_ms"], found["mean_tpot_ms"]


async def openai_package(base_url: str, requests: int, rate: float) -> Figures:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:

        async def one() -> tuple[float, float]:
            prompt = [random.randrange(100, 49_000) for _ in range(INPUT_TOKENS)]
            began_s = time.perf_counter()
            stream = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=OUTPUT_TOKENS, temperature=0, stream=True, extra_body={"ignore_eos": True}
            )
            instants = [time.perf_counter() async for event in stream if event.choices]
            return instants[0] - began_s, (instants[-1] - instants[0]) / (OUTPUT_TOKENS - 1)

        return await spread(one, requests, rate)


async def over_grpc(address: str, requests: int, rate: float) -> Figures:
    from disagg.client import AsyncClient

    async with AsyncClient(address) as client:

        async def one() -> tuple[float, float]:
            prompt = [random.randrange(100, 49_000) for _ in range(INPUT_TOKENS)]
            began_s = time.perf_counter()
            stream = client.stream(prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
            instants = [time.perf_counter() async for _ in stream]
            return instants[0] - began_s, (instants[-1] - instants[0]) / (OUTPUT_TOKENS - 1)

        return await spread(one, requests, rate)


async def spread(one: Callable[[], Awaitable[tuple[float, float]]], requests: int, rate: float) -> Figures:
    """Open loop, at exponential distances; one request before, to connect."""
    await one()
    tasks = []
    for _ in range(requests):
        tasks.append(asyncio.ensure_future(one()))
        await asyncio.sleep(random.expovariate(rate))
    found = await asyncio.gather(*tasks, return_exceptions=True)
    right = [f for f in found if not isinstance(f, BaseException)]
    return len(right), len(found) - len(right), *(1e3 * statistics.mean(column) for column in zip(*right, strict=True))


# ---- together


async def measure(name: str, run: Awaitable[Figures], front_pid: int, requests: int, log_file: Path | None) -> Row:
    logged = len(log_lines(log_file))
    before_s = cpu_s(front_pid)
    completed, failed, ttft_ms, tpot_ms = await run
    spent_ms = 1e3 * (cpu_s(front_pid) - before_s)
    ours: tuple[float, float] | None = None
    if log_file is not None:
        records = [json.loads(line) for line in log_lines(log_file)[logged:]][-requests:]  # without what came to connect
        ttft = statistics.mean(r["ttft_s"] for r in records)
        ours = 1e3 * ttft, 1e3 * statistics.mean(r["decode_s"] / (r["output_tokens"] - 1) for r in records)
    tokens = (requests + 1) * OUTPUT_TOKENS
    row = Row(name, completed, failed, ttft_ms, tpot_ms, ours and ours[0], ours and ours[1], 1e3 * spent_ms / tokens)
    print(line(row), file=sys.stderr, flush=True)  # a run takes minutes
    return row


def log_lines(file: Path | None) -> list[str]:
    return file.read_text().splitlines() if file is not None else []


async def ours(requests: int, rate: float) -> list[Row]:
    from disagg.models import get_model

    me, folder = [sys.executable, "-m", "bench.doors_real", "--part"], str(get_model(MODEL))
    with tempfile.TemporaryDirectory() as where:
        log_file = Path(where) / "requests.log"
        async with process(*me, "workers") as workers:
            targets = await line_of(workers)
            async with process(*me, "gateway", "--targets", targets, "--log-file", str(log_file)) as gateway:
                grpc_address, http_address = json.loads(await line_of(gateway))
                url = f"http://{http_address}"
                runs = {
                    "vLLM's benchmark, /v1/completions": lambda: vllm_bench(url, "/v1/completions", requests, rate, folder),
                    "vLLM's benchmark, /v1/chat/completions": lambda: vllm_bench(url, "/v1/chat/completions", requests, rate, folder),
                    "openai package, /v1/completions": lambda: openai_package(url, requests, rate),
                    "gRPC, disagg.client": lambda: over_grpc(grpc_address, requests, rate),
                }
                await openai_package(url, 4, 4.0)  # warm
                return [await measure(name, run(), gateway.pid, requests, log_file) for name, run in runs.items()]


async def peer(requests: int, rate: float) -> list[Row]:
    from disagg.models import get_model

    folder = str(get_model(MODEL))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [part for name, value in ARGS.items() for part in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", MODEL]
    async with process(*command, "--host", "127.0.0.1", "--port", str(port), *flags, stderr=asyncio.subprocess.DEVNULL) as server:
        async with asyncio.timeout(300):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                await asyncio.sleep(0.5)
        url = f"http://127.0.0.1:{port}"
        await openai_package(url, 4, 4.0)  # warm
        name = "vllm serve itself (vLLM's benchmark, /v1/completions)"
        return [await measure(name, vllm_bench(url, "/v1/completions", requests, rate, folder), server.pid, requests, None)]


async def line_of(part: asyncio.subprocess.Process) -> str:
    """The part's JSON line; engines print others."""
    while not (line := await answer(part)).startswith("["):
        pass
    return line


async def main(requests: int, rate: float, with_peer: bool) -> list[Row]:
    return await ours(requests, rate) + (await peer(requests, rate) if with_peer else [])


def line(row: Row) -> str:
    logged = ""
    if row.ours_ttft_ms is not None:
        logged = f", ours {row.ours_ttft_ms:.1f} / {row.ours_tpot_ms:.2f}: {'agrees' if row.agrees else 'DIFFERS'}"
    times = f"TTFT / TPOT {row.ttft_ms:.1f} / {row.tpot_ms:.2f} ms{logged}"
    cost = f"{row.front_cpu_ms_per_1000_tokens:.0f} ms CPU per 1,000 tokens"
    return f"{row.client}: {row.completed} done, {row.failed} failed; {times}; {cost}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second, Poisson")
    parser.add_argument("--peer", action="store_true", help="vLLM's own server as well")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", choices=("workers", "gateway"), help=argparse.SUPPRESS)
    parser.add_argument("--targets", help=argparse.SUPPRESS)
    parser.add_argument("--log-file", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part == "workers":
        asyncio.run(serve_workers())
    elif given.part == "gateway":
        asyncio.run(serve_gateway(given.targets, given.log_file))
    else:
        rows = asyncio.run(main(given.requests, given.rate, given.peer))
        if given.json:
            print(json.dumps([{**asdict(row), "agrees": row.agrees} for row in rows], indent=2))
        else:
            print("\n".join(map(line, rows)))
