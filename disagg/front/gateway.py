"""The gateway: pool, coordinator and doors in one process. Launching adds workers by `gateway.pool.join(name, role, target)`."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
from contextlib import AsyncExitStack
from typing import Protocol, Self

from disagg.config import Topology
from disagg.front.access import TokenCheck, http_context
from disagg.front.http_edge import EdgeSettings
from disagg.front.metrics import Metrics
from disagg.front.model_info import Served, read_served
from disagg.front.observed import ObservedCoordinator
from disagg.front.ops import Ops, OpsServer
from disagg.front.ports import bracketed, listening_socket, reachable_host
from disagg.front.readiness import Readiness
from disagg.front.request_log import log_request
from disagg.front.server import DoorServer
from disagg.front.tracing import Tracing
from disagg.serving.coordinator import Coordinator
from disagg.serving.pool import Pool

logger = logging.getLogger(__name__)


class HttpServer(Protocol):
    """Either kind of HTTP door."""

    async def close(self, grace_s: float) -> None: ...


class Gateway:
    """Made by `start`, ended by `close`. Without live workers it answers UNAVAILABLE, and NOT_SERVING on health.

    `endpoint`: where gRPC clients connect, as host:port. `http_endpoint`: where HTTP clients do; None where there is no HTTP door.
    `has_openai_api`: False where HTTP is health and metrics only.
    """

    def __init__(self, pool: Pool, coordinator: Coordinator, server: DoorServer, http: _HttpDoor | None, tracing: Tracing | None) -> None:
        self._tracing = tracing
        self.pool = pool
        self.coordinator = coordinator
        self._server = server
        self._http = http

    @classmethod
    async def start(cls, topology: Topology, model: str | None) -> Self:
        """Serve at `topology.gateway`. `model`: folder or hub name of the weights; unused when the engine is simulated.

        Raises PlacementError (port in use), ModelError (no config beside the weights, tokenizer unreadable), ConfigError.
        """
        served = await asyncio.to_thread(read_served, topology, model)
        pool = Pool(topology, served.info)
        coordinator = Coordinator(pool, topology, served.info)
        readiness = Readiness(pool, coordinator, topology.gateway.wedged_after_s)
        metrics = Metrics(topology, pool, coordinator)
        endpoint = topology.gateway.traces_endpoint
        tracing = Tracing.to(endpoint, topology.name) if endpoint is not None else None
        observed = ObservedCoordinator(coordinator, readiness.progressed, [metrics.observe, log_request], tracing)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(pool.close)
            server = await DoorServer.start(topology, served, observed, readiness)
            undo.push_async_callback(server.close, 0.0)
            http = await _HttpDoor.start(topology, model, served, observed, Ops(readiness, metrics), pool)
            undo.pop_all()
        logger.info("gateway of %s (%s) at %s", topology.name, served.info.name, server.endpoint)
        if http is not None:
            logger.info("%s at http://%s", "OpenAI API" if http.has_openai_api else "health and metrics", http.endpoint)
        return cls(pool, coordinator, server, http, tracing)

    @property
    def endpoint(self) -> str:
        return self._server.endpoint

    @property
    def http_endpoint(self) -> str | None:
        return self._http.endpoint if self._http is not None else None

    @property
    def has_openai_api(self) -> bool:
        return self._http is not None and self._http.has_openai_api

    async def close(self, grace_s: float = 0.0) -> None:
        """Refuse new requests at once, let running ones end for `grace_s` seconds, cancel the rest, let go of the workers. Idempotent."""
        doors = [self._server.close(grace_s), *([self._http.close(grace_s)] if self._http is not None else [])]
        await asyncio.gather(*doors)
        await self.coordinator.close()
        await self.pool.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


class _HttpDoor:
    """OpenAI's API by vLLM's server where the engine is vLLM and vLLM is installed; health and metrics alone elsewhere."""

    def __init__(self, server: HttpServer, endpoint: str, has_openai_api: bool) -> None:
        self._server = server
        self.endpoint = endpoint
        self.has_openai_api = has_openai_api

    @classmethod
    async def start(
        cls, topology: Topology, model: str | None, served: Served, coordinator: ObservedCoordinator, ops: Ops, pool: Pool
    ) -> Self | None:
        settings = topology.gateway
        if settings.http_port is None:
            return None
        check = TokenCheck.of(settings)
        tls = http_context(settings.tls) if settings.tls is not None else None
        sock = await asyncio.to_thread(listening_socket, settings.host, settings.http_port, "gateway.http_port")
        has_openai_api = topology.engine.kind == "vllm" and _has_vllm()
        server: HttpServer
        try:
            if has_openai_api:
                # Torch comes with vLLM; nothing computes here, and the cores belong to engines.
                os.environ.setdefault("OMP_NUM_THREADS", "1")
                door = await asyncio.to_thread(importlib.import_module, "disagg.front.openai_server")
                edge = EdgeSettings(topology.slo_classes, settings.max_message_mib << 20, check, ops)
                server = await door.OpenAiServer.start(topology, model, served.info, coordinator, pool, sock, edge, tls)
            else:
                server = await OpsServer.start(ops, sock, check, tls)
        except BaseException:
            sock.close()
            raise
        return cls(server, f"{bracketed(reachable_host(settings.host))}:{sock.getsockname()[1]}", has_openai_api)

    async def close(self, grace_s: float) -> None:
        await self._server.close(grace_s)


def _has_vllm() -> bool:
    if importlib.util.find_spec("vllm") is not None:
        return True
    logger.warning("no OpenAI API: vLLM is not installed on the gateway's host; gRPC clients are served")
    return False
