"""`--fit-machine`: how fast one worker is here, and the workload and topology sized to that.

The shipped workloads were written for a core that prefills REFERENCE_PREFILL_TOKENS_PER_S and decodes a step of one request in
REFERENCE_STEP_S (SmolLM2-135M in bfloat16 on one AVX-512 core: 3,000 tokens in 3.6 s, a step in 19 ms). On a slower one the same requests
would only measure overload. So, where it is slower,

    tokens  prompts and chunks are times (measured prefill speed / reference), answers times (reference step / measured step); TPOT
            targets are divided by the answers' factor: a step is so much longer. Rates, durations and TTFT targets stay: it takes as
            long as there
    time    gaps between requests, durations and targets are longer by the larger of the two slownesses. Lengths and chunks stay, so what
            a chunk is to a step, and a prompt to an answer, is as there; it takes so much longer to measure
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from disagg.ab.arms import Arm, on_free_ports
from disagg.ab.load import OpenLoop
from disagg.ab.rows import Row
from disagg.ab.trace_plan import AnyWorkload
from disagg.ab.workload import Lengths, PlannedRequest, Stream, Workload
from disagg.client import AsyncClient
from disagg.config import SloClass, Topology, parse_topology
from disagg.errors import ConfigError, EngineError
from disagg.types import Mode

REFERENCE_PREFILL_TOKENS_PER_S = 830.0
REFERENCE_STEP_S = 0.019
LONE_INPUT_TOKENS, LONE_OUTPUT_TOKENS = 768, 16
FEWEST_TOKENS = 4
CHUNK_STEP_TOKENS = 32  # vLLM's attention on CPUs works on blocks of so many
SMALLEST_CHUNK_TOKENS = 64  # of smaller steps a fixed cost is the larger part
LEAST_ROOM_TOKENS = 16  # that a long prompt leaves in a step
CHUNK_KEY, LONG_PROMPT_KEY = "max_num_batched_tokens", "long_prefill_token_threshold"
MIXED_KEY, MIXED_MS_KEY = "mixed_step_tokens", "mixed_step_ms"
TIMEOUT_S = 300.0


class Fit(StrEnum):
    """What gives way where a machine is slower."""

    TOKENS = "tokens"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one worker that has one request; medians. `start_s`: from nothing to an arm that answers."""

    prefill_tokens_per_s: float
    step_s: float
    start_s: float

    @property
    def input_factor(self) -> float:
        """Of prompts' and chunks' lengths."""
        return min(1.0, self.prefill_tokens_per_s / REFERENCE_PREFILL_TOKENS_PER_S)

    @property
    def output_factor(self) -> float:
        """Of answers' lengths; TPOT targets are divided by it."""
        return min(1.0, REFERENCE_STEP_S / self.step_s)

    @property
    def slowness(self) -> float:
        """How many times as long as there things take here, at most: of prefill or decode, whichever is slower; at least 1."""
        return max(1.0 / self.input_factor, 1.0 / self.output_factor)

    def text(self, fit: Fit) -> str:
        """For people."""
        return f"{self.prefill_tokens_per_s:.0f} tokens/s of prefill, {self.step_s * 1e3:.0f} ms a step; so {self.said(fit)}"

    def said(self, fit: Fit) -> str:
        """What it makes of a workload and its classes."""
        if fit is Fit.TIME:
            return f"all times x {self.slowness:.1f}"
        return f"prompts and chunks x {self.input_factor:.2f}, answers x {self.output_factor:.2f}, TPOT targets / {self.output_factor:.2f}"


def fitted_workload(workload: Workload, speed: Speed, fit: Fit = Fit.TOKENS) -> Workload:
    """The workload for this machine; its description says how it was changed."""
    change = _fewer_tokens if fit is Fit.TOKENS else _slower_arrivals
    update: dict[str, Any] = {
        "streams": tuple(stream.model_copy(update=change(stream, speed)) for stream in workload.streams),
        "description": f"{workload.description}; here {speed.said(fit)}",
    }
    if fit is Fit.TIME:
        update |= {"duration_s": workload.duration_s * speed.slowness, "timeout_s": workload.timeout_s * speed.slowness}
    return workload.model_copy(update=update)


def _fewer_tokens(stream: Stream, speed: Speed) -> dict[str, Any]:
    """Shared prefixes shrink with the prompts."""
    return {
        "input_tokens": times(stream.input_tokens, speed.input_factor),
        "shared_prefix_tokens": int(stream.shared_prefix_tokens * speed.input_factor),
        "output_tokens": times(stream.output_tokens, speed.output_factor),
    }


def _slower_arrivals(stream: Stream, speed: Speed) -> dict[str, Any]:
    slower = stream.arrivals.faster(1.0 / speed.slowness)
    update: dict[str, Any] = {"arrivals": slower.model_copy(update={"first_s": stream.arrivals.first_s * speed.slowness})}
    if stream.duration_s is not None:
        update["duration_s"] = stream.duration_s * speed.slowness
    if stream.sessions is not None:
        update["sessions"] = stream.sessions.model_copy(update={"gap_s": stream.sessions.gap_s * speed.slowness})
    return update


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


def fitted_topology(topology: Topology, speed: Speed, fit: Fit = Fit.TOKENS) -> Topology:
    """The topology with targets for this machine, and with fewer tokens in a chunk, too, where there are fewer in a prompt."""
    raw = topology.model_dump()
    raw["slo_classes"] = [_slower_class(c, speed, fit).model_dump() for c in topology.slo_classes]
    step_factor = _step_factor(speed, fit)
    sections: list[dict[str, Any]] = [raw["engine"], *(pool for pool in raw["pools"].values() if pool is not None)]
    for section in sections:
        if fit is Fit.TOKENS:
            section["args"] = {**section["args"], **_chunks(section["args"], raw["engine"]["args"].get("max_num_seqs"), speed.input_factor)}
        if mixed_ms := section["args"].get(MIXED_MS_KEY):
            section["args"] = {**section["args"], MIXED_MS_KEY: float(round(mixed_ms * step_factor, -1)) or mixed_ms}
    return parse_topology(raw)


def _step_factor(speed: Speed, fit: Fit) -> float:
    """How much longer a step may take, and with it a token."""
    return speed.slowness if fit is Fit.TIME else 1.0 / speed.output_factor


def _slower_class(slo_class: SloClass, speed: Speed, fit: Fit) -> SloClass:
    tpot, ttft = _step_factor(speed, fit), speed.slowness if fit is Fit.TIME else 1.0
    update = {
        name: target_ms if factor == 1.0 else float(round(target_ms * factor, -1))
        for name, factor in (("tpot_ms", tpot), ("ttft_ms", ttft))
        if (target_ms := getattr(slo_class, name)) is not None
    }
    return slo_class.model_copy(update=update)


def _chunks(args: dict[str, Any], usual_seqs: Any, factor: float) -> dict[str, int]:
    """The chunk arguments among `args`, shorter. A step still holds a token of each sequence, and a long prompt leaves room in it."""
    chunk, long_prompt = args.get(CHUNK_KEY), args.get(LONG_PROMPT_KEY)
    if chunk is None:
        return {}
    seqs = args.get("max_num_seqs", usual_seqs)
    least = max(SMALLEST_CHUNK_TOKENS, -(-seqs // CHUNK_STEP_TOKENS) * CHUNK_STEP_TOKENS if isinstance(seqs, int) else 0)

    def shorter(tokens: int) -> int:
        return min(tokens, max(least, round(tokens * factor / CHUNK_STEP_TOKENS) * CHUNK_STEP_TOKENS))

    found = {CHUNK_KEY: shorter(chunk)}
    if mixed := args.get(MIXED_KEY):
        found[MIXED_KEY] = shorter(mixed)
    if long_prompt:
        room = max(LEAST_ROOM_TOKENS, round(found[CHUNK_KEY] * (chunk - long_prompt) / chunk))
        found[LONG_PROMPT_KEY] = min(found[CHUNK_KEY] - room, long_prompt)
    return found


def lone_worker(topology: Topology) -> Arm:
    """What is measured: one colocated worker of the topology. Raises ConfigError where there is no real engine."""
    if topology.engine.kind != "vllm":
        raise ConfigError(
            key="--fit-machine", value=topology.engine.kind, expected="engine.kind: vllm; a simulated engine is as fast as its settings say"
        )
    raw = topology.with_mode(Mode.COLOCATED).model_dump()
    (pool,) = topology.with_mode(Mode.COLOCATED).active_pools().values()
    raw["pools"]["colocated"] = pool.model_dump() | {"count": 1}
    return on_free_ports(Arm("one-worker", "colocated", parse_topology(raw)))


def streams_only(workload: AnyWorkload) -> Workload:
    """Raise ConfigError for a trace: its file states its own scaling."""
    if not isinstance(workload, Workload):
        raise ConfigError(key="--fit-machine", value=workload.name, expected="a workload of streams; a trace's file scales its own lengths")
    return workload


async def measure_speed(endpoint: str, slo_class: str, num_workers: int, begin_s: float) -> Speed:
    """From lone requests, after some that warm up each worker. `begin_s`: when the start of the arm began, on time.monotonic.

    Raises EngineError when one of them fails.
    """
    start_s = time.monotonic() - begin_s
    async with AsyncClient(endpoint) as client:
        vocab_size = (await client.model_info()).vocab_size
        warm = [_request(n, m, slo_class, f"warm/{n}/{i}") for n, m in ((LONE_INPUT_TOKENS, 1), (32, 4)) for i in range(num_workers)]
        await send(client, warm, vocab_size)
        prompts = [await _lone(client, _request(LONE_INPUT_TOKENS, 1, slo_class, f"long/{i}"), vocab_size) for i in range(3)]
        answers = [await _lone(client, _request(32, LONE_OUTPUT_TOKENS, slo_class, f"short/{i}"), vocab_size) for i in range(3)]
    prefill_s = statistics.median(row.ttft_s or TIMEOUT_S for row in prompts)
    return Speed(LONE_INPUT_TOKENS / prefill_s, statistics.median(row.tpot_s or TIMEOUT_S for row in answers), start_s)


async def _lone(client: AsyncClient, request: PlannedRequest, vocab_size: int) -> Row:
    return (await send(client, [request], vocab_size))[0]


async def send(client: AsyncClient, requests: Sequence[PlannedRequest], vocab_size: int) -> list[Row]:
    """All at once, until all have ended. Raises EngineError when one of them fails."""
    load = OpenLoop(client, requests, arm="one-worker", vocab_size=vocab_size, timeout_s=TIMEOUT_S)
    async with aclosing(load.rows()) as rows:
        done = [row async for row in rows]
    if broken := next((row for row in done if not row.is_whole), None):
        raise EngineError(f"the machine could not be measured: {broken.error}: {broken.message}")
    return done


def at_once(requests: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """The requests as one burst, with prompts of their own."""
    return [replace(request, due_s=0.0, seed=f"burst/{request.seed}") for request in requests]


def _request(input_tokens: int, output_tokens: int, slo_class: str, seed: str) -> PlannedRequest:
    return PlannedRequest(
        round=0,
        index=0,
        stream="one-worker",
        slo_class=slo_class,
        due_s=0.0,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        shared_prefix_tokens=0,
        ignore_eos=True,
        temperature=0.0,
        seed=seed,
    )
