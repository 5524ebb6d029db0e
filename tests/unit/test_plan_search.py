"""The planner's search leaves most of the simulations out, and finds the plan that all of them would find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from disagg.plan.candidate import PREFILL_CHUNKS, Candidate
from disagg.plan.planner import make_plan
from disagg.plan.screen import Screen
from disagg.plan.search import adaptive_of, colocated_candidates, screened
from disagg.plan.trial import Trials
from disagg.sim.goodput import find_goodput
from disagg.types import Mode
from tests.plan_rig import question


def every_candidate(screen: Screen) -> list[Candidate]:
    """All counts and chunks, and all pairs of pools with every pair of workers as a route."""
    pairs = [s.candidate for s in screened(screen) if s.candidate.prefill is not None]
    chunked = [replace(c, prefill=replace(c.prefill, chunk=chunk)) for c in pairs for chunk in PREFILL_CHUNKS if c.prefill is not None]
    adaptive = [found for c in chunked if (found := adaptive_of(c, screen.question)) is not None]
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
