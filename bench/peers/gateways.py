"""What streaming costs in front of a prefill and a decode backend: our gateway beside other people's, on this machine, in turns.

    python -m bench.peers.gateways [--json] [--requests 400] [--rounds 3] [--proxy toy_proxy_server.py] [--out out/gateways]

The same load for all: 32 clients, each waiting for its answer of 32 tokens before it asks again.

disagg      our gateway over simulated workers whose steps take no time; KV is made, moved and checked. Clients speak gRPC.
vllm-router Rust, P/D mode, over two fake OpenAI servers that compute nothing. Installed by pip into OUT/tools on first use.
proxy       vLLM's example P/D proxy (tests/v1/kv_connector/nixl_integration/toy_proxy_server.py of its repository, which no wheel holds:
            left out unless --proxy names the file), over the same fake servers.
ray-serve   an ingress, a P and a D deployment of Ray Serve, tuned: RAY_SERVE_THROUGHPUT_OPTIMIZED, no limit on requests, no access log.
ray-serve-defaults   the same as it comes.

All are up at once, one at a time has a round. Rates on a machine with few cores are those of front, backends and clients together.
CPU ms per request: `front` is the gateway, router, proxy, or Serve's HTTP proxy with the ingress; `all` adds the backends (Ray's own
processes, too), and leaves out the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.micro.gateway_load import CLIENTS, OUTPUT_TOKENS, answer, cpu_s, part
from bench.peers.servers import free_port, router_program
from disagg.launch.processes import ProcessId, descendants, end, find_marked
from disagg.slo import percentile
from disagg.types import Role

MARK = "DISAGG_BENCH_GATEWAYS"
PARTS = "bench.peers.gateway_parts"
RAY_TUNED = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}
START_TIMEOUT_S = 180.0
HERE = Path(__file__).resolve().parents[2]

Pids = Callable[[], Sequence[int]]


@dataclass(frozen=True, slots=True)
class System:
    """One that can be asked. `front`, `all`: its processes now. `clients`: module and arguments of its load, without numbers."""

    name: str
    version: str
    clients: tuple[str, ...]
    front: Pids
    all: Pids


@dataclass(frozen=True, slots=True)
class Round:
    """What one turn showed."""

    requests_per_s: float
    ttft_ms_p50: float
    front_cpu_ms: float  # per request, as the next
    all_cpu_ms: float


@dataclass(slots=True)
class Systems:
    """Started by `stack`, which also ends them."""

    stack: AsyncExitStack
    found: list[System] = field(default_factory=list)

    async def ours(self, name: str, tree: Path) -> None:
        """The code in the checkout `tree`; all are asked by this one's client."""
        load = "bench.micro.gateway_load"
        env = {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
        roles = (Role.PREFILL, Role.DECODE)
        workers = [await self.stack.enter_async_context(part("worker", role, "0.0", env=env)) for role in roles]
        targets = json.dumps([json.loads(await answer(worker)) for worker in workers])
        gateway = await self.stack.enter_async_context(part("gateway", targets, env=env))
        endpoint = await answer(gateway)
        pids = [process.pid for process in (gateway, *workers)]
        self.found.append(System(name, _commit(tree), (load, "client", endpoint), lambda: pids[:1], lambda: pids))

    async def over_fakes(self, router: Path, proxy: Path | None) -> None:
        """The router and the proxy over one pair of fake servers."""
        fakes = [await self.stack.enter_async_context(part("fake", kind, module=PARTS)) for kind in ("prefill", "decode")]
        prefill, decode = [int(await answer(fake)) for fake in fakes]
        backends = [fake.pid for fake in fakes]
        port = free_port()
        pd = ["--vllm-pd-disaggregation", "--prefill", _url(prefill), "--decode", _url(decode), "--kv-connector", "nixl"]
        rest = ["--policy", "round_robin", "--log-level", "error", "--prometheus-port", str(free_port())]
        await self._http("vllm-router", _router_version(router), [str(router), "--port", str(port), *pd, *rest], port, "/health", backends)
        if proxy is not None:
            ports = ["--port", str(port := free_port()), "--prefiller-ports", str(prefill), "--decoder-ports", str(decode)]
            hosts = ["--prefiller-hosts", "127.0.0.1", "--decoder-hosts", "127.0.0.1"]
            await self._http("proxy", _proxy_version(proxy), [sys.executable, str(proxy), *ports, *hosts], port, "/healthcheck", backends)

    async def ray_serve(self, kind: str) -> None:
        name = "ray-serve" if kind == "tuned" else "ray-serve-defaults"
        mark = secrets.token_hex(16)
        port = free_port()
        env = {f"{MARK}_RAY": mark, **(RAY_TUNED if kind == "tuned" else {})}
        process = await self.stack.enter_async_context(part("ray", kind, str(port), module=PARTS, env=env))
        await answer(process)
        pids = {found.pid: _title(found) for found in (*find_marked(mark), *descendants(process.pid))}
        front = [pid for pid, title in pids.items() if "ProxyActor" in title or ":Ingress" in title]
        assert len(front) >= 2, f"no HTTP proxy or no ingress among {sorted(pids.values())}"
        everything = [*pids, process.pid]
        clients = (PARTS, "load", str(port))
        self.found.append(System(name, f"ray {version('ray')}", clients, lambda: front, lambda: everything))

    async def _http(self, name: str, what: str, command: list[str], port: int, health: str, backends: list[int]) -> None:
        log = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*command, stdin=log, stdout=log, stderr=log)
        self.stack.callback(_stop, process)
        await _healthy(name, process, port, health)
        front = [process.pid, *(child.pid for child in descendants(process.pid))]
        self.found.append(System(name, what, (PARTS, "load", str(port)), lambda: front, lambda: [*front, *backends]))


async def turn(system: System, requests: int) -> Round:
    """One round of load on one system."""
    module, kind, where = system.clients
    async with part(kind, where, str(requests), str(CLIENTS), module=module) as client:
        await answer(client)  # warm
        front, everything = system.front(), system.all()
        before = [sum(map(cpu_s, pids)) for pids in (front, everything)]
        assert client.stdin is not None
        client.stdin.write(b"\n")
        found = json.loads(await answer(client))
        spent_ms = [1e3 * (sum(map(cpu_s, pids)) - cpu) for pids, cpu in zip((front, everything), before, strict=True)]
    rate = found["requests"] / found["took_s"]
    return Round(rate, percentile(found["ttft_ms"], 50) or 0.0, spent_ms[0] / requests, spent_ms[1] / requests)


@asynccontextmanager
async def marked() -> AsyncIterator[None]:
    """Whatever is started within inherits a mark, by which all that is left of it is ended."""
    mark = os.environ[MARK] = secrets.token_hex(16)
    try:
        yield
    finally:
        left = end(find_marked(mark))
        assert not left, f"still running: {left}"


async def compare(given: argparse.Namespace) -> dict[str, Any]:
    """All systems, all rounds; medians by system."""
    router = router_program(given.out / "tools")
    async with marked(), AsyncExitStack() as stack:
        systems = Systems(stack)
        await systems.ours("disagg", HERE)
        if given.against is not None:
            await systems.ours("disagg-against", given.against.absolute())
        await systems.over_fakes(router, given.proxy)
        for kind in given.ray:
            await systems.ray_serve(kind)
        rounds: dict[str, list[Round]] = {system.name: [] for system in systems.found}
        for number in range(given.rounds):
            for system in systems.found[number % 2 * -1 :: -1 if number % 2 else 1]:  # there and back
                found = await turn(system, given.requests)
                rounds[system.name].append(found)
                cpu = f"CPU ms per request: front {found.front_cpu_ms:.2f}, all {found.all_cpu_ms:.2f}"
                print(f"round {number + 1}: {system.name:20s} {found.requests_per_s:7.0f} requests/s, {cpu}", file=sys.stderr)
        return {system.name: {"version": system.version, **_medians(rounds[system.name])} for system in systems.found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=400, help="per round and system")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--proxy", type=Path, help="vLLM's toy_proxy_server.py")
    parser.add_argument("--against", type=Path, help="another checkout of this repository, to compare this one with")
    parser.add_argument("--ray", nargs="*", choices=("tuned", "defaults"), default=["tuned", "defaults"], help="Ray Serve's settings")
    parser.add_argument("--out", type=Path, default=Path("out/gateways"), help="where vllm-router is installed")
    given = parser.parse_args()
    result = asyncio.run(compare(given))
    if given.json:
        print(json.dumps(result))
        return
    print(f"{CLIENTS} clients, answers of {OUTPUT_TOKENS} tokens, {given.requests} requests a round, medians of {given.rounds} rounds")
    print(f"{'':20s} {'requests/s':>11s} {'TTFT p50 ms':>12s} {'CPU ms: front':>14s} {'all':>7s}   ours: rate x, front CPU x")
    ours = result["disagg"]
    for name, row in result.items():
        ratios = f"{ours['requests_per_s'] / row['requests_per_s']:6.2f} {ours['front_cpu_ms'] / row['front_cpu_ms']:6.2f}"
        figures = f"{row['requests_per_s']:11.0f} {row['ttft_ms_p50']:12.1f} {row['front_cpu_ms']:14.2f} {row['all_cpu_ms']:7.2f}"
        print(f"{name:20s} {figures}   {ratios}   {row['version']}")


def _medians(rounds: Sequence[Round]) -> dict[str, float]:
    names = Round.__dataclass_fields__
    return {name: statistics.median(getattr(one, name) for one in rounds) for name in names}


async def _healthy(name: str, process: asyncio.subprocess.Process, port: int, path: str) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            assert process.returncode is None, f"{name} ended with {process.returncode}"
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
                status = await reader.readline()
                writer.close()
                if b" 200 " in status:
                    return
            await asyncio.sleep(0.3)


def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _title(process: ProcessId) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return "commit " + subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _proxy_version(file: Path) -> str:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return f"{file.name} sha256 {digest}, httpx {version('httpx')}, uvicorn {version('uvicorn')}"


def _router_version(program: Path) -> str:
    found = subprocess.run([program.parent / "pip", "show", "vllm-router"], capture_output=True, text=True, check=True).stdout
    return "vllm-router " + next(line.partition(": ")[2] for line in found.splitlines() if line.startswith("Version"))


if __name__ == "__main__":
    main()
