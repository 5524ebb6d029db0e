"""A live cluster of simulated engines and its discrete-event twin: the same requests at the same times give the same latencies.

Live: real gRPC, boxes, carriers and the live coordinator, on this machine's clock. Twin: the same topology, policy, scheduler and step
times, on the agenda. What differs is the work of this machine (messages, hashing, a busy neighbour), which the engine's slow clock
makes small.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from disagg import slo
from disagg.config import Topology, parse_topology
from disagg.sim.cluster import simulate
from disagg.sim.settings import SimSettings
from disagg.trace import TraceRequest
from tests.builders import Answer, Cluster, cluster
from tests.sim_rig import poisson, times

TOLERANCE = 0.05
SPEEDS = (0.5, 0.25)  # of the simulated device: a machine that stalls gets a second try, in which its stalls weigh half
MOST_LAG_S = 0.06
ANSWER_TOKENS = 24


@dataclass
class Lag:
    """How far this process's event loop fell behind its clock: the longest time at once, and as a share of all the time."""

    longest_s: float = 0.0
    share: float = 0.0


def topology_of(mode: str, speed: float) -> Topology:
    return parse_topology(
        {
            "model": "simulated",
            "mode": mode,
            "engine": {
                "kind": "simulated",
                "simulated": {"speed": speed, "kv_bytes_per_token": 4, "max_num_batched_tokens": 1024, "eos_mean_tokens": 10_000_000},
            },
            # One worker a role: with more, an early word here or there sends a request elsewhere, and few requests do not average that out.
            "pools": {"prefill": {"count": 1}, "decode": {"count": 1}, "colocated": {"count": 1}},
            "kv": {"outbox_gib": 0.02, "inbox_gib": 0.02},
        }
    )


async def live(topology: Topology, trace: Sequence[TraceRequest]) -> list[Answer]:
    async with cluster(topology) as c:
        prompts = [c.request(r.input_tokens).prompt_token_ids for r in trace]
        await c.ask(c.request(64, 4))
        start_s = time.monotonic() + 0.1
        return await asyncio.gather(*[_send(c, p, r, start_s + r.arrival_s) for p, r in zip(prompts, trace, strict=True)])


async def _send(c: Cluster, prompt: tuple[int, ...], planned: TraceRequest, due_s: float) -> Answer:
    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    return await c.ask(c.request(prompt, planned.output_tokens))


async def _watch(lag: Lag) -> None:
    start_s, behind_s = time.monotonic(), 0.0
    while True:
        due_s = time.monotonic() + 0.01
        await asyncio.sleep(0.01)
        late_s = time.monotonic() - due_s
        behind_s += late_s if late_s > 5e-3 else 0.0
        lag.longest_s, lag.share = max(lag.longest_s, late_s), behind_s / (time.monotonic() - start_s)


async def measure(topologies: Sequence[Topology], trace: Sequence[TraceRequest]) -> tuple[list[list[Answer]], Lag]:
    """All at once: they mostly sleep."""
    lag = Lag()
    watch = asyncio.create_task(_watch(lag))
    try:
        return await asyncio.gather(*[live(topology, trace) for topology in topologies]), lag
    finally:
        watch.cancel()


@pytest.mark.timed
async def test_live_and_twin_agree() -> None:
    """To within 5 %, and what the machine's own stalls, which are measured meanwhile, may have added to the live side."""
    for speed in SPEEDS:
        trace = poisson(4.0 * speed, 30, 2500, ANSWER_TOKENS, seed=4)
        topologies = [topology_of(mode, speed) for mode in ("disagg", "colocated")]
        measured, lag = await measure(topologies, trace)
        if lag.longest_s < MOST_LAG_S:
            break
    for topology, answers in zip(topologies, measured, strict=True):
        outcomes = simulate(topology, trace, SimSettings(network_s=1e-3, link_latency_s=2e-3, kv_bytes_per_token=4)).outcomes
        live_ttft = [a.instants_s[0] - a.request.arrival_s for a in answers]
        live_tpot = times([slo.tpot_s(a.instants_s) for a in answers])
        assert max(live_ttft) > 2 * min(live_ttft), "nobody queued: the test shows little"
        for name, ours, theirs, stall_s in (
            ("TTFT", live_ttft, times([o.ttft_s for o in outcomes]), lag.longest_s),
            ("TPOT", live_tpot, times([o.tpot_s for o in outcomes]), lag.longest_s / (ANSWER_TOKENS - 1)),
        ):
            for percent in (50, 95):
                expected, found = slo.percentile(theirs, percent), slo.percentile(ours, percent)
                assert found > (1 - TOLERANCE) * expected, f"{topology.mode} {name} p{percent}"
                # Stalls delay and never hasten; what waits in a queue is delayed by those of others, too.
                assert found < (1 + TOLERANCE + 2 * lag.share) * expected + 2 * stall_s, f"{topology.mode} {name} p{percent}, {lag}"
