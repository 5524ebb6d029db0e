"""How fast this machine serves a topology, and workloads sized to that: the same times on every machine, with more or fewer tokens.

The workload files were written for a core that prefills REFERENCE_PREFILL_TOKENS_PER_S and decodes a step of one request in
REFERENCE_STEP_S (SmolLM2-135M in bfloat16 on one AVX-512 core: 3,000 tokens in 3.6 s, a step in 19 ms). On a slower one the same requests
would only measure overload. So

    prompts are times (measured prefill speed / reference), answers times (reference step / measured step), at most 1
    TPOT targets are divided by the answers' factor: a step is so much longer; TTFT targets and durations stay
    five rates, RangeSearch.shares() of the capacity: requests/s that the colocated arm completes of a burst of the workload's first ones
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from disagg.ab.arms import Arm, parse_arms
from disagg.ab.load import OpenLoop
from disagg.ab.ray_arms import RayArms
from disagg.ab.rows import Row
from disagg.ab.rules import RangeSearch, rounded
from disagg.ab.workload import Lengths, PlannedRequest, Workload, load_workload, plan_round
from disagg.client import AsyncClient
from disagg.config import SloClass, Topology
from disagg.launch.session import RaySession

REFERENCE_PREFILL_TOKENS_PER_S = 830.0
REFERENCE_STEP_S = 0.019
BURST = 16  # requests
LONE_INPUT_TOKENS, LONE_OUTPUT_TOKENS = 768, 16
FEWEST_TOKENS = 4
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one worker that has one request; medians. `start_s`: from nothing to an arm that answers."""

    prefill_tokens_per_s: float
    step_s: float
    start_s: float

    @property
    def input_factor(self) -> float:
        """Of prompts' lengths."""
        return min(1.0, self.prefill_tokens_per_s / REFERENCE_PREFILL_TOKENS_PER_S)

    @property
    def output_factor(self) -> float:
        """Of answers' lengths; TPOT targets are divided by it."""
        return min(1.0, REFERENCE_STEP_S / self.step_s)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of a workload. `longest_s`: the longest time that a request of it takes alone, estimated from the speed."""

    burst: int
    completed_per_s: float
    rates: tuple[float, ...]
    longest_s: float


def scaled(workload: Workload, speed: Speed) -> Workload:
    """The workload with lengths for this machine. Shared prefixes shrink with the prompts."""
    streams = []
    for stream in workload.streams:
        prefix = int(stream.shared_prefix_tokens * speed.input_factor)
        lengths = {"input_tokens": times(stream.input_tokens, speed.input_factor), "shared_prefix_tokens": prefix}
        streams.append(stream.model_copy(update={**lengths, "output_tokens": times(stream.output_tokens, speed.output_factor)}))
    said = f"{workload.description}; here prompts x {speed.input_factor:.2f}, answers x {speed.output_factor:.2f}"
    return workload.model_copy(update={"streams": tuple(streams), "description": said})


def times(lengths: Lengths, factor: float) -> Lengths:
    """Lengths times a factor, FEWEST_TOKENS at least where they were that long."""

    def one(tokens: float) -> int:
        return max(min(FEWEST_TOKENS, int(tokens)), round(tokens * factor))

    if lengths.lognormal is not None:
        own = lengths.lognormal
        return Lengths(lognormal=own.model_copy(update={"median": float(one(own.median)), "max": one(own.max)}))
    if lengths.uniform is not None:
        return Lengths(uniform=(one(lengths.uniform[0]), one(lengths.uniform[1])))
    return Lengths(fixed=one(lengths.fixed or 1))


def slower_targets(classes: Sequence[SloClass], speed: Speed) -> list[SloClass]:
    """The classes with TPOT targets for this machine's steps."""
    return [
        c if c.tpot_ms is None else c.model_copy(update={"tpot_ms": float(round(c.tpot_ms / speed.output_factor, -1))}) for c in classes
    ]


async def calibrate(topology: Topology, base_dir: Path, names: Sequence[str], session: RaySession) -> tuple[Speed, dict[str, Capacity]]:
    """Bring up the colocated arm, measure how fast it is, and each scaled workload's capacity on it; take it down."""
    arm: Arm = next(arm for arm in parse_arms("colocated,adaptive", topology) if arm.kind == "colocated")
    source = RayArms(session, [arm], resident=False, base_dir=base_dir, say=lambda line: print(line, flush=True))
    try:
        begin_s = time.monotonic()
        serving = await source.use(arm.name)
        start_s = time.monotonic() - begin_s
        async with AsyncClient(serving.endpoint) as client:
            vocab_size = (await client.model_info()).vocab_size
            speed = replace(await _speed(client, topology.slo_classes[0].name, vocab_size), start_s=start_s)
            print(f"one worker: {asdict(speed)}", flush=True)
            found = {}
            for name in names:
                workload = scaled(load_workload(name), speed)
                found[name] = await _capacity(client, workload, topology.slo_classes, vocab_size, speed)
                print(f"{name}: {found[name].completed_per_s:.2f} requests/s of a burst of {found[name].burst}", flush=True)
            return speed, found
    finally:
        await source.close()


async def _speed(client: AsyncClient, slo_class: str, vocab_size: int) -> Speed:
    """From lone requests, after some that warm up each worker."""

    def long(seed: str) -> PlannedRequest:
        return _request(LONE_INPUT_TOKENS, 1, slo_class, seed)

    def short(seed: str) -> PlannedRequest:
        return _request(32, LONE_OUTPUT_TOKENS, slo_class, seed)

    await _sent(client, [kind(f"warm/{i}") for kind in (long, short) for i in range(2)], vocab_size)
    prompts = [(await _sent(client, [long(f"long/{i}")], vocab_size))[0] for i in range(3)]
    answers = [(await _sent(client, [short(f"short/{i}")], vocab_size))[0] for i in range(3)]
    prefill_s = statistics.median(row.ttft_s or TIMEOUT_S for row in prompts)
    return Speed(LONE_INPUT_TOKENS / prefill_s, statistics.median(row.tpot_s or TIMEOUT_S for row in answers), 0.0)


async def _capacity(client: AsyncClient, workload: Workload, classes: Sequence[SloClass], vocab_size: int, speed: Speed) -> Capacity:
    planned = plan_round(workload, classes, workload.seed, 0)[:BURST]
    rows = await _sent(client, [replace(request, due_s=0.0, seed=f"calibrate/{request.seed}") for request in planned], vocab_size)
    if not all(row.is_whole for row in rows):
        broken = next(row for row in rows if not row.is_whole)
        raise RuntimeError(f"{workload.name}: a request of the burst failed: {broken.error}: {broken.message}")
    per_s = len(rows) / max(row.end_s for row in rows)
    longest_s = max(r.input_tokens / speed.prefill_tokens_per_s + r.output_tokens * speed.step_s for r in planned)
    return Capacity(len(rows), per_s, tuple(rounded(per_s * share) for share in RangeSearch().shares()), longest_s)


async def _sent(client: AsyncClient, requests: Sequence[PlannedRequest], vocab_size: int) -> list[Row]:
    load = OpenLoop(client, requests, arm="calibrate", vocab_size=vocab_size, timeout_s=TIMEOUT_S)
    async with aclosing(load.rows()) as rows:
        return [row async for row in rows]


def _request(input_tokens: int, output_tokens: int, slo_class: str, seed: str) -> PlannedRequest:
    return PlannedRequest(
        round=0,
        index=0,
        stream="calibrate",
        slo_class=slo_class,
        due_s=0.0,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        shared_prefix_tokens=0,
        ignore_eos=True,
        temperature=0.0,
        seed=seed,
    )
