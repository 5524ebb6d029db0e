"""Goodput of every arm on real traces, simulated: colocated (its chunk tuned), every static P:D ratio, adaptive.

    python -m bench.sim_goodput --traces DIR [--workload azure-conv ...] [--arm adaptive ...] [--requests 6000] [--json out.json]

One cluster: 8 workers of four H100s, Llama-3.1-70B bf16, roofline timing. The trace is sent faster and faster (arrivals divided by one
factor, lengths as they are) until fewer than 90 % of the requests are inside their class; rejected and late ones count as missed, and
the first fifth of the requests is not counted. The router is not told how long answers will be: each request asks for as many tokens as
the longest answer of its trace.

    python -m bench.sim_goodput --traces DIR --duel --requests 1500 ...

looks for adaptive's goodput, tries all other arms once at that very rate, and looks for the goodput of the two that do best there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from disagg.config import Topology, parse_topology
from disagg.plan.search import MIXED_SHARE
from disagg.sim.cluster import Simulation
from disagg.sim.goodput import Goodput, find_goodput
from disagg.sim.outcome import SimReport
from disagg.sim.settings import SimSettings
from disagg.trace import Scaling, Trace, scale
from disagg.trace_files import read_trace

WORKERS = 8
CHUNKS = (256, 512, 1024, 2048)  # of the colocated arm: the best counts
CONTEXT = 131_072
TIMEOUT_S = 1800.0  # longer than any answer of these traces takes
LEVEL = 0.9  # of the requests, at which goodput is read
WARM_UP = 0.2  # this share of the requests, the first ones, finds the cluster emptier than it will be, and is not counted


@dataclass(frozen=True)
class Case:
    """A trace file, the class that its requests are held to, and the rate factor at which the search starts."""

    file: str
    slo_class: str | dict[str, Any]
    start: float


CASES = {
    "azure-conv": Case("azure2023_conv/AzureLLMInferenceTrace_conv.csv.gz", "chat", 10.0),
    "azure-code": Case("azure2023_code/AzureLLMInferenceTrace_code.csv.gz", "code", 6.0),
    "mooncake-conversation": Case(
        "mooncake_conversation/conversation_trace.jsonl.gz", {"name": "document", "ttft_ms": 5000, "tpot_ms": 100}, 3.0
    ),
    "servegen-r1": Case("servegen_deepseek_r1/servegen_deepseek_r1_10h-11h_8rps.csv.gz", "chat", 1.5),
}


def topology_of(arm: str, slo_class: str | dict[str, Any], extra: dict[str, Any]) -> Topology:
    """`colocated-CHUNK`, `P:D`, or `adaptive-P:D[/CHUNK[/MIXED]]`: tokens of a step of its workers, and of one in which somebody decodes.

    Without MIXED such a step may take 0.9 of the class's TPOT target.
    """
    mode, prefill, chunks, mixed = "disagg", WORKERS // 2, (8192, 2048, 512), {}
    if arm.startswith("colocated"):
        mode, chunks = "colocated", (512, 512, int(arm.partition("-")[2]))
    elif arm.startswith("adaptive"):
        mode = "adaptive"
        ratio, chunk, mixed_chunk = [*arm.partition("-")[2].split("/"), "8192", "auto"][:3]
        prefill, chunks = int(ratio.split(":")[0]), (int(chunk.split("-")[0]), int(chunk.split("-")[-1]), 512)
        mixed = {"mixed_step_ms": mixed_ms(slo_class)} if mixed_chunk == "auto" else {"mixed_step_tokens": int(mixed_chunk)}
    else:
        prefill = int(arm.split(":")[0])
    prefill_chunk, decode_chunk, colocated_chunk = chunks
    return parse_topology(
        {
            "model": "llama-3.1-70b-simulated",
            "mode": mode,
            "engine": {
                "kind": "simulated",
                "simulated": {"shape": "llama-3.1-70b", "gpu": "h100", "tp": 4, "max_model_len": CONTEXT, "kv_bytes_per_token": 64},
            },
            "pools": {
                "prefill": {"count": prefill, "simulated": {"max_num_batched_tokens": prefill_chunk, **mixed}},
                "decode": {"count": WORKERS - prefill, "simulated": {"max_num_batched_tokens": decode_chunk, **mixed}},
                "colocated": {"count": WORKERS, "simulated": {"max_num_batched_tokens": colocated_chunk}},
            },
            # Boxes of 2 M tokens: as much KV as the workers hold.
            "kv": {"outbox_gib": 0.125, "inbox_gib": 0.125},
            "admission": {"max_queued_requests": 100_000, "max_queued_tokens": 2_000_000_000},
            "slo_classes": [slo_class],
        },
        overrides=extra,
    )


def mixed_ms(slo_class: str | dict[str, Any]) -> float:
    """What a step beside decodes may take, as the planner has it."""
    pools = {"prefill": {"count": 1}, "decode": {"count": 1}}
    (given,) = parse_topology({"model": "m", "pools": pools, "slo_classes": [slo_class]}).slo_classes
    return MIXED_SHARE * 1e3 * (given.tpot_s or 0.1)


def run(trace: Trace, topology: Topology, factor: float, requests: int) -> SimReport:
    """The trace's first `requests` requests at `factor` times their rate."""
    window_s = trace.requests[min(requests, len(trace.requests) - 1)].arrival_s
    sent = scale(trace, Scaling(window_s=window_s, max_total_tokens=CONTEXT, over="drop", rate_factor=factor))
    longest = max(r.output_tokens for r in sent.requests)
    settings = SimSettings(timeout_s=TIMEOUT_S, prefix_block_tokens=sent.prefix_block_tokens, max_tokens=longest, keep_tokens=False)
    return Simulation(topology, sent.requests, settings).run()


def attainment_at(trace: Trace, topology: Topology, arm: str, factor: float, requests: int) -> float:
    """Share of the requests inside their class at `factor` times the trace's rate, the first fifth not counted."""
    began = time.process_time()
    report = run(trace, topology, factor, requests)
    counted = replace(report, outcomes=report.outcomes[int(len(report.outcomes) * WARM_UP) :])
    share = counted.attainment(topology.slo_classes) or 0.0
    waste = f"{report.num_preemptions} preemptions, " if report.num_preemptions else ""
    print(f"    {arm} x{factor:.3f}: {share:.4f}  ({waste}{time.process_time() - began:.1f} s)", file=sys.stderr, flush=True)
    return share


def measure(trace: Trace, case: Case, arm: str, start: float, requests: int, tolerance: float, extra: dict[str, Any]) -> Goodput:
    """Goodput in rate factors of the trace."""
    topology = topology_of(arm, case.slo_class, extra)

    def attainment(factor: float) -> float:
        return attainment_at(trace, topology, arm, factor, requests)

    return find_goodput(attainment, start=start, level=LEVEL, tolerance=tolerance)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--workload", action="append", choices=sorted(CASES))
    parser.add_argument("--arm", action="append", help="colocated-CHUNK, P:D, or adaptive-P:D/CHUNK; repeatable; default: all")
    parser.add_argument("--requests", type=int, default=6000, help="the first so many of each trace")
    parser.add_argument("--start", type=float, help="rate factor at which the search begins; default: the workload's")
    parser.add_argument("--at", type=float, help="attainment at this one rate factor, instead of a search for the goodput")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--duel", action="store_true", help="goodput of adaptive and of the two best others only")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of every arm's topology")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    extra = {key: json.loads(value) for key, _, value in (s.partition("=") for s in given.set)}
    static = [f"{p}:{WORKERS - p}" for p in range(1, WORKERS)]
    arms = given.arm or [*(f"colocated-{c}" for c in CHUNKS), *static, "adaptive-4:4"]
    found: dict[str, dict[str, Any]] = {}
    for name in given.workload or list(CASES):
        case = CASES[name]
        trace = read_trace(given.traces / case.file)
        rate = run_rate(trace, given.requests)
        print(f"{name}: {min(given.requests, len(trace.requests))} requests at {rate:.2f}/s; {'; '.join(trace.notes)}", flush=True)
        found[name] = {}
        start = given.start or case.start
        if given.duel:
            found[name] = duel(trace, case, arms, start, given.requests, given.tolerance, extra, rate)
            _compare(found[name])
            continue
        for arm in arms:
            if given.at is not None:
                topology = topology_of(arm, case.slo_class, extra)
                found[name][arm] = {"factor": given.at, "attainment": attainment_at(trace, topology, arm, given.at, given.requests)}
                continue
            goodput = measure(trace, case, arm, start, given.requests, given.tolerance, extra)
            start = goodput.rate or start
            found[name][arm] = {"goodput_rps": goodput.rate * rate, **asdict(goodput)}
            print(f"  {arm:16s} {goodput.rate * rate:8.2f} requests/s", flush=True)
        if given.at is None:
            _compare(found[name])
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def duel(
    trace: Trace, case: Case, arms: list[str], start: float, requests: int, tolerance: float, extra: dict[str, Any], rate: float
) -> dict[str, Any]:
    """Goodput of the last arm, and of the two others that have the highest attainment at that rate.

    `rate`: requests per second at factor 1.
    """
    *others, own = arms
    found: dict[str, Any] = {}

    def search(arm: str, begin: float) -> None:
        goodput = measure(trace, case, arm, begin, requests, tolerance, extra)
        found[arm] = {"goodput_rps": goodput.rate * rate, **asdict(goodput)}
        print(f"  {arm:16s} {goodput.rate * rate:8.2f} requests/s (factor {goodput.rate:.3f})", flush=True)

    search(own, start)
    at = found[own]["rate"]
    shares = {a: attainment_at(trace, topology_of(a, case.slo_class, extra), a, at, requests) for a in others}
    ranked = sorted(shares, key=lambda a: -shares[a])
    print("  at that rate: " + ", ".join(f"{arm} {shares[arm]:.1%}" for arm in ranked), flush=True)
    for arm in ranked[:2]:
        search(arm, at if shares[arm] >= LEVEL else at / 1.1)
    return found


def run_rate(trace: Trace, requests: int) -> float:
    """Mean rate of what `run` sends at factor 1."""
    count = min(requests, len(trace.requests) - 1)
    return count / trace.requests[count].arrival_s


def _compare(arms: dict[str, Any]) -> None:
    others = {arm: v["goodput_rps"] for arm, v in arms.items() if not arm.startswith("adaptive")}
    for arm in arms:
        if arm.startswith("adaptive") and others:
            best = max(others, key=lambda a: others[a])
            ratio = arms[arm]["goodput_rps"] / others[best] if others[best] else float("nan")
            print(f"  {arm} against the best other ({best}): {ratio:.3f} x", flush=True)


if __name__ == "__main__":
    main()
