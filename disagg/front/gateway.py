"""The gateway: pool, coordinator and doors in one process. Launching adds workers by `gateway.pool.join(name, role, target)`."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

from disagg.config import Topology
from disagg.front.http_edge import EdgeSettings
from disagg.front.model_info import Served, read_served
from disagg.front.ports import bracketed, listening_socket, reachable_host
from disagg.front.server import DoorServer
from disagg.serving.coordinator import Coordinator
from disagg.serving.pool import Pool

if TYPE_CHECKING:
    from disagg.front.openai_server import OpenAiServer

logger = logging.getLogger(__name__)


class Gateway:
    """Made by `start`, ended by `close`. Without live workers it answers UNAVAILABLE, and NOT_SERVING on health.

    `endpoint`: where gRPC clients connect, as host:port. `http_endpoint`: where HTTP clients do; None where there is no HTTP door.
    """

    def __init__(self, pool: Pool, coordinator: Coordinator, server: DoorServer, http: _HttpDoor | None) -> None:
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
        async with AsyncExitStack() as undo:
            undo.push_async_callback(pool.close)
            server = await DoorServer.start(topology, served, coordinator, pool)
            undo.push_async_callback(server.close, 0.0)
            http = await _HttpDoor.start(topology, model, served, coordinator, pool)
            undo.pop_all()
        logger.info("gateway of %s (%s) at %s", topology.name, served.info.name, server.endpoint)
        if http is not None:
            logger.info("OpenAI API of %s at http://%s/v1", topology.name, http.endpoint)
        return cls(pool, coordinator, server, http)

    @property
    def endpoint(self) -> str:
        return self._server.endpoint

    @property
    def http_endpoint(self) -> str | None:
        return self._http.endpoint if self._http is not None else None

    async def close(self, grace_s: float = 0.0) -> None:
        """Refuse new requests at once, let running ones end for `grace_s` seconds, cancel the rest, let go of the workers. Idempotent."""
        doors = [self._server.close(grace_s), *([self._http.close(grace_s)] if self._http is not None else [])]
        await asyncio.gather(*doors)
        await self.coordinator.close()
        await self.pool.close()


class _HttpDoor:
    """vLLM's API server, where the topology asks for it and vLLM is there."""

    def __init__(self, server: OpenAiServer, endpoint: str) -> None:
        self._server = server
        self.endpoint = endpoint

    @classmethod
    async def start(cls, topology: Topology, model: str | None, served: Served, coordinator: Coordinator, pool: Pool) -> Self | None:
        settings = topology.gateway
        if settings.http_port is None or topology.engine.kind != "vllm" or model is None:
            return None
        if importlib.util.find_spec("vllm") is None:
            logger.warning("no HTTP door: vLLM is not installed on the gateway's host; gRPC clients are served")
            return None
        # Torch comes with vLLM; nothing computes here, and the cores belong to engines.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        sock = await asyncio.to_thread(listening_socket, settings.host, settings.http_port, "gateway.http_port")
        try:
            openai_server = await asyncio.to_thread(importlib.import_module, "disagg.front.openai_server")
            edge = EdgeSettings(topology.slo_classes, settings.max_message_mib << 20)
            server = await openai_server.OpenAiServer.start(topology, model, served.info, coordinator, pool, sock, edge)
        except BaseException:
            sock.close()
            raise
        return cls(server, f"{bracketed(reachable_host(settings.host))}:{sock.getsockname()[1]}")

    async def close(self, grace_s: float) -> None:
        await self._server.close(grace_s)
