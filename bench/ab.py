"""`make bench`: colocated (its chunk tuned), disaggregated and adaptive serving on this machine, three workloads at five rates each.

    python -m bench.ab [--topology FILE] [--out out/bench] [--budget-min 42] [--only short-chat ...] [--plan-only] [--resume]

First the machine is measured (calibrate.py, about three minutes): lengths, chunks, TPOT targets and rates follow from that, rounds
and durations from the time that is left; OUT/plan.json and the first lines of the output say all of it. Then each workload is measured as
`disagg ab` measures it, with its own result and report in OUT/WORKLOAD, on arms that stay up for all of them; OUT/summary.md has the
verdicts. The chunk is searched on cpu-interference, whose long prompts are what chunks are about, and is used in all three. Interrupted, it
goes on with --resume, by the same plan.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from ray.exceptions import RayError
from rich.console import Console

from bench.calibrate import Capacity, calibrate
from disagg.ab.arms import Arm, can_be_resident, deployed, parse_arms, with_chunk
from disagg.ab.chunk_search import TRIAL_S
from disagg.ab.environment import free_memory_bytes
from disagg.ab.machine_fit import Fit, Speed, fitted_topology, fitted_workload
from disagg.ab.out import OutFolder
from disagg.ab.progress import RunProgress
from disagg.ab.ray_arms import RayArms
from disagg.ab.ray_tuning import tuned_on_ray
from disagg.ab.result import Result, read_result
from disagg.ab.run import begin, compare, run_ab
from disagg.ab.workload import load_workload
from disagg.cli_ab_report import print_result
from disagg.config import Topology, load_topology, parse_topology
from disagg.errors import DisaggError
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
    """What is run. `probably_s`: all of it, calibration and engine starts included. `case_s`: what each workload may take of the rest.

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
    begin_s = _begin_s(speed, capacity, arms)
    case_s = (left_s - begin_s) / len(capacity)
    rounds, durations = {}, {}
    probably_s = spent_s + begin_s
    for name, one in capacity.items():
        warm_up_s = WARM_UPS * one.longest_s
        turn_s = (case_s - arms * warm_up_s) / (RATES * arms)
        sending_s = turn_s / 2 - 1.5 * one.longest_s  # the rest of a turn goes by until its last answers are there
        rounds[name] = 2 if sending_s >= ONE_ROUND_BELOW_S else 1
        durations[name] = round(min(LONGEST_S, max(SHORTEST_S, turn_s / rounds[name] - 1.5 * one.longest_s)), 1)
        turns = RATES * arms * rounds[name]
        probably_s += arms * warm_up_s + turns * (durations[name] + 1.5 * one.longest_s)
    return Plan(budget_min, speed, dict(capacity), probably_s, max(0.0, case_s), rounds, durations)


def limit_of(planned: Plan, left_s: float, cases: int, arms: int) -> float:
    """What the next of `cases` workloads may take of what is left: the others' unused time, too; half of what was planned in any case.

    `arms`: that it has to bring up, after a chunk search; 0: they are up.
    """
    begin_s = _begin_s(planned.speed, planned.capacity, arms) if arms else 0.0
    return begin_s + max(0.5 * planned.case_s, (left_s - begin_s) / cases)


def _begin_s(speed: Speed, capacity: Mapping[str, Capacity], arms: int) -> float:
    """What the chunk search takes (each size has a start, its warm-up, and a turn that goes on until its last answers are there), and
    bringing up `arms` arms."""
    longest_s = max(one.longest_s for one in capacity.values())
    return CHUNK_TRIALS * (speed.start_s + (WARM_UPS + 2) * longest_s + TRIAL_S) + arms * speed.start_s


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
    try:
        failed = _run_cases(planned, given, begin_s)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"interrupted; what is measured is in {given.out}; --resume goes on from there", file=sys.stderr)
        return 130
    text = _summary(planned, given.out)
    (given.out / "summary.md").write_text(text)
    print(text)
    if failed:
        print(f"failed, or no result: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run_cases(planned: Plan, given: argparse.Namespace, begin_s: float) -> list[str]:
    """All cases that have no result yet, one after the other; the names of those that failed."""
    topology = load_topology(given.out / "topology.yaml")
    arms = parse_arms(ARMS, topology)
    open_ = [name for name in planned.capacity if not (given.resume and (given.out / name / "result.json").exists())]
    failed = []
    with RaySession.start(list(deployed(arms).values()), None) as session, RunProgress(Console(stderr=True)) as progress:
        cases = Cases(planned, topology, arms, given.out, session, progress)

        async def run() -> None:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
            try:
                for i, name in enumerate(open_):
                    left_s = 60 * planned.budget_min - (time.monotonic() - begin_s)
                    if not await cases.run(name, left_s, len(open_) - i, resume=given.resume):
                        failed.append(name)
                    print(f"{name}: done {(time.monotonic() - begin_s) / 60:.1f} min after the start", flush=True)
            finally:
                await cases.close()

        asyncio.run(run())
    return failed


class Cases:
    """The workloads on one set of arms, which the first of them brings up. Close it."""

    def __init__(
        self, planned: Plan, topology: Topology, arms: Sequence[Arm], out: Path, session: RaySession, progress: RunProgress
    ) -> None:
        self._planned = planned
        self._topology = topology
        self._arms = tuple(arms)
        self._out = out
        self._session = session
        self._progress = progress
        self._source: RayArms | None = None
        self._resident = can_be_resident(deployed(arms), free_memory_bytes())  # while nothing is up yet

    async def run(self, name: str, left_s: float, cases: int, *, resume: bool) -> bool:
        """One case, of `cases` that have `left_s`; whether it came to a result. What an accident broke off in the middle goes on, once: its
        rows are kept."""
        folder = self._out / name
        limit_s = limit_of(self._planned, left_s, cases, arms=0 if self._source is not None else len(self._arms))
        for is_again in (False, True):
            try:
                return (await self._measure(name, limit_s, resume=(resume or is_again) and _is_begun(folder))).not_a_result is None
            except (DisaggError, OSError, RayError) as error:
                await self.close()
                print(f"{name}: broken off: {error}", flush=True)
                if is_again or not _is_begun(folder) or (folder / "result.json").exists():
                    break
                print(f"{name}: going on with what is measured", flush=True)
        return False

    async def _measure(self, name: str, limit_s: float, *, resume: bool) -> Result:
        comparison = compare(
            self._topology,
            load_workload(str(self._out / f"{name}.yaml")),
            resident=self._resident,
            arms=self._arms,
            rates=self._planned.capacity[name].rates,
            rounds=self._planned.rounds[name],
            limit_s=limit_s,
        )
        folder = OutFolder(self._out / name, resume=resume)
        begin(comparison, folder, resume=resume)
        searched = self._chunk_found(name)
        if searched is None:
            comparison = await tuned_on_ray(comparison, self._session, self._out, folder, self._progress, CHUNK_TRIALS)
        else:
            comparison = replace(comparison, arms=tuple(with_chunk(arm, searched) for arm in comparison.arms))
        if self._source is None:
            self._source = RayArms(self._session, comparison.arms, resident=self._resident, base_dir=self._out, say=self._progress.say)
        result = await run_ab(comparison, self._source, folder, self._progress, resume=resume)
        print_result(result, folder)
        return result

    def _chunk_found(self, name: str) -> int | None:
        """By a case before `name`; None where that has to search it."""
        before = itertools.takewhile(lambda other: other != name, self._planned.capacity)
        files = [self._out / other / "result.json" for other in before]
        searches = [read_result(file).chunk_search for file in files if file.exists()]
        return next((search.chosen_tokens for search in searches if search is not None), None)

    async def close(self) -> None:
        """Take the arms down; a case that follows brings them up again."""
        source, self._source = self._source, None
        if source is not None:
            await source.close()


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


def _is_begun(folder: Path) -> bool:
    """Whether a run left something to go on with, if only in its chunk search."""
    return any((folder / name).exists() for name in ("asked.json", "run.json"))


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
