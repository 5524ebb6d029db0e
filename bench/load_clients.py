"""Other people's clients, and ours, as load for a server: each sends the same kind of request and says what it measured.

Random prompts of INPUT_TOKENS tokens, answers of OUTPUT_TOKENS, greedy, streamed; Poisson arrivals at `rate` per second, or all at once
where `rate` is infinite. Used by doors_real.py and by the tests of examples.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m"
INPUT_TOKENS, OUTPUT_TOKENS = 64, 32
RUN_TIMEOUT_S = 300.0
VLLM_BENCH = """
import argparse, asyncio
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
asyncio.run(serve.main_async(parser.parse_args()))
"""


@dataclass(frozen=True)
class Figures:
    """What a client reports: means over its requests in ms, and answer tokens per second over its run."""

    completed: int
    failed: int
    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float


@asynccontextmanager
async def process(*command: str, eof_patience_s: float = 0.0, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Ended when left: by the end of its input, `eof_patience_s` later by SIGTERM (engines have processes of their own), then SIGKILL."""
    pipe = asyncio.subprocess.PIPE
    started = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 24, **options)
    try:
        yield started
    finally:
        assert started.stdin is not None
        started.stdin.close()
        for ask, patience_s in ((None, eof_patience_s), (started.terminate, 20.0), (started.kill, 20.0)):
            with contextlib.suppress(ProcessLookupError):
                if ask is not None:
                    ask()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(started.wait(), patience_s)
                break


async def vllm_bench(base_url: str, endpoint: str, requests: int, rate: float, folder: str) -> Figures:
    """vLLM's own benchmark (`vllm bench serve`, by its module). `folder`: of the model, for its tokenizer."""
    with tempfile.TemporaryDirectory() as where:
        options = {
            "backend": "openai-chat" if "chat" in endpoint else "openai",
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
        command = (sys.executable, "-c", VLLM_BENCH, *flags, "--ignore-eos", "--save-result")
        found = await _result_of(command, Path(where) / "r.json")
    done = found["completed"]
    return Figures(done, requests - done, found["mean_ttft_ms"], found["mean_tpot_ms"], found["output_throughput"])


async def guidellm(base_url: str, requests: int, rate: float, folder: str, program: str = "guidellm") -> Figures:
    """guidellm 0.8, text completions. `program`: where it is installed."""
    with tempfile.TemporaryDirectory() as where:
        options = {
            "backend": {"kind": "openai_http", "target": base_url, "model": MODEL, "request_format": "/v1/completions"},
            "profile": {"kind": "poisson", "rate": rate},
            "constraint": {"kind": "max_requests", "count": requests},
            "data": {"kind": "synthetic_text", "prompt_tokens": INPUT_TOKENS, "output_tokens": OUTPUT_TOKENS},
            "tokenizer": {"kind": "huggingface_auto", "model": folder},
            "output": {"kind": "json", "path": f"{where}/r.json"},
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", json.dumps(value))]
        found = await _result_of((program, "run", *flags, "--disable-console"), Path(where) / "r.json")
    metrics = found["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    names = ("time_to_first_token_ms", "inter_token_latency_ms", "output_tokens_per_second")
    means = [metrics[name]["successful"]["mean"] for name in names]
    return Figures(totals["successful"], totals["errored"] + totals["incomplete"], *means)


async def _result_of(command: tuple[str, ...], file: Path) -> Any:
    """The JSON that the program writes. What it prints is shown when it writes none."""
    async with process(*command, stderr=asyncio.subprocess.STDOUT) as run:
        assert run.stdout is not None
        said = await asyncio.wait_for(run.stdout.read(), RUN_TIMEOUT_S)
    try:
        return json.loads(await asyncio.to_thread(file.read_text))
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} wrote no result; its last words:\n{said.decode()[-3000:]}") from None


async def openai_package(base_url: str, requests: int, rate: float) -> Figures:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:

        async def one() -> list[float]:
            stream = await client.completions.create(
                model=MODEL, prompt=_prompt(), max_tokens=OUTPUT_TOKENS, temperature=0, stream=True, extra_body={"ignore_eos": True}
            )
            return [time.perf_counter() async for event in stream if event.choices]

        return await spread(one, requests, rate)


async def over_grpc(address: str, requests: int, rate: float) -> Figures:
    from disagg.client import AsyncClient

    async with AsyncClient(address) as client:

        async def one() -> list[float]:
            stream = client.stream(_prompt(), max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
            return [time.perf_counter() async for _ in stream]

        return await spread(one, requests, rate)


def _prompt() -> list[int]:
    return [random.randrange(100, 49_000) for _ in range(INPUT_TOKENS)]


async def spread(one: Callable[[], Awaitable[list[float]]], requests: int, rate: float) -> Figures:
    """`one` sends a request and returns the instants of what came. One request goes before the others, to connect."""

    async def timed() -> tuple[float, float]:
        began_s = time.perf_counter()
        instants = await one()
        return instants[0] - began_s, (instants[-1] - instants[0]) / (OUTPUT_TOKENS - 1)

    await one()
    began_s = time.perf_counter()
    tasks = []
    for _ in range(requests):
        tasks.append(asyncio.ensure_future(timed()))
        await asyncio.sleep(0.0 if math.isinf(rate) else random.expovariate(rate))
    found = await asyncio.gather(*tasks, return_exceptions=True)
    took_s = time.perf_counter() - began_s
    right = [f for f in found if not isinstance(f, BaseException)]
    if not right:
        raise RuntimeError(f"no request succeeded; the first: {found[0]!r}")
    ttft_ms, tpot_ms = (1e3 * statistics.mean(column) for column in zip(*right, strict=True))
    return Figures(len(right), len(found) - len(right), ttft_ms, tpot_ms, len(right) * OUTPUT_TOKENS / took_s)
