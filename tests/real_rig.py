"""Real engines that files of tests share: our gateway with a prefill and a decode worker, and vLLM's own server with one engine.

Gateway, workers and vLLM's application live in the tests' process; gRPC, HTTP to the gateway, carriers and engine processes are real. One
core for each engine.
"""

from __future__ import annotations

import asyncio
import os
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from disagg.client import AsyncClient
from disagg.client_types import Answer
from disagg.config import Topology, parse_topology
from disagg.engine.vllm_args import CPU_MEMORY_SHARE, IN_PROCESS, engine_environment
from disagg.front.gateway import Gateway
from disagg.kv.carrier import Carrier, SlowCarrier
from disagg.kv.carriers.grpc import GrpcCarrier
from disagg.serving.start import start_worker
from disagg.serving.worker_rpc_server import WorkerServer
from disagg.types import Role
from tests.machine import QUICK_ARGS

MODEL = "smollm2-135m"
CHUNK_TOKENS = 512
CONTEXT_TOKENS = 4096
# The cache's size not by VLLM_CPU_KVCACHE_SPACE: an environment variable would stay in this process, for the engines of later tests.
ENGINE_ARGS: dict[str, Any] = {
    **QUICK_ARGS,
    "max_model_len": CONTEXT_TOKENS,
    "max_num_batched_tokens": CHUNK_TOKENS,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 512 << 20,
    "enable_prefix_caching": True,
    "seed": 0,
}
SHOW_CACHED = {"enable_prompt_tokens_details": True}  # usage counts cached tokens
CALL_TIMEOUT_S = 120.0
REST_TIMEOUT_S = 60.0


@dataclass
class Servers:
    """`ours` and `vllm`: HTTP clients of the two servers; `client`: ours by gRPC."""

    gateway: Gateway
    prefill: WorkerServer
    decode: WorkerServer
    ours: httpx.AsyncClient
    client: AsyncClient
    vllm: httpx.AsyncClient

    @contextmanager
    def over(self, carrier: str, delay_s: float = 0.0) -> Iterator[None]:
        """KV moves by this carrier only, slowed by `delay_s`."""
        inbox = self.decode.worker.inbox
        before = inbox._carriers
        chosen: Carrier = before[carrier]
        inbox._carriers = {carrier: SlowCarrier(chosen, delay_s) if delay_s else chosen}
        pulled = inbox.counters.frames
        try:
            yield
        finally:
            inbox._carriers = before
        assert inbox.counters.frames > pulled

    async def right(self, prompt: list[int], max_tokens: int) -> list[tuple[int, float]]:
        """Token ids and logprobs of vLLM's own greedy answer."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
        response = await self.vllm.post("/v1/completions", json={"model": MODEL, **body})
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        return list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))

    async def ask(self, prompt: list[int], max_tokens: int, **options: Any) -> Answer:
        """Our greedy answer, by gRPC."""
        return await self.client.generate(
            prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout_s=CALL_TIMEOUT_S, **options
        )

    async def assert_empty(self) -> None:
        """Gateway, boxes and engines come to rest with nothing left."""
        await asyncio.wait_for(self.gateway.coordinator.settle(), REST_TIMEOUT_S)
        deadline_s = time.monotonic() + REST_TIMEOUT_S
        engines = [server.worker.engine for server in (self.prefill, self.decode)]
        while time.monotonic() < deadline_s:
            states = [engine.state() for engine in engines]
            if all(s.free_kv_tokens == s.total_kv_tokens and not s.running_requests and not s.waiting_requests for s in states):
                break
            await asyncio.sleep(0.05)
        for engine in engines:
            state = engine.state()
            assert state.free_kv_tokens == state.total_kv_tokens, state
            assert state.running_requests == state.waiting_requests == 0, state
        self.gateway.coordinator.assert_empty()
        self.prefill.worker.assert_empty()
        self.decode.worker.assert_empty()


def topology() -> Topology:
    return parse_topology(
        {
            "model": MODEL,
            "engine": {"kind": "vllm", "args": ENGINE_ARGS},
            "pools": {"prefill": {"count": 1}, "decode": {"count": 1}},
            "gateway": {"port": 0, "http_port": 0, "http_args": SHOW_CACHED},
        }
    )


@asynccontextmanager
async def serve(folder: Path) -> AsyncIterator[Servers]:
    """Both servers, each engine with one thread of its own."""
    async with AsyncExitStack() as stack:
        app = await stack.enter_async_context(_vllm_app(folder))
        gateway = await Gateway.start(topology(), str(folder))
        stack.push_async_callback(gateway.close)
        workers = []
        for role, core in ((Role.PREFILL, 1), (Role.DECODE, 0)):
            worker = await start_worker(topology(), role, f"{role}-0", str(folder), cores=[core])
            stack.push_async_callback(worker.close)
            await _also_by_grpc(worker)
            await gateway.pool.join(f"{role}-0", role, worker.target)
            workers.append(worker)
        ours = httpx.AsyncClient(base_url=f"http://{gateway.http_endpoint}", timeout=CALL_TIMEOUT_S, trust_env=False)
        vllm = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://vllm", timeout=CALL_TIMEOUT_S)
        await stack.enter_async_context(ours)
        await stack.enter_async_context(vllm)
        client = await stack.enter_async_context(AsyncClient(gateway.endpoint))
        yield Servers(gateway, *workers, ours, client, vllm)


async def _also_by_grpc(server: WorkerServer) -> None:
    """Serve and pull by gRPC, too: `auto` offers shm and tcp alone."""
    worker = server.worker
    carrier = GrpcCarrier("127.0.0.1", 0)
    worker._carriers = [*worker._carriers, carrier]
    worker.inbox._carriers = {**worker.inbox._carriers, carrier.name: carrier}
    endpoint = await carrier.serve(worker.outbox)
    worker._address = replace(worker.address, endpoints=(*worker.address.endpoints, (carrier.name, endpoint)))


@asynccontextmanager
async def _vllm_app(folder: Path) -> AsyncIterator[Any]:
    """vLLM's own server, as `vllm serve` makes it."""
    args = _server_args(folder)
    env = {k: v for k, v in engine_environment("", [0], {}).items() if not k.startswith("DISAGG_")}
    old = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        engine_args = AsyncEngineArgs(
            model=str(folder),
            served_model_name=[MODEL],
            distributed_executor_backend=IN_PROCESS,
            gpu_memory_utilization=CPU_MEMORY_SHARE,
            block_size=32,
            disable_log_stats=True,
            **ENGINE_ARGS,
        )
        # In a thread: it blocks until the engine's process has loaded its weights.
        engine = await asyncio.to_thread(AsyncLLM.from_engine_args, engine_args)
    finally:
        for name, value in old.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    try:
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        yield app
    finally:
        engine.shutdown(5.0)


def _server_args(folder: Path) -> Namespace:
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args.model = str(folder)
    args.served_model_name = [MODEL]
    args.disable_log_stats = True
    args.enable_prompt_tokens_details = SHOW_CACHED["enable_prompt_tokens_details"]
    return args
