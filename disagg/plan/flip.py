"""How far the verdict is from turning: both winners again under other lengths and with cached prompts. Pure.

The winners' workers stay as they are; the workload changes. Both are simulated at one rate between the goodputs that the formulas foresee
for them (as far above or below the simulated ones as before): who has the larger share inside its class there is ahead. The rate itself
needs no simulation: the goodputs tell which rates each plan carries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from disagg.plan.load import Load, stretched, with_cached
from disagg.plan.question import Question
from disagg.plan.screen import Screen
from disagg.plan.trial import Mapped, Trial, figures_at

_FACTORS = (0.25, 0.35, 0.5, 0.7, 1.4, 2.0, 2.8, 4.0)


@dataclass(frozen=True, slots=True)
class Flip:
    """One change of the workload: the share inside its class of the best plan with two pools and of the best colocated one, at one rate."""

    change: str
    rate_rps: float
    disagg: float
    colocated: float

    @property
    def prefers_disagg(self) -> bool:
        return self.disagg > self.colocated


def flips(question: Question, disagg: Trial, colocated: Trial, screen: Screen, mapped: Mapped = map) -> tuple[Flip, ...]:
    """The winners under prompts and answers 20 % shorter and longer, and with half of each prompt cached."""
    if not (disagg.goodput_rps and colocated.goodput_rps):
        return ()
    load = question.load
    changes: list[tuple[str, Load]] = [
        ("prompts 20 % shorter", stretched(load, inputs=0.8)),
        ("prompts 20 % longer", stretched(load, inputs=1.2)),
        ("answers 20 % shorter", stretched(load, outputs=0.8)),
        ("answers 20 % longer", stretched(load, outputs=1.2)),
        ("half of each prompt cached", with_cached(load, 0.5)),
    ]
    changes = [(change, other) for change, other in changes if not _is_too_long(question, other)]
    winners = (disagg, colocated)
    before = [screen.goodput_rps(t.candidate) for t in winners]
    rates = [_rate_between(Screen(question.with_load(other)), winners, before) for _, other in changes]
    jobs = [(question.with_load(other), t.candidate, rate) for (_, other), rate in zip(changes, rates, strict=True) for t in winners]
    shares = [figures.attainment for figures in mapped(figures_at, *zip(*jobs, strict=True))]
    pairs = zip(shares[::2], shares[1::2], strict=True)
    return tuple(Flip(change, rate, *pair) for (change, _), rate, pair in zip(changes, rates, pairs, strict=True))


def _rate_between(after: Screen, winners: tuple[Trial, Trial], before: list[float]) -> float:
    """A rate between what the winners will carry, by the formulas' trend; `before`: what the formulas gave them."""
    expected = [t.goodput_rps * (after.goodput_rps(t.candidate) / b if b else 1.0) for t, b in zip(winners, before, strict=True)]
    return max(math.sqrt(expected[0] * expected[1]), max(expected) / 2)  # a plan that the change breaks loses at any rate


def turning_points(question: Question, disagg: Trial, colocated: Trial, screen: Screen) -> tuple[str, ...]:
    """By how much prompts or answers must change for the ratio of goodputs to pass 1, by the formulas' trend alone."""
    own = _estimated_ratio(screen, disagg, colocated)
    if not (own and disagg.goodput_rps and colocated.goodput_rps):
        return ()
    simulated = disagg.goodput_rps / colocated.goodput_rps
    said = []
    for what in ("inputs", "outputs"):
        for factor in sorted(_FACTORS, key=lambda f: max(f, 1 / f)):
            other = stretched(question.load, **{what: factor})
            if _is_too_long(question, other):
                continue
            ratio = _estimated_ratio(Screen(question.with_load(other)), disagg, colocated)
            if ratio and (ratio / own * simulated > 1) != (simulated > 1):
                said.append(f"{'prompts' if what == 'inputs' else 'answers'} about {factor:g} times as long")
                break
    return tuple(said)


def _is_too_long(question: Question, load: Load) -> bool:
    limit = question.shape.max_context_tokens
    return bool(limit) and load.longest_tokens > limit


def _estimated_ratio(screen: Screen, disagg: Trial, colocated: Trial) -> float | None:
    below = screen.goodput_rps(colocated.candidate)
    return screen.goodput_rps(disagg.candidate) / below if below else None
