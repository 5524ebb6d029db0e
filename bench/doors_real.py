"""The doors with real engines: other people's clients run to their end, what they measure is what we measure, and what a token costs.

    python -m bench.doors_real [--rows chat,grpc] [--requests 16] [--rate 0.5] [--out out/doors_real.jsonl]

One prefill and one decode worker (SmolLM2-135M on CPU), each on a core; workers and gateway are processes of their own. The same load,
random prompts of 64 tokens and answers of 32, comes from each client. A row per client: requests that failed; TTFT and TPOT (mean ms) as
the client reports them and as the gateway logged the same requests; answer tokens per second; CPU of the gateway process per 1,000 of them.
`flat-*`: 32 requests at once, which says what a door can carry. `vllm-serve*`: vLLM's own server, one engine on the same two cores, beside
it; its CPU is that of the API server process, without the engine's.

Rows that --out has already are not measured again: a run that was ended goes on where it was. `guidellm` needs a program that this project
does not install (--guidellm PROGRAM). SIGTERM ends what was started, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import socket
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.load_clients import MODEL, OUTPUT_TOKENS, Figures, guidellm, openai_package, over_grpc, process, vllm_bench
from bench.micro.gateway_load import answer, cpu_s, say
from disagg.config import Topology, parse_topology
from disagg.cpu import fastest_dtype
from disagg.types import Role

START_TIMEOUT_S = 600.0  # a busy machine needs minutes
FLAT_REQUESTS = 32
OUR_ROWS = ("completions", "chat", "openai", "grpc", "guidellm", "flat-http", "flat-grpc")
PEER_ROWS = ("vllm-serve", "vllm-serve-flat")
ARGS = {
    "dtype": fastest_dtype(),
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 256 << 20,
}


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
    tokens_per_s: float
    front_cpu_ms_per_1000_tokens: float

    @property
    def agrees(self) -> bool:
        """Within 5 % or 3 ms."""
        pairs = ((self.ttft_ms, self.ours_ttft_ms), (self.tpot_ms, self.ours_tpot_ms))
        return all(ours is None or abs(theirs - ours) <= max(3.0, 0.05 * ours) for theirs, ours in pairs)

    def line(self) -> str:
        logged = ""
        if self.ours_ttft_ms is not None:
            logged = f", ours {self.ours_ttft_ms:.1f} / {self.ours_tpot_ms:.2f}: {'agrees' if self.agrees else 'DIFFERS'}"
        times = f"TTFT / TPOT {self.ttft_ms:.1f} / {self.tpot_ms:.2f} ms{logged}"
        cost = f"{self.tokens_per_s:.0f} tokens/s; {self.front_cpu_ms_per_1000_tokens:.0f} ms CPU per 1,000 tokens"
        return f"{self.client}: {self.completed} done, {self.failed} failed; {times}; {cost}"


def topology(gateway: dict[str, Any]) -> Topology:
    """`gateway`: further settings of it."""
    traces = {"otlp_traces_endpoint": gateway["traces_endpoint"]} if "traces_endpoint" in gateway else {}
    return parse_topology(
        {
            "model": MODEL,
            "engine": {"args": ARGS | traces},
            "pools": {"prefill": {"count": 1}, "decode": {"count": 1}},
            "gateway": {"port": 0, "http_port": 0, **gateway},
            "slo_classes": [{"name": "default", "ttft_ms": 60_000, "tpot_ms": 2000}],
        }
    )


# ---- the parts, each a process


async def serve_workers(settings: Topology) -> None:
    from disagg.models import get_model
    from disagg.serving.start import start_worker

    folder = str(get_model(MODEL))
    servers = [await start_worker(settings, role, role, folder, cores=[core]) for core, role in enumerate((Role.PREFILL, Role.DECODE))]
    say(json.dumps([[s.worker.name, s.worker.name, s.target] for s in servers]))
    await asyncio.to_thread(os.read, 0, 1)
    for server in servers:
        await server.close()


async def serve_gateway(settings: Topology, targets: str, log_file: str) -> None:
    from disagg.front.gateway import Gateway
    from disagg.models import get_model

    requests = logging.getLogger("disagg.requests")
    requests.setLevel(logging.INFO)
    requests.addHandler(logging.FileHandler(log_file))
    gateway = await Gateway.start(settings, str(get_model(MODEL)))
    for name, role, target in json.loads(targets):
        await gateway.pool.join(name, Role(role), target)
    say(json.dumps([gateway.endpoint, gateway.http_endpoint]))
    await asyncio.to_thread(os.read, 0, 1)
    await gateway.close()


@dataclass(frozen=True)
class Server:
    """What is measured: `pid` of the process in front; `log_file` of its requests, None where it has none of ours."""

    url: str
    pid: int
    grpc_address: str = ""
    log_file: Path | None = None

    def log_lines(self) -> list[str]:
        return self.log_file.read_text().splitlines() if self.log_file is not None else []


@asynccontextmanager
async def our_server(**gateway: Any) -> AsyncIterator[Server]:
    """`gateway`: settings of it beyond the usual ones."""
    me = [sys.executable, "-m", "bench.doors_real", "--gateway", json.dumps(gateway), "--part"]
    async with AsyncExitStack() as stack:
        log_file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "requests.log"
        workers = await stack.enter_async_context(process(*me, "workers", eof_patience_s=20.0))
        targets = await _line_of(workers)
        gateway = await stack.enter_async_context(
            process(*me, "gateway", "--targets", targets, "--log-file", str(log_file), eof_patience_s=20.0)
        )
        grpc_address, http_address = json.loads(await _line_of(gateway))
        yield Server(f"http://{http_address}", gateway.pid, grpc_address, log_file)


@asynccontextmanager
async def vllm_serve(folder: str) -> AsyncIterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [part for name, value in ARGS.items() for part in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", MODEL]
    async with process(*command, "--host", "127.0.0.1", "--port", str(port), *flags, stderr=asyncio.subprocess.DEVNULL) as server:
        async with asyncio.timeout(START_TIMEOUT_S):
            while server.returncode is None:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                await asyncio.sleep(0.5)
        yield Server(f"http://127.0.0.1:{port}", server.pid)


async def _line_of(part: asyncio.subprocess.Process) -> str:
    """The part's JSON line; engines print others."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while not (line := await answer(part)).startswith("["):
            pass
    return line


# ---- together


@dataclass(frozen=True)
class Plan:
    """What the command line asks."""

    requests: int
    rate: float
    guidellm: str
    folder: str

    def run(self, row: str, server: Server) -> tuple[str, Callable[[], Awaitable[Figures]]]:
        """The row's name for people, and what measures it."""
        url, all_at_once = server.url, (FLAT_REQUESTS, math.inf)
        paced = (self.requests, self.rate)
        bench = "vLLM's benchmark"
        rows: dict[str, tuple[str, Callable[[], Awaitable[Figures]]]] = {
            "completions": (f"{bench}, /v1/completions", lambda: vllm_bench(url, "/v1/completions", *paced, self.folder)),
            "chat": (f"{bench}, /v1/chat/completions", lambda: vllm_bench(url, "/v1/chat/completions", *paced, self.folder)),
            "openai": ("openai package, /v1/completions", lambda: openai_package(url, *paced)),
            "grpc": ("gRPC, disagg.client", lambda: over_grpc(server.grpc_address, *paced)),
            "guidellm": ("guidellm, /v1/completions", lambda: guidellm(url, *paced, self.folder, self.guidellm)),
            "flat-http": ("openai package, all at once", lambda: openai_package(url, *all_at_once)),
            "flat-grpc": ("gRPC, disagg.client, all at once", lambda: over_grpc(server.grpc_address, *all_at_once)),
            "vllm-serve": (f"vllm serve itself, {bench}", lambda: vllm_bench(url, "/v1/completions", *paced, self.folder)),
            "vllm-serve-flat": ("vllm serve itself, openai package, all at once", lambda: openai_package(url, *all_at_once)),
        }
        return rows[row]


async def measure(name: str, run: Callable[[], Awaitable[Figures]], server: Server) -> Row:
    logged = len(server.log_lines())
    before_s = cpu_s(server.pid)
    got = await run()
    spent_ms = 1e3 * (cpu_s(server.pid) - before_s)
    ours: tuple[float, float] | None = None
    if server.log_file is not None:
        records = [json.loads(line) for line in server.log_lines()[logged:]][-got.completed :]  # without what came to connect
        ttft_s = statistics.mean(r["ttft_s"] for r in records)
        ours = 1e3 * ttft_s, 1e3 * statistics.mean(r["decode_s"] / (r["output_tokens"] - 1) for r in records)
    per_thousand_ms = 1e3 * spent_ms / ((got.completed + 1) * OUTPUT_TOKENS)
    times = (got.completed, got.failed, got.ttft_ms, got.tpot_ms, ours and ours[0], ours and ours[1])
    return Row(name, *times, got.tokens_per_s, per_thousand_ms)


async def main(rows: list[str], plan: Plan, out: Path) -> None:
    """Measure what `out` does not have yet."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that what was started is ended then, too
    known = _known(out)
    for own, start in ((OUR_ROWS, our_server), (PEER_ROWS, lambda: vllm_serve(plan.folder))):
        wanted = [row for row in rows if row in own and row not in known]
        if not wanted:
            continue
        async with start() as server:
            await openai_package(server.url, 4, 4.0)  # warm
            for row in wanted:
                measured = await measure(*plan.run(row, server), server)
                with out.open("a") as file:
                    file.write(json.dumps({"row": row, **asdict(measured), "agrees": measured.agrees}) + "\n")
                print(measured.line(), flush=True)


def _known(out: Path) -> set[str]:
    out.parent.mkdir(parents=True, exist_ok=True)
    return {json.loads(line)["row"] for line in out.read_text().splitlines()} if out.exists() else set()


def _rows(text: str) -> list[str]:
    rows = text.split(",")
    if unknown := [row for row in rows if row not in OUR_ROWS + PEER_ROWS]:
        raise argparse.ArgumentTypeError(f"no row {unknown[0]!r}; there are {', '.join(OUR_ROWS + PEER_ROWS)}")
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [row for row in OUR_ROWS + PEER_ROWS if row != "guidellm"]
    parser.add_argument("--rows", type=_rows, default=usual, help="some of " + ", ".join(OUR_ROWS + PEER_ROWS))
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.5, help="requests per second, Poisson")
    parser.add_argument("--guidellm", default="guidellm", help="the program")
    parser.add_argument("--out", type=Path, default=Path("out/doors_real.jsonl"))
    parser.add_argument("--part", choices=("workers", "gateway"), help=argparse.SUPPRESS)
    parser.add_argument("--gateway", type=json.loads, default={}, help=argparse.SUPPRESS)
    parser.add_argument("--targets", help=argparse.SUPPRESS)
    parser.add_argument("--log-file", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    given = _arguments()
    if given.part == "workers":
        asyncio.run(serve_workers(topology(given.gateway)))
    elif given.part == "gateway":
        asyncio.run(serve_gateway(topology(given.gateway), given.targets, given.log_file))
    else:
        from disagg.models import get_model

        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(main(given.rows, Plan(given.requests, given.rate, given.guidellm, str(get_model(MODEL))), given.out))
