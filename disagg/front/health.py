"""The standard health service (grpc.health.v1), answered from the pools at the moment of the question.

Services: "" and the names given. SERVING while a request could be served (readiness.py). Load balancers and Kubernetes probes ask it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from disagg.front.readiness import Readiness

WATCH_INTERVAL_S = 0.2

NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class HealthDoor(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The servicer."""

    def __init__(self, readiness: Readiness, needing_workers: Sequence[str], others: Sequence[str] = ()) -> None:
        """Names of services. `others` serve as long as the gateway does."""
        self._readiness = readiness
        self._services = frozenset(("", *needing_workers, *others))
        self._others = frozenset(others)

    @property
    def is_serving(self) -> bool:
        """True when a request that comes now can be served."""
        return self._readiness.obstacle() is None

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        if request.service not in self._services:
            known = ", ".join(sorted(self._services - {""}))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}; known: {known}")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - the name of the RPC
        said = None
        while True:
            changed = self._readiness.pools.changes.next()
            status = self._status(request.service)
            if status != said:
                said = status
                yield health_pb2.HealthCheckResponse(status=status)
            if self._readiness.is_closing:
                return
            await changed.wait()
            # Workers report many times a second; a watcher wants to know of losses.
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _status(self, service: str) -> Any:
        response = health_pb2.HealthCheckResponse
        if service not in self._services:
            return response.SERVICE_UNKNOWN
        is_serving = not self._readiness.is_closing if service in self._others else self.is_serving
        return response.SERVING if is_serving else response.NOT_SERVING
