"""vLLM's API server over our coordinator and simulated workers: real model files, real HTTP, no engine. Needs vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from disagg.config import SloClass
from disagg.front.http_edge import EdgeSettings
from disagg.front.metrics import Metrics
from disagg.front.observed import ObservedCoordinator
from disagg.front.openai_server import OpenAiServer
from disagg.front.ops import Ops
from disagg.front.ports import listening_socket
from disagg.front.readiness import Readiness
from disagg.serving.run import Run
from disagg.types import ModelInfo, Request, Sampling
from tests.builders import Cluster, cluster, sim_topology

VOCABULARY = 49152
MAX_BODY_BYTES = 1 << 20
KEPT = 100  # requests that the coordinator was asked; all of them would look like a leak in a long run
CLASSES = (SloClass(name="chat", priority=1), SloClass(name="batch", priority=-1))
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass
class Door:
    """A door, its workers, and what the coordinator was asked lately."""

    cluster: Cluster
    server: OpenAiServer
    port: int
    http: httpx.AsyncClient
    asked: list[Request]
    submitted: asyncio.Event

    def expected(self, prompt: list[int], max_tokens: int, **sampling: Any) -> list[int]:
        request = self.cluster.request(prompt, sampling=Sampling(**{"max_tokens": max_tokens, "temperature": 0.0, **sampling}))
        return list(self.cluster.expected(request))


@asynccontextmanager
async def door(
    folder: Path,
    *,
    check_empty: bool = True,
    http_args: dict[str, Any] | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    **shape: Any,
) -> AsyncIterator[Door]:
    topology = sim_topology(vocab_size=VOCABULARY, eos_token_id=2, **shape)
    gateway = topology.gateway.model_copy(update={"http_args": http_args or {}})
    topology = topology.model_copy(update={"model": "smollm2-135m", "slo_classes": CLASSES, "gateway": gateway})
    async with cluster(topology, check_empty=check_empty) as c:
        sock = listening_socket("127.0.0.1", 0, "gateway.http_port")
        info = ModelInfo("smollm2-135m", 8192, VOCABULARY, 64, (2,))
        readiness = Readiness(c.pool, c.coordinator, 60.0)
        metrics = Metrics(topology, c.pool, c.coordinator)
        observed = ObservedCoordinator(c.coordinator, [metrics.observe])
        edge = EdgeSettings(CLASSES, max_body_bytes, ops=Ops(readiness, metrics))
        server = await OpenAiServer.start(topology, str(folder), info, observed, c.pool, sock, edge)
        asked: list[Request] = []
        submitted = asyncio.Event()
        submit = c.coordinator.submit

        def watched_submit(request: Request) -> Run:
            asked.append(request)
            del asked[:-KEPT]
            submitted.set()
            return submit(request)

        c.coordinator.submit = watched_submit  # type: ignore[method-assign]
        port = sock.getsockname()[1]
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
                yield Door(c, server, port, http, asked, submitted)
        finally:
            await server.close(0.0)
        assert server.client.num_running == 0
        assert not server.client._output_processor.has_unfinished_requests()


def ask(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True, **fields}
