"""What the dispatcher knows of one worker: what it has been given, how fast it is, and what it will therefore do next. Pure.

Two sources are joined: the worker's own reports (a little old), and this gateway's accounts (exact, but only of its own requests).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from disagg.policy.step_cost import StepCost
from disagg.policy.step_fit import StepFit
from disagg.types import EngineState, Role, StepRecord

DUTY_S = 3.0  # time constant of the share of time that prompts take from decoding
LATE_S = 45.0  # time constant of how often steps were longer than decoding requests like
UNKNOWN_STEP_TOKENS = 2048
STUCK_STEPS = 4.0  # a decoding worker that is silent for so many of its steps is slow, and the slower the longer it is silent
STUCK_MIN_S = 0.5
IDLE_HALF_LIFE_S = 3.0  # of the difference between an idle worker's learned speed and its pool's


@dataclass(slots=True)
class Accounts:
    """What this gateway's requests hold of one worker; all 0 when it has none there.

    `prefills` with their `prefill_tokens` until the first token; `coming` are prompts that will decode here, with their `coming_tokens`,
    until then; `decodes` with their `context_tokens` and expected `output_tokens` from then to the end;
    `kv_tokens` reserved, of which `unseen_kv_tokens` cannot show in the worker's reports yet; bytes in the boxes.
    """

    prefills: int = 0
    prefill_tokens: int = 0
    coming: int = 0
    coming_tokens: int = 0
    decodes: int = 0
    context_tokens: float = 0.0
    output_tokens: float = 0.0
    kv_tokens: int = 0
    unseen_kv_tokens: int = 0
    outbox_bytes: int = 0
    inbox_bytes: int = 0
    groups: dict[float, int] = field(default_factory=dict)  # decodes by their target of seconds per token

    @property
    def is_empty(self) -> bool:
        requests = (self.prefills, self.prefill_tokens, self.coming, self.coming_tokens, self.decodes)
        room = (self.kv_tokens, self.unseen_kv_tokens, self.outbox_bytes, self.inbox_bytes)
        return not any(requests) and not any(room) and not self.groups


class WorkerBook:
    """One life of one worker."""

    def __init__(self, name: str, role: Role, host_id: str, state: EngineState, prior: StepCost, now_s: float) -> None:
        self.name = name
        self.role = role
        self.host_id = host_id
        self.state = state
        self.is_live = True
        self.fit = StepFit(prior)
        self.accounts = Accounts()
        self.prefilling: dict[int, float] = {}  # predicted seconds of the prompts given and not answered yet, by key, in order
        self.busy_until_s = now_s
        self.tail_steps = 0  # steps of the last prompt
        self.tail_room = 0  # tokens left in the last of them
        self.heard_s = now_s  # of a step or a token
        self.last_used_s = 0.0
        self.overhead_s = 0.0  # learned: what a first token takes beyond the engine's own steps
        self.foreign_requests = 0  # of other gateways
        self.typical: StepCost | None = None  # of a typical worker of the pool
        self._last_step = -1
        self._duty = 0.0
        self._late_per_s = 0.0
        self._learned_s = now_s
        self._cost: StepCost | None = None
        self._step_s: float | None = None

    # ---- what it reports

    def report(self, state: EngineState, now_s: float, tpot_s: float) -> None:
        """Take in a report. `tpot_s`: what decoding requests hereabouts want; a longer step counts as late."""
        self.state = state
        ours = self.accounts.prefills + self.accounts.decodes
        self.foreign_requests = max(0, state.running_requests + state.waiting_requests - ours)
        self.touch()
        steps = [step for step in state.steps if step.number > self._last_step]
        if not steps:
            return
        self._last_step = steps[-1].number
        self.heard_s = now_s
        for step in steps:
            self.fit.add(step, now_s)
        lost_s, late = 0.0, 0.0
        cost = self.fit.cost
        for step in steps:
            if step.prefill_tokens:
                lost_s += max(0.0, step.seconds - _decode_step_s(cost, step))
                late += max(0.0, step.seconds / tpot_s - 1.0)
        passed_s = max(0.0, now_s - self._learned_s)
        self._learned_s = now_s
        self._duty = min(0.95, self._duty * math.exp(-passed_s / DUTY_S) + lost_s / DUTY_S)
        self._late_per_s = self._late_per_s * math.exp(-passed_s / LATE_S) + late / LATE_S

    def touch(self) -> None:
        """Something changed: what follows from it is computed anew when asked for."""
        self._cost = None
        self._step_s = None

    # ---- what follows

    def cost(self, now_s: float) -> StepCost:
        """Step costs as learned; of a worker that has had no work for a while, drawn towards its pool's: it may have recovered."""
        if self._cost is None:
            cost = self.fit.cost
            idle_s = now_s - self.fit.last_s
            if self.typical is not None and idle_s > 1.0:
                cost = cost.blended(self.typical, 1.0 - 2.0 ** (-idle_s / IDLE_HALF_LIFE_S))
            self._cost = cost
        return self._cost

    @property
    def decodes(self) -> int:
        """Requests that decode here."""
        return self.accounts.decodes + self.foreign_requests

    @property
    def context_tokens(self) -> float:
        """Sum of the contexts of those."""
        a = self.accounts
        mean = a.context_tokens / a.decodes if a.decodes else 0.0
        return a.context_tokens + self.foreign_requests * mean

    @property
    def mean_output_tokens(self) -> float:
        """Mean length of the answers that decode here, at least 1."""
        a = self.accounts
        return max(1.0, a.output_tokens / a.decodes) if a.decodes else 64.0

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens that one step takes beside the decodes."""
        limit = self.state.max_step_tokens or UNKNOWN_STEP_TOKENS
        return max(limit - self.decodes, limit // 4, 1)

    def step_s(self, now_s: float) -> float:
        """Seconds of a decode step of the requests that are here now (of an empty one: of the first request to come)."""
        if self._step_s is None:
            self._step_s = self.cost(now_s).step_s(0, 0, max(1, self.decodes), self.context_tokens)
        return self._step_s

    def duty(self, now_s: float) -> float:
        """Share of its time, 0 to 0.95, that prompts lately took from decoding."""
        return self._duty * math.exp(-max(0.0, now_s - self._learned_s) / DUTY_S)

    def late_per_s(self, now_s: float) -> float:
        """Steps too long for decoding per second, lately, each counted by how much too long it was."""
        return self._late_per_s * math.exp(-max(0.0, now_s - self._learned_s) / LATE_S)

    def gap_s(self, now_s: float, more: int = 0, more_context: float = 0.0) -> float:
        """Seconds per token that a request decoding here gets, once those that are coming and `more` of `more_context` tokens are here."""
        more += self.accounts.coming
        step_s = self.step_s(now_s)
        if more and self.decodes + more > 1:
            context = self.context_tokens + self.accounts.coming_tokens + more_context
            step_s = self.cost(now_s).step_s(0, 0, self.decodes + more, context)
        return max(step_s / (1.0 - self.duty(now_s)), self._silence_s(now_s, step_s))

    def wait_s(self, now_s: float) -> float:
        """Until a further prompt would start here.

        A worker that is overdue is expected to take as long again: one that has stopped looks worse by the second.
        """
        if self.prefilling:
            return abs(self.busy_until_s - now_s)
        return 0.5 * self.step_s(now_s) if self.decodes else 0.0

    def feed_s(self, now_s: float) -> float:
        """How much work must stand ready so that the next step is worth its weight reads: twice the tokens that they hide."""
        cost = self.cost(now_s)
        tokens = min(self.chunk_tokens, 2 * cost.ridge_tokens)
        return cost.step_s(tokens, 0, self.decodes, self.context_tokens) if tokens else 0.0

    def prefill_s(self, tokens: int, cached: int, now_s: float) -> float:
        """Seconds that `tokens` prompt tokens after `cached` ones add, beside what decodes here and behind the prompts that are here.

        The last step of the prompt before it may have room left; then the two share it.
        """
        cost, decodes = self.cost(now_s), self.decodes
        shared = min(tokens, self.shared_room())
        rest_s = cost.prefill_s(tokens - shared, cached + shared, self.chunk_tokens, decodes, self.context_tokens if decodes else 0.0)
        return rest_s + shared * (cost.over_s + cost.token_s + cost.pair_s * (cached + shared / 2))

    def shared_room(self) -> int:
        """Prompt tokens that fit into the last step of the prompts that are here; none when that step has begun."""
        if not self.prefilling or (self.tail_steps <= 1 and len(self.prefilling) == 1):
            return 0
        return self.tail_room

    def took(self, key: int, tokens: int, seconds: float, now_s: float) -> None:
        """A prompt of `tokens` tokens to compute, expected to add `seconds`, stands behind those that are here."""
        chunk, shared = self.chunk_tokens, min(tokens, self.shared_room())
        rest = tokens - shared
        if rest:
            self.tail_steps = -(-rest // chunk)
            self.tail_room = -rest % chunk
        else:
            self.tail_room -= shared
        self.prefilling[key] = seconds
        self.busy_until_s = max(now_s, self.busy_until_s) + seconds

    @property
    def free_kv_tokens(self) -> int:
        """KV tokens that a new request may count on: by our own accounts and by what the worker says, whichever is less."""
        by_account = self.state.total_kv_tokens - self.accounts.kv_tokens
        by_report = self.state.free_kv_tokens - self.accounts.unseen_kv_tokens
        return min(by_account, by_report)

    def has_kv_room(self, tokens: int) -> bool:
        """A worker that holds nothing of ours is never too small: the total was checked when the request came."""
        return tokens <= self.free_kv_tokens or self.accounts.kv_tokens == 0

    def _silence_s(self, now_s: float, step_s: float) -> float:
        """How long a decoding worker has been silent, when that is longer than it should be."""
        if not self.accounts.decodes:
            return 0.0
        silent_s = now_s - self.heard_s
        return silent_s if silent_s > max(STUCK_MIN_S, STUCK_STEPS * step_s) else 0.0


def pace_s(cost: StepCost) -> float:
    """Seconds of a reference step: the one number by which workers are compared."""
    return cost.step_s(256, 256 * 512, 16, 16 * 1024)


def _decode_step_s(cost: StepCost, step: StepRecord) -> float:
    """What the step would have taken without its prompt tokens."""
    return cost.step_s(0, 0, max(1, step.decode_requests), step.context_tokens)
