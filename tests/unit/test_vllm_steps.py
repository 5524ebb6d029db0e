"""Shorter steps where somebody decodes: what vLLM's scheduler is told for one call, and that it is told nothing afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.engine.vllm_steps import _with_mixed_steps


@dataclass(frozen=True)
class Request:
    num_computed_tokens: int
    num_prompt_tokens: int
    max_tokens: int = 10
    kv_transfer_params: dict[str, Any] | None = None


PROMPT = Request(400, 3000)
DECODE = Request(64, 64)
RESUMED = Request(32, 64)
LAST_CHUNK_OF_ONE_TOKEN = Request(64, 64, max_tokens=1)
NEXT_PROMPT = Request(0, 900, kv_transfer_params={"write": {}})
HANDED_OVER = Request(0, 900, kv_transfer_params={"read": {}})


@dataclass
class Scheduler:
    """What is read of vLLM's."""

    running: list[Any]
    long_prompt: int = 0
    max_num_scheduled_tokens: int = 512
    num_spec_tokens: int = 0
    waiting: list[Any] = field(default_factory=list)
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
        (Scheduler([PROMPT, DECODE], long_prompt=416), (128, 63)),  # half of what the decodes leave is for short ones
        (Scheduler([PROMPT, *[DECODE] * 40], long_prompt=480), (128, 44)),
        (Scheduler([PROMPT, *[DECODE] * 40, RESUMED], long_prompt=480, waiting=[NEXT_PROMPT]), (128, 22)),  # two long ones share it
        (Scheduler([PROMPT, *[DECODE] * 40], long_prompt=480, waiting=[HANDED_OVER]), (128, 44)),
        (Scheduler([PROMPT, *[DECODE] * 40], long_prompt=480, num_spec_tokens=1), (128, 32)),  # but a quarter is its own
        (Scheduler([PROMPT, DECODE], long_prompt=48), (128, 48)),
        (Scheduler([PROMPT, DECODE], _disagg_mixed_step_tokens=600), (512, 0)),
        (Scheduler([PROMPT, DECODE], long_prompt=416, _disagg_mixed_step_tokens=600), (512, 255)),
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
