"""The gateway: pool, coordinator and door in one process. Launching adds workers by `gateway.pool.join(name, role, target)`."""

from __future__ import annotations

import asyncio
import logging
from typing import Self

from disagg.config import Topology
from disagg.front.model_info import read_served
from disagg.front.server import DoorServer
from disagg.serving.coordinator import Coordinator
from disagg.serving.pool import Pool

logger = logging.getLogger(__name__)


class Gateway:
    """Made by `start`, ended by `close`. Without live workers it answers UNAVAILABLE, and NOT_SERVING on health."""

    def __init__(self, pool: Pool, coordinator: Coordinator, server: DoorServer) -> None:
        self.pool = pool
        self.coordinator = coordinator
        self._server = server

    @classmethod
    async def start(cls, topology: Topology, model: str | None) -> Self:
        """Serve at `topology.gateway`. `model`: folder or hub name of the weights; unused when the engine is simulated.

        Raises PlacementError (port in use), ModelError (no config beside the weights, tokenizer unreadable), ConfigError.
        """
        served = await asyncio.to_thread(read_served, topology, model)
        pool = Pool(topology, served.info)
        coordinator = Coordinator(pool, topology, served.info)
        try:
            server = await DoorServer.start(topology, served, coordinator, pool)
        except BaseException:
            await pool.close()
            raise
        logger.info("gateway of %s (%s) at %s", topology.name, served.info.name, server.endpoint)
        return cls(pool, coordinator, server)

    @property
    def endpoint(self) -> str:
        """Where clients connect, as host:port."""
        return self._server.endpoint

    async def close(self, grace_s: float = 0.0) -> None:
        """Refuse new requests at once, let running ones end for `grace_s` seconds, cancel the rest, let go of the workers. Idempotent."""
        await self._server.close(grace_s)
        await self.coordinator.close()
        await self.pool.close()
