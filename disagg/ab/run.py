"""`disagg ab`: the same requests at the same times to every arm, in turns, on the same cores.

    bring up (all arms, or each for its turn)  ->  warm up (not measured)  ->  find the range of rates, if asked for
        ->  round 1: each rate, each arm  ->  round 2: each rate, the arms in another order  ->  ...  until the rule says stop  ->  result

An arm is measured alone: the others are idle or down, and a turn begins when the one before has answered everything. A drift of the machine
hits all arms and rates alike, because the rounds go over all of them. What is measured is on disk at once; a run that was
interrupted goes on where it was (journal.py).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from disagg.ab.arms import Arm, ArmSource, deployed, known_context, own_arms, with_chunk
from disagg.ab.environment import busy_cores, describe
from disagg.ab.journal import TurnKey, check_same_run
from disagg.ab.out import OutFolder
from disagg.ab.progress import RunProgress
from disagg.ab.result import ChunkSearch, Result
from disagg.ab.rows import Row
from disagg.ab.rules import RangeSearch, RoundRule, rounded
from disagg.ab.summary import result_of
from disagg.ab.trace_plan import AnyWorkload, at_rate, check_workload, duration_s, mean_rate_rps, plan_round
from disagg.ab.turns import Turns
from disagg.ab.workload import PlannedRequest
from disagg.config import SloClass, Topology
from disagg.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is to be run. The workload is as it is run: its seed is the one used, and its rate is scaled to each of `rates`.

    `rates`: requests per second, ascending; empty: found by `search`. `resident`: whether all arms stay up. `chunk_search`: how the
    colocated arm's chunk was found. `vocab_size`: of the model, where no arm of ours can be asked.
    """

    arms: tuple[Arm, ...]
    classes: tuple[SloClass, ...]
    workload: AnyWorkload
    rates: tuple[float, ...]
    search: RangeSearch | None
    rounds: RoundRule
    resident: bool
    chunk_search: ChunkSearch | None = None
    vocab_size: int | None = None

    @property
    def topologies(self) -> dict[str, Topology]:
        """Of the arms that are not external."""
        return deployed(self.arms)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What must be the same in a resumed run: what is sent, and to what. More rounds or rates may follow."""
        workload = self.workload.model_dump(mode="json", exclude_none=True, exclude={"rounds", "description"})
        arms = {arm.name: arm.url or deployed([arm])[arm.name].model_dump(mode="json") for arm in self.arms}
        return {"workload": workload, "arms": arms}


def compare(
    topology: Topology,
    workload: AnyWorkload,
    *,
    resident: bool,
    arms: tuple[Arm, ...] | None = None,
    rates: Sequence[float] = (),
    search: RangeSearch | None = None,
    rounds: int | None = None,
    most_rounds: int | None = None,
    limit_s: float | None = None,
    seed: int | None = None,
    chunk_search: ChunkSearch | None = None,
    vocab_size: int | None = None,
) -> Comparison:
    """Check everything that can be checked before an engine starts. Raises ConfigError.

    `rates`: empty and no `search`: the workload's own. `rounds`: exactly so many; None: the workload's at least, `most_rounds` (default
    twice as many) at most. `limit_s`: as RoundRule's, from when the first arm is brought up.
    """
    arms = own_arms(topology) if arms is None else arms
    classes = topology.slo_classes
    as_run = workload.model_copy(update={"seed": workload.seed if seed is None else seed})
    check_workload(as_run, classes, known_context(deployed(arms)))
    own = rounded(mean_rate_rps(as_run, classes))
    for rate in rates:
        if not 0 < rate < 1e6:
            raise ConfigError(key="--rates", value=rate, expected="requests per second above 0, separated by commas")
    chosen = tuple(sorted({rounded(rate) for rate in rates})) or (() if search is not None else (own,))
    for rate in chosen or (own,):
        paced = as_run if rate == own else at_rate(as_run, classes, rate)
        check_workload(paced, classes, None)
        plan_round(paced, classes, as_run.seed, 0)
    least = workload.rounds if rounds is None else rounds
    rule = RoundRule(least, least if rounds is not None else max(least, most_rounds or 2 * least), limit_s)
    return Comparison(tuple(arms), tuple(classes), as_run, chosen, search, rule, resident, chunk_search, vocab_size)


def begin(comparison: Comparison, out: OutFolder, *, resume: bool) -> None:
    """Write down what is asked for, or check that a resumed run asks for the same, before anything is started or measured.

    Raises ConfigError, DiskError.
    """
    if resume and (out.asked.exists() or not (out.run.exists() or out.machine.exists())):
        check_same_run(out.asked, comparison.fingerprint)
    elif not out.asked.exists():
        out.write(out.asked, json.dumps(comparison.fingerprint, indent=1) + "\n")


async def run_ab(comparison: Comparison, source: ArmSource, out: OutFolder, progress: RunProgress, *, resume: bool = False) -> Result:
    """Run all rounds; rows go to `out` as requests end, the result at the end. The caller closes `source`.

    `resume`: go on with the run that is in `out`. Raises what bringing up raises, ConfigError when the workload does not fit the model or
    the run in `out` is another one, DisaggError when a warm-up request fails, DiskError. Failed requests of a round are counted, never
    raised.
    """
    environment = {**describe(comparison.topologies, resident=comparison.resident), "busy_cores_before": await busy_cores()}
    if resume and (out.run.exists() or not out.asked.exists()):  # interrupted in the chunk search, it has not come here
        check_same_run(out.run, comparison.fingerprint)
    else:
        out.write(out.run, json.dumps(comparison.fingerprint, indent=1) + "\n")
    with Turns(source, out, progress, comparison.classes, vocab_size=comparison.vocab_size, resume=resume) as turns:
        run = _Run(comparison, turns, progress)
        probes = await run.find_range() if comparison.search is not None and not comparison.rates else ()
        stopped = await run.measure(comparison.rates or run.rates)
        for key in _unfinished(turns.rows, comparison.arms):
            turns.leave_out(key, "the round was interrupted, and its other turns were not asked for again")
        result = result_of(comparison, turns, {**environment, "vocab_size": turns.vocabulary}, probes, stopped)
    out.write_result(result.to_json())
    return result


class _Run:
    """The order in which turns are measured."""

    def __init__(self, comparison: Comparison, turns: Turns, progress: RunProgress) -> None:
        self._comparison = comparison
        self._turns = turns
        self._progress = progress
        self._own_rps = rounded(mean_rate_rps(comparison.workload, comparison.classes))
        self.rates: tuple[float, ...] = ()
        self._begin_s = time.monotonic()
        self._turn_s: list[float] = []  # how long each turn took; the first ones with what brought the arm up

    async def find_range(self) -> tuple[float, ...]:
        """Bisect on the best arm's attainment, one round a rate; sets `rates`, returns what was probed."""
        assert self._comparison.search is not None
        search = self._comparison.search.rates(self._own_rps)
        probed: list[float] = []
        rate = next(search)
        while True:
            await self._round(0, [rate], f"finding the range, {rate:g}/s")
            probed.append(rate)
            best = max(self._attainment(arm, rate) for arm in self._comparison.arms)
            self._progress.say(f"at {rate:g} requests/s the best arm keeps {best:.0%} inside their class")
            try:
                rate = search.send(best)
            except StopIteration as end:
                self.rates = end.value
                return tuple(probed)

    def _attainment(self, arm: Arm, rate: float) -> float:
        from disagg.ab.result import arm_figures

        return arm_figures(self._turns.rows[(arm.name, rate, 1)], self._comparison.classes, None).slo_attainment or 0.0

    async def measure(self, rates: Sequence[float]) -> dict[float, str]:
        """All rounds of all rates. Returns why each rate needed no more."""
        rule, arms = self._comparison.rounds, self._comparison.arms
        stopped: dict[float, str] = {}
        for round_ in range(rule.most):
            open_ = [rate for rate in rates if rate not in stopped]
            left = sum(
                not self._turns.is_measured((arm.name, rate, r + 1)) for arm in arms for rate in open_ for r in range(round_, rule.most)
            )
            self._progress.plan(left, self._mean_duration_s(open_))
            await self._round(round_, open_, f"round {round_ + 1} of {'' if rule.least == rule.most else 'at most '}{rule.most}")
            for rate in open_:
                if why := rule.stopped(round_ + 1, self._rows_at(rate), self._comparison.classes):
                    stopped[rate] = why
            still_open = [rate for rate in rates if rate not in stopped]
            if not still_open:
                break
            if late := rule.out_of_time(time.monotonic() - self._begin_s, len(still_open) * len(arms) * self._usual_turn_s()):
                return stopped | dict.fromkeys(still_open, f"after round {round_ + 1}: {late}")
        return stopped

    def _usual_turn_s(self) -> float:
        return statistics.median(self._turn_s) if self._turn_s else 0.0

    def _rows_at(self, rate: float) -> dict[str, list[Row]]:
        return {arm.name: rows_of(self._turns.rows, arm.name, rate) for arm in self._comparison.arms}

    def _mean_duration_s(self, rates: Iterable[float]) -> float:
        durations = [duration_s(self._paced(rate), self._comparison.classes) for rate in rates]
        return sum(durations) / max(1, len(durations))

    async def _round(self, round_: int, rates: Sequence[float], title: str) -> None:
        """One round: resident arms take turns at each rate; otherwise each arm does all rates while it is up."""
        pairs = [(arm, i, rate, place) for i, rate in enumerate(rates) for place, arm in enumerate(self._order(round_ + i))]
        if not self._comparison.resident:
            order = {arm.name: place for place, arm in enumerate(self._order(round_))}
            pairs = sorted(((arm, i, rate, order[arm.name]) for arm, i, rate, _ in pairs), key=lambda pair: (pair[3], pair[1]))
        for arm, _, rate, place in pairs:
            if self._turns.is_measured((arm.name, rate, round_ + 1)):
                continue
            workload = self._paced(rate)
            planned = planned_at(workload, rate, self._comparison.classes, round_)
            at = f", {rate:g}/s" if len(rates) > 1 else ""
            begin_s = time.monotonic()
            await self._turns.measure(arm, workload, rate, planned, place, f"{title}{at}, {arm.name}")
            self._turn_s.append(time.monotonic() - begin_s)

    def _order(self, shift: int) -> tuple[Arm, ...]:
        """The arms, each in turn the first one."""
        arms = self._comparison.arms
        shift %= len(arms)
        return arms[shift:] + arms[:shift]

    def _paced(self, rate: float) -> AnyWorkload:
        return workload_at(self._comparison, rate)


def _unfinished(measured: Iterable[TurnKey], arms: Sequence[Arm]) -> list[TurnKey]:
    """Turns of rounds that not every arm has: a run was interrupted in them, and resumed for fewer rounds or other rates."""
    keys = sorted(measured)
    whole = [(rate, number) for _, rate, number in keys]
    return [key for key in keys if whole.count(key[1:]) < len(arms)]


def planned_at(workload: AnyWorkload, rate_rps: float, classes: Sequence[SloClass], round_: int) -> tuple[PlannedRequest, ...]:
    """One round's requests at a rate. Other rates have other prompts, so that no prefix cache knows them from there."""
    planned = plan_round(workload, classes, workload.seed, round_)
    return tuple(replace(request, seed=f"{request.seed}@{rate_rps:g}") for request in planned)


def search_rate_rps(comparison: Comparison) -> float:
    """Where the chunk search measures: a loaded system, not one past saturation, in which only queues are seen."""
    rates = comparison.rates or (rounded(mean_rate_rps(comparison.workload, comparison.classes)),)
    return rates[len(rates) * 2 // 3 if len(rates) > 1 else 0]


def workload_at(comparison: Comparison, rate_rps: float) -> AnyWorkload:
    """The workload at a rate; as it is written where that is its own."""
    own = rounded(mean_rate_rps(comparison.workload, comparison.classes))
    return comparison.workload if rate_rps == own else at_rate(comparison.workload, comparison.classes, rate_rps)


def tuned(comparison: Comparison, search: ChunkSearch) -> Comparison:
    """The comparison with the colocated arms' chunk as the search chose it."""
    arms = tuple(with_chunk(arm, search.chosen_tokens) for arm in comparison.arms)
    return replace(comparison, arms=arms, chunk_search=search)


def rows_of(rows: Mapping[TurnKey, Sequence[Row]], arm: str, rate_rps: float) -> list[Row]:
    """All rows of an arm at a rate, by round."""
    return [row for key in sorted(rows) if key[0] == arm and key[1] == rate_rps for row in rows[key]]
