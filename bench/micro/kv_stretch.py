"""How much longer a decode batch's steps get while a long request arrives: two real engines, one core each, the prompt runs on the other.

    python -m bench.micro.kv_stretch [--rounds 3] [--carriers shm,tcp] [--json]

Each round has a window per carrier, beside a batch of four decodes: first the other worker runs a prompt of 2,000 tokens that stays there,
then one that is handed over. A gap is the time between two tokens of one running answer. The cores share memory, so the prompt itself
makes gaps longer, and so do other programs; what the hand-over adds is told apart:

median, p95   of the gaps until the first token of the prompt that is handed over (its KV is moved meanwhile), against those of the
              prompt that stays: the same statistic, over about as many gaps
load          of the steps from the first token to the second one (they load the KV): seconds spent on it over all other seconds
prompt        what is no part of it: median of the gaps beside the prompt that stays, against as many without any prompt

What follows belongs to the arrival's own decoding: the batch is one longer then. Figures are medians over rounds, less 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from bench.micro.kv_engine import greedy, prompt
from disagg.types import Request, new_id

ARRIVING_TOKENS = 2000
BATCH = 4
SETTLED_GAPS = 10  # of a fresh batch, not counted
QUIET_GAPS = 40


@dataclass(frozen=True)
class Window:
    """Gaps in seconds: without a prompt, beside one that stays, beside one that is handed over, and those that have a part of the load.

    `load_s`: seconds of the engine's steps that went into the load.
    """

    quiet: list[float]
    staying: list[float]
    arriving: list[float]
    loading: list[float]
    load_s: float

    def figures(self) -> dict[str, float]:
        return {
            "median": statistics.median(self.arriving) / statistics.median(self.staying) - 1,
            "p95": p95(self.arriving) / p95(self.staying) - 1,
            "load": self.load_s / (sum(self.loading) - self.load_s),
            "prompt": statistics.median(self.staying) / statistics.median(self.quiet) - 1,
        }


def p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


async def window(pair: Any) -> Window:
    """One arrival beside a batch of BATCH decodes on `pair.d`."""
    gaps: list[tuple[float, float]] = []  # (end, length)
    stop = asyncio.Event()

    async def decode(is_measured: bool) -> None:
        last_s = 0.0
        async with aclosing(pair.d.generate(Request(new_id(), prompt(64), greedy(3500)))) as chunks:
            async for _ in chunks:
                now_s = time.perf_counter()
                if is_measured and last_s:
                    gaps.append((now_s, now_s - last_s))
                last_s = now_s
                if stop.is_set():
                    return

    async def until(num_gaps: int) -> None:
        while len(gaps) < num_gaps:  # noqa: ASYNC110 (the batch has no event)
            await asyncio.sleep(0.02)

    batch = [asyncio.ensure_future(decode(i == 0)) for i in range(BATCH)]
    ledger = pair.engine(pair.d)._ledger
    try:
        await until(SETTLED_GAPS + QUIET_GAPS)
        stays_s = time.perf_counter()
        async with aclosing(pair.p.generate(Request(new_id(), prompt(ARRIVING_TOKENS), greedy(1)))) as chunks:
            async for _ in chunks:
                pass
        stayed_s, load_s = time.perf_counter(), ledger.load_s
        answer = await pair.ask(prompt(ARRIVING_TOKENS), greedy(2))
        load_s = ledger.load_s - load_s
    finally:
        stop.set()
        await asyncio.gather(*batch)

    def between(begin_s: float, end_s: float) -> list[float]:
        return [gap_s for at_s, gap_s in gaps if at_s - gap_s >= begin_s and at_s <= end_s]

    first_s, second_s = answer.prefilled_s, answer.at_s[0]
    quiet = between(0.0, stays_s)[-QUIET_GAPS:]
    # The step that computed the second token ends with it, give or take what the loop takes to hand on both.
    loading = [gap_s for at_s, gap_s in gaps if first_s < at_s < second_s - statistics.median(quiet) / 2]
    return Window(quiet, between(stays_s, stayed_s), between(answer.began_s, first_s), loading, load_s)


async def measure(rounds: int, carriers: Sequence[str]) -> dict[str, Any]:
    """Figures by carrier, and how many gaps they are of."""
    from bench.engine_pair import engine_pair

    windows: dict[str, list[Window]] = {carrier: [] for carrier in carriers}
    async with engine_pair() as pair:
        await pair.ask(prompt(ARRIVING_TOKENS), greedy(4))
        for _ in range(rounds):
            for carrier in carriers:
                pair.use(carrier)
                windows[carrier].append(await window(pair))
                told = "  ".join(f"{what} {share:+.1%}" for what, share in windows[carrier][-1].figures().items())
                print(f"{carrier}: {told}", file=sys.stderr, flush=True)
    result: dict[str, Any] = {name: summary(found) for name, found in windows.items()}
    return {**result, "rounds": rounds}


def summary(windows: Sequence[Window]) -> dict[str, Any]:
    """Medians of the windows' figures, and what they are of."""
    figures = [w.figures() for w in windows]
    return {
        **{name: statistics.median(f[name] for f in figures) for name in figures[0]},
        "step_ms": 1e3 * statistics.median(gap_s for w in windows for gap_s in w.quiet),
        "gaps": sum(len(w.arriving) for w in windows),
        "load_steps": sum(len(w.loading) for w in windows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.micro.kv_stretch", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--carriers", default="shm,tcp", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args()
    result = asyncio.run(measure(given.rounds, given.carriers.split(",")))
    if given.json:
        print(json.dumps(result))
        return
    for name, of in result.items():
        if isinstance(of, dict):
            shares = "  ".join(f"{what} {of[what]:+6.1%}" for what in ("median", "p95", "load", "prompt"))
            print(f"{name:8} {shares}  (steps of {of['step_ms']:.1f} ms, {of['gaps']} gaps, {of['load_steps']} steps with a load)")


if __name__ == "__main__":
    main()
