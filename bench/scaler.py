"""The scaler against fixed ratios on a bursty trace, simulated: workers change roles while the trace runs.

    python -m bench.scaler --traces DIR [--requests 1500] [--factor 3] [--move-s 1]

One cluster: 8 workers of four H100s, Llama-3.1-70B bf16, azure code (TTFT 500 ms, TPOT 30 ms) at `factor` times its rate. Workers of both
roles have equal engines (8,192 tokens a step), as a role must not need another engine. The share of requests inside their class counts
all but the first fifth; refused ones have missed it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from bench.sim_goodput import CASES, CONTEXT, TIMEOUT_S, WARM_UP, WORKERS, topology_of
from disagg.perf.hardware import find_device
from disagg.perf.roofline import StepModel
from disagg.perf.shapes import find_shape
from disagg.plan.scaler import Scaler, ScalerSettings
from disagg.sim.cluster import Simulation
from disagg.sim.fleet import FleetSettings
from disagg.sim.settings import SimSettings
from disagg.trace import Scaling, Trace, scale
from disagg.trace_files import read_trace

CASE = "azure-code"
EQUAL = {"pools.decode.simulated": {"max_num_batched_tokens": 8192}}


def settings_of() -> ScalerSettings:
    """Seconds of a worker for each token: a prompt of 2,048 tokens alone, and the largest batch at 2,048 tokens of context within 24 ms."""
    model = StepModel(find_shape("llama-3.1-70b"), find_device("h100"), 4)
    batch = max(b for b in range(1, 256) if model.decode_step_s(b, b * 2048) <= 0.024)
    return ScalerSettings(prompt_token_s=model.prefill_s(2048) / 2048, output_token_s=0.024 / batch)


def run(trace: Trace, ratio: str, factor: float, requests: int, scaler: Scaler | None, move_s: float) -> tuple[float, list[str]]:
    """(share inside the class, moves) of one run that starts with `ratio`."""
    window_s = trace.requests[min(requests, len(trace.requests) - 1)].arrival_s
    sent = scale(trace, Scaling(window_s=window_s, max_total_tokens=CONTEXT, over="drop", rate_factor=factor))
    longest = max(r.output_tokens for r in sent.requests)
    topology = topology_of(ratio, CASES[CASE].slo_class, EQUAL)
    fleet = None if scaler is None else FleetSettings(scaler, move_s=move_s, first_guess_tokens=28)
    simulation = Simulation(topology, sent.requests, SimSettings(timeout_s=TIMEOUT_S, max_tokens=longest, keep_tokens=False), fleet=fleet)
    report = simulation.run()
    counted = replace(report, outcomes=report.outcomes[int(len(report.outcomes) * WARM_UP) :])
    moves = [f"{at_s:.0f} s {name}: {move.reason}" for at_s, name, move in simulation.fleet.moves] if simulation.fleet else []
    return counted.attainment(topology.slo_classes) or 0.0, moves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--move-s", type=float, default=1.0)
    parser.add_argument("--ratio", action="append", help="fixed ratios, repeatable; default: 4:4 to 7:1")
    parser.add_argument("--start", action="append", help="ratios that the scaler starts from; default: 4:4 and 6:2")
    parser.add_argument("--moves", action="store_true", help="print the scaler's moves")
    given = parser.parse_args()
    trace = read_trace(given.traces / CASES[CASE].file)
    settings = settings_of()
    print(f"{CASE} x {given.factor:g}, {given.requests} requests; {WORKERS} workers; {settings}", file=sys.stderr)
    for ratio in given.ratio or ["4:4", "5:3", "6:2", "7:1"]:
        share, _ = run(trace, ratio, given.factor, given.requests, None, given.move_s)
        print(f"fixed {ratio:12s} {share:.2%}", flush=True)
    for ratio in given.start or ["4:4", "6:2"]:
        share, moves = run(trace, ratio, given.factor, given.requests, Scaler(settings), given.move_s)
        print(f"scaler from {ratio:6s} {share:.2%}, {len(moves)} moves", flush=True)
        if given.moves:
            print("\n".join(f"    {text}" for text in moves))


if __name__ == "__main__":
    main()
