"""`make bench`: colocated (its chunk tuned), disaggregated and adaptive serving on this machine, three workloads at five rates each.

    python -m bench.ab [--topology FILE] [--out out/bench] [--budget-min 42] [--only short-chat ...] [--plan-only] [--resume]

First the machine is measured (calibrate.py, about three minutes): lengths, chunks, TPOT targets and rates follow from that, rounds
and durations from the time that is left; OUT/plan.json and the first lines of the output say all of it. Then each workload is one
`disagg ab` with its own result and report in OUT/WORKLOAD; OUT/summary.md has the verdicts. The chunk is searched on cpu-interference,
whose long prompts are what chunks are about, and is used in all three. Interrupted, it goes on with --resume, by the same plan.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.calibrate import Capacity, calibrate
from disagg.ab.arms import parse_arms
from disagg.ab.chunk_search import TRIAL_S
from disagg.ab.machine_fit import Fit, Speed, fitted_topology, fitted_workload
from disagg.ab.result import Result, read_result
from disagg.ab.workload import load_workload
from disagg.config import Topology, load_topology, parse_topology
from disagg.launch.session import RaySession
from disagg.models import BUNDLED

ARMS = "colocated,disagg,adaptive"
TUNED_ON = "cpu-interference"
WORKLOADS = (TUNED_ON, "short-chat", "azure-conv-cpu")
CHUNK_TRIALS = 3
RATES = 5
SHORTEST_S, LONGEST_S = 8.0, 75.0  # of a turn's sending
WARM_UPS = 3  # of an arm: its shortest, median and longest requests, one kind after the other
ONE_ROUND_BELOW_S = 12.0  # shorter turns than this, and one round twice as long says more than two
ENGINE_ARGS = {"kv_cache_memory_bytes": 512 << 20}  # so that six engines fit the memory beside each other
BOXES_GIB = 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run. `probably_s`: all of it, calibration included. `case_s`: what each workload may take, engine starts included.

    `duration_s`: how long each turn sends, by workload.
    """

    budget_min: float
    speed: Speed
    capacity: Mapping[str, Capacity]
    probably_s: float
    case_s: float
    rounds: Mapping[str, int]
    duration_s: Mapping[str, float]

    def lines(self) -> list[str]:
        """For people."""
        speed = self.speed
        said = [f"one worker here: {speed.text(Fit.TOKENS)}", f"an arm is up in {speed.start_s:.0f} s"]
        for name, capacity in self.capacity.items():
            rates = ", ".join(f"{rate:g}" for rate in capacity.rates)
            each = f"{self.rounds[name]} round{'s' if self.rounds[name] > 1 else ''} of {self.duration_s[name]:.0f} s"
            said.append(f"{name}: {rates} requests/s (capacity {capacity.completed_per_s:.2f}), {each} at each for each arm")
        fits = (
            ""
            if self.probably_s <= 61 * self.budget_min
            else f", more than the {self.budget_min:g} asked for: shorter turns would say nothing"
        )
        return [*said, f"all of it takes about {self.probably_s / 60:.0f} minutes{fits}"]


def plan(budget_min: float, spent_s: float, speed: Speed, capacity: Mapping[str, Capacity], arms: int) -> Plan:
    """Share what is left of the budget between the workloads; turns are as long as that allows."""
    left_s = max(0.0, 60 * budget_min - spent_s)
    trials_s = _trials_s(speed, capacity)
    case_s = (left_s - trials_s) / len(capacity)
    rounds, durations = {}, {}
    probably_s = spent_s + trials_s
    for name, one in capacity.items():
        warm_up_s = WARM_UPS * one.longest_s
        turn_s = (case_s - arms * (speed.start_s + warm_up_s)) / (RATES * arms)
        sending_s = turn_s / 2 - 1.5 * one.longest_s  # the rest of a turn goes by until its last answers are there
        rounds[name] = 2 if sending_s >= ONE_ROUND_BELOW_S else 1
        durations[name] = round(min(LONGEST_S, max(SHORTEST_S, turn_s / rounds[name] - 1.5 * one.longest_s)), 1)
        turns = RATES * arms * rounds[name]
        probably_s += arms * (speed.start_s + warm_up_s) + turns * (durations[name] + 1.5 * one.longest_s)
    return Plan(budget_min, speed, dict(capacity), probably_s, max(0.0, case_s), rounds, durations)


def _trials_s(speed: Speed, capacity: Mapping[str, Capacity]) -> float:
    """What the chunk search takes: each size has a start, its warm-up, and a turn that goes on until its last answers are there."""
    longest_s = max(one.longest_s for one in capacity.values())
    return CHUNK_TRIALS * (speed.start_s + (WARM_UPS + 2) * longest_s + TRIAL_S)


def main() -> int:
    """Calibrate, then run the cases one after the other; 1 when one failed or is no result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", type=Path, default=Path("cluster/topologies/cpu-1p1d.yaml"))
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--budget-min", type=float, default=42.0, help="minutes for all of it")
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=[])
    parser.add_argument("--plan-only", action="store_true", help="measure the machine, print the plan, and end")
    parser.add_argument("--resume", action="store_true", help="go on by the plan that is in --out")
    given = parser.parse_args()
    begin_s = time.monotonic()
    names = [name for name in WORKLOADS if not given.only or name in given.only]
    given.out.mkdir(parents=True, exist_ok=True)
    planned = _planned(given, names, begin_s)
    print("\n".join(planned.lines()), flush=True)
    if given.plan_only:
        return 0
    failed = []
    open_ = [name for name in planned.capacity if not (given.resume and (given.out / name / "result.json").exists())]
    for i, name in enumerate(open_):
        left_s = 60 * planned.budget_min - (time.monotonic() - begin_s)
        if not _run(name, planned, given.out, _limit_s(name, planned, left_s, len(open_) - i, given.out), resume=given.resume):
            failed.append(name)
        print(f"{name}: done {(time.monotonic() - begin_s) / 60:.1f} min after the start", flush=True)
    text = _summary(planned, given.out)
    (given.out / "summary.md").write_text(text)
    print(text)
    if failed:
        print(f"failed, or no result: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _limit_s(name: str, planned: Plan, left_s: float, cases: int, out: Path) -> float:
    """What a workload may take of what is left for `cases` of them: the others' unused time, too; half of what was planned in any case."""
    trials_s = _trials_s(planned.speed, planned.capacity) if _tuned(name, out) is None else 0.0
    return trials_s + max(0.5 * planned.case_s, (left_s - trials_s) / cases)


def _run(name: str, planned: Plan, out: Path, limit_s: float, *, resume: bool) -> bool:
    """One case; whether it came to a result. What an accident broke off in the middle goes on, once: its rows are kept."""
    folder = out / name
    code = subprocess.run(_command(name, planned, out, limit_s, resume=resume), check=False).returncode
    if code and _is_begun(folder) and not (folder / "result.json").exists():
        print(f"{name}: broken off; going on with what is measured", flush=True)
        code = subprocess.run(_command(name, planned, out, limit_s, resume=True), check=False).returncode
    return code == 0


def _planned(given: argparse.Namespace, names: list[str], begin_s: float) -> Plan:
    """The plan that is in the folder, to go on with; else a new one, from a calibration. Its files are written."""
    file = given.out / "plan.json"
    if given.resume and file.exists():
        return _read_plan(json.loads(file.read_text()))
    topology = _for_bench(load_topology(given.topology), given.topology.parent)
    with RaySession.start([topology], None) as session:
        speed, capacity = asyncio.run(calibrate(topology, given.topology.parent, names, session))
    arms = len(parse_arms(ARMS, topology))
    found = plan(given.budget_min, time.monotonic() - begin_s, speed, capacity, arms)
    raw = fitted_topology(topology, speed).model_dump(mode="json", exclude_none=True)
    (given.out / "topology.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    for name in names:
        workload = fitted_workload(load_workload(name), speed).model_copy(update={"duration_s": found.duration_s[name]})
        (given.out / f"{name}.yaml").write_text(yaml.safe_dump(workload.model_dump(mode="json", exclude_none=True), sort_keys=False))
    file.write_text(json.dumps(asdict(found), indent=1) + "\n")
    return found


def _read_plan(raw: Mapping[str, Any]) -> Plan:
    capacity = {name: Capacity(**{**one, "rates": tuple(one["rates"])}) for name, one in raw["capacity"].items()}
    return Plan(**{**raw, "speed": Speed(**raw["speed"]), "capacity": capacity})


def _for_bench(topology: Topology, base_dir: Path) -> Topology:
    """With less memory for each engine on CPUs, and a model that is found from another folder, too."""
    raw = topology.model_dump(exclude_none=True)
    if topology.engine.kind == "vllm" and not any(pool.gpus for pool in topology.active_pools().values()):
        raw["engine"]["args"] = {**raw["engine"]["args"], **ENGINE_ARGS}
        raw["kv"] |= {"outbox_gib": BOXES_GIB, "inbox_gib": BOXES_GIB}
    if topology.model not in BUNDLED and (folder := base_dir / topology.model).exists():
        raw["model"] = str(folder.resolve())
    return parse_topology(raw)


def _command(name: str, planned: Plan, out: Path, limit_s: float, *, resume: bool) -> list[str]:
    folder = out / name
    tuned = _tuned(name, out)
    chunk = ["--chunk-trials", str(CHUNK_TRIALS)] if tuned is None else ["--chunk", str(tuned)]
    return [
        *(sys.executable, "-c", "from disagg.cli import app; app()", "ab", str(out / "topology.yaml")),
        *("--workload", str(out / f"{name}.yaml"), "--arms", ARMS, "--rounds", str(planned.rounds[name])),
        *("--rates", ",".join(f"{rate:g}" for rate in planned.capacity[name].rates), "--limit-min", f"{limit_s / 60:.2f}"),
        *(*chunk, "--out", str(folder)),
        *(["--resume"] if resume and _is_begun(folder) else []),
    ]


def _is_begun(folder: Path) -> bool:
    """Whether a run left something to go on with, if only in its chunk search."""
    return any((folder / name).exists() for name in ("asked.json", "run.json"))


def _tuned(name: str, out: Path) -> int | None:
    """The chunk that the search on TUNED_ON chose; None where `name` has to search one: it is that workload, or that was not asked for."""
    file = out / TUNED_ON / "result.json"
    search = read_result(file).chunk_search if name != TUNED_ON and file.exists() else None
    return None if search is None else search.chosen_tokens


def _summary(planned: Plan, out: Path) -> str:
    """A Markdown table: verdicts, and attainment by rate and arm."""
    lines = [f"- {line}" for line in planned.lines()] + [""]
    for name in planned.capacity:
        path = out / name / "result.json"
        if path.exists():
            lines += _section(name, read_result(path))
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
