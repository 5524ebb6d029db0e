"""The door over real gRPC: answers as they come, and what ends them: a stop string, a deadline, a client that leaves or stops reading."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import pytest

from disagg.client import AsyncClient
from disagg.errors import (
    CancelledRequestError,
    DeadlineError,
    EngineError,
    UnavailableError,
)
from disagg.front import grpc_door
from disagg.front.server import INFERENCE_NAME
from disagg.front.text import SyntheticTokenizer
from disagg.pb import inference_pb2 as pb
from disagg.types import Chunk, FinishReason, Phase, Request, Token, TopLogprob
from tests.flow.scripted import TEXT, endless, failing, serve, topology


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
