"""The inverse question: how many GPUs for a rate? Pure.

The formulas' estimate finds the neighbourhood and one simulated goodput corrects it; simulations at the rate itself then find the smallest
number of GPUs at which a plan keeps the wanted share inside its class. Little's law says what is in flight then. A rate too large
to simulate is cut into equal cells, each a cluster of its own behind its own router; one router over all of them does no worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from disagg.errors import ConfigError
from disagg.plan.candidate import Candidate
from disagg.plan.question import Question, check
from disagg.plan.screen import Screen
from disagg.plan.search import Screened, screened
from disagg.plan.trial import Figures, Mapped, Trials
from disagg.types import Mode

MOST_GPUS = 1 << 16
CELL_GPUS = 16  # of one kind of plan; what needs more is cut into cells
_TRIES = 4
_UNTROUBLED = 0.97  # share in class from which on a run says little of how much more there could be
Say = Callable[[str], None]


def _nobody(text: str) -> None:
    """Hears it."""


@dataclass(frozen=True, slots=True)
class Size:
    """`cells` equal clusters of `candidate` carry the rate. `figures`: of one of them, at its part of the rate."""

    candidate: Candidate
    cells: int
    figures: Figures
    runs: int

    @property
    def gpus(self) -> int:
        return self.cells * self.candidate.gpus


def find_sizes(question: Question, rate_rps: float, say: Say = _nobody, mapped: Mapped = map) -> list[Size]:
    """The fewest GPUs for `rate_rps`, one plan of each kind, fewest first. Raises ConfigError where no number of GPUs would do.

    `say` hears what is being done. `mapped`: how both kinds are found.
    """
    if not (rate_rps > 0 and math.isfinite(rate_rps)):
        raise ConfigError(key="rate", value=rate_rps, expected="requests/s above 0")
    say(f"how many GPUs carry {rate_rps:.4g} requests/s")
    of_kind = partial(_sized, say=say) if mapped is map else _sized  # another process cannot be heard meanwhile
    both = mapped(of_kind, [question] * 2, [rate_rps] * 2, [Mode.COLOCATED, Mode.DISAGG])
    found: list[Size] = [size for size in both if size is not None]
    if not found:
        raise ConfigError(key="slo", value=question.load.trace.name, expected="targets that some number of GPUs keeps")
    return sorted(found, key=lambda s: (s.gpus, s.candidate.name))


def _sized(question: Question, rate_rps: float, mode: Mode, say: Say = _nobody) -> Size | None:
    return _Sizing(question, mode, rate_rps, say).run()


class _Sizing:
    """For one kind of plan: from the formulas' number of GPUs to the smallest that the simulator accepts."""

    def __init__(self, question: Question, mode: Mode, rate_rps: float, say: Say) -> None:
        self._question = question
        self._mode = mode
        self._rate_rps = rate_rps
        self._say = say
        self._screened_at: dict[int, list[Screened]] = {}
        self._trials = Trials(question)  # of any number of GPUs: the same plan carries the same in each

    def run(self) -> Size | None:
        step = self._step()
        gpus = self._estimate(step)
        if gpus is None:
            return None
        gpus = self._corrected(gpus, step)
        cells = max(1, math.ceil(gpus / max(step, CELL_GPUS)))
        least = step if self._mode is Mode.COLOCATED else 2 * step
        best = self._walk(max(least, math.ceil(gpus / cells / step) * step), step, least, self._rate_rps / cells)
        return None if best is None else replace(best, cells=cells, runs=self._trials.num_runs)

    def _corrected(self, gpus: int, step: int) -> int:
        """The estimate, by how much more or less one simulated cell carries than the formulas say."""
        cell = min(gpus, max(step, CELL_GPUS) // step * step)
        question = self._question.with_gpus(cell)
        first = self._ranked(question)[:1]
        if not first:
            return gpus
        self._say(f"simulating {first[0].candidate.name}")
        carried = self._carried(question, first[0])
        return max(step, math.ceil(cell * self._rate_rps / carried / step) * step) if carried else gpus

    def _carried(self, question: Question, plan: Screened) -> float:
        """About the rate that a plan carries: what it serves in class where it has some trouble, over the share that must be.

        Near enough to begin the walk at: that settles it.
        """
        rate_rps = Screen(question).likely_rps(plan.candidate, plan.estimate_rps)
        carried = 0.0
        for _ in range(_TRIES):
            served = self._trials.at(plan.candidate, rate_rps).attainment
            carried = rate_rps * served / question.level
            if served < _UNTROUBLED:
                break
            rate_rps *= 1.4
        return min(carried, self._trials.most_rps(plan.candidate))

    def _walk(self, gpus: int, step: int, least: int, rate_rps: float) -> Size | None:
        """Down while it holds, up until it does."""
        best: Size | None = None
        for _ in range(_TRIES):
            size = self._holds(gpus, rate_rps)
            if size is not None:
                best = size
                gpus -= step
                if gpus < least:
                    break
            elif best is not None:
                break
            else:
                gpus += step * max(1, round(gpus / step * 0.15))
        return best

    def _holds(self, gpus: int, rate_rps: float) -> Size | None:
        question = self._question.with_gpus(gpus)
        try:
            ranked = self._ranked(question)
        except ConfigError:
            return None
        for each in ranked[:2]:
            if self._trials.most_rps(each.candidate) < rate_rps:
                continue
            self._say(f"simulating {each.candidate.name} at {rate_rps:.1f} requests/s")
            figures = self._trials.at(each.candidate, rate_rps, may_cut=True)
            if figures.attainment >= question.level:
                return Size(each.candidate, 1, figures, 0)
        return None

    def _ranked(self, question: Question) -> list[Screened]:
        if question.gpus not in self._screened_at:
            self._screened_at[question.gpus] = screened(Screen(question), self._mode)
        return [s for s in self._screened_at[question.gpus] if s.estimate_rps > 0]

    def _step(self) -> int:
        """GPUs by which a cluster grows: the smallest degree that holds the model."""
        check(self._question.with_gpus(self._question.gpus_per_host * 2))
        return min(self._question.with_gpus(self._question.gpus_per_host * 2).usable_degrees(self._question.device))

    def _estimate(self, step: int) -> int | None:
        """GPUs by the formulas: what a cluster of one or two hosts carries, scaled to the rate."""
        gpus = 2 * step
        while gpus <= 2 * self._question.gpus_per_host:
            ranked = self._ranked(self._question.with_gpus(gpus))
            if ranked:
                carried = ranked[0].estimate_rps
                if carried >= self._rate_rps or gpus == 2 * self._question.gpus_per_host:
                    wanted = gpus * self._rate_rps / carried
                    return min(MOST_GPUS, max(step if self._mode is Mode.COLOCATED else 2 * step, math.ceil(wanted / step) * step))
            gpus *= 2
        return None
