"""The gateway's gRPC server: the inference door, standard health and reflection on one port."""

from __future__ import annotations

import asyncio
from typing import Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from disagg.config import Topology
from disagg.front import decisions_door, health
from disagg.front.access import TokenCheck, TokenInterceptor, grpc_credentials
from disagg.front.decisions_door import DecisionsDoor, DecisionSource
from disagg.front.grpc_door import Coordinator, InferenceDoor
from disagg.front.health import HealthDoor
from disagg.front.model_info import Served
from disagg.front.ports import bracketed, reachable_host, why_not_bound
from disagg.front.readiness import Readiness
from disagg.pb import inference_pb2 as pb
from disagg.pb.decisions_pb2_grpc import add_DecisionsServicer_to_server
from disagg.pb.inference_pb2_grpc import add_InferenceServicer_to_server

INFERENCE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name


class DoorServer:
    """A running server. Made by `start`, ended by `close`."""

    def __init__(self, server: grpc.aio.Server, door: InferenceDoor, readiness: Readiness, endpoint: str) -> None:
        self._server = server
        self._readiness = readiness
        self.door = door
        self.endpoint = endpoint

    @classmethod
    async def start(
        cls, topology: Topology, served: Served, coordinator: Coordinator, readiness: Readiness, decisions: DecisionSource | None = None
    ) -> Self:
        """Bind and serve; with `decisions`, explain them.

        Raises PlacementError when the port is in use or the host is not ours, ConfigError for unusable files.
        """
        settings = topology.gateway
        check = TokenCheck.of(settings)
        credentials = grpc_credentials(settings.tls) if settings.tls is not None else None
        interceptors = [TokenInterceptor(check)] if check is not None else []
        server = grpc.aio.server(interceptors=interceptors, options=_options(settings.max_message_bytes(served.info.max_model_len)))
        door = InferenceDoor(topology, served, coordinator, readiness.pools)
        others = [decisions_door.NAME] if decisions is not None else []
        health_door = HealthDoor(readiness, [INFERENCE_NAME], others)
        add_InferenceServicer_to_server(door, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(health_door, server)
        if decisions is not None:
            add_DecisionsServicer_to_server(DecisionsDoor(decisions), server)  # type: ignore[no-untyped-call]
        reflection.enable_server_reflection((INFERENCE_NAME, *others, health.NAME, reflection.SERVICE_NAME), server)
        try:
            address = f"{bracketed(settings.host)}:{settings.port}"
            port = server.add_secure_port(address, credentials) if credentials is not None else server.add_insecure_port(address)
        except RuntimeError as error:
            await server.stop(None)
            raise await asyncio.to_thread(why_not_bound, settings.host, settings.port, "gateway.port", str(error)) from None
        await server.start()
        return cls(server, door, readiness, f"{bracketed(reachable_host(settings.host))}:{port}")

    async def close(self, grace_s: float) -> None:
        """Refuse new requests at once, let running ones end for `grace_s` seconds, then cancel them. Idempotent."""
        self._readiness.close()
        await self._server.stop(grace_s or None)  # 0 would race with itself: a wait of no time is a cancel


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        # Without this two gateways could share a port, and each would get some of the requests.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),  # the client's bound decides: logprobs of a long prompt are much longer than the prompt
        # A client whose host vanished is found out, and its requests are cancelled.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # Clients may probe us as often as ours do (client_types.py), also while an answer is silent.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]
