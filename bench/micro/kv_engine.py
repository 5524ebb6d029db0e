"""What moving KV costs real engines: SmolLM2-135M on two workers, one core each.

    python -m bench.micro.kv_engine [--rounds 5] [--json]

copies      seconds of engine steps spent copying between cache and boxes, digests included, over prefill seconds; prompts of 2,048 tokens.
            `stage` on the prefill side, `load` on the decode side
exposed     (prefill's end to second token, less a plain decode step) over prefill seconds, by carrier: what the client waits for the KV

Rounds take turns, and figures are medians over rounds: the machine is noisy, ratios of one run are not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
from typing import Any

from disagg.types import Sampling

PROMPT_TOKENS = 2048
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
            answer = await pair.ask(prompt(PROMPT_TOKENS), greedy(12))
            prefill_s = answer.prefilled_s - answer.began_s
            step_s = statistics.median(b - a for a, b in itertools.pairwise(answer.at_s))
            note("copies stage", (ledgers[0].stage_s - before[0]) / prefill_s)
            note("copies load", (ledgers[1].load_s - before[1]) / prefill_s)
            note(f"exposed {carrier}", (answer.at_s[0] - answer.prefilled_s - step_s) / prefill_s)

    async with engine_pair() as pair:
        await pair.ask(prompt(64), greedy(4))
        for _ in range(rounds):
            await one(pair)
    return {**{name: statistics.median(values) for name, values in samples.items()}, "rounds": rounds}


def prompt(length: int) -> tuple[int, ...]:
    """Token ids that no prefix cache knows."""
    return tuple(_draw.randrange(100, 49_000) for _ in range(length))


def greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


if __name__ == "__main__":
    main()
