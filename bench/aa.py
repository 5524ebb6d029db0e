"""Does `disagg ab` see what is there, and nothing else? A/A runs, and runs with one arm's decode slowed by a tenth, on simulated engines.

    python -m bench.aa [--runs 10] [--planted 3] [--slower 1.1] [--rounds 8] [--duration-s 3] [--json]

Live: gateway, router, gRPC, Ray and this machine's noise are real, only the models are not. All runs share two deployments per kind; each
has its own seed, so its own requests. A/A: two colocated arms. Planted: two disaggregated arms, the second one's decode workers slower.
What a run can show depends on how quiet the machine is: `tpot_p50_known_to` says how small a difference in TPOT would have been seen.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from disagg.ab.arms import Arm, deployed, parse_arms
from disagg.ab.out import OutFolder
from disagg.ab.progress import RunProgress
from disagg.ab.ray_arms import RayArms
from disagg.ab.result import Result
from disagg.ab.run import compare, run_ab
from disagg.ab.workload import Workload
from disagg.config import Topology, parse_topology, validated
from disagg.launch.session import RaySession

TOPOLOGY = {
    "name": "aa",
    "model": "llama-3.1-70b-simulated",
    "engine": {"kind": "simulated", "simulated": {"speed": 1.0}},
    "pools": {"prefill": {"count": 1, "bind_cores": False}, "decode": {"count": 1, "bind_cores": False}},
    "kv": {"outbox_gib": 0.05, "inbox_gib": 0.05},
    "slo_classes": [{"name": "chat", "ttft_ms": 1000, "tpot_ms": 60}],
}
CHAT = {"name": "chat", "arrivals": {"poisson_per_s": 4}, "input_tokens": {"uniform": [100, 900]}, "output_tokens": {"uniform": [20, 60]}}


def main() -> int:
    """0 when at least nine of ten A/A runs show no difference and every planted one is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--planted", type=int, default=3)
    parser.add_argument("--slower", type=float, default=1.1)
    parser.add_argument("--rounds", type=int, default=8, help="many short ones: what the machine drifts by averages out between turns")
    parser.add_argument("--duration-s", type=float, default=3.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    topology = parse_topology(TOPOLOGY)
    equal = _verdicts(topology, parse_arms("colocated,colocated", topology), given.runs, given)
    first, second = parse_arms("disagg-1p1d,disagg-1p1d", topology)
    planted = _verdicts(topology, (first, _slower(second, given.slower)), given.planted, given)
    quiet = sum(v["choose"] == "either" for v in equal)
    found = sum(v["choose"] == first.name for v in planted)
    wrong = sum(v["choose"] == second.name for v in planted)
    report = {"runs": len(equal), "no_difference": quiet, "planted": len(planted), "found": found, "wrong": wrong, "slower": given.slower}
    print(json.dumps({**report, "aa": equal, "with_slower": planted}) if given.json else report)
    return 0 if quiet >= 0.9 * len(equal) and found == len(planted) else 1


def _slower(arm: Arm, factor: float) -> Arm:
    """The arm with decode workers whose every step takes `factor` times as long."""
    assert arm.topology is not None
    raw = arm.topology.model_dump()
    raw["pools"]["decode"]["simulated"] = {"speed": 1 / factor}
    return Arm(arm.name, arm.kind, parse_topology(raw))


def _verdicts(topology: Topology, arms: Sequence[Arm], runs: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    with RaySession.start(list(deployed(arms).values())) as session, tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_all(session, topology, arms, runs, given, Path(folder)))


async def _all(
    session: RaySession, topology: Topology, arms: Sequence[Arm], runs: int, given: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    workload = validated(Workload, {"name": "aa", "duration_s": given.duration_s, "timeout_s": 60, "streams": [CHAT]}, "aa")
    source = RayArms(session, arms, resident=True, base_dir=Path(), say=lambda line: None)
    found = []
    try:
        for seed in range(runs):
            comparison = compare(topology, workload, resident=True, arms=tuple(arms), rounds=given.rounds, seed=seed)
            with RunProgress(Console(file=io.StringIO())) as progress:
                result = await run_ab(comparison, source, OutFolder(folder / str(seed)), progress)
            tpot = [result.arms[arm.name].tpot_s.p50 for arm in arms]
            found.append(
                {
                    "seed": seed,
                    "choose": result.verdict.choose,
                    "reason": result.verdict.reason,
                    "rounds": len(result.rounds),
                    "tpot_p50_s": tpot,
                    "tpot_p50_known_to": _known_to(result),
                    "not_a_result": result.not_a_result,
                }
            )
            known = f"known to {found[-1]['tpot_p50_known_to'] or 0:.1%}"
            print(f"{arms[1].name}, seed {seed}: {result.verdict.choose}, TPOT p50 {tpot} s, {known}", file=sys.stderr, flush=True)
    finally:
        await source.close()
    return found


def _known_to(result: Result) -> float | None:
    """Half the width of the interval of median TPOT's difference, as a share of it: smaller differences this run cannot show."""
    c = next((c for c in result.verdict.comparisons if c.measure == "TPOT p50"), None)
    return None if c is None or c.low is None or c.high is None else (c.high - c.low) / 2 / c.values[1]


if __name__ == "__main__":
    raise SystemExit(main())
