"""Which pair of workers serves a request: the one that costs least over all requests that it would touch. Pure.

One code path for all modes: disaggregated serving picks from prefill x decode workers, colocated serving is the pair (w, w), adaptive
serving picks from all pairs. What a pair costs is a sum of regrets (policy/targets.py), each a latency against its request's own target:

    first leg on p      regret of this request's TTFT: the wait there, and its prompt beside what decodes there
                        + what it keeps those behind it in the queue from: p's time, at the price that the queue gives it
                        + of each request decoding on p: the growth of its TPOT by the prompt's steps
                        + a little for every step that is longer than those requests' target
    second leg on d     regret of this request's TPOT beside d's others, prompts there lately included
                        + of each request decoding on d: the growth of its TPOT by one more
                        + a little for each too long step that it must expect there, and for what little room is left on d
    p unlike d          the hand-over, spread over each likely length of the answer: the short ones lose their target by it first

The sum is separable but for the hand-over, so the best pair is found in time P + D. Roles are a preference and no more: a prompt goes to a
decode worker, or an answer to a prefill worker, when that is cheaper for all concerned by more than `ROLE_BIAS`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from disagg.policy.decision import Candidate, Prediction
from disagg.policy.hand_over import HandOver
from disagg.policy.outline import Outline
from disagg.policy.standing import SHORTLIST, Standing
from disagg.policy.targets import EASE, FIRST_KNEE, KNEE, Spread, Targets, late_regret, regret
from disagg.policy.worker_book import KV_DOUBT, WorkerBook
from disagg.types import Mode, Role

LATE_WEIGHT = 0.15  # of a step that is longer than a decoding request's target by that target, against a regret of 1
ROLE_BIAS = 0.03
# What a worker's last seats, or its last KV, are worth: without them it takes no prompts either. From FULL_FROM of them on.
FULL_WEIGHT = 0.2
FULL_FROM = 0.5
# What a latency that is inside its target counts, for those who decode where a prompt goes. With EASE, 30 answers that would hardly notice
# outweigh a fifth of a second of the prompt's own, and decode workers idle beside a growing queue.
NEIGHBOURS_EASE = 0.05
AVOIDED = 1e3  # makes a worker that just failed this request the last choice, but still a choice
TIE = 0.004  # costs this near to the least, 0.8 % of a target, are equal, and take turns: noise must not send all to one worker
BEST_LEGS = 3  # of each kind are paired
CROSS_HOST_BYTES_PER_S = 1e9
_PREFILL, _DECODE = Role.PREFILL, Role.DECODE  # Python 3.11 looks an enum's member up by a call


class Known:
    """What one request's legs on a worker cost, as far as neither the instant nor the queue matters; each with the outline it is of.

    Who waits is weighed again at each event, and most workers have not changed since. `firsts`: the prompt's tokens and seconds, what it
    costs those who decode beside it, and the work that it adds behind other prompts. `seconds`: the leg of a worker without prompts.
    """

    __slots__ = ("firsts", "seconds")

    def __init__(self) -> None:
        self.firsts: dict[WorkerBook, tuple[Outline, int, float, float, float]] = {}
        self.seconds: dict[WorkerBook, tuple[Outline, SecondLeg]] = {}


@dataclass(slots=True)
class Ask:
    """What one request asks of its workers. `waited_s`: since its arrival. `output_tokens`: expected; `kv_tokens`: to reserve,
    with the `kv_variance` of that; `whole_tokens`: context and answer at their longest.

    `spread`: over how many of them a delay is spread, by likelihood; `spread_tokens`: the harmonic mean of those.

    `cached`: context tokens by worker that its prefix cache holds. `moves_kv`: there will be a second token. `queue_price`: regret that a
    second of a prefill worker's time costs those who wait behind; `has_followers`: there are such. `known`: what was worked out for the
    same request before, and holds as long as a worker's outline does.
    """

    context_tokens: int
    output_tokens: float
    spread: Spread
    spread_tokens: float
    whole_tokens: int
    kv_tokens: int
    kv_variance: int
    box_bytes: int
    moves_kv: bool
    targets: Targets
    waited_s: float
    avoid: Collection[str] = ()
    cached: Mapping[str, int] = field(default_factory=dict)
    queue_price: float = 0.0
    has_followers: bool = False
    known: Known = field(default_factory=Known)


@dataclass(slots=True, eq=False)  # not frozen: hundreds are made per decision
class FirstLeg:
    """The prompt on one worker: `wait_s` there, then `prefill_s`. `passes`: it shares the steps of a long prompt that is there."""

    worker: WorkerBook
    cost: float
    wait_s: float
    prefill_s: float
    cached_tokens: int
    passes: bool = False


@dataclass(slots=True, eq=False)
class SecondLeg:
    """The answer on one worker, at `tpot_s` per token. `busy_s`: what comes from elsewhere waits so long for a step of prompts to end."""

    worker: WorkerBook
    cost: float
    tpot_s: float
    busy_s: float


@dataclass(slots=True, eq=False)
class Pair:
    """A route with what it costs and gives."""

    first: FirstLeg
    second: SecondLeg
    cost: float
    transfer_s: float

    @property
    def is_colocated(self) -> bool:
        return self.first.worker is self.second.worker


@dataclass(slots=True)
class Shortage:
    """Why no pair has room now."""

    reason: str


def weigh_first(w: WorkerBook, ask: Ask, standing: Standing, extra_s: float = 0.0) -> FirstLeg:
    """The prompt on `w`, behind what is there and `extra_s` more."""
    now_s = standing.now_s
    o = w.outline(now_s)
    cached = min(ask.cached.get(w.name, 0), ask.context_tokens - 1) if ask.cached else 0
    tokens = ask.context_tokens - cached
    is_behind = bool(w.prefilling)
    wait_s = w.wait_s(now_s, o) + extra_s
    known = ask.known.firsts.get(w)
    if known is None or known[0] is not o or known[1] != tokens:  # what is cached of it may have changed
        known = ask.known.firsts[w] = _first_known(w, o, tokens, cached)
    _, _, core_s, stall_cost, work_s = known
    prefill_s = core_s + o.overhead_s
    if is_behind and ask.has_followers and prefill_s < o.feed_s:
        prefill_s = o.feed_s  # others will share its step
    passing = w.passing_s(tokens, now_s) if is_behind and w.pass_tokens else None
    if passing is not None and sum(passing) < wait_s + core_s:
        wait_s, core_s = passing
        prefill_s = core_s + o.overhead_s
        stall_cost = _stall_of(w, o, tokens, core_s)
        work_s = o.overhead_s + o.cost.prefill_s(tokens, cached, o.chunk_tokens, o.decodes, o.context_tokens)
    else:
        passing = None
    share = (ask.waited_s + wait_s + prefill_s) / ask.targets.ttft_scale_s
    cost = EASE * share if share <= FIRST_KNEE else regret(share, EASE, FIRST_KNEE)
    if w.coming_at:
        cost += _delay_cost(w, o, now_s + wait_s, core_s)
    cost += stall_cost
    if is_behind and ask.queue_price:
        # Its next free second is one that somebody else waits for; an idle worker's is lost when nobody takes it. What a step that is
        # there already would save is left out: whoever comes next saves it too, and for its sake the first of a queue would wait on and on.
        cost += ask.queue_price * (work_s if work_s > o.feed_s else o.feed_s)
    if w.role is _DECODE:
        cost += ROLE_BIAS
    if w.name in ask.avoid:
        cost += AVOIDED
    return FirstLeg(w, cost, wait_s, prefill_s, cached, passing is not None)


def _first_known(w: WorkerBook, o: Outline, tokens: int, cached: int) -> tuple[Outline, int, float, float, float]:
    """Of a prompt that passes nobody (Known.firsts)."""
    core_s = w.prefill_s(tokens, cached, o)
    work_s = o.overhead_s
    if w.shares_a_step:
        work_s += o.cost.prefill_s(tokens, cached, o.chunk_tokens, o.decodes, o.context_tokens)
    else:
        work_s += core_s
    return o, tokens, core_s, _stall_of(w, o, tokens, core_s), work_s


def _stall_of(w: WorkerBook, o: Outline, tokens: int, prompt_s: float) -> float:
    """What a prompt of `tokens` tokens, `prompt_s` seconds in all, costs those that decode beside it."""
    if not o.decodes:
        return 0.0
    steps = -(-tokens // o.chunk_tokens)
    return _stall_cost(w, o, max(0.0, prompt_s - steps * o.step_s), steps)


def _stall_cost(w: WorkerBook, o: Outline, stall_s: float, steps: int) -> float:
    """What a prompt of `steps` steps, `stall_s` longer in all, costs those that decode beside it: slower on the mean, and in lumps."""
    mixed_s = o.step_s + stall_s / steps
    gap_s = o.gap_s
    after_s = gap_s + stall_s / w.mean_spread_tokens
    if after_s > mixed_s:  # no mean is above the longest step
        after_s = mixed_s if mixed_s > gap_s else gap_s
    cost = 0.0
    for target_s, count in w.accounts.groups.items():
        if after_s > gap_s:
            share = after_s / target_s
            if share <= KNEE:  # what regret() gives there, written out: it is so nearly always
                cost += count * (NEIGHBOURS_EASE * share - NEIGHBOURS_EASE * (gap_s / target_s))
            else:
                cost += count * (regret(share, NEIGHBOURS_EASE) - regret(gap_s / target_s, NEIGHBOURS_EASE))
        if mixed_s > target_s:
            cost += count * LATE_WEIGHT * steps * (mixed_s / target_s - 1.0)
    return cost


def _delay_cost(w: WorkerBook, o: Outline, start_s: float, prompt_s: float) -> float:
    """What a prompt from `start_s` on costs those whose KV comes while it runs."""
    cost = 0.0
    for at_s, target_s, spread in w.coming_at.values():
        into_s = at_s - start_s
        if 0.0 < into_s < prompt_s:
            cost += late_regret(o.gap_s, w.until_let_in_s(prompt_s - into_s, o), spread, target_s)
    return cost


def weigh_second(w: WorkerBook, ask: Ask, standing: Standing, ready_s: float = 0.0) -> SecondLeg:
    """The answer on `w`, beside what is there. `ready_s`: from now, until the KV is there when it comes from elsewhere."""
    o = w.outline(standing.now_s)
    known = ask.known.seconds.get(w)
    if known is None or known[0] is not o:
        known = ask.known.seconds[w] = (o, _second_known(w, o, ask))
    leg = known[1]
    cost = leg.cost + AVOIDED if w.name in ask.avoid else leg.cost
    busy_s = w.busy_until_s - standing.now_s - ready_s if w.prefilling else 0.0
    if busy_s <= 0.0 and cost == leg.cost:
        return leg
    return SecondLeg(w, cost, leg.tpot_s, w.until_let_in_s(busy_s, o) if busy_s > 0.0 else 0.0)


def _second_known(w: WorkerBook, o: Outline, ask: Ask) -> SecondLeg:
    """Where no prompt is in the way (Known.seconds)."""
    tpot_s = w.gap_with_s(o, ask.context_tokens + 0.5 * ask.output_tokens)
    share = tpot_s / ask.targets.tpot_scale_s
    cost = EASE * share if share <= KNEE else regret(share)
    if tpot_s != o.gap_s:
        for other_s, count in w.accounts.groups.items():
            share = tpot_s / other_s
            if share <= KNEE:  # written out, as in _stall_cost
                cost += count * (EASE * share - EASE * (o.gap_s / other_s))
            else:
                cost += count * (regret(share) - regret(o.gap_s / other_s))
    if o.late_per_s > 0.0:
        cost += LATE_WEIGHT * o.late_per_s * ask.output_tokens * tpot_s
    if o.fullness > FULL_FROM:
        cost += FULL_WEIGHT * (o.fullness - FULL_FROM)
    if w.role is _PREFILL:
        cost += ROLE_BIAS
    return SecondLeg(w, cost, tpot_s, 0.0)


def has_room(w: WorkerBook, ask: Ask, standing: Standing) -> bool:
    """A seat in the batch, and KV for prompt and answer. A worker that holds nothing of ours has it if its whole KV cache is large enough:
    of unlike workers some may be too small for what the largest can hold."""
    a = w.accounts
    if ask.whole_tokens > w.state.total_kv_tokens > 0:
        return False
    if a.seats == 0:
        return True
    o = w.outline(standing.now_s)
    room = o.free_kv_tokens - ask.kv_tokens
    if room < 0 or o.free_seats <= 0:
        return False
    if ask.kv_variance == 0:
        return True
    return room >= KV_DOUBT * (math.sqrt(a.kv_variance + ask.kv_variance) - math.sqrt(a.kv_variance))


def has_prompt_room(w: WorkerBook, ask: Ask, standing: Standing) -> bool:
    """The same for a prompt whose answer is decoded elsewhere.

    Where nothing decodes, other prompts are all that it waits for, in the engine. It is sent before they end, as ever, and a long one would
    wait for ever at the gateway if shorter ones could always take what is left.
    """
    if ask.context_tokens > w.state.total_kv_tokens > 0:
        return False
    if not (w.accounts.decodes or w.accounts.coming):
        return True
    o = w.outline(standing.now_s)
    return o.free_seats > 0 and ask.context_tokens <= o.free_kv_tokens


def has_outbox_room(w: WorkerBook, ask: Ask) -> bool:
    """Room for what will move. A worker that holds nothing is never too small."""
    held = w.accounts.outbox_bytes
    return held == 0 or not ask.moves_kv or held + ask.box_bytes <= w.state.outbox_total_bytes


def has_inbox_room(w: WorkerBook, ask: Ask) -> bool:
    """Room for what comes from elsewhere. A worker that holds nothing is never too small."""
    held = w.accounts.inbox_bytes
    return held == 0 or not ask.moves_kv or held + ask.box_bytes <= w.state.inbox_total_bytes


class Router:
    """Weighs pairs. `hand_over`: what was learned of the KV's way on one host."""

    def __init__(self, mode: Mode) -> None:
        self.hand_over = HandOver()
        self._pairs_apart, self._pairs_alone = mode is not Mode.COLOCATED, mode is not Mode.DISAGG

    def pairs(
        self,
        ask: Ask,
        standing: Standing,
        extra_s: Mapping[str, float],
        best: int = 1,
        shortlist: int = SHORTLIST,
    ) -> list[Pair] | Shortage:
        """Pairs with room, the one to take first, then up to `best` - 1 by cost; or why there is none.

        `extra_s`: seconds of prompts meant for a worker but not given yet. `shortlist`: so many of each kind are weighed, all where no more
        than SHORTLIST are there. Of pairs that are as good as equal, the least recently used is to be taken.
        """
        firsts = [weigh_first(w, ask, standing, extra_s.get(w.name, 0.0)) for w in _least_busy(standing, ask, extra_s, shortlist)]
        ready_s = 0.0
        if firsts and ask.moves_kv:
            soonest = min(firsts, key=_cost)
            ready_s = soonest.wait_s + soonest.prefill_s + self.hand_over.seconds(ask.box_bytes)
        seconds = [weigh_second(w, ask, standing, ready_s) for w in _least_full(standing, ask, shortlist)]
        found = self._apart(ask, firsts, seconds, standing) if self._pairs_apart else []
        if self._pairs_alone:
            found += self._colocated(ask, firsts, seconds, standing, extra_s)
        if not found:
            return Shortage(_shortage(ask, standing))
        chosen = _fair(found)
        if best == 1:
            return [chosen]
        found.sort(key=_cost)
        if found[0] is chosen:  # so it is mostly
            return found[:best]
        return [chosen, *[pair for pair in found if pair is not chosen][: best - 1]]

    def _colocated(
        self, ask: Ask, firsts: list[FirstLeg], seconds: list[SecondLeg], standing: Standing, extra_s: Mapping[str, float]
    ) -> list[Pair]:
        """Both legs on one worker, for each that is among the best for either."""
        pairs = []
        first_on, second_on = {leg.worker: leg for leg in firsts}, {leg.worker: leg for leg in seconds}
        for w in dict.fromkeys([*first_on, *second_on]):
            second = second_on.get(w)
            if not (second is not None and ask.moves_kv) and not has_room(w, ask, standing):  # `seconds` have room
                continue
            first = first_on.get(w) or weigh_first(w, ask, standing, extra_s.get(w.name, 0.0))
            second = second or weigh_second(w, ask, standing)
            pairs.append(Pair(first, second, first.cost + second.cost, 0.0))
        return pairs

    def _apart(self, ask: Ask, firsts: list[FirstLeg], seconds: list[SecondLeg], standing: Standing) -> list[Pair]:
        """Pairs of two workers: the best few first legs with the best few second legs."""
        sources = _best([leg for leg in firsts if has_outbox_room(leg.worker, ask) and has_prompt_room(leg.worker, ask, standing)])
        sinks = _best([leg for leg in seconds if has_inbox_room(leg.worker, ask)])
        if not ask.moves_kv:
            return [Pair(first, second, first.cost, 0.0) for first in sources for second in sinks if first.worker is not second.worker]
        pairs = []
        near_s = self.hand_over.seconds(ask.box_bytes)
        for second in sinks:
            sink, host_id = second.worker, second.worker.host_id
            here, there = self._arriving(ask, second, near_s), None
            for first in sources:
                source = first.worker
                if source is sink:
                    continue
                cost, transfer_s = here
                if source.host_id != host_id:
                    there = there or self._arriving(ask, second, near_s + ask.box_bytes / CROSS_HOST_BYTES_PER_S)
                    cost, transfer_s = there
                pairs.append(Pair(first, second, first.cost + cost, transfer_s))
        return pairs

    def _arriving(self, ask: Ask, second: SecondLeg, transfer_s: float) -> tuple[float, float]:
        """The second leg's cost, and the hand-over's seconds, for what comes from elsewhere within `transfer_s`."""
        transfer_s += second.busy_s
        target_s = ask.targets.tpot_scale_s
        late = 0.0
        for more_s, share in self.hand_over.surprises:
            late += share * late_regret(second.tpot_s, transfer_s + more_s, ask.spread, target_s)
        return second.cost + late, transfer_s


def _shortage(ask: Ask, standing: Standing) -> str:
    if not any(has_room(w, ask, standing) for w in standing.sinks):
        free = [o for w in standing.sinks if (o := w.outline(standing.now_s)).free_seats > 0]
        if not free:
            return "all workers run as many requests as they can"
        most = max(o.free_kv_tokens for o in free)
        needed = f"{ask.kv_tokens} KV tokens, {ask.whole_tokens} at the most"
        return f"no worker has room for {needed} (the emptiest has {max(0, most)})"
    if not any(has_prompt_room(w, ask, standing) for w in standing.sources):
        return f"no worker has room for a prompt of {ask.context_tokens} tokens"
    return "the outboxes or inboxes of all workers are full"


def candidate(pair: Pair, ask: Ask, note: str = "") -> Candidate:
    """The pair as a value for the record."""
    first = pair.first
    prediction = Prediction(  # by place: by name takes twice as long
        ask.waited_s + first.wait_s + first.prefill_s,
        pair.second.tpot_s + pair.transfer_s / ask.spread_tokens if ask.moves_kv else 0.0,  # tpot_s()
        ask.waited_s + first.wait_s,
        first.prefill_s,
        pair.transfer_s,
        round(ask.output_tokens),
        ask.kv_tokens,
        first.cached_tokens,
    )
    return Candidate(first.worker.name, pair.second.worker.name, prediction, pair.cost, note)


def tpot_s(pair: Pair, ask: Ask) -> float:
    """Predicted seconds per token after the first, the hand-over spread over them. 0 when there is no second token."""
    if not ask.moves_kv:
        return 0.0
    return pair.second.tpot_s + pair.transfer_s / ask.spread_tokens


def _least_busy(standing: Standing, ask: Ask, extra_s: Mapping[str, float], shortlist: int) -> Iterable[WorkerBook]:
    """The workers that could start a prompt soonest, and disturb least; those that hold much of it come too."""
    if len(standing.sources) <= SHORTLIST:
        return standing.sources
    chosen = standing.least_busy(extra_s, shortlist)
    if ask.cached:
        chosen += [w for w in standing.sources if ask.cached.get(w.name, 0) * 4 > ask.context_tokens and w not in chosen][:shortlist]
    return chosen


def _least_full(standing: Standing, ask: Ask, shortlist: int) -> Iterable[WorkerBook]:
    """The emptiest of those that have room."""
    sinks = standing.sinks
    if len(sinks) <= SHORTLIST:
        return [w for w in sinks if has_room(w, ask, standing)] if ask.moves_kv else sinks
    return itertools.islice((w for w in standing.least_full() if not ask.moves_kv or has_room(w, ask, standing)), shortlist)


LegT = TypeVar("LegT", FirstLeg, SecondLeg)


def _best(legs: list[LegT]) -> list[LegT]:
    """The few cheapest; those as good as equally cheap by turns."""
    if len(legs) <= BEST_LEGS:
        return legs
    limit = min([leg.cost for leg in legs]) + 0.5 * TIE
    keyed = [(leg.cost > limit, leg.cost if leg.cost > limit else leg.worker.last_used_s, i) for i, leg in enumerate(legs)]
    keyed.sort()
    return [legs[i] for _, _, i in keyed[:BEST_LEGS]]


_cost = operator.attrgetter("cost")


def _fair(pairs: Sequence[Pair]) -> Pair:
    """The cheapest; of those as good as equally cheap, that of the least recently used workers."""
    limit = min([pair.cost for pair in pairs]) + TIE
    equal = [pair for pair in pairs if pair.cost <= limit]
    if len(equal) > 1:
        longest_s = min([pair.first.worker.last_used_s for pair in equal])
        equal = [pair for pair in equal if pair.first.worker.last_used_s == longest_s]
    if len(equal) > 1:
        longest_s = min([pair.second.worker.last_used_s for pair in equal])
        equal = [pair for pair in equal if pair.second.worker.last_used_s == longest_s]
    return equal[0] if len(equal) == 1 else min(equal, key=lambda p: (p.first.worker.name, p.second.worker.name))
