"""How many tokens a step takes: fewer where somebody decodes in it (engine argument `mixed_step_tokens`).

vLLM has one limit for all steps. A worker that runs prompts alone wants large steps, and one that decodes beside a prompt wants short ones;
in mode adaptive the same worker does both, by turns.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from disagg.engine.mixed_step import long_prompt_tokens
from disagg.engine.vllm_plan import READ

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.request import Request


def limit_mixed_steps(mixed_step_tokens: int) -> None:
    """Have vLLM's scheduler, in this process, plan at most so many tokens for a step in which a request decodes. Idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler

    Scheduler._disagg_mixed_step_tokens = mixed_step_tokens
    if not hasattr(Scheduler.schedule, "_disagg_patched"):
        Scheduler.schedule = _with_mixed_steps(Scheduler.schedule)


def _with_mixed_steps(schedule: Any) -> Any:
    """`schedule` with other limits for one call: of the step, and of a long prompt in it (mixed_step.py)."""

    @functools.wraps(schedule)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        config, whole = self.scheduler_config, self.max_num_scheduled_tokens
        decodes = num_decodes(self.running)
        if not decodes:
            return schedule(self, *args, **kwargs)
        taken = decodes * (1 + self.num_spec_tokens)
        limit = min(whole, max(self._disagg_mixed_step_tokens, taken))
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


def num_decodes(running: Iterable[Request]) -> int:
    """How many of them wait for more tokens with their whole prompt computed. An answer of one token never decodes."""
    return sum(request.max_tokens > 1 and request.num_computed_tokens >= request.num_prompt_tokens for request in running)


def _prompts(scheduler: Any) -> list[int]:
    """Tokens that each prompt still wants computed, under way or waiting; without those whose KV comes from elsewhere."""
    wanted = [request.num_prompt_tokens - request.num_computed_tokens for request in scheduler.running]
    own = (request for request in scheduler.waiting if READ not in (request.kv_transfer_params or {}))
    return wanted + [request.num_prompt_tokens for request in own]
