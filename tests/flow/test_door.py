"""The door over real gRPC: bad input has its typed error and the service goes on; cancel, deadline, health, reflection."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from disagg.client import AsyncClient
from disagg.errors import (
    CancelledRequestError,
    ConfigError,
    DeadlineError,
    DisaggError,
    EngineError,
    InvalidRequestError,
    NoWorkerError,
    PlacementError,
    RejectedError,
    TransferCorruptError,
    UnavailableError,
    WorkerLostError,
)
from disagg.front import grpc_door
from disagg.front.server import INFERENCE_NAME
from disagg.front.text import SyntheticTokenizer
from disagg.pb import inference_pb2 as pb
from disagg.types import Chunk, FinishReason, Phase, Request, Role, Token, TopLogprob
from tests.flow.scripted import Script, serve, topology

TEXT = SyntheticTokenizer().decode


def failing(error: Exception, after: int = 0) -> Script:
    async def script(request: Request) -> AsyncGenerator[Chunk, None]:
        for n in range(after):
            yield Chunk((Token(n),))
        raise error

    return script


async def endless(request: Request) -> AsyncGenerator[Chunk, None]:
    """One token, then nothing for ever."""
    yield Chunk((Token(1),))
    await asyncio.Event().wait()


async def test_an_answer_comes_whole_with_text_and_usage() -> None:
    async with serve() as door, AsyncClient(door.address) as client:
        answer = await client.generate("hello", max_tokens=5, request_id="mine")
    assert answer.request_id == "mine"
    assert answer.token_ids == (0, 1, 2, 3, 4)
    assert answer.text == TEXT(range(5))
    assert answer.finish is FinishReason.LENGTH
    usage = answer.usage
    assert (usage.prompt_tokens, usage.output_tokens, usage.prefill_worker, usage.decode_worker, usage.attempts) == (5, 5, "p0", "d0", 1)
    assert door.scripted.requests[0].prompt_token_ids == tuple(b"hello")


async def test_logprobs_come_with_their_tokens() -> None:
    async def script(request: Request) -> AsyncGenerator[Chunk, None]:
        yield Chunk((Token(1, -0.25, (TopLogprob(1, -0.25), TopLogprob(9, -2.5))), Token(2, -1.5)), FinishReason.STOP)

    async with serve(script) as door, AsyncClient(door.address) as client:
        answer = await client.generate([1], logprobs=2)
    assert answer.tokens == (Token(1, -0.25, (TopLogprob(1, -0.25), TopLogprob(9, -2.5))), Token(2, -1.5))
    assert answer.finish is FinishReason.STOP


async def test_the_first_token_leaves_at_once() -> None:
    """It is there while the second one is not even made."""
    second = asyncio.Event()

    async def script(request: Request) -> AsyncGenerator[Chunk, None]:
        yield Chunk((Token(7),))
        await second.wait()
        yield Chunk((Token(8),), FinishReason.LENGTH)

    async with serve(script) as door, AsyncClient(door.address) as client, asyncio.timeout(60):
        parts = client.stream([1], max_tokens=2)
        first = await anext(parts)
        assert first.tokens == (Token(7),)
        assert first.text == TEXT([7])
        second.set()
        assert [part.tokens async for part in parts] == [(Token(8),)]


# -- bad input


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


# -- ends


async def test_closing_the_iterator_cancels_the_run() -> None:
    async with serve(endless) as door, AsyncClient(door.address) as client:
        async with aclosing(client.stream([1])) as parts:
            await anext(parts)
        await door.scripted.wait_ended(1)
        assert door.scripted.ended == [Phase.CANCELLED]


async def test_a_client_that_vanishes_cancels_its_runs() -> None:
    async with serve(endless) as door:
        client = AsyncClient(door.address)
        streams = [client.stream([1]) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        await client.close()
        await door.scripted.wait_ended(3)
        assert door.scripted.ended == [Phase.CANCELLED] * 3
        for stream in streams:
            with pytest.raises((CancelledRequestError, UnavailableError, asyncio.CancelledError)):
                await anext(stream)


async def test_the_clients_deadline_is_the_requests() -> None:
    async with serve(endless) as door, AsyncClient(door.address) as client:
        with pytest.raises(DeadlineError):
            await client.generate([1], timeout_s=0.5)
        await door.scripted.wait_ended(1)
        request = door.scripted.requests[0]
        assert request.deadline_s is not None
        assert 0 < request.deadline_s - request.arrival_s < 0.5
        door.scripted.script = failing(EngineError("no deadline"))
        with pytest.raises(EngineError):
            await client.generate([1])
        assert door.scripted.requests[1].deadline_s is None


async def test_a_stop_string_ends_the_run_and_counts_as_finished() -> None:
    async def forever(request: Request) -> AsyncGenerator[Chunk, None]:
        for n in range(1000):
            yield Chunk((Token(n),))
            await asyncio.sleep(0)

    word = TEXT([5]).strip()
    async with serve(forever) as door, AsyncClient(door.address) as client:
        answer = await client.generate([1], stop=["no such word", word], max_tokens=1000)
        assert answer.text == TEXT(range(5))
        assert answer.token_ids == (0, 1, 2, 3, 4, 5)
        assert (answer.finish, answer.usage.output_tokens) == (FinishReason.STOP, 6)
        await door.scripted.wait_ended(1)
        assert door.scripted.ended == [Phase.FINISHED]


async def test_a_reader_that_stops_is_cut_off_and_slows_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing piles up at the door: the source stands still while the client does not read, and ends when it never does."""
    monkeypatch.setattr(grpc_door, "WRITE_TIMEOUT_S", 1.0)
    made = 0

    async def flood(request: Request) -> AsyncGenerator[Chunk, None]:
        nonlocal made
        top = tuple(TopLogprob(i, -1.0) for i in range(20))
        for _ in range(1_000_000):
            made += 1
            yield Chunk(tuple(Token(1, -1.0, top) for _ in range(50)))

    async with serve(flood) as door, grpc.aio.insecure_channel(door.address) as channel:
        call: Any = channel.unary_stream(
            f"/{INFERENCE_NAME}/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])))
        await call.read()
        await door.scripted.wait_ended(1)
        # Each chunk is some 17 KB on the wire: what the connection buffers, and no more.
        assert made < 5_000
        call.cancel()


async def test_64_streams_at_once_are_answered_in_turns() -> None:
    """Each gets its own answer, and none waits for another to end."""
    barrier = asyncio.Barrier(64)

    async def script(request: Request) -> AsyncGenerator[Chunk, None]:
        base = request.prompt_token_ids[0]
        yield Chunk((Token(base),))
        await barrier.wait()
        for n in range(1, 20):
            yield Chunk((Token(base + n),), FinishReason.LENGTH if n == 19 else None)

    async with serve(script) as door, AsyncClient(door.address) as client, asyncio.timeout(60):
        answers = await asyncio.gather(*(client.generate([100 * i], max_tokens=20) for i in range(64)))
    assert [a.token_ids for a in answers] == [tuple(range(100 * i, 100 * i + 20)) for i in range(64)]
    assert len({a.request_id for a in answers}) == 64


async def test_long_texts_are_tokenised_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one prompt is being tokenised, others are answered."""
    started, go_on = threading.Event(), threading.Event()

    def slow(self: SyntheticTokenizer, text: str, *, is_whole: bool = True) -> list[int]:
        started.set()
        assert go_on.wait(20)
        return list(text.encode())

    settings = topology(engine={"kind": "simulated", "simulated": {"max_model_len": 32768}})
    async with serve(settings=settings) as door, AsyncClient(door.address) as client:
        monkeypatch.setattr(SyntheticTokenizer, "encode", slow)
        long = asyncio.create_task(client.generate("x" * 20_000, max_tokens=1))
        assert await asyncio.to_thread(started.wait, 20)
        assert (await client.generate([1], max_tokens=2)).token_ids == (0, 1)
        assert not long.done()
        go_on.set()
        assert (await long).usage.prompt_tokens == 20_000


async def test_closing_lets_running_answers_end() -> None:
    go_on = asyncio.Event()

    async def script(request: Request) -> AsyncGenerator[Chunk, None]:
        yield Chunk((Token(1),))
        await go_on.wait()
        yield Chunk((Token(2),), FinishReason.LENGTH)

    async with serve(script) as door, AsyncClient(door.address) as client, aclosing(client.stream([1], max_tokens=2)) as parts:
        await anext(parts)
        closing = asyncio.create_task(door.server.close(20.0))
        await asyncio.sleep(0)
        go_on.set()
        assert [part.finish async for part in parts] == [FinishReason.LENGTH]
        await closing


# -- standard services


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
