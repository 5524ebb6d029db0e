"""`make bench`: colocated (its chunk tuned), disaggregated and adaptive serving on this machine, three workloads at five rates each.

    python -m bench.ab [--topology FILE] [--out out/bench] [--only short-chat ...] [--resume]

Each workload is one `disagg ab` with its own result and report in OUT/WORKLOAD; OUT/summary.md has the verdicts. Rates, rounds and
durations are such that all of it takes about 40 minutes on 2 cores; more rounds (`--rounds`) make the intervals narrower. Interrupted, it
goes on with --resume.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from disagg.ab.result import Result, read_result

ARMS = "colocated,disagg,adaptive"


@dataclass(frozen=True, slots=True)
class Case:
    """A workload, its rates in requests/s from light to past what two slow cores keep up with, and how long each round sends."""

    workload: str
    rates: tuple[float, ...]
    duration_s: float


CASES = (
    Case("short-chat", (0.6, 1.5, 3.0, 5.0, 8.0), 9.0),
    Case("cpu-interference", (0.3, 0.57, 0.85, 1.2, 1.8), 16.0),
    Case("azure-conv-cpu", (0.4, 0.8, 1.5, 2.5, 4.0), 10.0),
)


def main() -> int:
    """Run the cases one after the other; 1 when one failed or is no result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="cluster/topologies/cpu-1p1d.yaml")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--only", nargs="*", choices=[case.workload for case in CASES], default=[])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    begin_s = time.monotonic()
    failed = []
    for case in CASES:
        if given.only and case.workload not in given.only:
            continue
        if given.resume and (given.out / case.workload / "result.json").exists():
            continue
        if subprocess.run(_command(case, given), check=False).returncode:
            failed.append(case.workload)
        print(f"{case.workload}: done {(time.monotonic() - begin_s) / 60:.1f} min after the start", flush=True)
    text = _summary(given.out)
    (given.out / "summary.md").write_text(text)
    print(text)
    if failed:
        print(f"failed, or no result: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _command(case: Case, given: argparse.Namespace) -> list[str]:
    folder = given.out / case.workload
    return [
        *(sys.executable, "-c", "from disagg.cli import app; app()", "ab", given.topology),
        *("--workload", case.workload, "--arms", ARMS, "--rates", ",".join(f"{rate:g}" for rate in case.rates)),
        *("--duration-s", f"{case.duration_s:g}", "--rounds", str(given.rounds), "--chunk-trials", "3", "--out", str(folder)),
        *(["--resume"] if given.resume and (folder / "run.json").exists() else []),
    ]


def _summary(out: Path) -> str:
    """A Markdown table: verdicts, and attainment by rate and arm."""
    lines = []
    for case in CASES:
        path = out / case.workload / "result.json"
        if path.exists():
            lines += _section(case.workload, read_result(path))
    return "\n".join(lines) + "\n"


def _section(name: str, result: Result) -> list[str]:
    arms = list(result.setups)
    lines = [f"## {name}: {result.verdict.choose}", "", result.not_a_result or result.verdict.reason, ""]
    lines += ["| requests/s | " + " | ".join(f"{arm}: within SLO" for arm in arms) + " |", "|---" * (len(arms) + 1) + "|"]
    for point in result.points:
        shares = (point.arms[arm].slo_attainment for arm in arms)
        lines.append(f"| {point.rate_rps:g} | " + " | ".join("-" if s is None else f"{s:.0%}" for s in shares) + " |")
    if result.chunk_search is not None:
        lines += [
            "",
            f"Colocated chunk: {result.chunk_search.chosen_tokens} tokens, the best of {len(result.chunk_search.trials)} measured.",
        ]
    return [*lines, ""]


if __name__ == "__main__":
    raise SystemExit(main())
