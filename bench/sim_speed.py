"""How quick the simulator is, and how much memory it takes: an hour of azure conv (19,366 requests, 4 M output tokens).

    python -m bench.sim_speed --traces DIR                                   8 workers at the trace's rate
    python -m bench.sim_speed --traces DIR --workers 256 --factor 10 --hours 10    as many workers as fit ten times the rate

`--hours`: the trace is sent so many times, one after the other; `--factor` divides its arrivals. Seconds are of this process's CPU.
Memory: the requests to send are there from the beginning; of those that have ended only sums are kept (Simulation.stream).
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

from bench.sim_goodput import topology_of
from disagg.config import parse_topology
from disagg.plan.load import Load
from disagg.sim.cluster import Simulation
from disagg.sim.settings import SimSettings
from disagg.trace_files import read_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--hours", type=int, default=1)
    parser.add_argument("--mode", default="disagg", choices=["disagg", "colocated", "adaptive"])
    given = parser.parse_args()
    trace = read_trace(given.traces / "azure2023_conv/AzureLLMInferenceTrace_conv.csv.gz")
    count = len(trace.requests) * given.hours
    tree = topology_of("4:4", "chat", {}).model_dump(exclude_none=True) | {"mode": given.mode}
    for name, share in (("prefill", 2), ("decode", 2), ("colocated", 1)):
        tree["pools"][name]["count"] = max(1, given.workers // share)
    topology = parse_topology(tree)
    requests = Load(trace, topology.slo_classes).sent(trace.mean_rate_rps * given.factor, count)
    before_mib = resident_mib()
    began = time.process_time()
    simulation = Simulation(topology, requests, SimSettings(keep_tokens=False, timeout_s=600))
    classes = {c.name: c for c in topology.slo_classes}
    tokens = in_class = 0
    marks_mib = []
    for ended, outcome in enumerate(simulation.stream(), start=1):  # nothing is kept of them
        tokens += outcome.output_tokens
        in_class += outcome.meets(classes[outcome.slo_class])
        if ended in (count // 4, count // 2, 3 * count // 4, count):
            marks_mib.append(resident_mib())
    seconds = time.process_time() - began
    print(
        f"{given.mode}, {given.workers} workers, {count:,} requests, {tokens:,} output tokens, "
        f"{simulation.report().end_s:,.0f} s simulated: {seconds:.1f} s of CPU, {count / seconds:,.0f} requests/s, "
        f"{simulation.num_events:,} events, in class {in_class / count:.1%}; resident memory {before_mib:,.0f} MiB before, "
        f"{', '.join(f'{mib:,.0f}' for mib in marks_mib)} after each quarter"
    )


def resident_mib() -> float:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / (1 << 20)


if __name__ == "__main__":
    main()
