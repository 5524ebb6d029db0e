"""Two real workers in this process, one core each, with the KV path between them and no gateway: what the KV benches measure on."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from disagg.config import parse_topology
from disagg.engine.vllm_engine import VllmEngine
from disagg.kv.layout import hash_tokens
from disagg.models import get_model
from disagg.serving.start import start_worker
from disagg.serving.worker import LocalWorker
from disagg.types import Prefilled, Request, Role, Sampling, Token, Transfer, new_id

ARGS = {
    "dtype": "fastest",
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 512 << 20,
}
_attempts = itertools.count()


@dataclass
class Answer:
    """The first token, its instant, and each later token with its instant (seconds of time.perf_counter)."""

    began_s: float
    prefilled: Prefilled
    prefilled_s: float
    tokens: list[Token]
    at_s: list[float]


@dataclass
class EnginePair:
    """`p` and `d` are the workers. `carriers`: names of those that `d` can pull by."""

    p: LocalWorker
    d: LocalWorker

    @staticmethod
    def engine(worker: LocalWorker) -> VllmEngine:
        assert isinstance(worker.engine, VllmEngine)
        return worker.engine

    @property
    def carriers(self) -> list[str]:
        return list(self.d.inbox._carriers)

    def use(self, carrier: str) -> None:
        """Move KV by this carrier only."""
        self.d.inbox._choice = carrier  # type: ignore[assignment]

    async def ask(self, prompt: tuple[int, ...], sampling: Sampling, form: str = "blocks", decode_salt: str = "") -> Answer:
        """Prefill on `p`, decode on `d`; the pull starts with the prefill, as the coordinator starts it.

        With a `decode_salt` of its own, a prompt meets nothing in the prefix cache of `d`.
        """
        import asyncio

        request = Request(new_id(), prompt, sampling)
        transfer = Transfer(new_id(), next(_attempts), self.p.address, len(prompt), hash_tokens(prompt), form)
        began_s = time.perf_counter()
        fetch = asyncio.ensure_future(self.d.fetch(transfer))
        try:
            prefilled = await self.p.prefill(request, transfer)
            prefilled_s = time.perf_counter()
            tokens: list[Token] = []
            at_s: list[float] = []
            async with aclosing(self.d.decode(replace(request, cache_salt=decode_salt), prefilled, transfer)) as chunks:
                async for chunk in chunks:
                    tokens += chunk.tokens
                    at_s += [time.perf_counter()] * len(chunk.tokens)
            return Answer(began_s, prefilled, prefilled_s, tokens, at_s)
        finally:
            fetch.cancel()


@asynccontextmanager
async def engine_pair(args: dict[str, Any] | None = None, kv: dict[str, Any] | None = None) -> AsyncIterator[EnginePair]:
    """SmolLM2-135M on core 0 (prefill) and core 1 (decode)."""
    topology = parse_topology(
        {
            "model": "smollm2-135m",
            "engine": {"args": {**ARGS, **(args or {})}},
            "pools": {"prefill": {"count": 1}, "decode": {"count": 1}},
            "kv": {"outbox_gib": 0.25, "inbox_gib": 0.25, **(kv or {})},
        }
    )
    model, servers = str(get_model("smollm2-135m")), []
    try:
        for role, cores in ((Role.PREFILL, [0]), (Role.DECODE, [1])):
            servers.append(await start_worker(topology, role, f"{role}-0", model, cores=cores))
        yield EnginePair(servers[0].worker, servers[1].worker)
    finally:
        for server in servers:
            await server.close()
