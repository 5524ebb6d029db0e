"""What every Engine must do, whatever it computes with. A module that has a `rig` fixture subclasses `EngineContract` and gets all tests.

The reference answer is `rig.expected`; each test uses fresh prompts, so that no prefix cache changes a real engine's rounding.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest

from disagg.engine.engine import Chunks, Engine
from disagg.errors import InvalidRequestError
from disagg.types import FinishReason, Prefilled, Request, Sampling, Token, new_id

GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Rig:
    """Three engines of one model (the same one three times will do) and the means to move KV between the first two.

    prompt: fresh token ids of a length. expected: the right answer to a request, prior output not included.
    open: an outbox entry for a request of the prefill engine; move: the same KV, complete, as an inbox entry of the decode engine.
    is_ended: whether the engine has ended its use of an entry. assert_empty: waits for engines to settle, then checks for leaks.
    """

    prefill: Engine
    decode: Engine
    colocated: Engine
    prompt: Callable[[int], tuple[int, ...]]
    expected: Callable[[Request], Awaitable[tuple[int, ...]]]
    open: Callable[[Request], Awaitable[Any]]
    move: Callable[[Request, Any], Awaitable[Any]]
    is_ended: Callable[[Any], bool]
    assert_empty: Callable[[], Awaitable[None]]
    vocab_size: int
    max_model_len: int
    chunk_tokens: int
    timeout_s: float = 30.0


@dataclass(frozen=True)
class Got:
    """An answer: tokens after the prior output, and how it ended. `num_chunks` counts what the decode side gave."""

    tokens: tuple[Token, ...]
    finish: FinishReason | None
    num_chunks: int = 0

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(t.token_id for t in self.tokens)


def request_of(prompt: tuple[int, ...], sampling: Sampling = GREEDY, **changes: Any) -> Request:
    prior = changes.pop("prior_output", ())
    return Request(new_id(), prompt, dataclasses.replace(sampling, **changes), prior_output=prior)


async def drain(chunks: Chunks) -> Got:
    """All of an answer. A finish must be on the last chunk, and only there."""
    tokens: list[Token] = []
    finish, count = None, 0
    async with aclosing(chunks):
        async for chunk in chunks:
            assert finish is None, "a chunk came after the last one"
            tokens += chunk.tokens
            finish, count = chunk.finish, count + 1
    return Got(tuple(tokens), finish, count)


async def colocated(rig: Rig, request: Request) -> Got:
    async with asyncio.timeout(rig.timeout_s):
        return await drain(rig.colocated.generate(request))


async def prefilled(rig: Rig, request: Request) -> tuple[Prefilled, Any]:
    entry = await rig.open(request)
    async with asyncio.timeout(rig.timeout_s):
        result = await rig.prefill.prefill(request, entry)
    assert rig.is_ended(entry)
    return result, entry


async def disaggregated(rig: Rig, request: Request) -> Got:
    """Through prefill, a move and decode; the entries must be ended afterwards."""
    first, outbox = await prefilled(rig, request)
    if first.finish is not None:
        return Got((first.first,), first.finish)
    inbox = await rig.move(request, outbox)
    async with asyncio.timeout(rig.timeout_s):
        rest = await drain(rig.decode.decode(request, first, inbox))
    assert rig.is_ended(inbox)
    return Got((first.first, *rest.tokens), rest.finish, rest.num_chunks)


class EngineContract:
    """The tests. Each ends with nothing left in the engines."""

    @pytest.fixture(autouse=True)
    async def _nothing_left(self, rig: Rig) -> Any:
        yield
        await rig.assert_empty()

    async def test_lengths_around_blocks_and_chunks(self, rig: Rig) -> None:
        block, chunk = rig.prefill.layout.block_tokens, rig.chunk_tokens
        lengths = {1, 2, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1}
        lengths |= {chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk + 5}
        for length in sorted(n for n in lengths if n > 0):
            request = request_of(rig.prompt(length))
            want = await rig.expected(request)
            assert len(want) == GREEDY.max_tokens
            got = await disaggregated(rig, request)
            assert (got.ids, got.finish) == (want, FinishReason.LENGTH), f"prompt of {length} tokens"
            assert (await colocated(rig, request)).ids == want, f"prompt of {length} tokens"

    async def test_logprobs_come_with_every_token_and_are_equal(self, rig: Rig) -> None:
        request = request_of(rig.prompt(rig.chunk_tokens + 3), logprobs=3)
        got, want = await disaggregated(rig, request), await colocated(rig, request)
        assert got.tokens == want.tokens
        for token in got.tokens:
            assert token.logprob is not None
            assert token.logprob <= 0
            assert len(token.top) >= 3
            assert token.top[0].token_id == token.token_id, "greedy takes the most likely token"

    async def test_no_logprobs_unless_asked(self, rig: Rig) -> None:
        got = await disaggregated(rig, request_of(rig.prompt(9)))
        assert all(t.logprob is None and not t.top for t in got.tokens)

    async def test_max_tokens_one_ends_at_the_prefill(self, rig: Rig) -> None:
        request = request_of(rig.prompt(20), max_tokens=1)
        result, _ = await prefilled(rig, request)
        assert result.finish is FinishReason.LENGTH
        assert (result.first.token_id,) == await rig.expected(request) == (await colocated(rig, request)).ids

    async def test_max_tokens_two_has_one_chunk_of_decode(self, rig: Rig) -> None:
        request = request_of(rig.prompt(20), max_tokens=2)
        got = await disaggregated(rig, request)
        assert (len(got.tokens), got.finish, got.num_chunks) == (2, FinishReason.LENGTH, 1)

    async def test_first_token_that_stops_ends_at_the_prefill(self, rig: Rig) -> None:
        request = request_of(rig.prompt(20))
        first = (await rig.expected(request))[0]
        result, _ = await prefilled(rig, request_of(request.prompt_token_ids, stop_token_ids=(first,)))
        assert (result.first.token_id, result.finish) == (first, FinishReason.STOP)

    async def test_stop_token_in_the_middle_is_the_last_one(self, rig: Rig) -> None:
        for _ in range(8):
            request = request_of(rig.prompt(20))
            want = await rig.expected(request)
            if want[3] not in want[:3]:
                break
        stopping = request_of(request.prompt_token_ids, stop_token_ids=(want[3],))
        for got in (await disaggregated(rig, stopping), await colocated(rig, stopping)):
            assert got.ids == want[: want.index(want[3]) + 1]
            assert got.finish is FinishReason.STOP

    async def test_min_tokens_holds_over_both_legs(self, rig: Rig) -> None:
        request = request_of(rig.prompt(20))
        want = await rig.expected(request)
        for min_tokens in (1, 2, 5):
            stopping = request_of(request.prompt_token_ids, stop_token_ids=want, min_tokens=min_tokens)
            got, reference = await disaggregated(rig, stopping), await colocated(rig, stopping)
            assert got.ids == reference.ids
            assert not set(got.ids[:min_tokens]) & set(want), "a stop token came before min_tokens"

    async def test_seeded_sampling_is_the_same_on_both_ways(self, rig: Rig) -> None:
        prompt = rig.prompt(20)
        sampled = [request_of(prompt, temperature=1.0, seed=seed, max_tokens=12) for seed in (1, 2)]
        answers = [await disaggregated(rig, r) for r in sampled]
        assert answers[0].ids != answers[1].ids, "the seed has no effect"
        for got, request in zip(answers, sampled, strict=True):
            assert got.ids == (await colocated(rig, request)).ids

    async def test_prior_output_continues_the_answer(self, rig: Rig) -> None:
        request = request_of(rig.prompt(2 * rig.prefill.layout.block_tokens - 2))
        want = await rig.expected(request)
        for done in (1, 2, 3, len(want) - 1):
            rest = request_of(request.prompt_token_ids, prior_output=want[:done])
            assert (await disaggregated(rig, rest)).ids == want[done:]
            got = await colocated(rig, rest)
            assert (got.ids, got.finish) == (want[done:], FinishReason.LENGTH)

    async def test_prior_output_counts_for_min_tokens(self, rig: Rig) -> None:
        request = request_of(rig.prompt(20))
        want = await rig.expected(request)
        stopping = request_of(request.prompt_token_ids, prior_output=want[:3], stop_token_ids=want, min_tokens=3)
        assert (await disaggregated(rig, stopping)).ids == want[3:4], "three prior tokens already are min_tokens"
        waiting = request_of(request.prompt_token_ids, prior_output=want[:3], stop_token_ids=want, min_tokens=4)
        assert (await disaggregated(rig, waiting)).ids[:1] != want[3:4]

    async def test_thirty_two_at_once_are_all_right(self, rig: Rig) -> None:
        requests = [request_of(rig.prompt(1 + 7 * i), max_tokens=4 + i % 5) for i in range(32)]
        want = [await rig.expected(r) for r in requests]
        got = await asyncio.gather(*(disaggregated(rig, r) for r in requests))
        assert [g.ids for g in got] == want

    async def test_cancelled_prefill_leaves_nothing(self, rig: Rig) -> None:
        length = 4 * rig.chunk_tokens
        began = asyncio.get_running_loop().time()
        await prefilled(rig, request_of(rig.prompt(length)))
        whole_s = asyncio.get_running_loop().time() - began
        for share in (0.0, 0.1, 0.3, 0.6, 0.9):
            request = request_of(rig.prompt(length))
            entry = await rig.open(request)
            task = asyncio.create_task(rig.prefill.prefill(request, entry))
            await asyncio.sleep(share * whole_s)
            task.cancel()
            await asyncio.wait([task], timeout=rig.timeout_s)
            assert task.done()
            assert rig.is_ended(entry), "a cancelled prefill still owns its outbox entry"
        await rig.assert_empty()
        await self._still_right(rig)

    @pytest.mark.parametrize("num_chunks", [0, 1, 3])
    async def test_closed_decode_leaves_nothing(self, rig: Rig, num_chunks: int) -> None:
        request = request_of(rig.prompt(rig.chunk_tokens + 1), max_tokens=64)
        first, outbox = await prefilled(rig, request)
        inbox = await rig.move(request, outbox)
        chunks = rig.decode.decode(request, first, inbox)
        for _ in range(num_chunks):
            await anext(aiter(chunks))
        await chunks.aclose()
        await chunks.aclose()
        assert rig.is_ended(inbox), "a closed decode still owns its inbox entry"
        await rig.assert_empty()
        await self._still_right(rig)

    async def test_cancelled_wait_for_a_chunk_leaves_nothing(self, rig: Rig) -> None:
        request = request_of(rig.prompt(rig.chunk_tokens + 1), max_tokens=64)
        first, outbox = await prefilled(rig, request)
        inbox = await rig.move(request, outbox)
        for chunks in (rig.decode.decode(request, first, inbox), rig.colocated.generate(request)):
            task = asyncio.create_task(drain(chunks))
            await asyncio.sleep(0.002)
            task.cancel()
            await asyncio.wait([task], timeout=rig.timeout_s)
            assert task.done()
        assert rig.is_ended(inbox)
        await rig.assert_empty()
        await self._still_right(rig)

    async def test_wrong_requests_are_refused_by_name(self, rig: Rig) -> None:
        too_long = rig.max_model_len
        for field, request in (
            ("prompt", request_of(())),
            ("max_tokens", request_of(rig.prompt(5), max_tokens=0)),
            ("max_tokens", request_of(rig.prompt(5), max_tokens=too_long)),
            ("max_tokens", request_of(rig.prompt(5), max_tokens=2, prior_output=(5, 6))),
            ("prompt_token_ids", request_of((5, rig.vocab_size))),
        ):
            entry = await rig.open(request)
            with pytest.raises(InvalidRequestError) as refused:
                await rig.prefill.prefill(request, entry)
            assert refused.value.field == field
            assert rig.is_ended(entry)
            with pytest.raises(InvalidRequestError) as refused:
                await drain(rig.colocated.generate(request))
            assert refused.value.field == field
        await self._still_right(rig)

    async def test_state_counts_what_runs(self, rig: Rig) -> None:
        idle = rig.colocated.state()
        assert idle.free_kv_tokens <= idle.total_kv_tokens
        assert idle.total_kv_tokens >= rig.max_model_len
        chunks = rig.colocated.generate(request_of(rig.prompt(40), max_tokens=64))
        await anext(aiter(chunks))
        busy = rig.colocated.state()
        assert busy.running_requests == 1
        assert busy.free_kv_tokens <= idle.free_kv_tokens - 40
        assert busy.step_s > 0
        await chunks.aclose()
        await rig.assert_empty()
        assert rig.colocated.state().running_requests == 0

    async def _still_right(self, rig: Rig) -> None:
        request = request_of(rig.prompt(33))
        assert (await disaggregated(rig, request)).ids == await rig.expected(request)
