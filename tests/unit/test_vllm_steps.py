"""Shorter steps where somebody decodes: what vLLM's scheduler is told for one call, and that it is told nothing afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.engine.vllm_steps import _with_mixed_steps

PROMPT = SimpleNamespace(num_computed_tokens=400, num_prompt_tokens=3000, max_tokens=10)
DECODE = SimpleNamespace(num_computed_tokens=64, num_prompt_tokens=64, max_tokens=10)
RESUMED = SimpleNamespace(num_computed_tokens=32, num_prompt_tokens=64, max_tokens=10)
LAST_CHUNK_OF_ONE_TOKEN = SimpleNamespace(num_computed_tokens=64, num_prompt_tokens=64, max_tokens=1)


@dataclass
class Scheduler:
    """What is read of vLLM's."""

    running: list[Any]
    long_prompt: int = 0
    max_num_scheduled_tokens: int = 512
    num_spec_tokens: int = 0
    waiting: list[Any] = field(default_factory=list)
    kv_holding_waiting: list[Any] = field(default_factory=list)
    deferred_waiting: set[int] = field(default_factory=set)
    _disagg_mixed_step_tokens: int = 128
    seen: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler_config = SimpleNamespace(long_prefill_token_threshold=self.long_prompt)

    def limits(self) -> tuple[int, int]:
        return self.max_num_scheduled_tokens, self.scheduler_config.long_prefill_token_threshold

    @_with_mixed_steps
    def schedule(self, fails: bool = False) -> str:
        self.seen = self.limits()
        if fails:
            raise RuntimeError
        return "planned"


@pytest.mark.parametrize(
    ("scheduler", "seen"),
    [
        (Scheduler([]), (512, 0)),
        (Scheduler([PROMPT, RESUMED, LAST_CHUNK_OF_ONE_TOKEN]), (512, 0)),
        (Scheduler([PROMPT, DECODE]), (128, 0)),
        (Scheduler([PROMPT, DECODE], long_prompt=416), (128, 127)),  # nobody else wants any
        (Scheduler([PROMPT, DECODE, RESUMED], long_prompt=416), (128, 32)),  # 96 tokens are left to others, but a quarter is its own
        (Scheduler([PROMPT, DECODE], long_prompt=480, waiting=[RESUMED]), (128, 95)),
        (Scheduler([PROMPT, *[DECODE] * 40], long_prompt=480, waiting=[RESUMED]), (128, 56)),  # beside what decodes take
        (Scheduler([PROMPT, *[DECODE] * 40], long_prompt=480, num_spec_tokens=1, kv_holding_waiting=[RESUMED]), (128, 32)),
        (Scheduler([PROMPT, DECODE], long_prompt=480, waiting=[RESUMED], deferred_waiting={1}), (128, 127)),  # it waits for its KV
        (Scheduler([PROMPT, DECODE], _disagg_mixed_step_tokens=600), (512, 0)),
        (Scheduler([DECODE] * 200), (200, 0)),
        (Scheduler([DECODE] * 100, num_spec_tokens=3), (400, 0)),
        (Scheduler([DECODE] * 600), (512, 0)),
    ],
)
def test_limits_of_a_step(scheduler: Scheduler, seen: tuple[int, int]) -> None:
    before = scheduler.limits()
    assert scheduler.schedule() == "planned"
    assert scheduler.seen == seen
    assert scheduler.limits() == before
    with pytest.raises(RuntimeError):
        scheduler.schedule(fails=True)
    assert scheduler.limits() == before
