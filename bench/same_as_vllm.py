"""Are our figures vLLM's? The same answers, measured by `vllm bench serve` and by our client at once.

    python -m bench.same_as_vllm [--topology FILE | --url URL] [--requests 60] [--rate 1] [--input-tokens 128] [--output-tokens 24] [--json]

                                  /v1/completions            /v1/completions
    vllm bench serve  ----------------------------->  relay  --------------->  server (our OpenAI door, or any)
    our client  ---  /copy/N/v1/completions  ------------^

vLLM's benchmark drives. For each of its requests the relay opens one at the server and hands every piece of the answer, as it comes, to
vLLM's client and to ours, which began a request of its own at that moment, over HTTP like any external arm. Each client measures by its own
clock and accounts by its own rules; what then differs is what one measures otherwise than the other. Without --url the topology is brought
up first (--model and --tokenizer are then known). Exit status 1 when a mean or a percentile differs by more than 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from bench.peers.servers import free_port
from disagg.ab.arms import Arm
from disagg.ab.external import ExternalClient
from disagg.ab.load import OpenLoop
from disagg.ab.ray_arms import RayArms
from disagg.ab.result import Distribution, arm_figures
from disagg.ab.rows import Row
from disagg.ab.workload import PlannedRequest
from disagg.config import SloClass, load_topology
from disagg.launch.session import RaySession
from disagg.models.resolve import resolve_model

TOLERANCE = 0.02
BENCH_TIMEOUT_S = 1800.0
VLLM_BENCH = """
import argparse, asyncio
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
asyncio.run(serve.main_async(parser.parse_args()))
"""
MEASURES = {"TTFT": ("ttft", "ttft_s"), "TPOT": ("tpot", "tpot_s"), "ITL": ("itl", "itl_s"), "E2E": ("e2el", "e2e_s")}  # vLLM's key, ours
PERCENTS = {"p50": "50", "p90": "90", "p95": "95", "p99": "99"}


@dataclass(frozen=True, slots=True)
class Load:
    """What vLLM's benchmark sends. `goodput_ms`: targets of TTFT and TPOT, for vLLM's goodput and our attainment."""

    model: str
    tokenizer: str
    requests: int
    rate_rps: float
    input_tokens: int
    output_tokens: int
    goodput_ms: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Pair:
    """One figure by both, in its own unit."""

    name: str
    vllm: float
    ours: float

    @property
    def difference(self) -> float:
        """Ours by vLLM's, less 1."""
        return self.ours / self.vllm - 1 if self.vllm else float(self.ours != 0)


# ---- the relay


class Relay:
    """Stands between vLLM's benchmark and a server; measures what passes with our own client. Use it in `async with`; then `rows`."""

    def __init__(self, server: str, load: Load) -> None:
        self._server = server.rstrip("/").removesuffix("/v1")
        self._load = load
        self._copies: dict[int, asyncio.Queue[bytes]] = {}
        self._measuring: set[asyncio.Task[None]] = set()
        self.rows: list[Row] = []
        self.url = ""

    async def __aenter__(self) -> Relay:
        app = web.Application()
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/copy/{number}/v1/completions", self._copy)
        app.router.add_get("/v1/models", self._models)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._measuring:
            task.cancel()
        await self._session.close()
        await self._runner.cleanup()

    async def measured(self) -> list[Row]:
        """All rows, once every copy has been read to its end."""
        await asyncio.gather(*self._measuring)
        return self.rows

    async def _models(self, request: web.Request) -> web.Response:
        async with self._session.get(f"{self._server}/v1/models") as answer:
            return web.json_response(await answer.json())

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self._copies)
        copy = self._copies[number] = asyncio.Queue()
        task = asyncio.create_task(self._measure(number))
        self._measuring.add(task)
        task.add_done_callback(self._measuring.discard)
        # Ours counts tokens by their ids, as in any external arm; vLLM's client takes no notice of them.
        async with self._session.post(f"{self._server}/v1/completions", json={**body, "return_token_ids": True}) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                copy.put_nowait(piece)
                await response.write(piece)
        copy.put_nowait(b"")
        return response

    async def _copy(self, request: web.Request) -> web.StreamResponse:
        copy = self._copies[int(request.match_info["number"])]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while piece := await copy.get():
            await response.write(piece)
        return response

    async def _measure(self, number: int) -> None:
        async with ExternalClient(f"{self.url}/copy/{number}") as client:
            sender = OpenLoop(client, [], arm="ours", vocab_size=2, timeout_s=BENCH_TIMEOUT_S)
            self.rows.append(await sender.send_now(_planned(self._load, number)))


def _planned(load: Load, number: int) -> PlannedRequest:
    """Ours of vLLM's request. Its prompt stays at the relay: the answer is that to vLLM's."""
    return PlannedRequest(
        round=0,
        index=number,
        stream="vllm",
        slo_class="vllm",
        due_s=0.0,
        input_tokens=1,
        output_tokens=load.output_tokens,
        shared_prefix_tokens=0,
        ignore_eos=True,
        temperature=0.0,
        seed=str(number),
    )


# ---- both measure


async def measure(server: str, load: Load) -> list[Pair]:
    """Every figure that both have. Raises RuntimeError when vLLM's benchmark fails or a request does."""
    async with Relay(server, load) as relay:
        theirs = await _vllm_bench(relay.url, load)
        rows = await relay.measured()
    if theirs["completed"] != load.requests or not all(row.is_whole for row in rows) or len(rows) != load.requests:
        first = next((f"{row.error}: {row.message}" for row in rows if not row.is_whole), "")
        whole = sum(row.is_whole for row in rows)
        raise RuntimeError(f"of {load.requests} requests vLLM's client saw {theirs['completed']} whole, ours {whole}. {first}")
    ttft_ms, tpot_ms = load.goodput_ms
    ours = arm_figures(rows, [SloClass(name="vllm", ttft_ms=ttft_ms, tpot_ms=tpot_ms)], None)
    pairs = [pair for name, (key, field) in MEASURES.items() for pair in _latency_pairs(name, theirs, key, getattr(ours, field))]
    good = theirs["request_goodput"] * theirs["duration"] / load.requests
    pairs.append(Pair("share inside the targets", good, ours.slo_attainment or 0.0))
    pairs.append(Pair("output tokens", float(theirs["total_output_tokens"]), float(sum(row.output_tokens for row in rows))))
    pairs.append(Pair("output tokens/s", theirs["output_throughput"], ours.output_tokens_per_s or 0.0))
    return pairs


def _latency_pairs(name: str, theirs: dict[str, Any], key: str, ours: Distribution) -> list[Pair]:
    """Mean and percentiles in ms; those only that we print, which have samples enough."""
    found = [Pair(f"{name} mean, ms", theirs[f"mean_{key}_ms"], 1e3 * (ours.mean or 0.0))]
    for ours_name, percent in PERCENTS.items():
        value = getattr(ours, ours_name)
        if value is not None:
            found.append(Pair(f"{name} {ours_name}, ms", theirs[f"p{percent}_{key}_ms"], 1e3 * value))
    return found


async def _vllm_bench(url: str, load: Load) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "backend": "openai",
            "base-url": url,
            "endpoint": "/v1/completions",
            "model": load.model,
            "tokenizer": load.tokenizer,
            "dataset-name": "random",
            "random-input-len": load.input_tokens,
            "random-output-len": load.output_tokens,
            "num-prompts": load.requests,
            "request-rate": load.rate_rps,
            "ready-check-timeout-sec": 0,
            "percentile-metrics": "ttft,tpot,itl,e2el",
            "metric-percentiles": ",".join(PERCENTS.values()),
            "result-dir": folder,
            "result-filename": "result.json",
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        targets = [f"ttft:{load.goodput_ms[0]:g}", f"tpot:{load.goodput_ms[1]:g}"]
        command = [sys.executable, "-c", VLLM_BENCH, *flags, "--goodput", *targets, "--ignore-eos", "--save-result", "--disable-tqdm"]
        run = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
        try:
            said, _ = await asyncio.wait_for(run.communicate(), BENCH_TIMEOUT_S)
        finally:
            if run.returncode is None:
                run.kill()
                await run.wait()
        file = Path(folder) / "result.json"
        if not file.exists():
            raise RuntimeError(f"vllm bench serve ended with {run.returncode} and no result:\n{said.decode(errors='replace')[-3000:]}")
        found: dict[str, Any] = json.loads(file.read_text())
        return found


# ---- a server


@asynccontextmanager
async def deployed(file: Path) -> AsyncIterator[tuple[str, str, str]]:
    """Bring a topology up; yields its door's URL, the model's name and the folder with its tokenizer."""
    port = free_port()
    topology = load_topology(file, {"gateway.http_port": port, "gateway.port": 0})
    arm = Arm("same", topology.mode, topology)
    with RaySession.start([topology], None) as session:
        source = RayArms(session, [arm], resident=False, base_dir=file.parent, say=lambda line: print(line, file=sys.stderr, flush=True))
        try:
            await source.use("same")
            yield f"http://127.0.0.1:{port}", topology.model, str(resolve_model(topology.model, file.parent))
        finally:
            await source.close()


async def warm(url: str, load: Load) -> None:
    """A few requests that nobody measures, of the same lengths."""
    async with ExternalClient(url) as client:
        await client.max_model_len()

        async def one(number: int) -> None:
            prompt = [1 + (number + i) % 1000 for i in range(load.input_tokens)]
            stream: AsyncGenerator[Any, None] = client.stream(
                prompt, max_tokens=load.output_tokens, temperature=0.0, ignore_eos=True, slo_class=None, timeout_s=BENCH_TIMEOUT_S
            )
            async for _ in stream:
                pass

        await asyncio.gather(*(one(number) for number in range(3)))


async def run(given: argparse.Namespace) -> list[Pair]:
    def load(model: str, tokenizer: str) -> Load:
        sizes = given.requests, given.rate, given.input_tokens, given.output_tokens
        return Load(model, tokenizer, *sizes, goodput_ms=(given.ttft_ms, given.tpot_ms))

    if given.url:
        return await measure(given.url, load(given.model, given.tokenizer or given.model))
    async with deployed(given.topology) as (url, model, tokenizer):
        wanted = load(model, tokenizer)
        await warm(url, wanted)
        return await measure(url, wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", type=Path, default=Path("cluster/topologies/cpu-1p1d.yaml"))
    parser.add_argument("--url", help="of a server that is up; wants --model")
    parser.add_argument("--model", default="smollm2-135m", help="as the server at --url names it")
    parser.add_argument("--tokenizer", help="name or folder, for vLLM's benchmark; default: --model")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second, Poisson")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--ttft-ms", type=float, default=2000.0, help="target for goodput")
    parser.add_argument("--tpot-ms", type=float, default=200.0, help="target for goodput")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    began_s = time.monotonic()
    pairs = asyncio.run(run(given))
    apart = [pair for pair in pairs if abs(pair.difference) > TOLERANCE]
    if given.json:
        print(json.dumps([{**asdict(pair), "difference": pair.difference} for pair in pairs], indent=1))
    else:
        for pair in pairs:
            print(f"{pair.name:26} vLLM {pair.vllm:12,.2f}   ours {pair.ours:12,.2f}   {pair.difference:+.2%}")
        print(f"{len(apart)} of {len(pairs)} differ by more than {TOLERANCE:.0%}; {time.monotonic() - began_s:.0f} s")
    return 1 if apart else 0


if __name__ == "__main__":
    raise SystemExit(main())
