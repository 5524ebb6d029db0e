"""Two real engines of this process, prefill and decode, and what lies between them: for tests of engine `vllm`. Needs vllm."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from disagg.engine.vllm_engine import VllmEngine
from disagg.kv.inbox import Inbox
from disagg.kv.layout import hash_tokens
from disagg.kv.outbox import Outbox
from disagg.types import FinishReason, KvAddress, Prefilled, Request, Sampling, Token, Transfer, new_id

GREEDY = Sampling(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=2)
COLOCATED = "colocated"  # salt of the right answers
WAIT_S = 60.0


@dataclass
class Cluster:
    """The engines and what lies between them. `decode` has room for little more than one longest context: it can be made to preempt."""

    prefill: VllmEngine
    decode: VllmEngine
    outbox: Outbox
    inbox: Inbox
    address: KvAddress

    def transfer(self, request: Request, form: str = "blocks", first_token: int = 0) -> Transfer:
        context = (*request.prompt_token_ids, *request.prior_output)
        return Transfer(new_id(), 0, self.address, len(context), hash_tokens(context), form, first_token)

    async def staged(self, request: Request, form: str = "blocks", first_token: int = 0) -> tuple[Prefilled, Any]:
        """Prefilled, moved, and the complete inbox entry (None when the first token ended the request)."""
        transfer = self.transfer(request, form, first_token)
        entry = await self.outbox.open(transfer)
        fetching = asyncio.create_task(self.inbox.fetch(transfer))
        prefilled = await self.prefill.prefill(request, entry)
        await asyncio.wait_for(fetching, WAIT_S)
        return prefilled, await self.inbox.take(transfer.transfer_id)

    async def answer(self, request: Request, form: str = "blocks", first_token: int = 0) -> tuple[list[Token], FinishReason | None]:
        """The disaggregated answer."""
        prefilled, entry = await self.staged(request, form, first_token)
        if prefilled.finish is not None:
            entry.end_read()
            return [prefilled.first], prefilled.finish
        tokens, finish = await drain(self.decode.decode(request, prefilled, entry))
        return [prefilled.first, *tokens], finish

    async def expected(self, request: Request) -> tuple[list[Token], FinishReason | None]:
        """The colocated answer, from one engine: with a salt of its own it takes nothing that was cached for the other answer."""
        return await drain(self.prefill.generate(replace(request, cache_salt=COLOCATED)))

    async def assert_empty(self) -> None:
        """Engines, ledgers and boxes come to rest with nothing left."""
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while asyncio.get_running_loop().time() < deadline:
            if all(is_at_rest(engine) for engine in (self.prefill, self.decode)):
                break
            await asyncio.sleep(0.02)
        for engine in (self.prefill, self.decode):
            assert is_at_rest(engine), (engine.name, engine.state(), engine._ledger)
        self.outbox.assert_empty()
        self.inbox.assert_empty()


def is_at_rest(engine: VllmEngine) -> bool:
    state = engine.state()
    idle = state.waiting_requests == state.running_requests == state.waiting_tokens == engine._ledger.num_open == 0
    return idle and state.free_kv_tokens == state.total_kv_tokens


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (the engine's process tells of its cache on its own time)
            await asyncio.sleep(0.02)


async def drain(chunks: Any) -> tuple[list[Token], FinishReason | None]:
    tokens: list[Token] = []
    finish = None
    async with aclosing(chunks):
        async for chunk in chunks:
            assert finish is None
            tokens += chunk.tokens
            finish = chunk.finish
    return tokens, finish


_fresh = itertools.count(1)


def fresh_prompt(length: int) -> tuple[int, ...]:
    """Token ids that no test has used before, so that no prefix cache knows them."""
    draw = random.Random(next(_fresh) * 7919)
    return tuple(draw.randrange(100, 49000) for _ in range(length))


def request_of(prompt: tuple[int, ...], prior_output: tuple[int, ...] = (), **sampling: Any) -> Request:
    settings = {**{f: getattr(GREEDY, f) for f in Sampling.__dataclass_fields__}, **sampling}
    return Request(new_id(), prompt, Sampling(**settings), prior_output=prior_output)


def ids(tokens: list[Token]) -> list[int]:
    return [t.token_id for t in tokens]


def assert_equal_or_near_tie(got: list[Token], want: list[Token], within: float = 0.05) -> None:
    """Equal tokens; or where they first differ, they are the two best of the right answer, and those are `within` of each other."""
    for a, b in zip(got, want, strict=True):
        if a.token_id != b.token_id:
            assert a.token_id in {t.token_id for t in b.top[:2]}, (a, b)
            assert abs(b.top[0].logprob - b.top[1].logprob) <= within, (a, b)
            return
