"""The gateway: pool, coordinator and doors in one process. Launching adds workers by `gateway.pool.join(name, role, target)`."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import logging
import os
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol, Self

from disagg.config import Topology
from disagg.errors import ConfigError, DisaggError
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
from disagg.perf.model_config import shape_from_config
from disagg.perf.shapes import ModelShape
from disagg.serving.coordinator import Coordinator
from disagg.serving.pool import Pool

logger = logging.getLogger(__name__)


class HttpServer(Protocol):
    """Either kind of HTTP door."""

    async def close(self, grace_s: float) -> None: ...


class Gateway:
    """Made by `start`, ended by `close`. Without live workers it answers UNAVAILABLE, and NOT_SERVING on health.

    `endpoint`: where gRPC clients connect, as host:port.
    """

    def __init__(self, pool: Pool, coordinator: Coordinator, server: DoorServer, http: _HttpDoor | None, tracing: Tracing | None) -> None:
        self.pool = pool
        self.coordinator = coordinator
        self._server = server
        self._http = http
        self._tracing = tracing

    @classmethod
    async def start(cls, topology: Topology, model: str | None, *, wait_http: bool = True) -> Self:
        """Serve at `topology.gateway`. `model`: folder or hub name of the weights; unused when the engine is simulated.

        `wait_http`: return when HTTP is served too; else it comes up meanwhile (vLLM's server takes seconds), see the method of that name.
        Raises PlacementError (port in use), ModelError (no config beside the weights, tokenizer unreadable), ConfigError.
        """
        served = await asyncio.to_thread(read_served, topology, model)
        pool = Pool(topology, served.info, await asyncio.to_thread(_shape_of, model))
        coordinator = Coordinator(pool, topology, served.info)
        readiness = Readiness(pool, coordinator, topology.gateway.wedged_after_s)
        metrics = Metrics(topology, pool, coordinator)
        endpoint = topology.gateway.traces_endpoint
        tracing = Tracing.to(endpoint, topology.name) if endpoint is not None else None
        observed = ObservedCoordinator(coordinator, [metrics.observe, log_request], tracing)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(pool.close)
            server = await DoorServer.start(topology, served, observed, readiness, coordinator.decisions)
            undo.push_async_callback(server.close, 0.0)
            http = await _HttpDoor.start(topology, model, served, observed, Ops(readiness, metrics), pool)
            gateway = cls(pool, coordinator, server, http, tracing)
            if wait_http:
                undo.push_async_callback(gateway.close)
                await gateway.wait_http()
            undo.pop_all()
        logger.info("gateway of %s (%s) at %s", topology.name, served.info.name, server.endpoint)
        return gateway

    @property
    def endpoint(self) -> str:
        return self._server.endpoint

    @property
    def http_endpoint(self) -> str | None:
        """Where HTTP clients connect, as host:port; None where there is no HTTP door."""
        return self._http.endpoint if self._http is not None else None

    @property
    def has_openai_api(self) -> bool:
        """False where HTTP is health and metrics only."""
        return self._http is not None and self._http.has_openai_api

    async def wait_http(self) -> None:
        """Returns when HTTP is served; at once where there is no HTTP door. Raises ConfigError and ModelError when it cannot be."""
        if self._http is not None:
            await self._http.wait_up()

    async def close(self, grace_s: float = 0.0) -> None:
        """Refuse new requests at once, let running ones end for `grace_s` seconds, cancel the rest, let go of the workers. Idempotent."""
        doors = [self._server.close(grace_s), *([self._http.close(grace_s)] if self._http is not None else [])]
        await asyncio.gather(*doors)
        await self.coordinator.close()
        await self.pool.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


def _shape_of(model: str | None) -> ModelShape | None:
    """The shape of a model in a local folder: where predictions of its speed start. None when its config does not tell."""
    config = Path(model) / "config.json" if model is not None else None
    if config is None or not config.is_file():
        return None
    try:
        return shape_from_config(json.loads(config.read_text()))
    except (ConfigError, ValueError) as error:
        logger.info("predictions start from a guess: %s", error)
        return None


class _HttpDoor:
    """OpenAI's API by vLLM's server where the engine is vLLM and vLLM is installed; health and metrics alone elsewhere.

    Its port is taken at once; `starting` ends when it serves.
    """

    def __init__(self, sock: socket.socket, endpoint: str, has_openai_api: bool, starting: asyncio.Task[HttpServer]) -> None:
        self._sock = sock
        self._starting = starting
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

        async def serve() -> HttpServer:
            if not has_openai_api:
                return await OpsServer.start(ops, sock, check, tls)
            # Torch comes with vLLM; nothing computes here, and the cores belong to engines.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            door = await asyncio.to_thread(importlib.import_module, "disagg.front.openai_server")
            edge = EdgeSettings(topology.slo_classes, settings.max_message_bytes(served.info.max_model_len), check, ops)
            server: HttpServer = await door.OpenAiServer.start(topology, model, served.info, coordinator, pool, sock, edge, tls)
            return server

        endpoint = f"{bracketed(reachable_host(settings.host))}:{sock.getsockname()[1]}"
        return cls(sock, endpoint, has_openai_api, asyncio.create_task(serve()))

    async def wait_up(self) -> None:
        await asyncio.shield(self._starting)

    async def close(self, grace_s: float) -> None:
        if not self._starting.done():
            self._starting.cancel()
        try:
            server = await self._starting
        except (asyncio.CancelledError, DisaggError):
            self._sock.close()
            return
        await server.close(grace_s)


def _has_vllm() -> bool:
    if importlib.util.find_spec("vllm") is not None:
        return True
    logger.warning("no OpenAI API: vLLM is not installed on the gateway's host; gRPC clients are served")
    return False
