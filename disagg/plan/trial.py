"""What a plan does with a workload, by simulation: its goodput, and its figures at one rate. Pure.

The simulator runs the live router and the engines' scheduler. A run sends requests at one mean rate; those of its beginning find the
cluster emptier than it will be and are not counted. The router is not told how long answers will be.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from disagg.config import SloClass
from disagg.plan.candidate import Candidate, topology_of
from disagg.plan.question import Question
from disagg.plan.screen import Screen
from disagg.sim.cluster import Simulation
from disagg.sim.outcome import Outcome, SimReport
from disagg.sim.settings import SimSettings
from disagg.slo import Summary, summarise

Mapped = Callable[..., Iterable[Any]]  # `map`, or one that shares the calls out among processes
WARM_UP = 0.35  # of the requests, at the beginning
_STEPS_UP = ((1.0, 1.8), (0.99, 1.4), (0.95, 1.15), (0.0, 1.08))  # (share at least, factor) from a rate that holds to the next one
_COLLAPSED = 0.5
_FURTHEST = 3.0  # down at once
_FURTHEST_CUT = 1.5  # after a run that ended early: it saw its worst part
_CLEARLY = 1.25  # times as many as may be must have missed for a run to end early: where it is close, by how much must be exact
# Tolerances between two rates, at most, for a line between their shares to tell where it crosses the level; fewer where the share falls off
# a cliff, which a line knows nothing of.
_STRAIGHT = 4
_STEEP = 2
_CLIFF = 0.9  # of the level
_MOST_RUNS = 16  # for one plan's goodput
_CLOSE = 0.04  # a share so little below the level may be chance, of fewer counted requests than
_MANY = 500
# Of so many and more, a share so little above the level is at it: rates one or two per cent apart differ by as much, for a cluster under
# overload amplifies what is different. Each of these runs takes seconds.
_AT_LEVEL = 0.025
_BUSY = 0.9  # share of its time from which on a pool is the limit
TIMEOUT_S = 1800.0
_FIRST = ("ttft", "refused_ttft")
_NEXT = ("tpot", "refused_tpot")
_REFUSED = ("refused_ttft", "refused_tpot", "refused")


@dataclass(frozen=True, slots=True)
class Figures:
    """One run at one rate. Seconds. `attainment`: share of the counted requests inside their class.

    `missed`: of the counted requests, how many missed what: `ttft` and `tpot`, `refused_ttft` and `refused_tpot` because they would have,
    `refused` for another reason, `late` (no whole answer). `busy`: share of the time that each pool's workers spent in steps; `batch`:
    requests that got a token in a step, on the mean. `concurrency`: mean requests in the system; `e2e_s`: their mean time in it.
    `is_cut`: it ended as soon as too many had missed; `counted` are then those sent by that time.
    """

    rate_rps: float
    attainment: float
    ttft: Summary
    tpot: Summary
    missed: dict[str, int]
    counted: int
    busy: dict[str, float]
    batch: dict[str, float]
    concurrency: float
    e2e_s: float
    span_s: float
    preemptions: int
    is_cut: bool = False

    @property
    def output_rps(self) -> float:
        """Requests/s that were answered in their class."""
        return self.rate_rps * self.attainment


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulated plan. `goodput_rps`: where the share in class falls to the level, by a straight line between two rates; 0: nowhere.

    `best`: figures at the highest rate that held; `beyond`: at the lowest that did not, which says what limits it. Where a long run only
    just holds, `goodput_rps` is what was served in class there, over the share that must be, and `best` is `beyond`, too. `is_rough`: it
    lost to another plan in one run, and `goodput_rps` is the same of that.
    """

    candidate: Candidate
    goodput_rps: float
    best: Figures | None
    beyond: Figures | None
    num_runs: int
    is_rough: bool = False

    def limit(self) -> str:
        """What limits it, in a few words: which target is missed, by how many, and how busy the pool behind it is then."""
        at = self.beyond
        if at is None:
            return "its workers' time, by the formulas: no target is missed at the highest rate that was tried"
        shares = {what: count / at.counted for what, count in at.missed.items() if count}
        first, second = (sum(shares.get(what, 0.0) for what in kind) for kind in (_FIRST, _NEXT))
        first_pool, next_pool = ("colocated", "colocated") if "colocated" in at.busy else ("prefill", "decode")
        batch = f"{at.batch[next_pool]:.0f} requests decoding on each {next_pool} worker"
        if first > second:
            is_full = "the pool is full" if at.busy[first_pool] >= _BUSY else "prompts wait for each other, or are long"
            said = f"first tokens ({first:.0%} late or refused for it); {first_pool} workers {at.busy[first_pool]:.0%} busy: {is_full}"
            said += f"; {batch}" if first_pool == "colocated" else ""
        elif second:
            said = f"time per token ({second:.0%} slow or refused for it); {batch}"
        else:
            said = f"requests that wait too long or are refused ({sum(shares.values()):.0%}); {batch}"
        return f"{said}; {at.preemptions} preemptions: KV memory" if at.preemptions else said


class Trials:
    """Runs of one question; equal runs are made once. `num_runs`: simulations made; `num_cut`: of them, ended early."""

    def __init__(self, question: Question, screen: Screen | None = None) -> None:
        """`screen`: of the same question, where there is one."""
        self.question = question
        self.num_runs = 0
        self.num_cut = 0
        self._screen = screen or Screen(question)
        self._kept: dict[tuple[Candidate, float, bool, int], Figures] = {}

    def keep(self, candidate: Candidate, figures: Figures) -> None:
        """A run that was made elsewhere, and may have been cut. It counts."""
        self.num_runs += 1
        self.num_cut += figures.is_cut
        self._kept[candidate, figures.rate_rps, True, 1] = figures

    def first(self, candidate: Candidate, start_rps: float) -> Figures:
        """The run with which `goodput` begins."""
        return self.at(candidate, min(start_rps, self.most_rps(candidate)), may_cut=True)

    def goodput(self, candidate: Candidate, start_rps: float, *, tolerance: float = 0.03, rival_rps: float | None = None) -> Trial:
        """Find where the plan's share in class falls to the level, to `tolerance`, from `start_rps` on.

        `rival_rps`: of a plan that it has to beat. Where it does not hold just above that, one run is all it gets; but where it only just
        does not, and the run was short, one that is twice as long decides. No rate is tried that the workers' time does not allow: a run is
        too short for a queue to grow beyond a target of minutes, or beyond none.
        """
        most_rps = self.most_rps(candidate)
        before = self.num_runs
        level = self.question.level
        low: Figures | None = None
        high: Figures | None = None
        failed = 0  # in a row
        rate_rps: float | None = start_rps if not rival_rps else rival_rps * (1 + tolerance)
        for _ in range(_MOST_RUNS):
            if rate_rps is None or (low is not None and low.rate_rps >= most_rps):
                break
            rate_rps = min(rate_rps, most_rps)
            at = self.at(candidate, rate_rps, may_cut=True)
            if rival_rps and low is None and level - _CLOSE <= at.attainment < level and at.counted < _MANY:
                at = self.at(candidate, rate_rps, may_cut=True, times=2)
            if at.attainment >= level:
                low, failed = at, 0
                if at.counted >= _MANY and at.attainment < level + _AT_LEVEL:
                    break
            else:
                high, failed = at, failed + 1
                if rival_rps and low is None:
                    rough_rps = min(rival_rps, at.rate_rps * at.attainment / level)
                    return Trial(candidate, rough_rps, None, at, self.num_runs - before, is_rough=True)
            rate_rps = _next_rps(low, high, level, tolerance, failed)
        if low is not None and low.counted >= _MANY and low.attainment < level + _AT_LEVEL:
            goodput_rps = min(low.output_rps / level, high.rate_rps if high is not None else math.inf)
            return Trial(candidate, goodput_rps, low, low, self.num_runs - before)
        return Trial(candidate, _crossing_rps(low, high, level), low, high, self.num_runs - before)

    def most_rps(self, candidate: Candidate) -> float:
        """A rate that no scheduler can pass; in a run that serves on after it has sent, where that ends before the targets let it."""
        most_rps = self._screen.most_rps(candidate)
        sends_s = self.question.requests_at(most_rps) / most_rps
        sample = self.question.load.sample
        is_ended = float(np.max(sample.ttft_s)) <= sends_s and math.isfinite(float(np.max(sample.tpot_s)))
        return most_rps * self.question.overhang(most_rps) if is_ended else most_rps

    def at(self, candidate: Candidate, rate_rps: float, *, may_cut: bool = False, times: int = 1) -> Figures:
        """Figures at `rate_rps`. `may_cut`: where it does not hold, only that and about by how much is wanted.

        `times`: the run is so many times as long as usual.
        """
        key = (candidate, rate_rps, may_cut, times)
        if key not in self._kept:
            self.num_runs += 1
            self._kept[key] = figures_at(self.question, candidate, rate_rps, may_cut, times)
            self.num_cut += self._kept[key].is_cut
        return self._kept[key]


def _crossing_rps(low: Figures | None, high: Figures | None, level: float) -> float:
    """Where a straight line from `low`, which holds, to `high`, which does not, is at the level."""
    if low is None:
        return 0.0
    if high is None:
        return low.rate_rps
    return low.rate_rps + (high.rate_rps - low.rate_rps) * (low.attainment - level) / (low.attainment - high.attainment)


def _next_rps(low: Figures | None, high: Figures | None, level: float, tolerance: float, failed: int) -> float | None:
    """Where to look next, between a rate that holds and one that does not, or beyond the only one of them; None: near enough.

    Up in steps that shrink as the share does. Down to what was still served in class: requests that cannot be in time are refused, so
    that an overloaded cluster serves about its goodput. Where nearly all that was sent was served, that says little (long prompts may be
    late at any rate): down in steps that grow then, and where a straight line crosses the level. `failed`: rates in a row that did not
    hold.
    """
    if high is None:
        assert low is not None
        return low.rate_rps * next(step for share, step in _STEPS_UP if low.attainment >= share)
    served_rps = high.rate_rps * high.attainment / level
    if low is None:
        furthest = _FURTHEST_CUT if high.is_cut else _FURTHEST
        return max(high.rate_rps / furthest, min(high.rate_rps / (1 + tolerance) ** failed, served_rps))
    # Between rates that are near to each other the share falls nearly straight: a crossing next to one of them is not far off.
    crossing_rps = _crossing_rps(low, high, level)
    is_next_to_one = crossing_rps <= low.rate_rps * (1 + tolerance) or crossing_rps * (1 + tolerance) >= high.rate_rps
    apart = _STRAIGHT if high.attainment >= _CLIFF * level else _STEEP
    if is_next_to_one and high.rate_rps <= low.rate_rps * (1 + tolerance) ** apart:
        return None
    # Without admission what it serves late says nothing.
    if high.attainment < _COLLAPSED or failed > 1:
        served_rps = math.sqrt(low.rate_rps * high.rate_rps)
    elif served_rps * (1 + tolerance) >= high.rate_rps:
        served_rps = crossing_rps
    return max(low.rate_rps * (1 + tolerance), min(high.rate_rps / (1 + tolerance), served_rps))


def figures_at(question: Question, candidate: Candidate, rate_rps: float, may_cut: bool = False, times: int = 1) -> Figures:
    """One simulation, `times` as long as usual.

    `may_cut`: it ends once more have missed than may of all, and clearly more than of those sent by then: it does not hold whatever comes.
    """
    topology = topology_of(question, candidate)
    requests = question.load.sent(rate_rps, times * question.requests_at(rate_rps))
    links = min(pool.tp for pool in candidate.pools.values())
    settings = SimSettings(
        link_bandwidth=question.link.usable * links,
        kv_bytes_per_token=question.wire_bytes_per_token(links),
        timeout_s=TIMEOUT_S,
        prefix_block_tokens=question.load.trace.prefix_block_tokens,
        max_tokens=max(r.output_tokens for r in requests),
        keep_tokens=False,
    )
    first = int(len(requests) * WARM_UP)
    may_miss = 1 - question.level + 1e-9 if may_cut else math.inf
    miss = partial(_miss, {c.name: c for c in question.load.classes})
    simulation = Simulation(topology, requests, settings)
    outcomes: list[Outcome] = []
    missed: Counter[str] = Counter()
    sent = len(requests)
    with contextlib.closing(simulation.stream()) as stream:
        for outcome in stream:
            outcomes.append(outcome)
            if outcome.index >= first:
                missed[miss(outcome)] += 1
                num_missed = missed.total() - missed[""]
                if num_missed > may_miss * (len(requests) - first):
                    by_then = bisect.bisect(requests, outcome.end_s or 0.0, key=lambda r: r.arrival_s)
                    if num_missed > _CLEARLY * may_miss * (by_then - first):
                        sent = by_then
                        break
    outcomes.sort(key=operator.attrgetter("index"))
    return _figures(candidate, rate_rps, simulation.report(outcomes), first, missed, sent - first)


def _figures(candidate: Candidate, rate_rps: float, report: SimReport, first: int, missed: Counter[str], counted: int) -> Figures:
    """`counted` requests, from number `first` on; the others found the cluster emptier."""
    outcomes = report.outcomes
    whole = [o for o in outcomes if o.is_whole]
    settled = [o for o in outcomes if o.index >= first]
    busy_s: dict[str, float] = defaultdict(float)
    decoded: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for worker in report.workers:
        busy_s[worker.role] += worker.busy_s
        decoded[worker.role] += worker.decode_tokens
        steps[worker.role] += worker.steps
    refused = sum(missed[what] for what in _REFUSED)
    is_cut = missed.total() < counted
    attainment = missed[""] / counted
    if is_cut:  # some are under way: they do as the other admitted ones
        admitted = missed.total() - refused
        attainment = (1 - refused / counted) * (missed[""] / admitted if admitted else 1.0)
    return Figures(
        rate_rps=rate_rps,
        attainment=attainment,
        ttft=summarise([o.ttft_s for o in settled if o.ttft_s is not None]),
        tpot=summarise([o.tpot_s for o in settled if o.tpot_s is not None]),
        missed={what: missed[what] for what in (*_FIRST, *_NEXT, "refused", "late")},
        counted=counted,
        busy={name: min(1.0, busy_s[name] / pool.count / max(report.end_s, 1e-9)) for name, pool in candidate.pools.items()},
        batch={name: decoded[name] / max(1, steps[name]) for name in candidate.pools},
        concurrency=report.mean_in_flight,
        e2e_s=math.fsum([o.end_s - o.sent_s for o in whole if o.end_s is not None]) / max(1, len(whole)),
        span_s=outcomes[-1].sent_s - outcomes[0].sent_s,
        preemptions=report.num_preemptions,
        is_cut=is_cut,
    )


def _miss(classes: Mapping[str, SloClass], o: Outcome) -> str:
    """What kept it out of its class; empty: nothing."""
    ttft_s, tpot_s = classes[o.slo_class].ttft_s, classes[o.slo_class].tpot_s
    if o.status == "rejected":
        said = o.message or ""
        if "first token" in said or "any more" in said:  # policy/admission.py's and policy/dispatch.py's words
            return "refused_ttft"
        return "refused_tpot" if "per token" in said else "refused"
    if not o.is_whole:
        return "late"
    if ttft_s is not None and o.ttft_s is not None and o.ttft_s > ttft_s:
        return "ttft"
    return "tpot" if tpot_s is not None and o.tpot_s is not None and o.tpot_s > tpot_s else ""


def best_of(trials: Sequence[Trial]) -> Trial:
    """The one with the highest goodput; of equal ones the first."""
    return max(trials, key=lambda t: t.goodput_rps)
