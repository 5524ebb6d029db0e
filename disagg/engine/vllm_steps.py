"""How much a step takes: less where somebody decodes in it (engine arguments `mixed_step_tokens` and `mixed_step_ms`).

vLLM has one limit for all steps, in tokens. A worker that runs prompts alone wants large steps, and one that decodes beside a prompt wants
short ones; in mode adaptive the same worker does both, by turns. How many tokens a step of so many milliseconds has is learned from the
steps themselves, by what the router learns with.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from disagg.engine.mixed_step import UNBOUNDED_TOKENS, long_prompt_tokens, tokens_in_time
from disagg.engine.vllm_plan import READ
from disagg.policy.step_cost import GENERIC
from disagg.policy.step_fit import StepFit
from disagg.types import StepRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.request import Request

    from disagg.engine.vllm_stats import Work

NEWEST = 0.2  # weight of the newest mixed step
MOST = 4.0  # times longer or shorter than fitted: a step further off says no more than this


class MixedSteps:
    """The limits of one engine's mixed steps, and what its steps have taken. `tokens`, `seconds`: 0 where there is no such limit."""

    def __init__(self, tokens: int = 0, seconds: float = 0.0) -> None:
        self._tokens = tokens or UNBOUNDED_TOKENS
        self._seconds = seconds
        self._fit = StepFit(GENERIC)
        self._excess = 0.0  # of mixed steps, measured over fitted, in logarithms: most steps only decode, and say little of these

    def note(self, work: Work | None, now_s: float) -> None:
        """A step is over; None: one without work."""
        if work is None or not self._seconds or work[0] <= 0:
            return
        took_s, prompt_tokens, _, decodes, _ = work
        if prompt_tokens and decodes:
            ratio = took_s / max(1e-9, self._fit.cost.step_s(*work[1:]))
            self._excess += NEWEST * (math.log(min(max(ratio, 1 / MOST), MOST)) - self._excess)
        self._fit.add(StepRecord(0, *work), now_s)

    def limit(self, decodes: int, context_tokens: int, cached: int) -> int:
        """Tokens of a step in which `decodes` requests decode, beside a prompt of which `cached` are done."""
        if not self._seconds:
            return self._tokens
        fitted_s = self._seconds / math.exp(self._excess)
        return min(self._tokens, tokens_in_time(self._fit.cost, fitted_s, decodes, context_tokens, cached))


def limit_mixed_steps(mixed_steps: MixedSteps) -> None:
    """Have vLLM's scheduler, in this process, keep to these limits in steps in which a request decodes. The latest ones count."""
    from vllm.v1.core.sched.scheduler import Scheduler

    Scheduler._disagg_mixed_steps = mixed_steps
    if not hasattr(Scheduler.schedule, "_disagg_patched"):
        Scheduler.schedule = _with_mixed_steps(Scheduler.schedule)


def _with_mixed_steps(schedule: Any) -> Any:
    """`schedule` with other limits for one call: of the step, and of a long prompt in it (mixed_step.py)."""

    @functools.wraps(schedule)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        config, whole = self.scheduler_config, self.max_num_scheduled_tokens
        decodes, context_tokens, cached = contents(self.running)
        if not decodes:
            return schedule(self, *args, **kwargs)
        taken = decodes * (1 + self.num_spec_tokens)
        limit = min(whole, max(self._disagg_mixed_steps.limit(decodes, context_tokens, cached), taken))
        long_prompt = config.long_prefill_token_threshold
        self.max_num_scheduled_tokens = limit
        if long_prompt:
            config.long_prefill_token_threshold = min(long_prompt, long_prompt_tokens(limit, taken, _prompts(self)))
        try:
            return schedule(self, *args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = whole
            config.long_prefill_token_threshold = long_prompt

    wrapped._disagg_patched = True  # type: ignore[attr-defined]
    return wrapped


def contents(running: Iterable[Request]) -> tuple[int, int, int]:
    """How many of them wait for more tokens with their whole prompt computed (an answer of one token never decodes), the tokens that those
    have computed, and the most that any other has computed of its prompt."""
    decodes = context_tokens = cached = 0
    for request in running:
        computed = request.num_computed_tokens
        if computed < request.num_prompt_tokens:
            cached = max(cached, computed)
        elif request.max_tokens > 1:
            decodes += 1
            context_tokens += computed
    return decodes, context_tokens, cached


def _prompts(scheduler: Any) -> list[int]:
    """Tokens that each prompt still wants computed, under way or waiting; without those whose KV comes from elsewhere."""
    left = (request.num_prompt_tokens - request.num_computed_tokens for request in scheduler.running)
    wanted = [tokens for tokens in left if tokens > 0]
    own = (request for request in scheduler.waiting if READ not in (request.kv_transfer_params or {}))
    return wanted + [request.num_prompt_tokens for request in own]
