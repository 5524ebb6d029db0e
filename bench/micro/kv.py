"""KV carriers against the machine's own limits.

    python -m bench.micro.kv [--json] [--rounds 9] [--carrier NAME ...]

Limits, of 128 MB at once: one memcpy; plain blocking TCP sockets; torch.distributed send/recv (gloo) with nothing around it. Then each
carrier with transfers of 1, 16 and 128 MB, one and four at once: KV in a source process's outbox, complete and verified in a puller
process's inbox. The source has everything staged; engines take no part. Figures are medians over rounds; a round runs limits and carriers
one after the other, so what disturbs the machine for longer disturbs all of them.

gb_s            10^9 bytes of KV per second, from the fetch until the inbox has verified the last byte
cpu_s_per_gb    CPU seconds of both processes per 10^9 bytes of KV

Source and puller are processes of their own, as in a deployment; on few cores they compete, so the machine must be quiet. Needs 2 GiB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from bench.micro.kv_ends import CARRIERS, LAYOUT, MB, free_port, tokens_of

SIZES_MB = (1, 16, 128)
CONCURRENT = (1, 4)
LIMITS = ("memcpy", "tcp", "torch_dist")
REPEATS = {1: 8, 16: 2, 128: 1}  # transfers of a size in one sample, so that no sample is too short to time
START_S, COMMAND_S = 120.0, 60.0

Case = tuple[str, int, int]  # carrier, MB, at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--carrier", action="append", choices=sorted(CARRIERS), help="only this one (may be repeated)")
    given = parser.parse_args()
    found = asyncio.run(measure(given.carrier or list(CARRIERS), given.rounds))
    result = {
        "limits": {f"{name}_gb_s": found.limit(name, SIZES_MB[-1]) for name in LIMITS},
        "carriers": [
            {"name": name, "mb": mb, "concurrent": n, "gb_s": found.gb_s((name, mb, n)), "cpu_s_per_gb": found.cpu_s_per_gb((name, mb, n))}
            for name, mb, n in found.cases
        ],
    }
    if given.json:
        print(json.dumps(result))
        return
    print_table(found)


class Found:
    """Samples of one run, (GB/s, CPU s/GB): of each case, and of each limit by MB."""

    def __init__(self, cases: list[Case]) -> None:
        self.cases = cases
        self.limits: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        self.samples: dict[Case, list[tuple[float, float]]] = defaultdict(list)

    def limit(self, name: str, mb: int) -> float:
        return round(statistics.median(rate for rate, _ in self.limits[name, mb]), 3)

    def gb_s(self, case: Case) -> float:
        return round(statistics.median(rate for rate, _ in self.samples[case]), 3)

    def cpu_s_per_gb(self, case: Case) -> float:
        return round(statistics.median(cpu for _, cpu in self.samples[case]), 3)


async def measure(names: list[str], rounds: int) -> Found:
    apart = [name for name in names if name != "loopback"]
    found = Found([(name, mb, n) for name in names for mb in SIZES_MB for n in CONCURRENT])
    async with AsyncExitStack() as stack:
        source, puller = await stack.enter_async_context(end("source")), await stack.enter_async_context(end("puller"))
        served = await source("endpoints", apart)
        await puller("start", apart, served)
        both = None
        if "loopback" in names:
            both = await stack.enter_async_context(end("both"))
            await both("start", ["loopback"])
        tcp_port, torch_port = await source("tcp_listen"), free_port()
        await asyncio.gather(source("torch_start", torch_port), puller("torch_start", torch_port))
        for number in range(rounds + 1):
            kept = found if number else Found([])  # the first round warms pages, connections and code
            await measure_limits(kept, source, puller, tcp_port)
            for case in found.cases:
                ends = (both, both) if case[0] == "loopback" else (source, puller)
                kept.samples[case].append(await sample(case, *ends))
    return found


async def measure_limits(found: Found, source: Any, puller: Any, tcp_port: int) -> None:
    for mb in SIZES_MB:
        size = mb * MB
        await limit(found, ("memcpy", mb), [puller], puller("memcpy", size))
        await limit(found, ("tcp", mb), [source, puller], puller("tcp_receive", tcp_port, size), source("tcp_send", size))
        await limit(found, ("torch_dist", mb), [source, puller], puller("torch_receive", size), source("torch_send", size))


async def limit(found: Found, case: tuple[str, int], ends: list[Any], *parts: Awaitable[Any]) -> None:
    before_s = sum([await each("cpu_s") for each in ends])
    took_s, *_ = await asyncio.gather(*parts)
    cpu_s = sum([await each("cpu_s") for each in ends]) - before_s
    num_gb = case[1] * MB / 1e9
    found.limits[case].append((num_gb / took_s, cpu_s / num_gb))


async def sample(case: Case, source: Any, puller: Any) -> tuple[float, float]:
    """GB/s and CPU seconds per GB of one case."""
    name, mb, concurrent = case
    num_tokens = tokens_of(mb * MB)
    took_s = cpu_s = 0.0
    for _ in range(REPEATS[mb]):
        ids = await source("stage", num_tokens, concurrent)
        ends = [source] if source is puller else [source, puller]
        before_s = sum([await each("cpu_s") for each in ends])
        took_s += await puller("pull", name, num_tokens, ids)
        cpu_s += sum([await each("cpu_s") for each in ends]) - before_s
    num_gb = REPEATS[mb] * concurrent * LAYOUT.entry_bytes(num_tokens) / 1e9
    return num_gb / took_s, cpu_s / num_gb


@asynccontextmanager
async def end(part: str) -> AsyncIterator[Any]:
    """One of the two processes, as a function from a command to its answer; ended when left."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "bench.micro.kv_ends", part, stdin=pipe, stdout=pipe)

    async def command(*words: object) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(words).encode() + b"\n")
        line = await asyncio.wait_for(process.stdout.readline(), COMMAND_S)
        if not line:
            raise SystemExit(f"the {part} process ended at {words}")
        return json.loads(line)

    try:
        await asyncio.wait_for(command("cpu_s"), START_S)
        yield command
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def print_table(found: Found) -> None:
    for name in LIMITS:
        each = ", ".join(f"{found.limit(name, mb):.2f} at {mb} MB" for mb in SIZES_MB)
        cpu = statistics.median(cpu for _, cpu in found.limits[name, SIZES_MB[-1]])
        print(f"limit {name:12s} {each} (GB/s); {cpu:.2f} CPU s/GB")
    print(f"{'carrier':12s} {'MB':>5s} {'at once':>8s} {'GB/s':>8s} {'of its limit':>13s} {'CPU s/GB':>9s}")
    for case in found.cases:
        name, mb, concurrent = case
        limit = {"grpc": "tcp", "tcp": "tcp", "torch_dist": "torch_dist"}.get(name, "memcpy")
        share = found.gb_s(case) / found.limit(limit, mb)
        print(f"{name:12s} {mb:5d} {concurrent:8d} {found.gb_s(case):8.2f} {share:13.2f} {found.cpu_s_per_gb(case):9.2f}")
    print(f"load {os.getloadavg()[0]:.1f}; limits are of one transfer of the same size")


if __name__ == "__main__":
    main()
