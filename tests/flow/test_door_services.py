"""What a gateway's gRPC port offers beside answers: model info, health, reflection; and how the port is taken."""

from __future__ import annotations

import asyncio
import socket

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from disagg.client import AsyncClient
from disagg.errors import (
    PlacementError,
)
from disagg.front.server import INFERENCE_NAME
from disagg.types import Role
from tests.flow.scripted import serve, topology


async def test_model_info_says_what_is_served() -> None:
    async with serve() as door, AsyncClient(door.address) as client:
        door.scripted.set_live(Role.DECODE)
        info = await client.model_info()
    assert (info.model, info.engine, info.mode) == ("a-model", "simulated", "disagg")
    assert (info.max_model_len, info.vocab_size, info.accepts_text) == (4096, 32000, True)
    assert [(c.name, c.ttft_s, c.tpot_s, c.priority) for c in info.slo_classes] == [("chat", 2.0, None, 1), ("batch", None, None, 0)]
    assert [(p.role, p.workers, p.wanted) for p in info.pools] == [("prefill", (), 1), ("decode", ("d0",), 1)]


async def test_health_follows_the_pools() -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with serve() as door, grpc.aio.insecure_channel(door.address) as channel, asyncio.timeout(60):
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)

        assert [await status(name) for name in ("", INFERENCE_NAME)] == [serving, serving]
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        assert (await watch.read()).status == serving
        for live, expected in [((Role.DECODE,), not_serving), ((Role.PREFILL, Role.DECODE), serving), ((Role.PREFILL,), not_serving)]:
            door.scripted.set_live(*live)
            assert await status("") == expected
            assert (await watch.read()).status == expected
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status("nonsense")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch.cancel()


async def test_reflection_lists_the_services_and_their_messages() -> None:
    async with serve() as door, grpc.aio.insecure_channel(door.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        wanted = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=INFERENCE_NAME),
        ]
        listed, file = [answer async for answer in stub.ServerReflectionInfo(iter(wanted))]
    assert {s.name for s in listed.list_services_response.service} >= {INFERENCE_NAME, "grpc.health.v1.Health"}
    assert b"GenerateRequest" in file.file_descriptor_response.file_descriptor_proto[0]


# -- ports


async def test_a_port_in_use_names_the_port_and_its_holder() -> None:
    async with serve() as door:
        port = int(door.address.rsplit(":", 1)[1])
        with pytest.raises(PlacementError, match=f"gateway.port: {port} is in use by process .*pytest") as caught:
            async with serve(settings=topology(gateway={"port": port})):
                pass
        assert "0 for any" in caught.value.expected


async def test_a_port_held_by_another_kind_of_server_is_refused_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PlacementError, match=str(port)):
            async with serve(settings=topology(gateway={"port": port})):
                pass


async def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"gateway.host.*192\.0\.2\.1"):
        async with serve(settings=topology(gateway={"host": "192.0.2.1", "port": 0, "insecure": True})):
            pass


async def test_a_port_is_free_again_after_closing() -> None:
    async with serve() as door:
        port = int(door.address.rsplit(":", 1)[1])
        async with AsyncClient(door.address) as client:
            await client.generate([1], max_tokens=1)
    async with serve(settings=topology(gateway={"port": port})) as again, AsyncClient(again.address) as client:
        assert (await client.generate([1], max_tokens=1)).token_ids == (0,)
