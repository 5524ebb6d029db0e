"""Shorter steps where somebody decodes: what vLLM's scheduler is told for one call, and that it is told nothing afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.engine.vllm_steps import MixedSteps, _with_mixed_steps
from disagg.policy.step_cost import StepCost


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
SHORT, MIDDLE = Request(0, 30), Request(0, 100)
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
    _disagg_mixed_steps: MixedSteps = field(default_factory=lambda: MixedSteps(128))
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
        (Scheduler([PROMPT, DECODE], long_prompt=416), (128, 127)),  # all that the decodes leave, while no short one is there
        (Scheduler([PROMPT, DECODE, RESUMED], long_prompt=416), (128, 95)),
        (Scheduler([PROMPT, DECODE], long_prompt=416, waiting=[SHORT, SHORT]), (128, 67)),
        (Scheduler([PROMPT, DECODE], long_prompt=416, waiting=[SHORT] * 9), (128, 63)),  # half at least
        (Scheduler([DECODE], long_prompt=416, waiting=[MIDDLE, MIDDLE]), (128, 127)),  # first come, first served
        (Scheduler([PROMPT, DECODE], long_prompt=416, waiting=[MIDDLE, MIDDLE]), (128, 63)),
        (Scheduler([PROMPT, *[DECODE] * 40, RESUMED], long_prompt=480, waiting=[NEXT_PROMPT]), (128, 28)),  # two long ones share it
        (Scheduler([PROMPT, *[DECODE] * 40], long_prompt=480, waiting=[HANDED_OVER]), (128, 88)),
        (Scheduler([PROMPT, *[DECODE] * 40], long_prompt=480, num_spec_tokens=1), (128, 48)),
        (Scheduler([PROMPT, *[DECODE] * 60], long_prompt=480, num_spec_tokens=1), (128, 32)),  # but a quarter is its own
        (Scheduler([PROMPT, DECODE], long_prompt=48), (128, 48)),
        (Scheduler([PROMPT, DECODE], _disagg_mixed_steps=MixedSteps(600)), (512, 0)),
        (Scheduler([PROMPT, DECODE], long_prompt=416, _disagg_mixed_steps=MixedSteps(600)), (512, 416)),
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


COST = StepCost(base_s=0.1, over_s=0.0, token_s=0.004, pair_s=2e-6, decode_s=0.01, context_s=1e-5)


def run(steps: MixedSteps, cost: StepCost, decodes: int, cached: int, count: int = 60) -> list[float]:
    """Seconds of the mixed steps of a worker of that cost, which takes as many tokens as it is told; two of three steps only decode."""
    seconds = []
    for i in range(count):
        prompt = steps.limit(decodes, 100 * decodes, cached) - decodes if i % 3 == 2 else 0
        work = (prompt, prompt * (cached + (prompt + 1) / 2), decodes, 100 * decodes)
        took_s = cost.step_s(*work)
        steps.note((took_s, *work), i * 0.3)
        steps.note(None, i * 0.3)
        if prompt:
            seconds.append(took_s)
    return seconds


@pytest.mark.parametrize("decodes", [1, 5, 20])
@pytest.mark.parametrize("cached", [0, 1000])
def test_a_step_bounded_in_time_takes_as_many_tokens_as_its_worker_computes_in_it(decodes: int, cached: int) -> None:
    assert run(MixedSteps(0, 0.5), COST, decodes, cached)[-5:] == pytest.approx([0.5] * 5, rel=0.1)


def test_a_worker_that_turns_slower_gets_fewer_tokens() -> None:
    steps = MixedSteps(0, 0.5)
    run(steps, COST, 2, 0)
    before = steps.limit(2, 200, 0)
    assert run(steps, COST.scaled(2.0), 2, 0)[-5:] == pytest.approx([0.5] * 5, rel=0.1)
    assert 2 < steps.limit(2, 200, 0) < 0.5 * before


def test_the_smaller_of_both_limits_counts() -> None:
    narrow, wide = MixedSteps(50, 0.5), MixedSteps(500, 0.5)
    run(narrow, COST, 1, 0)
    run(wide, COST, 1, 0)
    assert narrow.limit(1, 100, 0) == 50
    assert 50 < wide.limit(1, 100, 0) < 150
