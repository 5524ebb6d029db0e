"""Measuring one engine: prompts of many lengths, decoding at many batch sizes and contexts, and both at once.

The engine tells what each step consisted of and how long it took (EngineState.steps); nothing here is timed from outside, except transfers.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from disagg.engine.engine import Engine
from disagg.types import Request, Sampling, StepRecord

DECODE_TOKENS = 12  # per request and point: so many steps of one batch
POLL_S = 0.02  # an engine remembers 32 steps or more
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run. `prompts`: lengths. `decodes`: (batch, context). `mixed`: (batch, context, prompt beside it).

    Mixed points run once, the others `repeats` times. A point whose prompts alone would take longer than `point_s` seconds (a prompt
    alone, or a mixed point, twice that), as fast as prompts ran before, is left out.
    """

    prompts: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]
    mixed: tuple[tuple[int, int, int], ...]
    repeats: int = 2
    point_s: float = 6.0


def plan_for(max_context_tokens: int, max_num_seqs: int, kv_cache_tokens: int, *, quick: bool = False) -> Plan:
    """Lengths and batches that the engine can hold, spread evenly in logarithms; `quick` takes a third of them."""
    longest = max_context_tokens - 2 * DECODE_TOKENS
    prompts = [n for n in (16, 48, 128, 256, 512, 1024, 2000, 3000, 6000, 12000, 24000) if n < longest] or [max(1, longest)]
    batches = [b for b in (1, 2, 4, 8, 16, 32, 64, 128) if b <= max_num_seqs]
    contexts = [n for n in (64, 512, 2000) if n < longest] or [max(1, longest)]
    decodes = [(b, c) for c in contexts for b in batches if b * (c + DECODE_TOKENS) <= 0.9 * kv_cache_tokens]
    mixed = [(b, contexts[0], p) for b in batches[1::2] for p in prompts[-2:] if b * contexts[0] + p < 0.9 * kv_cache_tokens]
    if quick:
        prompts, decodes, mixed = prompts[::2], decodes[::2], mixed[:1]
    return Plan(tuple(prompts), tuple(decodes), tuple(mixed), 1 if quick else 2)


class Measurement:
    """Runs a plan on an engine and keeps every step that it reports."""

    def __init__(self, engine: Engine, vocab_size: int, seed: int = 0) -> None:
        self.records: list[StepRecord] = []
        self._engine = engine
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._names: Iterator[int] = itertools.count()
        self._last = max((s.number for s in engine.state().steps), default=0)

    async def run(self, plan: Plan, say: Say, budget_s: float = float("inf")) -> Sequence[StepRecord]:
        """All of `plan`, or as much as begins within `budget_s`; the engine should have nothing else to do."""
        end_s = time.monotonic() + budget_s
        watching = asyncio.create_task(self._watch())
        try:
            for repeat in range(plan.repeats):
                for what, point in self._points(plan, with_mixed=repeat == 0):
                    if time.monotonic() > end_s:
                        break
                    say(what)
                    await point()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        self._take()
        return self.records

    def _points(self, plan: Plan, *, with_mixed: bool) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """What to say, and what to do."""
        for length in plan.prompts:
            rate = self._prompt_tokens_per_s()
            if rate and length > 2 * plan.point_s * rate:
                break
            yield f"a prompt of {length:,} tokens", partial(self._together, [(length, 1)])
        affordable = plan.point_s * self._prompt_tokens_per_s()
        for batch, context in plan.decodes:
            if batch == 1 or batch * context <= affordable:
                yield (
                    f"{batch} requests decode at {context:,} tokens of context",
                    partial(self._together, [(context, DECODE_TOKENS)] * batch),
                )
        for batch, context, prompt in plan.mixed if with_mixed else ():
            if batch * context + prompt > 2 * affordable:
                continue
            chats = [(context, 4 * DECODE_TOKENS)] * batch
            yield f"a prompt of {prompt:,} tokens beside {batch} that decode", partial(self._together, [*chats, (prompt, 1)])

    def _prompt_tokens_per_s(self) -> float:
        seconds = sum(s.seconds for s in self.records)
        return sum(s.prefill_tokens for s in self.records) / seconds if seconds else 0.0

    def _request(self, num_tokens: int, max_tokens: int) -> Request:
        """Random tokens: no prefix cache knows them."""
        ids = tuple(self._random.randrange(3, self._vocab_size) for _ in range(num_tokens))
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return Request(f"profile-{next(self._names)}", ids, sampling)

    async def _together(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Requests of (prompt tokens, output tokens), all at once."""
        async with asyncio.TaskGroup() as group:
            for num_tokens, max_tokens in lengths:
                group.create_task(self._answer(self._request(num_tokens, max_tokens)))

    async def _answer(self, request: Request) -> None:
        async with aclosing(self._engine.generate(request)) as chunks:
            async for _ in chunks:
                self._take()

    async def _watch(self) -> None:
        """Steps of long prompts bring no token, and are forgotten after a while."""
        while True:
            self._take()
            await asyncio.sleep(POLL_S)

    def _take(self) -> None:
        for step in self._engine.state().steps:
            if step.number > self._last:
                self.records.append(step)
                self._last = step.number
