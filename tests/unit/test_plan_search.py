"""The planner's search leaves most of the simulations out, and finds the plan that all of them would find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from disagg.config import SloClass
from disagg.plan.candidate import DECODE_CHUNK, PREFILL_CHUNKS, Candidate, topology_of
from disagg.plan.planner import _first_verdict, make_plan
from disagg.plan.question import Question
from disagg.plan.screen import Screen
from disagg.plan.search import adaptive_of, colocated_candidates, neighbours, screened
from disagg.plan.trial import Figures, Trials
from disagg.sim.goodput import find_goodput
from disagg.slo import summarise
from disagg.types import Mode, Role
from tests.plan_rig import question


def every_candidate(screen: Screen) -> list[Candidate]:
    """All counts and chunks, and all pairs of pools with every pair of workers as a route."""
    pairs = [s.candidate for s in screened(screen) if s.candidate.prefill is not None]
    chunked = [replace(c, prefill=replace(c.prefill, chunk=chunk)) for c in pairs for chunk in PREFILL_CHUNKS if c.prefill is not None]
    adaptive = [found for c in chunked if (found := adaptive_of([c], screen.question)) is not None]
    return [*colocated_candidates(screen), *chunked, *adaptive]


@pytest.mark.parametrize("asked", [{"outputs": 60}, {"inputs": 3000, "outputs": 30}], ids=["even", "long-prompts"])
def test_the_search_finds_the_winner_of_all_simulations(asked: dict[str, Any]) -> None:
    given = question(**asked)
    screen, trials = Screen(given), Trials(given)
    carried = {}
    for candidate in every_candidate(screen):
        found = find_goodput(lambda rate, c=candidate: trials.at(c, rate).attainment, start=10.0, tolerance=0.08)  # type: ignore[misc]
        carried[candidate] = found.rate
        most_rps = screen.most_rps(candidate)
        assert found.rate <= most_rps * given.overhang(most_rps), "what no scheduler can pass"
    plan = make_plan(given, with_flips=False)
    assert plan.runs < 0.6 * trials.num_runs
    kinds = {kind: max(rate for c, rate in carried.items() if (c.mode is Mode.COLOCATED) == kind) for kind in (True, False)}
    assert plan.disagg is not None
    for trial, kind in ((plan.colocated, True), (plan.disagg, False)):
        assert not trial.is_rough
        assert trial.goodput_rps >= 0.9 * kinds[kind]
    if max(kinds.values()) > 1.15 * min(kinds.values()):
        assert (plan.chosen.candidate.mode is Mode.COLOCATED) == (kinds[True] > kinds[False])


class Curve(Trials):
    """Trials of a plan whose share in class is a function of the rate."""

    def __init__(self, share: Callable[[float], float], asked: Question | None = None, counted: int = 100) -> None:
        super().__init__(asked or question())
        self._share = share
        self._counted = counted

    def at(self, candidate: Candidate, rate_rps: float, *, may_cut: bool = False, times: int = 1) -> Figures:
        self.num_runs += 1
        none = summarise([])
        share = self._share(rate_rps) + (0.03 if times > 1 else 0.0)
        return Figures(rate_rps, share, none, none, {}, self._counted, {}, {}, 0.0, 0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("share", "most_runs"),
    [
        (lambda rate: 0.9 - 0.08 * (rate / 10 - 1), 8),  # long prompts are late at any rate
        (lambda rate: 1 - 0.1 * (rate / 10) ** 6 if rate < 10 else 0.9 * 10 / rate, 5),  # what cannot be in time is refused
        (lambda rate: 1 - 0.1 * (rate / 10) ** 6 if rate < 10 else max(0.0, 0.9 - 4 * (rate / 10 - 1)), 8),  # a queue
    ],
    ids=["plateau", "refusals", "queue"],
)
@pytest.mark.parametrize("start_rps", [7.0, 10.5, 15.0])
def test_a_goodput_is_found_in_few_runs(share: Callable[[float], float], most_runs: int, start_rps: float) -> None:
    curve = Curve(share)
    (candidate,) = list(colocated_candidates(Screen(curve.question)))[:1]
    found = curve.goodput(candidate, start_rps, tolerance=0.04)
    assert found.goodput_rps == pytest.approx(10, rel=0.04)
    assert curve.num_runs <= most_runs


def test_a_close_loss_in_a_short_run_is_looked_at_again() -> None:
    """Of few requests a share is a matter of chance: in a run twice as long it is 0.03 higher here."""
    trials = Curve(lambda rate: 0.98 - 0.01 * rate)
    (candidate,) = list(colocated_candidates(Screen(trials.question)))[:1]
    close = trials.goodput(candidate, 1.0, rival_rps=9.0)
    assert not close.is_rough
    assert close.goodput_rps > 9.0
    before = trials.num_runs
    assert trials.goodput(candidate, 1.0, rival_rps=20.0).is_rough
    assert trials.num_runs == before + 1, "far behind"


def test_a_long_run_that_only_just_holds_is_not_made_again() -> None:
    """Of many requests a share this near is at the level; of few it may be chance, and another rate is tried."""
    (candidate,) = list(colocated_candidates(Screen(question())))[:1]
    long, short = (Curve(lambda rate: 1 - 0.01 * rate, counted=counted) for counted in (900, 100))
    found = long.goodput(candidate, 8.5)
    assert long.num_runs == 1
    assert found.goodput_rps == pytest.approx(8.5 * 0.915 / 0.9)
    assert found.beyond is found.best
    assert not found.is_rough
    assert short.goodput(candidate, 8.5).goodput_rps == pytest.approx(10, rel=0.04)
    assert short.num_runs > 1


def test_neighbours_leave_no_gpus_idle() -> None:
    given = question(gpus=32, degrees=(2, 4))
    screen = Screen(given)
    pairs = {
        (c.prefill.count, c.prefill.tp, c.decode.count, c.decode.tp): c
        for s in screened(screen, Mode.DISAGG)
        if (c := s.candidate).prefill is not None and c.decode is not None
    }
    kind = next(k for k in pairs if k[1] != k[3] and min(k[0], k[2]) > 1 and max(k[0], k[2]) > 4)
    found = neighbours(screen, pairs[kind])
    assert len(found) == 2
    assert all(c.gpus == 32 for c in found)


def test_the_first_answer_compares_what_was_served_in_class() -> None:
    given = question()
    candidates = [next(s.candidate for s in screened(Screen(given)) if s.candidate.mode is mode) for mode in (Mode.COLOCATED, Mode.DISAGG)]
    looks = [replace(Curve(lambda rate: 1.0).at(candidates[0], 10.0), attainment=share) for share in (0.45, 0.9)]
    said = _first_verdict(given, candidates, looks)
    assert said.startswith("disaggregate: 100% more goodput")
    assert all(c.name in said for c in candidates)


def test_without_a_target_for_first_tokens_the_workers_time_is_the_limit() -> None:
    """A run is too short for a queue to be missed by anybody: any rate would hold in it."""
    trials = Curve(lambda rate: 1.0, question(slo=SloClass(name="batch", tpot_ms=100)))
    (candidate,) = list(colocated_candidates(Screen(trials.question)))[:1]
    found = trials.goodput(candidate, 1.0)
    assert found.goodput_rps == Screen(trials.question).most_rps(candidate)
    assert "workers' time" in found.limit()


def test_adaptive_is_tried_on_the_best_alike_pools_where_the_best_pair_is_unlike() -> None:
    given = question(model="llama-3.1-8b", gpus=3, degrees=(1, 2))
    pairs = [s.candidate for s in screened(Screen(given), Mode.DISAGG)]
    tp = {(c.prefill.tp, c.decode.tp): c for c in reversed(pairs) if c.prefill is not None and c.decode is not None}
    found = adaptive_of([tp[2, 1], tp[1, 1]], given)
    assert found is not None
    assert (found.mode, found.prefill and found.prefill.tp, found.decode and found.decode.tp) == (Mode.ADAPTIVE, 1, 1)
    assert adaptive_of([tp[2, 1]], given) is None


def test_adaptive_plans_take_large_prompts_and_keep_their_mixed_steps_inside_tpot() -> None:
    given = question(slo=SloClass(name="chat", ttft_ms=500, tpot_ms=40))
    pair = next(s.candidate for s in screened(Screen(given), Mode.DISAGG) if s.candidate.prefill.tp == s.candidate.decode.tp)  # type: ignore[union-attr]
    found = adaptive_of([pair], given)
    assert found is not None
    assert pair.prefill is not None
    for role in (Role.PREFILL, Role.DECODE):
        settings = topology_of(given, found).simulated(role)
        assert (settings.mixed_step_ms, settings.max_num_batched_tokens) == (36.0, pair.prefill.chunk)
    assert "36 ms beside decodes" in found.name
    without = adaptive_of([pair], question(slo=SloClass(name="chat", ttft_ms=500)))
    assert without is not None
    assert without.decode is not None
    assert (without.decode.mixed_step_ms, without.decode.chunk) == (None, DECODE_CHUNK)
