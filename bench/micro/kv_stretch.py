"""How much longer a decode batch's steps get while a long request arrives: two real engines, one core each, the prompt runs on the other.

    python -m bench.micro.kv_stretch [--rounds 3] [--carriers shm,tcp] [--json]

Each round has a window per carrier: a batch of four decodes, a request of 2,000 tokens arrives, and as many gaps are quiet, before and
after it, for a machine drifts and a context grows. A gap is the time between two tokens of one running answer. Quiet and arriving gaps
are compared by the same statistic over the same number of gaps:

median, p95   over the whole arrival, from its being sent to its second token: the transfer fills the inbox, then the engine loads it
load          medians, of the gaps from the arrival's first token to its second: those with a part of the load in them

What follows belongs to the arrival's own decoding: the batch is one longer then. Figures are medians over rounds of (arriving / quiet - 1).
`against itself` is the same of each window's quiet gaps, every other one against the rest: what noise alone makes of it.
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
QUIET_BEFORE = 40


@dataclass(frozen=True)
class Window:
    """Gaps in seconds. `load`: those of `arriving` that a load was a part of."""

    quiet: list[float]
    arriving: list[float]
    load: list[float]

    def figures(self) -> dict[str, float]:
        return {
            "median": statistics.median(self.arriving) / statistics.median(self.quiet) - 1,
            "p95": p95(self.arriving) / p95(self.quiet) - 1,
            "load": statistics.median(self.load) / statistics.median(self.quiet) - 1,
        }

    def noise(self) -> dict[str, float]:
        some, rest = self.quiet[::2], self.quiet[1::2]
        return {"median": statistics.median(some) / statistics.median(rest) - 1, "p95": p95(some) / p95(rest) - 1}


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
    try:
        await until(SETTLED_GAPS + QUIET_BEFORE)
        answer = await pair.ask(prompt(ARRIVING_TOKENS), greedy(2))
        second_s = answer.at_s[0]
        arriving = [(end_s, gap_s) for end_s, gap_s in gaps if end_s - gap_s > answer.began_s and end_s < second_s]
        arrived = len(gaps)
        await until(arrived + max(2, len(arriving) - QUIET_BEFORE))
    finally:
        stop.set()
        await asyncio.gather(*batch)
    # The gap in which the second token was computed ends with that token, give or take what the loop takes to hand on both.
    step_s = statistics.median(gap_s for _, gap_s in gaps)
    arriving = [(end_s, gap_s) for end_s, gap_s in arriving if end_s < second_s - step_s / 2]
    load = [gap_s for end_s, gap_s in arriving if end_s > answer.prefilled_s]
    quiet = [gap_s for end_s, gap_s in gaps[SETTLED_GAPS:] if end_s < answer.began_s] + [gap_s for _, gap_s in gaps[arrived + 1 :]]
    return Window(quiet, [gap_s for _, gap_s in arriving], load or [arriving[-1][1]])


async def measure(rounds: int, carriers: Sequence[str]) -> dict[str, Any]:
    """Figures by carrier, and how many gaps they are of."""
    from bench.engine_pair import engine_pair

    windows: dict[str, list[Window]] = {carrier: [] for carrier in carriers}
    async with engine_pair() as pair:
        for _ in range(2):
            await pair.ask(prompt(ARRIVING_TOKENS), greedy(4))
        for _ in range(rounds):
            for carrier in carriers:
                pair.use(carrier)
                windows[carrier].append(await window(pair))
                told = "  ".join(f"{what} {share:+.1%}" for what, share in windows[carrier][-1].figures().items())
                print(f"{carrier}: {told}", file=sys.stderr, flush=True)
    result: dict[str, Any] = {name: summary([w.figures() for w in found], found) for name, found in windows.items()}
    every = [w for found in windows.values() for w in found]
    return {**result, "against itself": summary([w.noise() for w in every], every), "rounds": rounds}


def summary(figures: Sequence[dict[str, float]], windows: Sequence[Window]) -> dict[str, Any]:
    """Medians of `figures`, and what they are of."""
    return {
        **{name: statistics.median(f[name] for f in figures) for name in figures[0]},
        "step_ms": 1e3 * statistics.median(gap_s for w in windows for gap_s in w.quiet),
        "gaps": sum(len(w.arriving) for w in windows),
        "load_gaps": sum(len(w.load) for w in windows),
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
            shares = "  ".join(f"{what} {of[what]:+6.1%}" for what in ("median", "p95", "load") if what in of)
            print(f"{name:16} {shares}  (steps of {of['step_ms']:.1f} ms, {of['gaps']} gaps while arriving, {of['load_gaps']} with a load)")


if __name__ == "__main__":
    main()
