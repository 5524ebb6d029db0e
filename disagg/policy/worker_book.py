"""What the dispatcher knows of one worker: what it has been given, how fast it is, and what it will therefore do next. Pure.

Two sources are joined: the worker's own reports (a little old), and this gateway's accounts (exact, but only of its own requests).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.engine.mixed_step import UNBOUNDED_TOKENS, half_for_long, room_for_short, tokens_in_time
from disagg.policy.outline import Outline
from disagg.policy.step_cost import StepCost
from disagg.policy.step_fit import StepFit
from disagg.policy.targets import Spread
from disagg.types import EngineState, Role, StepRecord

DUTY_S = 3.0  # time constant of the share of time that prompts take from decoding
LATE_S = 45.0  # time constant of how often steps were longer than decoding requests like
KV_DOUBT = 2.0  # standard deviations of what answers will hold together that are kept beyond what is expected
UNKNOWN_STEP_TOKENS = 2048
UNKNOWN_SEATS = 1 << 30  # of an engine that does not tell how many requests it runs at once
STUCK_STEPS = 4.0  # a decoding worker that is silent for so many of its steps is slow, and the slower the longer it is silent
STUCK_MIN_S = 0.5
FRESH_S = 0.05  # what depends on time alone may be so old
SKETCH_S = 0.5
MOST_PASSING_STEPS = 3  # of a prompt that passes a long one
IDLE_HALF_LIFE_S = 3.0  # of the difference between an idle worker's learned speed and its pool's
# A difference in speed to its pool that may be noise, as a logarithm; and what the first step adds to it, the n-th one 1/n of that.
NOISE = 0.1
EARLY_NOISE = 4.0


# What has happened since an outline was drawn: nothing, a report of the worker (or of its pool), or something that it was given.
_FRESH, _REPORTED, _TOUCHED = 0, 1, 2


@dataclass(slots=True)
class Accounts:
    """What this gateway's requests hold of one worker; all 0 when it has none there.

    `prefills` with their `prefill_tokens` until the first token; `coming` are prompts that will decode here, with their `coming_tokens`,
    until then; `decodes` with their `context_tokens` and expected `output_tokens` from then to the end;
    `kv_tokens` reserved, of which `unseen_kv_tokens` cannot show in the worker's reports yet, and `kv_variance` of which says how far off
    they may be together; `seats` in its batch; bytes in the boxes.
    """

    prefills: int = 0
    prefill_tokens: int = 0
    coming: int = 0
    coming_tokens: int = 0
    decodes: int = 0
    context_tokens: float = 0.0
    output_tokens: float = 0.0
    spread_tokens: float = 0.0
    kv_tokens: int = 0
    unseen_kv_tokens: int = 0
    kv_variance: int = 0
    seats: int = 0
    outbox_bytes: int = 0
    inbox_bytes: int = 0
    groups: dict[float, int] = field(default_factory=dict)  # decodes by their target of seconds per token

    @property
    def is_empty(self) -> bool:
        requests = (self.prefills, self.prefill_tokens, self.coming, self.coming_tokens, self.decodes)
        room = (self.kv_tokens, self.unseen_kv_tokens, self.kv_variance, self.seats, self.outbox_bytes, self.inbox_bytes)
        return not any(requests) and not any(room) and not self.groups


class Typical(NamedTuple):
    """What a typical worker of a pool costs, the same as one number (step_fit.pace_s), and what it adds to first tokens."""

    cost: StepCost
    pace_s: float
    overhead_s: float


class WorkerBook:
    """One life of one worker. `takes_answers`: it may decode what a prompt began, here or elsewhere."""

    __slots__ = (
        "_age", "_believed", "_duty", "_foreign", "_is_slow", "_last_step", "_late_per_s", "_learned_s", "_long_step_s", "_outline",
        "accounts", "busy_until_s", "coming_at", "fit", "heard_s", "host_id", "last_used_s", "name", "overhead_s", "pass_tokens",
        "passing_tokens", "prefilling", "prompt_rate", "role", "state", "tail_room", "tail_s", "tail_steps",
        "takes_answers", "typical",
    )  # fmt: skip

    def __init__(self, name: str, role: Role, host_id: str, state: EngineState, prior: StepCost, now_s: float) -> None:
        self.name = name
        self.role = role
        self.host_id = host_id
        self.state = state
        self.fit = StepFit(prior)
        self.takes_answers = True
        self.typical: Typical | None = None  # of its pool; None when it is alone there
        self._believed: StepCost | None = prior  # None: to be worked out
        self._is_slow = False  # slower than its pool
        self.accounts = Accounts()
        self.prefilling: dict[int, float] = {}  # predicted seconds of the prompts given and not answered yet, by key, in order
        self.busy_until_s = now_s
        self.coming_at: dict[int, tuple[float, float, Spread]] = {}  # KV from elsewhere: when it is here, TPOT target, spread
        self.pass_tokens = 0  # of each step that a long prompt leaves to others (0: it takes all)
        self.passing_tokens = 0  # of short prompts that pass a long one now
        self._long_step_s = 0.0  # of the last prompt of several steps
        self.tail_steps = 0  # steps of the last of them
        self.tail_room = 0  # tokens left in the last of those
        self.tail_s = 0.0  # seconds of that one
        self.heard_s = now_s  # of a step or a token
        self.last_used_s = 0.0
        self.overhead_s = 0.0  # learned: what a first token takes beyond the engine's own steps
        self._foreign = 0  # requests of other gateways
        self._last_step = -1
        self._duty = 0.0
        self._late_per_s = 0.0
        self._learned_s = now_s
        self.prompt_rate: tuple[Outline, StepCost, float] | None = None  # kept by policy/outlook.py: of which outline, against what
        self._outline = self._draw(now_s)
        self._age = _TOUCHED

    # ---- what it reports

    def report(self, state: EngineState, now_s: float, tpot_s: float) -> None:
        """Take in a report. `tpot_s`: what decoding requests hereabouts want; a longer step counts as late."""
        self.state = state
        ours = self.accounts.prefills + self.accounts.decodes
        self._foreign = max(0, state.running_requests + state.waiting_requests - ours)
        self._age = self._age or _REPORTED
        steps = state.steps
        if not steps or steps[-1].number <= self._last_step:
            return
        if steps[0].number <= self._last_step:
            steps = tuple([step for step in steps if step.number > self._last_step])
        self._last_step = steps[-1].number
        self.heard_s = now_s
        for step in steps:
            self.fit.add(step, now_s)
        self._believed = None
        if self.takes_answers:
            self._learn_disturbance(steps, now_s, tpot_s)

    def _learn_disturbance(self, steps: Sequence[StepRecord], now_s: float, tpot_s: float) -> None:
        """What prompts take from those who decode here, and how often steps are too long for them."""
        lost_s, late = 0.0, 0.0
        for step in steps:
            if step.prefill_tokens:
                lost_s += max(0.0, step.seconds - self.fit.cost.step_s(0, 0, max(1, step.decode_requests), step.context_tokens))
                # As long as such a step is believed to be: a hiccup of the machine says nothing of those to come.
                likely_s = self._belief().step_s(step.prefill_tokens, step.prefill_pairs, step.decode_requests, step.context_tokens)
                late += max(0.0, min(step.seconds, likely_s) / tpot_s - 1.0)
        passed_s = max(0.0, now_s - self._learned_s)
        self._learned_s = now_s
        if self._duty or lost_s:
            self._duty = min(0.95, self._duty * math.exp(-passed_s / DUTY_S) + lost_s / DUTY_S)
        if self._late_per_s or late:
            self._late_per_s = self._late_per_s * math.exp(-passed_s / LATE_S) + late / LATE_S

    def touch(self) -> None:
        """What it has been given changed."""
        self._age = _TOUCHED

    def compare(self, typical: Typical | None) -> None:
        """Take in what a typical worker of its pool is like; None when there is no other to compare it with."""
        self.typical = typical
        self._believed = None
        self._age = self._age or _REPORTED

    def _belief(self) -> StepCost:
        """How much of the difference to its pool is the worker's own: little of what may be noise, and of what the first steps say."""
        if self._believed is not None:
            return self._believed
        own, typical, steps = self.fit.cost, self.typical, self.fit.num_steps
        self._is_slow = False
        if typical is None:
            self._believed = own
        elif not steps:
            self._believed = typical.cost
        else:
            own_s, typical_s = self.fit.pace_s, typical.pace_s
            far = abs(math.log(own_s / typical_s)) if own_s > 0 and typical_s > 0 else math.inf
            noise = NOISE + EARLY_NOISE / steps
            self._is_slow = far > noise and own_s > typical_s
            self._believed = typical.cost if far <= noise else typical.cost.blended(own, 1.0 - (noise / far) ** 2)
        return self._believed

    # ---- what follows

    def outline(self, now_s: float) -> Outline:
        """This worker as of now, or a moment ago."""
        if self._age or now_s - self._outline.at_s > FRESH_S:
            self._outline = self._draw(now_s)
            self._age = _FRESH
        return self._outline

    def sketch(self, now_s: float) -> Outline:
        """The same with what it was given until now, while what it reported, and what time changes, may be SKETCH_S old.

        To choose among many whom to look at: what they report changes all of them a little, all the time.
        """
        if self._age == _TOUCHED or now_s - self._outline.at_s > SKETCH_S:
            return self.outline(now_s)
        return self._outline

    def _draw(self, now_s: float) -> Outline:
        a = self.accounts
        cost, overhead_s = self._as_of(now_s)
        decodes = a.decodes + self._foreign
        context = a.context_tokens * (decodes / a.decodes) if a.decodes else 0.0
        step_s = cost.step_s(0, 0, decodes or 1, context)
        gap_s = cost.step_s(0, 0, decodes + a.coming, context + a.coming_tokens) if a.coming and decodes + a.coming > 1 else step_s
        state = self.state
        most = limit = state.max_step_tokens or UNKNOWN_STEP_TOKENS
        is_mixed = state.mixed_step_tokens or state.mixed_step_s
        if is_mixed and (decodes or a.coming > len(self.coming_at)):
            limit = min(limit, self._mixed_limit(cost, decodes or 1, context))
        if decodes and is_mixed and self.pass_tokens:
            chunk = min(most - self.pass_tokens, half_for_long(limit, decodes))
        else:
            chunk = max(min(limit - self.pass_tokens, limit - decodes), limit // 4, 1)
        room = state.total_kv_tokens - a.kv_tokens
        if a.kv_variance:
            room -= math.ceil(KV_DOUBT * math.sqrt(a.kv_variance))
        unseen = state.free_kv_tokens - a.unseen_kv_tokens
        most_seats = state.max_running_requests
        seats = most_seats - a.seats - self._foreign if most_seats else UNKNOWN_SEATS
        o = Outline(now_s, cost, overhead_s, decodes, context, step_s, chunk, most, room if room < unseen else unseen, seats)
        free = o.free_kv_tokens / state.total_kv_tokens if state.total_kv_tokens else 1.0
        if most_seats:
            free = min(free, o.free_seats / most_seats)
        o.fullness = 1.0 - free
        since_s = max(0.0, now_s - self._learned_s)
        if self._duty:
            o.duty = self._duty * math.exp(-since_s / DUTY_S)
            gap_s = max(gap_s, min(o.mixed_s, gap_s / (1.0 - o.duty)))
        if self._late_per_s:
            o.late_per_s = self._late_per_s * math.exp(-since_s / LATE_S)
        o.gap_s = max(gap_s, self._silence_s(now_s, step_s)) if a.decodes else gap_s
        return o

    def _mixed_limit(self, cost: StepCost, decodes: int, context_tokens: float) -> int:
        """Tokens of a step in which so many decode, where the engine bounds such steps."""
        limit, step_s = self.state.mixed_step_tokens or UNBOUNDED_TOKENS, self.state.mixed_step_s
        return min(limit, max(decodes, tokens_in_time(cost, step_s, decodes, context_tokens))) if step_s else limit

    def _as_of(self, now_s: float) -> tuple[StepCost, float]:
        """Step costs and overhead as believed; those of a slow worker that idles drawn towards its pool's: it may have recovered."""
        cost, overhead_s, typical = self._belief(), self.overhead_s, self.typical
        idle_s = now_s - self.fit.last_s
        if typical is None or idle_s <= 1.0:
            return cost, overhead_s
        keep = 2.0 ** (-idle_s / IDLE_HALF_LIFE_S)
        if self._is_slow:
            cost = cost.blended(typical.cost, 1.0 - keep)
        if overhead_s > typical.overhead_s:
            overhead_s = typical.overhead_s + keep * (overhead_s - typical.overhead_s)
        return cost, overhead_s

    def _silence_s(self, now_s: float, step_s: float) -> float:
        """How long a decoding worker has been silent, when that is longer than it should be."""
        if not self.accounts.decodes:
            return 0.0
        silent_s = now_s - self.heard_s
        return silent_s if silent_s > max(STUCK_MIN_S, STUCK_STEPS * step_s) else 0.0

    @property
    def mean_spread_tokens(self) -> float:
        """Tokens over which a delay is spread, of the answers that decode here, at least 1."""
        a = self.accounts
        return max(1.0, a.spread_tokens / a.decodes) if a.decodes else 64.0

    @property
    def mean_output_tokens(self) -> float:
        """Mean length of the answers that decode here, at least 1."""
        a = self.accounts
        return max(1.0, a.output_tokens / a.decodes) if a.decodes else 64.0

    def gap_with_s(self, o: Outline, context_tokens: float) -> float:
        """Seconds per token that decoding requests here get, once one more of `context_tokens` is here. `o`: its outline now."""
        a = self.accounts
        others = o.decodes + a.coming
        if not others:
            return o.gap_s
        step_s = o.cost.step_s(0, 0, others + 1, o.context_tokens + a.coming_tokens + context_tokens)
        if o.duty > 0.0:
            step_s = max(step_s, min(o.mixed_s, step_s / (1.0 - o.duty)))
        return step_s if step_s > o.gap_s else o.gap_s

    def held_to_s(self, o: Outline) -> float | None:
        """The tightest TPOT target of those who decode here that this worker could keep if each were alone; None where there is none.

        A target that one request alone would miss is lost whoever joins: to wait for its sake would leave a batch of one.
        """
        if not self.accounts.groups:
            return None
        alone_s = o.cost.alone_s(o.context_tokens / max(1, o.decodes))
        return min((target_s for target_s in self.accounts.groups if target_s > alone_s), default=None)

    def until_let_in_s(self, busy_s: float, o: Outline) -> float:
        """How long KV from elsewhere waits on a worker that has prompts for another `busy_s`. `o`: its outline now.

        Engines serve in order of arrival, and a prompt of several steps takes all that a step has: who comes waits for its end, unless
        prompts leave a part of each step to others.
        """
        return busy_s if not self.pass_tokens else min(busy_s, o.mixed_s if o.decodes else o.whole_step_s)

    @property
    def is_idle(self) -> bool:
        """Nothing is computed here, of ours or of others."""
        return not (self.prefilling or self.accounts.decodes or self._foreign)

    def wait_s(self, now_s: float, o: Outline) -> float:
        """Until a further prompt would start here. `o`: its outline.

        A worker that is overdue is expected to take as long again: one that has stopped looks worse by the second.
        """
        if self.prefilling:
            return abs(self.busy_until_s - now_s)
        return 0.5 * o.step_s if o.decodes else 0.0

    def prefill_s(self, tokens: int, cached: int, o: Outline) -> float:
        """Seconds that `tokens` prompt tokens after `cached` ones add, beside what decodes here and behind the prompts that are here.

        `o`: its outline now. The last step of the prompt before it may have room left; then the two share it.
        """
        cost, shared = o.cost, min(tokens, self._shared_room())
        rest_s = cost.prefill_s(tokens - shared, cached + shared, o.chunk_tokens, o.decodes, o.context_tokens)
        if not shared:
            return rest_s
        return rest_s + shared * (cost.over_s + cost.token_s + cost.pair_s * (cached + shared / 2))

    @property
    def shares_a_step(self) -> bool:
        """Whether a further prompt would begin in the last step of those that are here."""
        return self._shared_room() > 0

    def passing_s(self, tokens: int, now_s: float) -> tuple[float, float] | None:
        """Wait and prefill seconds of a short prompt that shares the steps of a long one which is here; None where it would not."""
        if not self.pass_tokens or not self.prefilling or self._long_step_s <= 0.0:
            return None
        o = self.outline(now_s)
        room = self.pass_tokens - o.decodes
        if o.decodes and (self.state.mixed_step_tokens or self.state.mixed_step_s):
            limit = min(self._mixed_limit(o.cost, o.decodes, o.context_tokens), self.state.max_step_tokens or UNKNOWN_STEP_TOKENS)
            room = room_for_short(limit, o.decodes)
        if room <= 0 or self.busy_until_s - now_s < self._long_step_s:
            return None
        steps = -(-(self.passing_tokens + tokens) // room)
        if steps > MOST_PASSING_STEPS:
            return None
        return 0.5 * self._long_step_s, steps * self._long_step_s + tokens * (o.cost.token_s + o.cost.over_s)

    def takes_passer(self, key: int, tokens: int, now_s: float) -> None:
        """A short prompt shares the steps of the long one; that one ends a little later."""
        cost = self.outline(now_s).cost
        self.passing_tokens += tokens
        self.prefilling[key] = tokens * (cost.token_s + cost.over_s)
        self.busy_until_s += self.prefilling[key]

    def took(self, key: int, tokens: int, seconds: float, now_s: float) -> None:
        """A prompt of `tokens` tokens to compute, expected to add `seconds`, stands behind those that are here."""
        shared = min(tokens, self._shared_room())
        rest = tokens - shared
        if rest:
            chunk = self.outline(now_s).chunk_tokens
            self.tail_steps = -(-rest // chunk)
            self.tail_room = -rest % chunk
            self.tail_s = seconds / self.tail_steps
            self._long_step_s = self.tail_s if self.tail_steps > 1 else 0.0
        else:
            self.tail_room -= shared
            self.tail_s += seconds
        self.prefilling[key] = seconds
        self.busy_until_s = max(now_s, self.busy_until_s) + seconds

    def gave(self, key: int, now_s: float) -> None:
        """A prompt is through, or gone. Those behind the first one start now, whatever was predicted."""
        was_first = next(iter(self.prefilling), None) == key
        self.prefilling.pop(key, None)
        if was_first:
            self.busy_until_s = now_s + sum(self.prefilling.values())

    def _shared_room(self) -> int:
        """Prompt tokens that fit into the last step of the prompts that are here; none when that step has begun."""
        if not self.prefilling or (self.tail_steps <= 1 and len(self.prefilling) == 1):
            return 0
        return self.tail_room


def looks(books: Sequence[WorkerBook], now_s: float, *, in_detail: bool) -> Iterator[Outline]:
    """`outline` or `sketch` of each, when it is its turn: of hundreds, for each request, so that a call for each would take too long."""
    newest, oldest_s = (_FRESH, FRESH_S) if in_detail else (_REPORTED, SKETCH_S)
    for w in books:
        o = w._outline
        yield o if w._age <= newest and now_s - o.at_s <= oldest_s else w.outline(now_s)


def all_looks(books: Sequence[WorkerBook], now_s: float, *, in_detail: bool) -> list[Outline]:
    """The same of all of them now, which is quicker."""
    newest, oldest_s = (_FRESH, FRESH_S) if in_detail else (_REPORTED, SKETCH_S)
    return [o if w._age <= newest and now_s - (o := w._outline).at_s <= oldest_s else w.outline(now_s) for w in books]
