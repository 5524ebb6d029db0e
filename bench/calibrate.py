"""How fast this machine serves a topology, and how many requests of each workload: what `make bench` sizes itself by.

Lengths, chunks and TPOT targets follow from the speed by the rules of disagg/ab/machine_fit.py; each workload's five rates are
RangeSearch.shares() of its capacity: requests/s that the colocated arm completes of a burst of the workload's first ones.
That is less than what a turn of some seconds sustains (the burst's last batches run half empty, and the turn may end with a backlog that is
still inside the targets), so the highest rate is MOST_SHARE of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from disagg.ab.arms import Arm, parse_arms
from disagg.ab.machine_fit import Speed, at_once, fitted_topology, fitted_workload, measure_speed, send
from disagg.ab.ray_arms import RayArms
from disagg.ab.rules import RangeSearch, rounded
from disagg.ab.workload import Workload, load_workload, plan_round
from disagg.client import AsyncClient
from disagg.config import SloClass, Topology
from disagg.launch.session import RaySession

BURST = 48  # requests: of sixteen, on two workers, batches never fill, and five rates ended before saturation
MOST_SHARE = 1.6
LAST = 16  # of these, the longest is what a turn waits for at its end


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of a workload. `longest_s`: the longest time that a request of it takes alone, estimated from the speed."""

    burst: int
    completed_per_s: float
    rates: tuple[float, ...]
    longest_s: float


async def calibrate(topology: Topology, base_dir: Path, names: Sequence[str], session: RaySession) -> tuple[Speed, dict[str, Capacity]]:
    """Bring up the colocated arm, measure how fast it is, and each fitted workload's capacity on it; take it down."""
    arm: Arm = next(arm for arm in parse_arms("colocated,adaptive", topology) if arm.kind == "colocated")
    assert arm.topology is not None
    num_workers = sum(pool.count for pool in arm.topology.active_pools().values())
    source = RayArms(session, [arm], resident=False, base_dir=base_dir, say=lambda line: print(line, flush=True))
    try:
        begin_s = time.monotonic()
        serving = await source.use(arm.name)
        speed = await measure_speed(serving.endpoint, topology.slo_classes[0].name, num_workers, begin_s)
        print(f"one worker: {asdict(speed)}", flush=True)
        classes = fitted_topology(topology, speed).slo_classes
        found = {}
        async with AsyncClient(serving.endpoint) as client:
            vocab_size = (await client.model_info()).vocab_size
            for name in names:
                found[name] = await _capacity(client, fitted_workload(load_workload(name), speed), classes, vocab_size, speed)
                print(f"{name}: {found[name].completed_per_s:.2f} requests/s of a burst of {found[name].burst}", flush=True)
        return speed, found
    finally:
        await source.close()


async def _capacity(client: AsyncClient, workload: Workload, classes: Sequence[SloClass], vocab_size: int, speed: Speed) -> Capacity:
    planned = plan_round(workload, classes, workload.seed, 0)[:BURST]
    rows = await send(client, at_once(planned), vocab_size)
    per_s = len(rows) / max(row.end_s for row in rows)
    longest_s = max(r.input_tokens / speed.prefill_tokens_per_s + r.output_tokens * speed.step_s for r in planned[:LAST])
    return Capacity(len(rows), per_s, tuple(rounded(per_s * share) for share in RangeSearch().shares(MOST_SHARE)), longest_s)
