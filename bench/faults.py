"""`python -m bench.faults`: seeded fault runs with simulated workers, per carrier; the last lines say whether anything was ever wrong.

Every run sends one to four requests through a cluster of 2 + 2 workers while one fault happens (see tests/fault_runs.py). It exits with 1
when an answer was wrong, a request outlived its deadline, an error was not a typed one, or something was left behind; each such run is
printed with its number, and `--first NUMBER --runs 1` repeats it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections import Counter

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core remarks on every broken connection; read when gRPC is imported

from tests.fault_runs import Summary, fault_runs, scene_of
from tests.kv_rig import CARRIERS

TOLD_RUNS = 25


async def run_all(carrier: str, seed: int, first: int, num_runs: int) -> Summary:
    """The runs first .. first + num_runs - 1 of a seed, one after the other."""
    async with fault_runs(carrier, seed) as runs:
        for number in range(first, first + num_runs):
            await runs.run(scene_of(carrier, seed, number))
            if runs.summary.num_runs % TOLD_RUNS == 0 or sys.stderr.isatty():
                tell_progress(runs.summary, num_runs)
    return runs.summary


def tell_progress(summary: Summary, num_runs: int) -> None:
    """How far the runs are, to stderr: a line, which a terminal sees once, changing."""
    so_far = f"{summary.carrier}: {summary.num_runs} of {num_runs} runs, {len(summary.problems)} problems, {summary.seconds:.0f} s"
    is_last = summary.num_runs == num_runs
    print(so_far, end="\r" if sys.stderr.isatty() and not is_last else "\n", file=sys.stderr, flush=True)


def as_json(summary: Summary) -> dict[str, object]:
    """One carrier's summary, for --json."""
    outcomes = {f"{place}: {fault}": dict(counts) for (place, fault), counts in sorted(summary.outcomes.items())}
    return {
        "carrier": summary.carrier,
        "seed": summary.seed,
        "runs": summary.num_runs,
        "requests": summary.num_requests,
        "faults": summary.num_faults,
        "seconds": round(summary.seconds, 1),
        "worst_lateness_s": round(max(summary.worst_lateness_s, 0.0), 3),
        "outcomes": outcomes,
        "problems": summary.problems,
    }


def table(summary: Summary) -> str:
    """One carrier's summary, for people."""
    totals: Counter[str] = sum(summary.outcomes.values(), Counter())
    names = [name for name, _ in totals.most_common()]
    width = max(len(f"{place} {fault}") for place, fault in summary.outcomes) if summary.outcomes else 0
    lines = [
        f"{summary.carrier}, seed {summary.seed}: {summary.num_runs} runs, {summary.num_requests} requests, {summary.num_faults} faults, "
        f"{summary.seconds:.0f} s; latest end {max(summary.worst_lateness_s, 0.0):.2f} s after its deadline"
    ]
    lines.append("  " + " " * width + "".join(f"  {name:>{max(6, len(name))}}" for name in names))
    for (place, fault), counts in sorted(summary.outcomes.items()):
        lines.append(f"  {place + ' ' + fault:<{width}}" + "".join(f"  {counts[name]:>{max(6, len(name))}}" for name in names))
    lines += summary.problems or ["  every request right or a typed error, nothing late, nothing left"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--carrier", choices=sorted(CARRIERS), action="append", help="may be repeated; default: all")
    parser.add_argument("--runs", type=int, default=500, help="per carrier (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of tables")
    options = parser.parse_args()
    if options.runs < 1 or options.first < 0:
        parser.error("--runs must be positive and --first not negative")
    logging.disable(logging.ERROR)  # each fault is logged where it is noticed
    summaries = []
    for carrier in options.carrier or sorted(CARRIERS):
        summaries.append(asyncio.run(run_all(carrier, options.seed, options.first, options.runs)))
        if not options.json:
            print(table(summaries[-1]), flush=True)
    if options.json:
        print(json.dumps([as_json(summary) for summary in summaries], indent=1))
    return 1 if any(summary.problems for summary in summaries) else 0


if __name__ == "__main__":
    sys.exit(main())
