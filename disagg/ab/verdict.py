"""Which arm to choose, from the rows of all of them. Pure.

All arms got the same requests, so two arms are compared in pairs of equal requests. A difference counts when (1) its interval lies on one
side of zero: 95 % for all measures of the verdict together, from a block bootstrap over time that also takes in how the rounds differ
(see stats.py); (2) it is larger than what nobody would act on (`floor`: 2 points of attainment, 5 % of a latency or a rate); (3) no round
clearly shows the opposite. Measures decide in a fixed order: goodput and SLO attainment over all rates (where several were measured), the
share that completed, SLO attainment (of all requests, then of the classes, where those that differ agree), the tail of the inter-token
gaps, TPOT, TTFT, throughput. The first that differs chooses the arm; the reason also says what that arm does worse. When none differs,
the verdict is "either": no difference shown.

Two cases end in "either" although something differs, and the reason says which: both arms miss their targets with nearly every request, so
that neither serves this load; or what weighs more than the measure that decides (goodput, the share that completed, attainment) speaks
against that arm by a tenth, in too few requests to tell whether by chance.

With more than two arms the baseline is the first champion; each other arm, in the given order, replaces the champion when a verdict between
the two chooses it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from disagg import slo
from disagg.ab.measures import ATTAINMENT, SHARE_FLOOR, Measure, Unit, compared
from disagg.ab.rows import Row, span_s
from disagg.ab.stats import DRIFT, Blocks, Pooled, Scale, difference, of_rounds, time_blocks
from disagg.config import SloClass

EITHER = "either"
_SURE, _MANY = 0.001, 0.1  # of lost requests: chance of the split, and share
_EXACT = 2_000  # requests
BASELINE = "colocated"
COMPLETED = "completed"
Key = tuple[float | None, int, int]  # rate, round, index: names one request in every arm


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of two arms. `low` and `high`: interval of first - second. `better`: None when no difference is shown.

    `arms` and `values`: first, second. `slo_class`: None for all requests together. Without an interval (throughput of a single
    round) no difference is shown.
    """

    measure: str
    slo_class: str | None
    unit: Unit
    arms: tuple[str, str]
    values: tuple[float, float]
    low: float | None
    high: float | None
    better: str | None

    def value(self, arm: str) -> float:
        """The value of one of its two arms."""
        return self.values[self.arms.index(arm)]

    def other(self, arm: str) -> str:
        """Its arm that is not `arm`."""
        return self.arms[1 - self.arms.index(arm)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`choose`: an arm's name, or "either". `reason`: plain words with the numbers."""

    choose: str
    reason: str
    comparisons: tuple[Comparison, ...]


def baseline_of(arms: Sequence[str]) -> str:
    """What the others are compared with: colocated serving where it was measured, else the first arm."""
    return BASELINE if BASELINE in arms else arms[0]


def judge(
    first: Sequence[Row],
    second: Sequence[Row],
    classes: Sequence[SloClass],
    arms: tuple[str, str] = ("disagg", "colocated"),
    *,
    simulated: bool = False,
) -> Verdict:
    """The verdict on all rows of two arms. `arms`: their names. `simulated`: no machine drifted while they were measured."""
    return decide(compare_arms(first, second, classes, arms, simulated=simulated))


def judge_all(arms: Sequence[str], compare: Callable[[str, str], list[Comparison]]) -> Verdict:
    """The verdict on any number of arms: comparisons of each arm with the baseline, then those with another champion."""
    baseline = baseline_of(arms)
    others = [name for name in arms if name != baseline]
    found = [c for name in others for c in compare(name, baseline)]
    champion = baseline
    for name in others:
        found += compare(name, champion) if champion != baseline else []
        if decide([c for c in found if c.arms == (name, champion)]).choose == name:
            champion = name
    return verdict_of(champion, baseline, found)


def verdict_of(champion: str, baseline: str, comparisons: Sequence[Comparison]) -> Verdict:
    """The verdict for a champion, worded from its comparisons with the baseline; the baseline, from those with each other arm."""
    if champion != baseline:
        return replace(decide([c for c in comparisons if c.arms == (champion, baseline)]), choose=champion, comparisons=tuple(comparisons))
    others = dict.fromkeys(c.arms[0] for c in comparisons if c.arms[1] == baseline)
    verdicts = [decide([c for c in comparisons if c.arms == (name, baseline)]) for name in others]
    chosen = baseline if any(v.choose == baseline for v in verdicts) else EITHER
    reason = " ".join(v.reason for v in verdicts) or "Nothing is compared: it takes two arms."
    return Verdict(chosen, reason, tuple(comparisons))


def decide(comparisons: Sequence[Comparison]) -> Verdict:
    """Choose between the two arms of `comparisons` by the first measure that differs, and say what the choice costs."""
    if not comparisons:
        return Verdict(EITHER, "No difference shown: the arms have no request in common.", ())
    arms = comparisons[0].arms
    overall = [c for c in comparisons if c.slo_class is None]
    by_class = [c for c in comparisons if c.slo_class is not None and c.better is not None]
    chosen = _deciding(overall, by_class)
    if (said := obstacle(comparisons)) is not None:
        better = _listed([c for c in (*overall, *by_class) if chosen is not None and c.better == chosen], chosen or arms[0])
        return Verdict(EITHER, f"{said} {_titled(chosen)} is better in {better}." if chosen and better else said, tuple(comparisons))
    same = _listed([c for c in overall if c.better is None], chosen or arms[0])
    if chosen is None:
        reason = f"No difference shown over all requests ({arms[0]} against {arms[1]}): {same or 'none completed in both arms'}."
        for name in arms:
            own = [c for c in by_class if c.better == name]
            reason += f" {_titled(name)} is better in {_listed(own, name)}." if own else ""
        return Verdict(EITHER, reason, tuple(comparisons))
    reason = f"{_titled(chosen)} is better in {_listed([c for c in (*overall, *by_class) if c.better == chosen], chosen)}."
    worse = _listed([c for c in (*overall, *by_class) if c.better not in (chosen, None)], chosen)
    reason += f" It is worse in {worse}." if worse else ""
    reason += f" Within the noise of this run: {same}." if same else ""
    return Verdict(chosen, reason, tuple(comparisons))


def _deciding(overall: Sequence[Comparison], by_class: Sequence[Comparison]) -> str | None:
    """The arm that the first differing measure favours: goodput; attainment of all; of classes, where those agree; then the others."""
    of_all = next((c.better for c in overall if c.unit in ("requests/s", "share") and c.better is not None), None)
    of_classes = {c.better for c in by_class if c.unit == "share"}
    if of_all is not None or len(of_classes) == 1:
        return of_all or of_classes.pop()
    return next((c.better for c in overall if c.better is not None), None)


def obstacle(comparisons: Sequence[Comparison]) -> str | None:
    """Why neither of the two arms is to be chosen whatever differs; None when nothing stands in the way."""
    arms = comparisons[0].arms
    met = [c for c in comparisons if c.measure == ATTAINMENT]
    completed = next((c for c in comparisons if c.measure == COMPLETED), None)
    if completed is not None and completed.better is not None:
        return None
    if met and all(max(c.values) < SHARE_FLOOR for c in met):
        return f"Neither {arms[0]} nor {arms[1]} serves this load: {_listed(met[:1], arms[0])}. Send less, or loosen the targets."
    overall = [c for c in comparisons if c.slo_class is None]
    chosen = _deciding(overall, [c for c in comparisons if c.slo_class is not None and c.better is not None])
    weightier = itertools.takewhile(lambda c: c.better is None, overall)  # than what decides
    against = [c for c in weightier if chosen is not None and c.value(c.other(chosen)) - c.value(chosen) >= _much(c)]
    if chosen is None or not against:
        return None
    return f"Too little was measured to choose {chosen}: it may be worse in {_listed(against, chosen)}."


def _much(c: Comparison) -> float:
    """How far a rate or a share, more being better, must speak against an arm, unproven, to keep it from being chosen for less."""
    return {"share": _MANY, "requests/s": _MANY * max(c.values)}.get(c.unit, math.inf)


def _titled(arm: str) -> str:
    return arm[:1].upper() + arm[1:]


def _listed(comparisons: Sequence[Comparison], arm: str) -> str:
    """`ITL p99.9 (48 ms against 410 ms), ...`, the value of `arm` first."""
    return ", ".join(_told(c, arm) for c in comparisons)


def _told(c: Comparison, arm: str) -> str:
    name = f"{c.slo_class} {c.measure}" if c.slo_class else c.measure
    return f"{name} ({shown(c.value(arm), c.unit)} against {shown(c.value(c.other(arm)), c.unit)})"


def compare_arms(
    first: Sequence[Row],
    second: Sequence[Row],
    classes: Sequence[SloClass],
    arms: tuple[str, str],
    *,
    num_pairs: int = 1,
    simulated: bool = False,
) -> list[Comparison]:
    """Every measure of two arms over the requests that both were sent. `num_pairs`: how many pairs of arms the verdict compares."""
    pairs = paired(first, second)
    if not pairs:
        return []
    sides = ([a for a, _ in pairs], [b for _, b in pairs])
    blocks = blocks_of(sides)
    measures = compared(sides, {c.name: c for c in classes})
    family = num_pairs * (len(measures) + 1)  # and throughput
    drift = 0.0 if simulated else DRIFT
    found = [c for m in measures if (c := compare_measure(m, sides, blocks, arms, family, drift)) is not None]
    completed = _compare_completed(sides, arms)
    return [*([completed] if completed is not None else []), *found, _compare_throughput(sides, arms, family, drift)]


def paired(first: Sequence[Row], second: Sequence[Row]) -> list[tuple[Row, Row]]:
    """The rows of both arms for each request that both were sent."""
    other = {_key(r): r for r in second}
    return [(r, other[_key(r)]) for r in first if _key(r) in other]


def _key(row: Row) -> Key:
    return (row.rate_rps, row.round, row.index)


def blocks_of(sides: Sequence[Sequence[Row]]) -> Blocks:
    """Windows of time longer than requests last in either arm; rates are resampled apart. `sides`: the same requests in each arm."""
    durations = sorted(r.end_s - r.sent_s for rows in sides for r in rows)
    memory_s = durations[int(0.9 * (len(durations) - 1))]
    first = sides[0]
    return time_blocks([r.round for r in first], [r.due_s for r in first], memory_s, [r.rate_rps for r in first])


def compare_measure(
    measure: Measure, sides: Sequence[Sequence[Row]], blocks: Blocks, arms: tuple[str, str], family: int, drift: float
) -> Comparison | None:
    """One measure of both arms over the same requests; None when an arm has no sample of it."""
    first, second = (Pooled([measure.samples(row) for row in rows], blocks.of_request, measure.percent) for rows in sides)
    scale: Scale = "share" if measure.unit == "share" else "ratio"
    effect = difference(first, second, blocks, scale=scale, drift=drift, family=family, num_samples=first.size + second.size)
    ours, theirs = first(blocks.everything()), second(blocks.everything())
    if effect is None or ours is None or theirs is None:
        return None
    is_shown = effect.excludes_zero and abs(effect.value) >= measure.floor(ours, theirs)
    is_shown = is_shown and not _contradicted(measure, first, second, blocks, effect.value)
    better = arms[0 if (effect.value > 0) == measure.higher_is_better else 1] if is_shown else None
    low, high = (max(-1.0, effect.low), min(1.0, effect.high)) if measure.unit == "share" else (effect.low, effect.high)
    return Comparison(measure.name, measure.slo_class, measure.unit, arms, (ours, theirs), low, high, better)


def _compare_completed(sides: Sequence[Sequence[Row]], arms: tuple[str, str]) -> Comparison | None:
    """Requests that brought an answer, where some did not: an arm that lost many is not chosen for the latencies of the others.

    An exact paired sign test (McNemar 1947). Requests that fail together count as many here: that an arm failed at all is no noise.
    None when all completed.
    """
    judged = [(a, b) for a, b in zip(*sides, strict=True) if a.is_judged and b.is_judged]
    only_first = sum(a.is_whole and not b.is_whole for a, b in judged)
    only_second = sum(b.is_whole and not a.is_whole for a, b in judged)
    if all(a.is_whole and b.is_whole for a, b in judged):
        return None
    values = (sum(a.is_whole for a, _ in judged) / len(judged), sum(b.is_whole for _, b in judged) / len(judged))
    difference_ = values[0] - values[1]
    spread = 1.96 * math.sqrt(max(0.0, (only_first + only_second) / len(judged) - difference_**2) / len(judged))
    is_shown = _sign_test(only_first, only_second) < _SURE and abs(difference_) >= _MANY
    better = arms[0 if difference_ > 0 else 1] if is_shown else None
    low, high = max(-1.0, difference_ - spread), min(1.0, difference_ + spread)
    return Comparison(COMPLETED, None, "share", arms, values, low, high, better)


def _sign_test(ups: int, downs: int) -> float:
    """Two-sided probability of so unequal a split by chance."""
    count = ups + downs
    if count > _EXACT:  # a sum of so many large numbers takes minutes; here the normal distribution is the same to three digits
        return math.erfc((abs(ups - downs) - 1) / math.sqrt(2 * count)) if ups != downs else 1.0
    tail = sum(math.comb(count, k) for k in range(min(ups, downs) + 1))
    return float(min(1.0, 2 * tail / 2**count))


def _contradicted(measure: Measure, first: Pooled, second: Pooled, blocks: Blocks, effect: float) -> bool:
    """Whether a round shows a clear difference of the opposite sign."""
    for weights in blocks.each_round():
        ours, theirs = first(weights), second(weights)
        if ours is None or theirs is None:
            continue
        if (ours - theirs) * effect < 0 and abs(ours - theirs) >= measure.floor(ours, theirs):
            return True
    return False


def _compare_throughput(sides: Sequence[Sequence[Row]], arms: tuple[str, str], family: int, drift: float) -> Comparison:
    """Output tokens/s. A round's is one figure, so the interval comes from how rounds differ; a single round has none."""
    numbers = dict.fromkeys((r.rate_rps, r.round) for r in sides[0])
    by_round = [[_tokens_per_s([r for r in rows if (r.rate_rps, r.round) == number]) for rows in sides] for number in numbers]
    ours, theirs = (_tokens_per_s(rows) for rows in sides)
    effect = of_rounds([a - b for a, b in by_round], ours - theirs, drift=drift * theirs, family=family)
    is_shown = effect is not None and effect.excludes_zero and abs(ours - theirs) >= 0.05 * max(ours, theirs)
    better = arms[0 if ours > theirs else 1] if is_shown else None
    low, high = (effect.low, effect.high) if effect is not None else (None, None)
    return Comparison("throughput", None, "tokens/s", arms, (ours, theirs), low, high, better)


def _tokens_per_s(rows: Sequence[Row]) -> float:
    return slo.rate_per_s(sum(r.output_tokens for r in rows if r.is_whole), span_s(rows)) or 0.0


def shown(value: float, unit: Unit) -> str:
    """A value for people."""
    if unit == "share":
        return f"{value:.0%}"
    if unit in ("tokens/s", "requests/s"):
        return f"{value:.{1 if unit == 'tokens/s' else 2}f} {unit}"
    return f"{value * 1e3:,.0f} ms"
