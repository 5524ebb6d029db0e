"""When a point has been measured often enough, whether the warm-up was, and which rates to measure. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace

from disagg.ab.measures import row_meets, tpot
from disagg.ab.result import WarmUpReport
from disagg.ab.rows import Row
from disagg.ab.stats import Pooled, difference
from disagg.ab.verdict import blocks_of, paired
from disagg.config import SloClass

Z95 = 1.96
NARROW = 0.05  # half-width of an attainment difference's interval at which more rounds say nothing new
NARROW_TPOT = 0.06  # the same for the ratio of median TPOTs: what two rounds can know on a machine that is quiet (stats.DRIFT)
_MEASURES = 8  # that a verdict on one class compares
WARM_UP_TOLERANCE = 1.25  # first window by later ones; below it, noise of a shared machine explains it
_LEAST_IN_WINDOW = 4


@dataclass(frozen=True, slots=True)
class RoundRule:
    """Rounds per point: at least `least`; then until each difference in attainment is known to `NARROW` and in median TPOT to
    `NARROW_TPOT`, or is surely none of chance; at most `most`.

    `limit_s`: no round after the first begins that would probably end later than that after the run's begin.
    """

    least: int
    most: int
    limit_s: float | None = None

    def after(self, spent_s: float) -> RoundRule:
        """The rule for a run that begins when `spent_s` of the limit are gone."""
        return self if self.limit_s is None else replace(self, limit_s=self.limit_s - spent_s)

    def out_of_time(self, spent_s: float, next_round_s: float) -> str | None:
        """Why no further round begins, None when there is time for one."""
        if self.limit_s is None or spent_s + next_round_s <= self.limit_s:
            return None
        return f"a further round of about {next_round_s:.0f} s would end after the limit of {self.limit_s:.0f} s"

    def stopped(self, rounds: int, rows: Mapping[str, Sequence[Row]], classes: Sequence[SloClass]) -> str | None:
        """Why `rounds` rounds are enough, None when they are not. `rows`: of the point, by arm."""
        if rounds < self.least:
            return None
        if rounds >= self.most:
            return f"{rounds} rounds, the most" if self.most > self.least else f"{rounds} rounds, as asked"
        pairs = [(rows[a], rows[b]) for a, b in itertools.combinations(rows, 2)]
        open_ = any(not _is_decided(*pair, classes) or not _tpot_is_decided(*pair) for pair in pairs)
        known = f"in attainment to {NARROW:.0%}, in TPOT to {NARROW_TPOT:.0%}"
        return None if open_ else f"after {rounds} rounds every difference is known ({known}) or clear"


def _is_decided(first: Sequence[Row], second: Sequence[Row], classes: Sequence[SloClass]) -> bool:
    """Whether the paired difference in attainment has a narrow interval, or one that leaves out zero."""
    by_name = {c.name: c for c in classes}
    other = {(row.round, row.index): row for row in second if row.is_judged}
    differences = [
        float(row_meets(row, by_name[row.slo_class])) - float(row_meets(pair, by_name[pair.slo_class]))
        for row in first
        if row.is_judged and (pair := other.get((row.round, row.index))) is not None
    ]
    if len(differences) < 2:
        return False
    # One imaginary pair on either side: without any difference seen, the interval is narrow, not nothing.
    mean = statistics.fmean(differences)
    half = Z95 * math.sqrt(statistics.pvariance([*differences, 1.0, -1.0]) / len(differences))
    return half <= NARROW or abs(mean) > half


def _tpot_is_decided(first: Sequence[Row], second: Sequence[Row]) -> bool:
    """The same of the median TPOT, by the verdict's intervals; true where nothing is to be compared."""
    pairs = [(a, b) for a, b in paired(first, second) if a.is_whole and b.is_whole]
    if len(pairs) < 2:
        return True
    sides = ([a for a, _ in pairs], [b for _, b in pairs])
    blocks = blocks_of(sides)
    ours, theirs = (Pooled([tpot(row) for row in side], blocks.of_request, 50) for side in sides)
    by_itself = difference(ours, theirs, blocks, scale="ratio")
    among_others = difference(ours, theirs, blocks, scale="ratio", family=_MEASURES)
    base = theirs(blocks.everything())
    if by_itself is None or among_others is None or base is None:
        return True
    return among_others.excludes_zero or by_itself.high - by_itself.low <= 2 * NARROW_TPOT * base


def warm_up_report(requests: int, rounds: Sequence[Sequence[Row]]) -> WarmUpReport:
    """Whether an arm was warm when it was first measured. `rounds`: its rows at one rate, in the order in which they were measured.

    The first third of the first round against the same third of later rounds, which had the same load before them; with one round only,
    against the rest of it.
    """
    first = _tpots(rounds[0], 0, 1 / 3) if rounds else []
    later = [x for rows in rounds[1:] for x in _tpots(rows, 0, 1 / 3)] if len(rounds) > 1 else _tpots(rounds[0], 1 / 3, 1) if rounds else []
    if min(len(first), len(later)) < _LEAST_IN_WINDOW:
        return WarmUpReport(requests=requests, first_tpot_s=None, later_tpot_s=None, ratio=None, enough=None)
    one, other = statistics.median(first), statistics.median(later)
    ratio = one / other if other > 0 else None
    return WarmUpReport(
        requests=requests, first_tpot_s=one, later_tpot_s=other, ratio=ratio, enough=None if ratio is None else ratio <= WARM_UP_TOLERANCE
    )


def _tpots(rows: Sequence[Row], begin: float, end: float) -> list[float]:
    """TPOTs of the whole answers that were due in that part of their round."""
    last_s = max((row.due_s for row in rows), default=0.0)
    return [x for row in rows if row.is_whole and begin * last_s <= row.due_s <= end * last_s and (x := row.tpot_s) is not None]


@dataclass(frozen=True, slots=True)
class RangeSearch:
    """How rates are found from light to past saturation: bisection on the best arm's attainment, then `points` rates around its end."""

    level: float = 0.9
    points: int = 5
    most_probes: int = 8
    resolution: float = 1.25

    def rates(self, start_rps: float) -> Generator[float, float, tuple[float, ...]]:
        """Yields a rate to probe and wants the best arm's attainment at it; returns the rates to measure, ascending.

        search = RangeSearch().rates(0.5)
        rate = next(search);  rate = search.send(attainment) ...  until StopIteration
        """
        low: float | None = None
        high: float | None = None
        rate = start_rps
        for _ in range(self.most_probes):
            if (yield rounded(rate)) >= self.level:
                low = rate
                rate = rate * 2 if high is None else math.sqrt(low * high)
            else:
                high = rate
                rate = rate / 2 if low is None else math.sqrt(low * high)
            if low is not None and high is not None and high / low <= self.resolution:
                break
        saturation = math.sqrt(low * high) if low is not None and high is not None else low or high or start_rps
        return tuple(rounded(saturation * share) for share in self.shares())

    def shares(self, most: float = 1.25) -> list[float]:
        """Shares of the saturation rate that are measured: from light to past it, `most`."""
        return [0.3 + (most - 0.3) * i / max(1, self.points - 1) for i in range(self.points)]


def rounded(rate_rps: float) -> float:
    """A rate with three significant digits: it is a name in files, too."""
    return float(f"{rate_rps:.3g}")
