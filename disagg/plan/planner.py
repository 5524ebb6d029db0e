"""The planner: screen every plan by formulas, simulate the best few of each kind, compare the winners. Pure; same question, same answer.

screened ──> the best of disagg and of colocated, one run each ──> so far
                └──> the best two of each ──simulated──> their neighbours ──> adaptive on the best alike workers
                                                                                 └──> verdict, its distance from flipping

Simulations are what takes time, so: what cannot beat the best of its kind by arithmetic alone is not simulated (Screen.most_rps), and
what does not hold just above the best one's goodput is simulated once. What the formulas hold for clearly worse (HOPE) is left out, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from disagg.errors import ConfigError
from disagg.plan.candidate import Candidate
from disagg.plan.flip import Flip, flips, turning_points
from disagg.plan.question import Question, check
from disagg.plan.screen import Screen
from disagg.plan.search import Screened, adaptive_of, neighbours, screened
from disagg.plan.trial import Figures, Mapped, Trial, Trials, best_of, figures_at
from disagg.types import Mode

FINALISTS = 2  # of each kind
MOST_MOVES = 3  # from a winner to a better neighbour
SHOWN = 5
TOLERANCE = 0.04  # of a goodput
HOPE = 1.2  # by so much the formulas may hold a plan for less than another, beside what they were off there, and it is simulated
CLEAR = 0.05  # by so much a goodput must be higher, for a plan to be called better: the noise of a search is about half of it
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """`trials`: best goodput first, the best of each kind among those that are shown. `at_rate`: figures of those at the workload's rate,
    or at the goodput where that is lower.

    `disagg`, `colocated`: the best of each kind; `disagg` may be adaptive, and is None where no pair of pools fits the GPUs.
    `turns`: changes that would turn the verdict, by the formulas' trend. `screened`: plans that the formulas saw; `runs`: simulations;
    `cut`: of them, ended early.
    """

    question: Question
    trials: tuple[Trial, ...]
    at_rate: tuple[Figures | None, ...]
    disagg: Trial | None
    colocated: Trial
    chosen: Trial
    verdict: str
    flips: tuple[Flip, ...]
    turns: tuple[str, ...]
    screened: int
    runs: int
    cut: int

    @property
    def ratio(self) -> float | None:
        """Goodput of the best plan with two pools over that of the best colocated plan."""
        if self.disagg is None or self.colocated.goodput_rps == 0:
            return None
        return self.disagg.goodput_rps / self.colocated.goodput_rps


def make_plan(
    question: Question,
    say: Say = lambda text: None,
    *,
    tell_verdict: Say = lambda text: None,
    with_flips: bool = True,
    mapped: Mapped = map,
) -> Plan:
    """Answer the question. `say` hears what is being done, `tell_verdict` the verdict: after one run of each kind, and when it stands,
    before steps that only add to it.

    `mapped`: how simulations that do not depend on each other are run.

    Raises ConfigError for what no plan can do, naming what stands in the way.
    """
    check(question)
    say("screening")
    screen = Screen(question)
    found = screened(screen)
    if found[0].estimate_rps == 0:
        raise ConfigError(_nothing_keeps(question, screen, found), key="slo", expected="targets that an idle cluster keeps")
    say(f"{len(found)} plans screened; simulating the best of each kind")
    question = replace(question, span_s=question.requests / screen.likely_rps(found[0].candidate, found[0].estimate_rps))
    kinds = [[s for s in found if s.candidate.mode is mode] for mode in (Mode.COLOCATED, Mode.DISAGG)]
    looks: list[Figures | None] = [None, None]
    if all(kind and kind[0].estimate_rps for kind in kinds):
        looks = list(mapped(first_look, [question] * 2, kinds))
        tell_verdict(_first_verdict(question, [kind[0].candidate for kind in kinds], looks))
    # Another process cannot be heard meanwhile.
    first, second = mapped(partial(raced, say=say) if mapped is map else raced, [question] * 2, kinds, looks)
    colocated, two_pools = first.best, second.best
    trials, runs, cut = [*first.trials, *second.trials], first.runs + second.runs, first.cut + second.cut
    assert colocated is not None
    # Adaptive does not need the ratio or the degrees that are best for roles kept strictly: where those want unlike pools, the next best.
    split = [*[t.candidate for t in _ordered(second.trials, ())], *[s.candidate for s in kinds[1]]]
    if two_pools is not None and (adaptive := adaptive_of(split, question)) is not None:
        say(f"{runs} simulations; now {adaptive.name}")
        runner = Trials(question)
        trial = runner.goodput(adaptive, two_pools.goodput_rps or 1.0, tolerance=TOLERANCE, rival_rps=two_pools.goodput_rps)
        runs, cut = runs + runner.num_runs, cut + runner.num_cut
        trials.append(trial)
        two_pools = best_of([two_pools, trial])
    chosen, verdict = judge(two_pools, colocated)
    tell_verdict(verdict)
    if chosen.goodput_rps == 0:
        raise ConfigError(_nothing_holds(question, trials), key="slo", expected="targets or GPUs with more room")
    ordered = _ordered(trials, [t for t in (two_pools, colocated) if t is not None])
    say(f"{runs} simulations; now the best ones at the workload's rate")
    at_rate = _at_rate(question, ordered[:SHOWN], mapped)
    runs += sum(at is not None for at in at_rate)
    duels: tuple[Flip, ...] = ()
    turns: tuple[str, ...] = ()
    if with_flips and two_pools is not None:
        say(f"{runs} simulations; now both winners under other lengths")
        duels = flips(question, two_pools, colocated, screen, mapped)
        turns = turning_points(question, two_pools, colocated, screen)
    return Plan(question, ordered, at_rate, two_pools, colocated, chosen, verdict, duels, turns, len(found), runs + 2 * len(duels), cut)


def first_look(question: Question, ranked: Sequence[Screened]) -> Figures:
    """One run of what the formulas hold for the best."""
    screen = Screen(question)
    return Trials(question, screen).first(ranked[0].candidate, _start_rps(screen, ranked[0]))


def _first_verdict(question: Question, candidates: Sequence[Candidate], looks: Sequence[Figures | None]) -> str:
    """Who is ahead after one run each, by what they served in class over the share that must be: less than the goodput, where all hold."""
    colocated, disagg = (
        Trial(candidate, at.output_rps / question.level, None, at, 1, is_rough=True)
        for candidate, at in zip(candidates, looks, strict=True)
        if at is not None
    )
    return f"{judge(disagg, colocated)[1]}, after one simulation of {colocated.candidate.name} and one of {disagg.candidate.name}"


def _start_rps(screen: Screen, each: Screened) -> float:
    """Where to look first."""
    return screen.likely_rps(each.candidate, each.estimate_rps) if each.estimate_rps else 1.0


def _ordered(trials: Sequence[Trial], winners: Sequence[Trial]) -> tuple[Trial, ...]:
    """Best goodput first, but the best of each kind among those that are shown."""
    ordered = sorted(trials, key=lambda t: (-t.goodput_rps, t.is_rough, t.candidate.name))
    for winner in winners:
        if winner in ordered[SHOWN:]:
            ordered.remove(winner)
            ordered.insert(SHOWN - 1, winner)
    return tuple(ordered)


def _at_rate(question: Question, trials: Sequence[Trial], mapped: Mapped) -> tuple[Figures | None, ...]:
    """Of each plan at the workload's rate, or at its goodput where that is lower; None where nothing holds."""
    rates = [min(question.load.rate_rps, trial.goodput_rps) for trial in trials]
    jobs = [(question, trial.candidate, rate) for trial, rate in zip(trials, rates, strict=True) if rate]
    found = iter(mapped(figures_at, *zip(*jobs, strict=True)))
    return tuple(next(found) if rate else None for rate in rates)


@dataclass(frozen=True, slots=True)
class Raced:
    """What came of one kind of plan: the best one (None: there is no such plan), all that were simulated, and in how many runs.

    `cut`: runs that ended early.
    """

    best: Trial | None
    trials: tuple[Trial, ...]
    runs: int
    cut: int


def raced(question: Question, ranked: Sequence[Screened], look: Figures | None = None, say: Say = lambda text: None) -> Raced:
    """Simulate the first few of one kind, then whatever beats the best of them one step away. `look`: what `first_look` found."""
    screen = Screen(question)
    runner = Trials(question, screen)
    if look is not None:
        runner.keep(ranked[0].candidate, look)
    race = _Race(screen, runner, say)
    best = race.run(ranked)
    return Raced(best, tuple(race.trials), runner.num_runs, runner.num_cut)


class _Race:
    """Simulates candidates; keeps what it found."""

    def __init__(self, screen: Screen, trials: Trials, say: Say) -> None:
        self.trials: list[Trial] = []
        self._screen = screen
        self._runner = trials
        self._say = say

    def run(self, ranked: Sequence[Screened]) -> Trial | None:
        """The best of one kind: the finalists, then whatever beats them one step away."""
        finalists = [s for s in ranked[:FINALISTS] if s.estimate_rps > 0] or list(ranked[:1])
        if not finalists:
            return None
        best: Trial | None = None
        for each in finalists:
            if best is None:
                best = self.try_out(each.candidate, _start_rps(self._screen, each))
            elif self._may_win(each, best):
                best = best_of([best, self.try_out(each.candidate, best.goodput_rps or _start_rps(self._screen, each), best)])
        assert best is not None
        for _ in range(MOST_MOVES):
            before = best
            near = [Screened(c, self._screen.goodput_rps(c)) for c in neighbours(self._screen, before.candidate)]
            for each in sorted(near, key=lambda s: -s.estimate_rps):
                if self._may_win(each, best):
                    best = best_of([best, self.try_out(each.candidate, best.goodput_rps or 1.0, best)])
            if best is before:
                break
        return best

    def _may_win(self, each: Screened, rival: Trial) -> bool:
        """Whether the formulas, as far as they were off for the rival, leave it a chance, and its workers' time does.

        The latter whatever a scheduler does, in a run that serves on after it has sent.
        """
        expected_rps = self._screen.goodput_rps(rival.candidate)
        if each.estimate_rps * HOPE < expected_rps and rival.goodput_rps:
            return False
        most_rps = self._screen.most_rps(each.candidate)
        return most_rps * self._screen.question.overhang(most_rps) > rival.goodput_rps

    def try_out(self, candidate: Candidate, start_rps: float, rival: Trial | None = None) -> Trial:
        """Its goodput; where a rival is better, just that."""
        known = next((t for t in self.trials if t.candidate == candidate), None)
        if known is not None:
            return known
        ahead = "" if rival is None else f"; ahead: {rival.candidate.name} with {rival.goodput_rps:.3g}/s"
        self._say(f"{self._runner.num_runs} simulations; now {candidate.name}{ahead}")
        trial = self._runner.goodput(candidate, start_rps, tolerance=TOLERANCE, rival_rps=rival.goodput_rps if rival else None)
        self.trials.append(trial)
        return trial


def judge(disagg: Trial | None, colocated: Trial) -> tuple[Trial, str]:
    """(the plan to take, why). Where both are level the simpler one."""
    if disagg is None:
        return colocated, "colocated: the GPUs do not make two pools"
    c, d = colocated.goodput_rps, disagg.goodput_rps
    kind = "adaptive" if disagg.candidate.mode is Mode.ADAPTIVE else "disaggregate"
    if c == 0 or d > c * (1 + CLEAR):
        more = f"{d / c - 1:.0%} more goodput than the best colocated plan" if c else "no colocated plan keeps the targets"
        return disagg, f"{kind}: {more} ({d:.2f} against {c:.2f} requests/s)"
    if d < c * (1 - CLEAR):
        less = f"colocated has {c / d - 1:.0%} more goodput" if d else "no plan with two pools keeps the targets"
        return colocated, f"do not disaggregate: {less} ({c:.2f} against {d:.2f} requests/s)"
    return colocated, f"stay colocated: {c:.2f} requests/s against {d:.2f} is no clear difference, and it is the simpler plan"


def _nothing_keeps(question: Question, screen: Screen, found: Sequence[Screened]) -> str:
    """Why even an idle cluster misses the targets: what the expected times are."""
    s = screen.load.sample
    widest = max(question.usable_degrees(question.device))
    worker = screen.worker(question.device, widest)
    alone, _, _ = worker.prefill(s, 8192)
    prompt_s = float(sorted(alone)[int(question.level * (len(alone) - 1))])
    return (
        f"slo: none of {len(found)} plans keeps the targets, not even on idle workers: on {widest} x {question.device.name} expect "
        f"{prompt_s * 1e3:.1f} ms for a prompt of the {question.level:.0%} quantile, and {worker.decode_s(1, screen.context) * 1e3:.1f} ms "
        "for a token alone"
    )


def _nothing_holds(question: Question, trials: Sequence[Trial]) -> str:
    seen = "; ".join(f"{t.candidate.name}: {t.limit()}" for t in trials[:3])
    return f"slo: no simulated plan has {question.level:.0%} of the requests inside their class at any rate ({seen})"
