"""The door over real gRPC: bad input and faults of serving come as typed errors, and the service goes on."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import pytest

from disagg.client import AsyncClient
from disagg.errors import (
    CancelledRequestError,
    ConfigError,
    DeadlineError,
    DisaggError,
    EngineError,
    InvalidRequestError,
    NoWorkerError,
    RejectedError,
    TransferCorruptError,
    WorkerLostError,
)
from disagg.front.server import INFERENCE_NAME
from disagg.pb import inference_pb2 as pb
from disagg.types import Chunk, Request, Token
from tests.flow.scripted import endless, failing, serve, topology

BAD: list[tuple[str, Any, dict[str, Any], str]] = [
    ("prompt", "", {}, "at least one"),
    ("prompt", [], {}, "at least one"),
    ("prompt", [1] * 4096, {}, "at most 4095 tokens"),
    ("prompt", "x" * 4096, {}, "at most 4095 tokens"),
    ("prompt", "word " * 800_000, {}, "at most 4095 tokens"),
    ("prompt", "word " * 4_000_000, {}, "within the gateway's bound"),
    ("prompt", [12345] * 3_000_000, {}, "within the gateway's bound"),
    ("chat.messages", [{"role": "user", "content": "x"}] * 100_000, {}, "from 1 to 1024"),
    ("prompt[1]", [1, 32000], {}, "from 0 to 31999"),
    ("prompt[0]", [-1], {}, "from 0 to 31999"),
    ("prompt", [2**70], {}, ""),
    ("prompt", ["a"], {}, ""),
    ("prompt", "\ud800", {}, "UTF-8"),
    ("max_tokens", [1], {"max_tokens": 0}, "from 1"),
    ("max_tokens", [1], {"max_tokens": -5}, "from 1"),
    ("max_tokens", [1] * 10, {"max_tokens": 4087}, "at most 4086"),
    ("max_tokens", [1], {"max_tokens": 1 << 70}, ""),
    ("max_tokens", [1], {"max_tokens": "many"}, ""),
    ("min_tokens", [1], {"max_tokens": 4, "min_tokens": 5}, "which is 4"),
    ("slo_class", [1], {"slo_class": "chatt"}, "did you mean 'chat'"),
    ("temperature", [1], {"temperature": -0.5}, "from 0"),
    ("temperature", [1], {"temperature": math.nan}, "from 0"),
    ("top_p", [1], {"top_p": 0.0}, "above 0"),
    ("top_k", [1], {"top_k": -2}, "from -1"),
    ("min_p", [1], {"min_p": 2.0}, "from 0 to 1"),
    ("seed", [1], {"seed": -1}, "from 0"),
    ("presence_penalty", [1], {"presence_penalty": 3.0}, "from -2 to 2"),
    ("frequency_penalty", [1], {"frequency_penalty": -3.0}, "from -2 to 2"),
    ("repetition_penalty", [1], {"repetition_penalty": 0.0}, "from 0.01"),
    ("stop[0]", [1], {"stop": [""]}, "from 1"),
    ("stop_token_ids[0]", [1], {"stop_token_ids": [32000]}, "from 0 to 31999"),
    ("logprobs", [1], {"logprobs": 21}, "from 0 to 20"),
    ("priority", [1], {"priority": 1001}, "from -1000 to 1000"),
    ("request_id", [1], {"request_id": "x" * 200}, "at most 128"),
]


async def test_every_bad_input_is_refused_by_name_and_the_service_goes_on() -> None:
    async with serve() as door, AsyncClient(door.address) as client:
        for field, prompt, options, expected in BAD:
            with pytest.raises(InvalidRequestError) as caught:
                await client.generate(prompt, timeout_s=60, **options)
            assert caught.value.field == field
            assert expected in caught.value.expected
            assert len(caught.value.message) < 600
            assert door.scripted.requests == []
        assert (await client.generate([1], max_tokens=2)).token_ids == (0, 1)


async def test_a_message_beyond_the_bound_is_refused() -> None:
    async with serve(settings=topology(gateway={"port": 0, "max_message_mib": 1})) as door, AsyncClient(door.address) as client:
        with pytest.raises(InvalidRequestError, match="larger than max") as caught:
            await client.generate("x" * (2 << 20), timeout_s=60)
        assert caught.value.field == "prompt"
        assert (await client.generate([1], max_tokens=2)).token_ids == (0, 1)


async def test_a_request_id_in_use_is_refused() -> None:
    async with serve(endless) as door, AsyncClient(door.address) as client:
        async with aclosing(client.stream([1], request_id="twin")) as parts:
            await anext(parts)
            with pytest.raises(InvalidRequestError, match="twin"):
                await client.generate([1], request_id="twin")
        await door.scripted.wait_ended(1)
        door.scripted.script = failing(EngineError("free again"))
        with pytest.raises(EngineError, match="free again"):
            await client.generate([1], request_id="twin")


# -- errors of serving


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError(field="prompt", value=1, expected="x"), grpc.StatusCode.INVALID_ARGUMENT),
        (RejectedError("full", retry_after_s=2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (DeadlineError("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (NoWorkerError("none"), grpc.StatusCode.UNAVAILABLE),
        (WorkerLostError(worker="d0"), grpc.StatusCode.UNAVAILABLE),
        (TransferCorruptError("bad sum"), grpc.StatusCode.INTERNAL),
        (EngineError("broken"), grpc.StatusCode.INTERNAL),
        (CancelledRequestError("gone"), grpc.StatusCode.CANCELLED),
        (ConfigError(key="k", value=1, expected="x"), grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
@pytest.mark.parametrize("after", [0, 3])
async def test_typed_errors_arrive_typed(error: DisaggError, code: grpc.StatusCode, after: int) -> None:
    async with serve(failing(error, after)) as door, AsyncClient(door.address) as client:
        parts = client.stream([1])
        tokens = [(await anext(parts)).tokens[0].token_id for _ in range(after)]
        with pytest.raises(DisaggError) as caught:
            await anext(parts)
        assert type(caught.value) is type(error)
        assert caught.value.message == error.message
        assert caught.value.details() == error.details()
        assert tokens == list(range(after))
        # Clients that know nothing of our errors still get the standard code and a sentence.
        async with grpc.aio.insecure_channel(door.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raw:
                await raw_generate(channel, pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])))
        assert raw.value.code() is code
        assert error.message in str(raw.value.details())
        if isinstance(error, RejectedError):
            assert "retry after 2.5 s" in str(raw.value.details())


async def raw_generate(channel: grpc.aio.Channel, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    call: Any = channel.unary_stream(
        f"/{INFERENCE_NAME}/Generate",
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateResponse.FromString,
    )
    return [response async for response in call(message)]


async def test_an_unexpected_fault_is_a_sentence_and_a_log_entry(caplog: pytest.LogCaptureFixture) -> None:
    async with serve(failing(ZeroDivisionError("secret detail"))) as door, AsyncClient(door.address) as client:
        with pytest.raises(EngineError, match="request mine failed by a fault of the gateway") as caught:
            await client.generate([1], request_id="mine")
        assert "secret" not in caught.value.message
        assert any("mine" in record.message and record.exc_info for record in caplog.records)
        door.scripted.script = endless
        async with aclosing(client.stream([1])) as parts:
            assert (await anext(parts)).tokens == (Token(1),)


async def test_an_answer_without_an_end_is_an_error() -> None:
    async def cut(request: Request) -> AsyncGenerator[Chunk, None]:
        yield Chunk((Token(1),))

    async with serve(cut) as door, AsyncClient(door.address) as client:
        with pytest.raises(EngineError, match="without a finish reason"):
            await client.generate([1])


async def test_a_very_long_error_still_arrives() -> None:
    async with serve(failing(EngineError("x" * 100_000))) as door, AsyncClient(door.address) as client:
        with pytest.raises(EngineError, match="xxx"):
            await client.generate([1])
