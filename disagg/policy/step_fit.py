"""A worker's speed, learned on line from the steps it reports. Pure.

Two learners on top of each other. The slow one fits the coefficients of `StepCost`: least squares of *relative* errors over the last few
hundred steps, never negative, and held near the prior where the steps say nothing. Steps with and without prompt tokens are counted and
remembered apart, so that an hour of decoding doesn't forget what a prompt costs, and a prompt among a hundred decode steps is not missed.
The fast one is a single factor on all of them: an exponential mean of measured over fitted, in logarithms. A worker that turns five times
slower is seen by it within 20 steps, long before the slow one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from disagg.policy.step_cost import GENERIC, StepCost
from disagg.types import StepRecord

FORGET = 1.0 / 300  # weight that a remembered step loses with each further one of its kind
PRIOR_WEIGHT = 0.5  # of the prior, in steps
FAST = 0.15  # weight of the newest step in the factor: 20 steps carry 96 %
QUICK = math.log(2.0)  # a step so much quicker than believed is no hiccup: those are slow. The worker has recovered,
RECOVERED = 0.5  # and the step weighs so much in the factor
EARLY_STEPS = 64  # of a kind, of which each is remembered; later every fourth one
NEWS = 0.1  # what others have learned counts for new when it differs by so much
SWEEPS = 8
MAX_RATIO = 20.0  # one step further off than this says no more than this
_MIN_RATIO = 1.0 / MAX_RATIO
_N = 6
_KEEP = 1.0 - FORGET
_PAIRS = [(i, j) for i in range(_N) for j in range(i, _N)]


class _Memory:
    """Decayed sums of the normal equations of one kind of step."""

    __slots__ = ("gram", "right")

    def __init__(self) -> None:
        self.gram = [0.0] * len(_PAIRS)
        self.right = [0.0] * _N

    def add(self, row: Sequence[float], weight: float) -> None:
        """One step; nothing of it is 0 by its kind."""
        products = [x * y for x, y in itertools.combinations_with_replacement(row, 2)]  # in the order of _PAIRS
        self.gram = [_KEEP * g + weight * product for g, product in zip(self.gram, products, strict=True)]
        self.right = [_KEEP * b + weight * x for b, x in zip(self.right, row, strict=True)]

    def add_decodes(self, row: Sequence[float], weight: float) -> None:
        """A step without prompts, of which there are ten times as many: written out, and without the products of what is 0."""
        base, over, _, _, decode, context = row
        g, r, w = self.gram, self.right, weight
        g[0] = _KEEP * g[0] + w * (base * base)
        g[4] = _KEEP * g[4] + w * (base * decode)
        g[5] = _KEEP * g[5] + w * (base * context)
        g[18] = _KEEP * g[18] + w * (decode * decode)
        g[19] = _KEEP * g[19] + w * (decode * context)
        g[20] = _KEEP * g[20] + w * (context * context)
        r[0], r[4], r[5] = _KEEP * r[0] + w * base, _KEEP * r[4] + w * decode, _KEEP * r[5] + w * context
        if over or g[6]:  # batches above the ridge
            g[1] = _KEEP * g[1] + w * (base * over)
            g[6] = _KEEP * g[6] + w * (over * over)
            g[9] = _KEEP * g[9] + w * (over * decode)
            g[10] = _KEEP * g[10] + w * (over * context)
            r[1] = _KEEP * r[1] + w * over


class StepFit:
    """The cost of one worker's steps.

    `num_steps` learned from, of which `num_prompt_steps` with prompt tokens; the last one reported at `last_s` (monotonic seconds).
    """

    __slots__ = (
        "_cost",
        "_factor_log",
        "_first_prior",
        "_mean_row",
        "_memories",
        "_own_values",
        "_pace_s",
        "_prior",
        "_ridge_tokens",
        "_scales",
        "_values",
        "last_s",
        "num_prompt_steps",
        "num_steps",
    )

    def __init__(self, prior: StepCost) -> None:
        self._ridge_tokens = prior.ridge_tokens
        given = (prior.base_s, prior.over_s, prior.token_s, prior.pair_s, prior.decode_s, prior.context_s)
        floor = (GENERIC.base_s, GENERIC.token_s, GENERIC.token_s, GENERIC.pair_s, GENERIC.decode_s, GENERIC.context_s)
        # Units in which coefficients are near 1, also where the prior knows nothing of one.
        self._scales = [max(value, 0.05 * least) for value, least in zip(given, floor, strict=True)]
        self._prior = self._first_prior = self._in_scale(prior)
        self._values, self._own_values = list(self._prior), list(self._prior)  # the latter: as if nobody had told it anything
        self._memories = (_Memory(), _Memory())
        self._mean_row = [0.0] * _N
        self._factor_log = 0.0
        self._cost: StepCost | None = prior
        self._pace_s: float | None = None
        self.num_steps = self.num_prompt_steps = 0
        self.last_s = -math.inf

    @property
    def cost(self) -> StepCost:
        """As learned so far; worked out when it is asked for."""
        if self._cost is None:
            self._cost = self._cost_of(self._values, math.exp(self._factor_log))
        return self._cost

    def _cost_of(self, v: Sequence[float], factor: float) -> StepCost:
        s = self._scales  # written out, as all that is done for each step
        return StepCost(
            v[0] * s[0] * factor,
            v[1] * s[1] * factor,
            v[2] * s[2] * factor,
            v[3] * s[3] * factor,
            v[4] * s[4] * factor,
            v[5] * s[5] * factor,
            self._ridge_tokens,
        )

    def own_cost(self) -> StepCost:
        """What its own steps say, beside what was believed at its start: for others to lean on.

        Not `cost`: what others have told it would come back to them, each time by the factor larger, and what no step shows (prompts above
        the ridge, where none is so long) would grow for as long as all are slow.
        """
        now = _dot(self._mean_row, self._values)
        self._descend(self._own_values, self._first_prior, now)
        own = _dot(self._mean_row, self._own_values)
        return self._cost_of(self._own_values, math.exp(self._factor_log) * (now / own if own > 0 and now > 0 else 1.0))

    @property
    def pace_s(self) -> float:
        """`pace_s` of the cost."""
        if self._pace_s is None:
            self._pace_s = pace_s(self.cost)
        return self._pace_s

    def add(self, step: StepRecord, now_s: float) -> None:
        """Learn from one step. One without duration or work teaches nothing."""
        prompt, decodes, seconds = step.prefill_tokens, step.decode_requests, step.seconds
        if seconds <= 0 or prompt + decodes == 0:
            return
        self.last_s = now_s
        self.num_steps = count = self.num_steps + 1
        if prompt:
            self.num_prompt_steps = of_kind = self.num_prompt_steps + 1
        else:
            of_kind = count - self.num_prompt_steps
        over = prompt + decodes - self._ridge_tokens
        base, beyond, token, pair, decode, context = self._scales
        row = (
            base,
            over * beyond if over > 0.0 else 0.0,
            prompt * token,
            step.prefill_pairs * pair,
            decodes * decode,
            step.context_tokens * context,
        )
        fitted_s = _dot(row, self._values)
        ratio = seconds / (fitted_s if fitted_s > 1e-9 else 1e-9)
        surprise = math.log(MAX_RATIO if ratio > MAX_RATIO else ratio if ratio > _MIN_RATIO else _MIN_RATIO) - self._factor_log
        newest = 1.0 / count
        pull = FAST if surprise > -QUICK else RECOVERED
        self._factor_log += surprise * (newest if newest > pull else pull)
        if of_kind <= EARLY_STEPS or of_kind % 4 == 0:
            self._mean_row = [m + (x - m) * FAST for m, x in zip(self._mean_row, row, strict=True)]
            # A step far from the worker's present speed is a hiccup or a change; only the factor follows at once.
            weight = 1.0 if abs(surprise) < 0.5 or of_kind < 8 else 0.25
            relative = [x / seconds for x in row]
            if prompt:
                self._memories[1].add(relative, weight)
            else:
                self._memories[0].add_decodes(relative, weight)
            if of_kind <= 8 or of_kind % (8 if of_kind <= EARLY_STEPS else 64) == 0:
                self._solve()
        self._cost = self._pace_s = None

    def lean_on(self, known: StepCost) -> None:
        """Take `known` for the prior from now on: what equal workers have learned says more than what was believed at the start.

        It has the present speed in it, as the factor has: coefficients are without.
        """
        factor = math.exp(self._factor_log)
        prior = [value / factor for value in self._in_scale(known)]
        if all(abs(new - old) <= NEWS * old for new, old in zip(prior, self._prior, strict=True)):
            return
        self._prior = prior
        if self.num_steps:
            self._solve()
        else:
            self._values = list(prior)
        self._cost = self._pace_s = None

    def _in_scale(self, cost: StepCost) -> list[float]:
        given = (cost.base_s, cost.over_s, cost.token_s, cost.pair_s, cost.decode_s, cost.context_s)
        return [value / scale for value, scale in zip(given, self._scales, strict=True)]

    def _solve(self) -> None:
        """Coefficients from the steps that are remembered, and the prior."""
        before_s = _dot(self._mean_row, self._values)
        self._descend(self._values, self._prior, before_s)
        after_s = _dot(self._mean_row, self._values)
        if before_s > 0 and after_s > 0:  # what the coefficients have taken up is no longer the factor's
            self._factor_log += math.log(before_s / after_s)

    def _descend(self, values: list[float], prior: Sequence[float], typical_s: float) -> None:
        """Non-negative least squares by coordinate descent, from these values on, in place.

        `typical_s`: what the mean step is now fitted to.

        What was believed at the start is believed of the proportions, not of the speed: a device that decodes ten times slower than that is
        ten times slower with prompts, too, until they say otherwise. (Held to its absolute values it would outweigh dozens of prompts: rows
        are over the seconds measured, so each of a slow device weighs little against it.) What peers have learned is in seconds.
        """
        weight = PRIOR_WEIGHT
        believed_s = _dot(self._mean_row, prior)
        if prior is self._first_prior and believed_s > 0 and typical_s > 0:
            speed = math.exp(self._factor_log) * typical_s / believed_s
            prior = [speed * value for value in prior]
            weight /= max(1.0, speed) ** 2
        gram = [[0.0] * _N for _ in range(_N)]
        few, many = self._memories
        for value, other, (i, j) in zip(few.gram, many.gram, _PAIRS, strict=True):
            gram[i][j] = gram[j][i] = value + other
        right = [a + b for a, b in zip(few.right, many.right, strict=True)]
        for i in range(_N):
            gram[i][i] += weight
            right[i] += weight * prior[i]
        for _ in range(SWEEPS):
            for i in range(_N):
                values[i] = max(0.0, values[i] + (right[i] - _dot(gram[i], values)) / gram[i][i])


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3] + a[4] * b[4] + a[5] * b[5]


def pace_s(cost: StepCost) -> float:
    """Seconds of a reference step: the one number by which workers are compared."""
    return cost.step_s(256, 256 * 512, 16, 16 * 1024)
