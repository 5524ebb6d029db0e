"""What moving KV costs real engines: SmolLM2-135M on two workers, one core each.

    python -m bench.micro.kv_engine [--rounds 5] [--json]

copies      seconds of engine steps spent copying between cache and boxes, digests included, over prefill seconds; prompts of 2,048 tokens.
            `stage` on the prefill side, `load` on the decode side
exposed     (prefill's end to second token, less a plain decode step) over prefill seconds, by carrier: what the client waits for the KV
stretch     longest gap between two tokens of a running decode batch while a 2,000-token request arrives, over the batch's median gap when
            nothing arrives; the prompt runs on the other worker. `quiet` is the same ratio for a window in which nothing arrives

Rounds take turns, and figures are medians over rounds: the machine is noisy, ratios of one run are not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from contextlib import aclosing
from typing import Any

from disagg.types import Request, Sampling, new_id

COPIED_TOKENS, EXPOSED_TOKENS, ARRIVING_TOKENS = 2048, 2048, 2000
BATCH = 4
_draw = random.Random(11)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    result = asyncio.run(measure(given.rounds))
    if given.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:24} {value:8.1%}" if isinstance(value, float) else f"{name:24} {value}")


async def measure(rounds: int) -> dict[str, Any]:
    from bench.engine_pair import EnginePair, engine_pair

    samples: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)

    async def one(pair: EnginePair) -> None:
        for carrier in pair.carriers:
            pair.use(carrier)
            ledgers = [pair.engine(worker)._ledger for worker in (pair.p, pair.d)]
            before = ledgers[0].stage_s, ledgers[1].load_s
            answer = await pair.ask(prompt(EXPOSED_TOKENS), greedy(12))
            prefill_s = answer.prefilled_s - answer.began_s
            step_s = statistics.median(b - a for a, b in itertools.pairwise(answer.at_s))
            note("copies stage", (ledgers[0].stage_s - before[0]) / prefill_s)
            note("copies load", (ledgers[1].load_s - before[1]) / prefill_s)
            note(f"exposed {carrier}", (answer.at_s[0] - answer.prefilled_s - step_s) / prefill_s)
            quiet, busy = await stretch(pair)
            note("stretch quiet", quiet)
            note(f"stretch {carrier}", busy)

    async with engine_pair() as pair:
        await pair.ask(prompt(64), greedy(4))
        for _ in range(rounds):
            await one(pair)
    return {**{name: statistics.median(values) for name, values in samples.items()}, "rounds": rounds}


async def stretch(pair: Any) -> tuple[float, float]:
    """Longest over median gap of a decode batch, in a quiet window and in one in which a request arrives; each less 1."""
    gaps: list[float] = []
    stop = asyncio.Event()

    async def decode(is_first: bool) -> None:
        last_s = 0.0
        request = Request(new_id(), prompt(64), greedy(3000))
        async with aclosing(pair.d.generate(request)) as chunks:
            async for _ in chunks:
                now_s = time.perf_counter()
                if is_first and last_s:
                    gaps.append(now_s - last_s)
                last_s = now_s
                if stop.is_set():
                    return

    batch = [asyncio.ensure_future(decode(i == 0)) for i in range(BATCH)]
    try:
        while len(gaps) < 10:  # noqa: ASYNC110 (the batch has no event)
            await asyncio.sleep(0.02)
        gaps.clear()
        await pair.ask(prompt(ARRIVING_TOKENS), greedy(3))
        busy = list(gaps)
        gaps.clear()
        while len(gaps) < len(busy):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        quiet = list(gaps)
    finally:
        stop.set()
        await asyncio.gather(*batch)
    typical_s = statistics.median(quiet)
    return max(quiet) / typical_s - 1, max(busy) / typical_s - 1


def prompt(length: int) -> tuple[int, ...]:
    """Token ids that no prefix cache knows."""
    return tuple(_draw.randrange(100, 49_000) for _ in range(length))


def greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


if __name__ == "__main__":
    main()
