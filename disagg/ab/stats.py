"""Intervals for what a run measured: a block bootstrap over time, widened for few blocks and for rounds that disagree. Pure.

Requests that are in the system together share its moments: one long prompt stalls every chat that runs. Resampling single requests (or
single gaps) would take each of them for news of its own and give intervals far too narrow. So each round is cut into windows of time,
longer than requests last, and whole windows are resampled with all requests that were due in them (Carlstein 1986, non-overlapping
blocks).

Few blocks: percentile intervals are too narrow then; they are stretched by t / z x sqrt(n / (n - 1)), the "expanded percentile interval" of
Hesterberg (2015, What Teachers Should Know about the Bootstrap).

Rounds: what they differ by, beyond what their blocks explain, is the machine's drift (the method of moments of DerSimonian and Laird 1986).
Two rounds say little of a variance, so that is averaged with what is known beforehand, which counts as much as four more rounds: on a
measured machine two turns of one arm differ by a few per cent (DRIFT). So one round alone shows large differences only, and ten quiet ones
show small ones. Nothing drifts in a simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

RESAMPLES = 400
LEAST_RESAMPLES = 100
_MOST_SAMPLES = 50_000_000  # read in all, over the resamples of one measure: what seconds can do
_MOST_BLOCKS_A_ROUND = 20
_LEAST_BLOCKS = 6
DRIFT = 0.03  # standard deviation of (arm / baseline) between rounds of one machine, as expected before any was measured
_PRIOR_DEGREES = 4  # how many rounds that expectation is worth
_LEAST_TURNS = 4
_DRIFTING = 2  # what drifts: the speed of prefill and of decode; all measures of a turn move with these together
_MOST_LOG = 300.0  # an interval without an upper end stays a number in JSON
_Z95 = NormalDist().inv_cdf(0.975)

Weights = np.ndarray  # [blocks] int64: how often each block counts
Statistic = Callable[[Weights], float | None]
Scale = Literal["ratio", "share"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Requests in blocks. `of_request`: [requests] block numbers; `round_of`, `stratum_of`: [blocks]. Strata are resampled apart."""

    of_request: np.ndarray
    round_of: np.ndarray
    stratum_of: np.ndarray

    @property
    def count(self) -> int:
        return int(self.round_of.size)

    def everything(self) -> Weights:
        """Each block once."""
        return np.ones(self.count, dtype=np.int64)

    def draws(self, count: int) -> np.ndarray:
        """`count` resamples of as many blocks, drawn with replacement within each stratum: [count, blocks]. Always the same."""
        rng = np.random.default_rng(0)
        weights = np.zeros((count, self.count), dtype=np.int64)
        for stratum in np.unique(self.stratum_of):
            own = np.flatnonzero(self.stratum_of == stratum)
            weights[:, own] = rng.multinomial(own.size, np.full(own.size, 1 / own.size), size=count)
        return weights

    def each_round(self) -> list[Weights]:
        """The weights that leave one round's blocks, for each round."""
        return [(self.round_of == number).astype(np.int64) for number in np.unique(self.round_of)]


def time_blocks(rounds: Sequence[int], due_s: Sequence[float], memory_s: float, strata: Sequence[Hashable] | None = None) -> Blocks:
    """Cut each (stratum, round) into windows of equal length, longer than twice `memory_s`, the time that requests last.

    At least two windows a round and six in all, however long requests last; at most twenty a round.
    """
    groups: dict[tuple[Hashable, int], list[int]] = {}
    for i, number in enumerate(rounds):
        groups.setdefault((strata[i] if strata is not None else None, number), []).append(i)
    strata_seen = {stratum: i for i, stratum in enumerate(dict.fromkeys(stratum for stratum, _ in groups))}
    per_stratum = {s: sum(other == s for other, _ in groups) for s in strata_seen}
    of_request = np.zeros(len(rounds), dtype=np.int64)
    round_of: list[int] = []
    stratum_of: list[int] = []
    due = np.asarray(due_s, dtype=np.float64)
    for (stratum, number), members in groups.items():
        own = due[members]
        first, span = float(own.min()), float(own.max() - own.min())
        fewest = max(2, math.ceil(_LEAST_BLOCKS / per_stratum[stratum]))
        wanted = int(span / (2 * memory_s)) if memory_s > 0 else _MOST_BLOCKS_A_ROUND
        windows = min(max(fewest, min(wanted, _MOST_BLOCKS_A_ROUND)), len(members))
        window = np.minimum((own - first) / (span or 1.0) * windows, windows - 1).astype(np.int64)
        present, place = np.unique(window, return_inverse=True)
        of_request[members] = len(round_of) + place
        round_of += [number] * len(present)
        stratum_of += [strata_seen[stratum]] * len(present)
    return Blocks(of_request, np.asarray(round_of, dtype=np.int64), np.asarray(stratum_of, dtype=np.int64))


class Pooled:
    """One measure's samples, sorted once; a resample only changes how often each block counts."""

    def __init__(self, samples: Sequence[Sequence[float]], of_request: np.ndarray, percent: float | None) -> None:
        """`samples`: per request, its own. `percent`: which percentile, None for the mean."""
        sizes = [len(own) for own in samples]
        values = np.fromiter((x for own in samples for x in own), dtype=np.float64, count=sum(sizes))
        owners = np.repeat(of_request, sizes)
        order = np.argsort(values, kind="stable")
        self._values, self._owners = values[order], owners[order]
        self._percent = percent
        self.size = int(values.size)

    def __call__(self, weights: Weights) -> float | None:
        """The measure under these weights; None when no sample is left. Percentiles as in slo.percentile."""
        times = weights[self._owners]
        upto = np.cumsum(times)
        if not upto.size or upto[-1] == 0:
            return None
        total = int(upto[-1])
        if self._percent is None:
            return float(times @ self._values / total)
        position = (total - 1) * self._percent / 100
        below = int(position)
        first, second = self._values[np.searchsorted(upto, [below, min(below + 1, total - 1)], side="right")]
        return float(first + (second - first) * (position - below))


@dataclass(frozen=True, slots=True)
class Effect:
    """A statistic with its interval; for two arms of (arm - baseline)."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def num_resamples(num_samples: int) -> int:
    """How many resamples a measure of so many samples gets."""
    return max(LEAST_RESAMPLES, min(RESAMPLES, _MOST_SAMPLES // max(1, num_samples)))


def interval(statistic: Statistic, blocks: Blocks, *, num_samples: int = 0) -> Effect | None:
    """A statistic of one arm with its 95 % interval over what was measured; None when it has no value."""
    return _bootstrapped(statistic, blocks, 1, 0.0, num_samples)


def difference(
    first: Statistic, second: Statistic, blocks: Blocks, *, scale: Scale, drift: float = DRIFT, family: int = 1, num_samples: int = 0
) -> Effect | None:
    """(first - second) with an interval that holds with 95 % for `family` measures together (Bonferroni). None without values.

    `ratio`: the interval is computed for the logarithm of first / second, where noise is alike at all sizes, and given as a difference at
    the second's value. A ratio that does not exist (a zero) falls back to the difference. `share`: the difference; a machine's drift moves
    most requests across their targets where half of them meet them. `drift`: as DRIFT, 0 for what has none.
    """
    whole = blocks.everything()
    ours, theirs = first(whole), second(whole)
    if ours is None or theirs is None:
        return None
    if scale == "ratio" and ours > 0 and theirs > 0:

        def log_ratio(weights: Weights) -> float | None:
            a, b = first(weights), second(weights)
            return math.log(a / b) if a is not None and b is not None and a > 0 and b > 0 else None

        found = _bootstrapped(log_ratio, blocks, family, drift, num_samples)
        assert found is not None
        return Effect(ours - theirs, theirs * math.expm1(found.low), theirs * math.expm1(min(found.high, _MOST_LOG)))

    def plain(weights: Weights) -> float | None:
        a, b = first(weights), second(weights)
        return a - b if a is not None and b is not None else None

    mean = min(1.0, max(0.0, (ours + theirs) / 2))
    expected = drift * 4 * mean * (1 - mean) if scale == "share" else drift * max(abs(ours), abs(theirs))
    return _bootstrapped(plain, blocks, family, expected, num_samples)


def of_rounds(by_round: Sequence[float], value: float, *, drift: float, family: int = 1) -> Effect | None:
    """`value` with an interval from how a figure differs between rounds, in which `drift` is expected; None for a single round."""
    if len(by_round) < 2:
        return None
    variance, degrees = _drift(by_round, 0.0, drift)
    half = t_quantile(1 - 0.025 / family, degrees) * math.sqrt(variance)
    return Effect(value, value - half, value + half)


def of_turns(differences: Sequence[Sequence[float]], *, family: int = 1) -> Effect | None:
    """The mean difference over all requests with an interval from how it differs between turns; None for fewer than four of them.

    `differences`: of each turn (one rate, one round), one per request. Turns are what is counted, not requests: the cluster-robust variance
    of a mean (Liang and Zeger 1986), with a t of as many turns. It is no less than that of independent requests.
    """
    if len(differences) < _LEAST_TURNS:
        return None
    total = sum(map(len, differences))
    mean = math.fsum(d for own in differences for d in own) / total
    between = sum((math.fsum(own) - len(own) * mean) ** 2 for own in differences) / total**2 * len(differences) / (len(differences) - 1)
    alone = (math.fsum(d * d for own in differences for d in own) / total - mean**2) / total
    half = t_quantile(1 - 0.025 / family, len(differences) - 1) * math.sqrt(max(between, alone, 0.0))
    return Effect(mean, mean - half, mean + half)


def _bootstrapped(statistic: Statistic, blocks: Blocks, family: int, drift: float, num_samples: int) -> Effect | None:
    value = statistic(blocks.everything())
    if value is None:
        return None
    draws = [statistic(weights) for weights in blocks.draws(num_resamples(num_samples))]
    drawn = np.asarray([d for d in draws if d is not None] or [value])
    few = math.sqrt(blocks.count / max(1, blocks.count - 1))
    by_round = [d for weights in blocks.each_round() if (d := statistic(weights)) is not None]
    variance = float(np.var(drawn)) * few**2
    drifted, drift_degrees = _drift(by_round, variance, drift)
    low95, high95 = (float(x) for x in np.percentile(drawn, (2.5, 97.5)))
    stretch = t_quantile(1 - 0.025 / family, max(1, blocks.count - 1)) / _Z95 * few
    of_drift = t_quantile(1 - 0.025 / min(family, _DRIFTING), drift_degrees) * math.sqrt(drifted)
    below, above = (math.hypot(stretch * side, of_drift) for side in (max(0.0, value - low95), max(0.0, high95 - value)))
    return Effect(value, value - below, value + above)


def _drift(by_round: Sequence[float], explained: float, expected: float) -> tuple[float, int]:
    """Variance of the mean over rounds that drift causes, and its degrees of freedom.

    `explained`: the variance of that mean that the blocks account for. `expected`: DRIFT in the figure's own unit, 0 where nothing drifts
    but what the rounds themselves show.
    """
    count = len(by_round)
    seen = max(0.0, float(np.var(by_round, ddof=1)) - count * explained) if count > 1 else 0.0
    if expected == 0:
        return seen / max(1, count), max(1, count - 1)
    degrees = _PRIOR_DEGREES + count - 1
    return (_PRIOR_DEGREES * expected**2 + (count - 1) * seen) / degrees / max(1, count), degrees


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t for 0.5 <= probability < 1, by bisection of its distribution."""
    if degrees > 200:
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, 1.0
    while _t_below(high, degrees) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, degrees) < probability else (low, middle)
    return high


def _t_below(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0 and whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(theta), math.cos(theta)
    term = total = 1.0 if degrees % 2 == 0 else cosine
    start = 2 if degrees % 2 == 0 else 3
    for k in range(start, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    if degrees % 2 == 0:
        return 0.5 + 0.5 * sine * total
    return 0.5 + (theta + (sine * total if degrees > 1 else 0.0)) / math.pi
