"""What the router does, simulated: overload, one huge prompt, a worker that turns slow or silent, prompts with common prefixes.

    python -m bench.router_shows [overload] [long-prompt] [slow] [silent] [prefix --traces DIR] [--mode disagg]

4 + 4 workers of four H100s each, Llama-3.1-70B bf16, roofline timing; Poisson arrivals, prompts of 200 to 1,800 tokens (mean 1,000),
answers of 20 to 280 (mean 150); `prefix` takes the begin of the mooncake conversation trace. The router is not told how long answers
will be. Nothing is random but the load, which is seeded.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from disagg.config import Topology, parse_topology
from disagg.engine.simulated_timing import step_model
from disagg.perf.roofline import PrefillChunk
from disagg.sim.cluster import Simulation, SlowDown
from disagg.sim.outcome import Outcome
from disagg.sim.settings import SimSettings
from disagg.slo import percentile
from disagg.trace import Scaling, TraceRequest, scale
from disagg.trace_files import read_trace
from disagg.types import Role

CLASSES: list[dict[str, Any]] = [
    {"name": "chat", "ttft_ms": 500, "tpot_ms": 50, "if_missed": "reject"},
    {"name": "urgent", "ttft_ms": 500, "tpot_ms": 50, "if_missed": "reject", "priority": 10},
    {"name": "batch", "priority": -1},
]
SHARES = {"chat": 0.8, "urgent": 0.1, "batch": 0.1}
LONGEST = 280
PREFILLS = 4
WARM_S = 4.0
SPAN_S = 16.0
RATES = (60.0, 80.0, 90.0, 100.0, 120.0)  # requests per second, among which the best goodput is looked for


def topology(mode: str, *, by_slo: bool = True) -> Topology:
    simulated = {"shape": "llama-3.1-70b", "gpu": "h100", "tp": 4, "max_model_len": 65_536, "kv_bytes_per_token": 64}
    return parse_topology(
        {
            "model": "llama-3.1-70b-simulated",
            "mode": mode,
            "engine": {"kind": "simulated", "simulated": simulated},
            "pools": {
                "prefill": {"count": PREFILLS, "simulated": {"max_num_batched_tokens": 8192, "mixed_step_tokens": 512}},
                "decode": {"count": 4, "simulated": {"max_num_batched_tokens": 8192, "mixed_step_tokens": 512}},
                "colocated": {"count": 8, "simulated": {"max_num_batched_tokens": 512}},
            },
            "kv": {"outbox_gib": 0.125, "inbox_gib": 0.125},
            "admission": {"by_slo": by_slo, "max_queued_requests": 100_000, "max_queued_tokens": 2_000_000_000},
            "slo_classes": CLASSES,
        }
    )


def load(rate: float, seconds: float, shares: dict[str, float], seed: int = 1) -> list[TraceRequest]:
    draw, at_s, found = random.Random(seed), 0.0, []
    while (at_s := at_s + draw.expovariate(rate)) < seconds:
        (name,) = draw.choices(list(shares), list(shares.values()))
        found.append(TraceRequest(at_s, draw.randrange(200, 1801), draw.randrange(20, LONGEST + 1), name))
    return found


def simulate(where: Topology, requests: Sequence[TraceRequest], slow_downs: Sequence[SlowDown] = ()) -> tuple[Outcome, ...]:
    settings = SimSettings(max_tokens=LONGEST, keep_tokens=False, timeout_s=600.0)
    return Simulation(where, requests, settings, slow_downs=slow_downs).run().outcomes


# ---- overload


@dataclass(frozen=True)
class Served:
    """What one rate brings, after the warm-up. `goodput_rps`: chat and urgent requests per second that are inside their class."""

    goodput_rps: float
    attainment: float
    of_admitted: float
    of_urgent: float
    batch_done: float


def serve(where: Topology, rate: float, span_s: float = SPAN_S, warm_s: float = WARM_S) -> Served:
    classes = {c.name: c for c in where.slo_classes}
    counted = [o for o in simulate(where, load(rate, span_s, SHARES)) if o.sent_s >= warm_s]
    asked = [o for o in counted if o.slo_class != "batch"]
    met = {o.index for o in asked if o.meets(classes[o.slo_class])}
    admitted = [o for o in asked if o.status != "rejected"]
    urgent = [o for o in asked if o.slo_class == "urgent"]
    batch = [o for o in counted if o.slo_class == "batch"]
    return Served(
        goodput_rps=len(met) / (span_s - warm_s),
        attainment=len(met) / len(asked),
        of_admitted=len(met) / max(1, len(admitted)),
        of_urgent=sum(o.index in met for o in urgent) / len(urgent),
        batch_done=sum(o.is_whole for o in batch) / len(batch),
    )


def overload(mode: str) -> None:
    """Capacity: the highest of RATES at which 90 % are inside their class."""
    found = {rate: serve(topology(mode), rate) for rate in RATES}
    capacity = max([rate for rate, s in found.items() if s.attainment >= 0.9], default=min(RATES))
    found[3 * capacity] = serve(topology(mode), 3 * capacity)
    rows = [(f"{rate:.0f}/s", s) for rate, s in found.items()]
    rows.append((f"{3 * capacity:.0f}/s, admission off", serve(topology(mode, by_slo=False), 3 * capacity)))
    for name, s in rows:
        kinds = f"of admitted {s.of_admitted:.1%}, of urgent {s.of_urgent:.1%}, batch whole {s.batch_done:.0%}"
        print(f"  {name:22s} goodput {s.goodput_rps:6.1f}/s, attainment {s.attainment:.1%}, {kinds}", flush=True)
    best = max(s.goodput_rps for s in found.values())
    print(f"  3 x capacity ({capacity:.0f}/s): goodput {found[3 * capacity].goodput_rps / best:.2f} of the best at any rate")


# ---- one huge prompt


def long_prompt(mode: str) -> float:
    """200 short prompts at half of what the workers can do, with and without one of 30,000 tokens among them.

    Returns the ratio of the short ones' TTFT p99.
    """
    short = load(40.0, 60.0, {"chat": 1.0})[:200]
    at_s = short[60].arrival_s
    huge = TraceRequest(at_s, 30_000, 100, "batch")
    p99 = []
    for requests in (short, sorted([*short, huge], key=lambda r: r.arrival_s)):
        outcomes = simulate(topology(mode), requests)
        assert all(o.is_whole for o in outcomes), "a request was refused"
        p99.append(percentile([o.ttft_s or 0.0 for o in outcomes if o.slo_class == "chat"], 99) or 0.0)
    print(f"  short prompts' TTFT p99 {p99[0] * 1e3:.0f} ms without it, {p99[1] * 1e3:.0f} ms with it: {p99[1] / p99[0]:.2f} x")
    if mode == "disagg":
        alone, beside = ideal_p99_s(short), ideal_p99_s([*short, huge])
        print(f"  an ideal queue before {PREFILLS} workers (first come, first free, no network): {beside / alone:.2f} x")
    return p99[1] / p99[0]


def ideal_p99_s(requests: Sequence[TraceRequest]) -> float:
    """Short prompts' TTFT p99 where the first of one queue goes to the first free worker, at once: what a split of the workers allows."""
    settings = topology("disagg").simulated(Role.PREFILL)
    steps, chunk = step_model(settings), settings.max_num_batched_tokens
    free_s, found = [0.0] * PREFILLS, []
    for request in sorted(requests, key=lambda r: r.arrival_s):
        starts = range(0, request.input_tokens, chunk)
        prompt_s = sum(steps.step_s([PrefillChunk(min(chunk, request.input_tokens - start), start)]) for start in starts)
        ends_s = max(request.arrival_s, heapq.heappop(free_s)) + prompt_s
        heapq.heappush(free_s, ends_s)
        if request.slo_class == "chat":
            found.append(ends_s - request.arrival_s)
    return percentile(found, 99) or 0.0


# ---- a worker that turns slow


def slow(mode: str, factor: float) -> None:
    """One worker of each role in turn is `factor` times slower from second 10 to second 25; its share of the routes in each 5 s."""
    for name in ("colocated-0",) if mode == "colocated" else ("prefill-0", "decode-0"):
        shares = shares_of(name, mode, factor, load(30.0, 45.0, {"batch": 1.0}), (10.0, 25.0))
        print(f"  {name}, {factor:g} x slower from 10 to 25 s; share per 5 s: {', '.join(f'{share:.1%}' for share in shares)}")


def shares_of(name: str, mode: str, factor: float, requests: Sequence[TraceRequest], spell_s: tuple[float, float]) -> list[float]:
    """A worker's share of both legs of the routes in each 5 s; it is `factor` times slower in a spell."""
    outcomes = simulate(topology(mode), requests, [SlowDown(spell_s[0], name, factor), SlowDown(spell_s[1], name, 1.0)])
    shares = []
    for begin in range(0, int(requests[-1].arrival_s), 5):
        routed = [o for o in outcomes if o.routed_s is not None and begin <= o.routed_s < begin + 5]
        used = [o.prefill_worker == name for o in routed] + [o.decode_worker == name for o in routed]
        shares.append(sum(used) / max(1, len(used)))
    return shares


# ---- common prefixes


def prefix(mode: str, traces: Path, count: int, factor: float) -> None:
    """Prompt tokens that the workers' caches save, against one cache as large as theirs together; and how evenly prompts are spread."""
    trace = read_trace(traces / "mooncake_conversation/conversation_trace.jsonl.gz")
    window_s = trace.requests[min(count, len(trace.requests) - 1)].arrival_s
    sent = scale(trace, Scaling(window_s=window_s, max_total_tokens=65_000, over="drop", rate_factor=factor))
    longest = max(r.output_tokens for r in sent.requests)
    settings = SimSettings(max_tokens=longest, keep_tokens=False, timeout_s=1800.0, prefix_block_tokens=sent.prefix_block_tokens)
    simulation = Simulation(topology(mode, by_slo=False), [replace(r, slo_class="batch") for r in sent.requests], settings)
    room = sum(w.report().total_kv_tokens for w in simulation.workers.values() if mode != "disagg" or w.role is Role.PREFILL)
    report = simulation.run()
    saved = sum(o.cached_tokens for o in report.outcomes)
    could = one_cache(sent.requests, sent.prefix_block_tokens, room)
    busy = [w.busy_s for w in report.workers if mode != "disagg" or w.role == Role.PREFILL]
    tokens = sum(r.input_tokens for r in sent.requests)
    print(
        f"  {len(sent.requests)} prompts of {tokens} tokens at {factor:g} x the trace's rate: {saved} saved ({saved / tokens:.1%}), ",
        end="",
    )
    share = f"{saved / could:.2f} of one cache" if could else "as much as one cache"
    print(f"{share} of {room} tokens; busiest worker {max(busy) / (sum(busy) / len(busy)):.2f} x the mean")


def one_cache(requests: Sequence[TraceRequest], unit: int, room_tokens: int) -> int:
    """Tokens that a single cache saves, which forgets the least recently used block."""
    cache: OrderedDict[int, None] = OrderedDict()
    saved = 0
    for request in requests:
        full = request.prefix_hashes[: request.input_tokens // unit]
        found = next((i for i, block in enumerate(full) if block not in cache), len(full))
        saved += min(found * unit, request.input_tokens - 1)
        for block in reversed(full):  # a prompt's end goes before its begin
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) * unit > room_tokens:
            cache.popitem(last=False)
    return saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shows = {
        "overload": overload,
        "long-prompt": long_prompt,
        "slow": lambda mode: slow(mode, 5.0),
        "prefix": lambda mode: prefix(mode, given.traces, given.requests, given.factor),
        "silent": lambda mode: slow(mode, 160.0),  # one prompt takes about as long as the spell
    }
    parser.add_argument("what", nargs="*", default=list(shows), help=f"of {', '.join(shows)}; default: all")
    parser.add_argument("--mode", choices=("disagg", "colocated", "adaptive"), default="disagg")
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--requests", type=int, default=1000, help="of the trace, for prefix")
    parser.add_argument("--factor", type=float, default=1.5, help="of the trace's rate, for prefix")
    given = parser.parse_args()
    if unknown := set(given.what) - set(shows):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(shows)}")
    for what in given.what:
        print(f"{what} ({given.mode})", flush=True)
        shows[what](given.mode)


if __name__ == "__main__":
    main()
