"""A request's way is explained: over gRPC, and on the command line."""

from __future__ import annotations

import asyncio
import json

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from disagg.cli import app
from disagg.client_decisions import fetch_decisions
from disagg.config import parse_topology
from disagg.errors import InvalidRequestError, RejectedError
from disagg.front import decisions_door
from disagg.front.server import INFERENCE_NAME
from disagg.policy.decision import Verdict
from tests.builders import sim_topology
from tests.flow.test_gateway import served


async def test_a_granted_request_is_explained_with_its_pairs() -> None:
    async with served(sim_topology(prefill=2, decode=2)) as s:
        answer = await s.client.generate([5, 6, 7], max_tokens=4, temperature=0.0)
        (record,) = await asyncio.to_thread(fetch_decisions, s.gateway.endpoint, "")
        assert record.verdict is Verdict.GRANTED
        assert record.chosen is not None
        assert (record.chosen.prefill, record.chosen.decode) == (answer.usage.prefill_worker, answer.usage.decode_worker)
        assert len(record.candidates) == 4
        assert record.context_tokens == 3
        told = await asyncio.to_thread(CliRunner().invoke, app, ["explain", record.request_id, "--address", s.gateway.endpoint])
        assert told.exit_code == 0, told.output
        assert f"request {record.request_id}" in told.output
        assert "went to" in told.output
        assert told.output.count("chosen") == 1
        as_json = await asyncio.to_thread(CliRunner().invoke, app, ["explain", "--json", "--address", s.gateway.endpoint])
        assert json.loads(as_json.output)["request_id"] == record.request_id


async def test_a_refused_request_is_explained_with_numbers() -> None:
    classes = [{"name": "impossible", "ttft_ms": 0.001, "if_missed": "reject"}]
    async with served(parse_topology({**sim_topology(speed=1).model_dump(), "slo_classes": classes})) as s:
        with pytest.raises(RejectedError, match="first token after"):
            await s.client.generate([5] * 100, max_tokens=4)
        (record,) = await asyncio.to_thread(fetch_decisions, s.gateway.endpoint, "")
        assert record.verdict is Verdict.REJECTED
        assert record.retry_after_s is not None
        assert record.candidates[0].prediction.ttft_s > 0
        told = await asyncio.to_thread(CliRunner().invoke, app, ["explain", "--address", s.gateway.endpoint])
        assert "was refused" in told.output


async def test_an_unknown_request_is_said_by_name() -> None:
    async with served(sim_topology()) as s:
        with pytest.raises(InvalidRequestError, match="'nobody'"):
            await asyncio.to_thread(fetch_decisions, s.gateway.endpoint, "nobody")
        with pytest.raises(InvalidRequestError, match="any request"):
            await asyncio.to_thread(fetch_decisions, s.gateway.endpoint, "")


async def test_its_health_is_its_own() -> None:
    """Past decisions are explained also while no request could be served."""
    async with served(sim_topology()) as s, grpc.aio.insecure_channel(s.gateway.endpoint) as channel:
        for name in list(s.cluster.workers):
            await s.gateway.pool.leave(name)
        stub, status = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckResponse
        for service, want in (("", status.NOT_SERVING), (INFERENCE_NAME, status.NOT_SERVING), (decisions_door.NAME, status.SERVING)):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == want
