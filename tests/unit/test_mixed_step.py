"""How many tokens fit a step of so many seconds."""

from __future__ import annotations

import pytest

from disagg.engine.mixed_step import STRETCH, UNBOUNDED_TOKENS, tokens_in_time
from disagg.policy.step_cost import StepCost

CPU = StepCost(base_s=0.1, over_s=0.0, token_s=0.004, pair_s=3e-6, decode_s=0.01, context_s=1e-5)
GPU = StepCost(base_s=0.02, over_s=60e-6, token_s=2e-6, pair_s=1e-9, decode_s=20e-6, context_s=1e-8, ridge_tokens=300)
NO_PAIRS = StepCost(base_s=0.02, over_s=0.0, token_s=1e-3, pair_s=0.0, decode_s=0.0, context_s=0.0)


def step_s(cost: StepCost, tokens: int, decodes: int, context: int, cached: int) -> float:
    prompt = tokens - decodes
    return cost.step_s(prompt, prompt * cached + prompt * prompt / 2, decodes, context)


@pytest.mark.parametrize(("cost", "seconds"), [(CPU, 0.5), (GPU, 0.03), (GPU, 0.05), (NO_PAIRS, 0.1)])
@pytest.mark.parametrize("decodes", [1, 16])
@pytest.mark.parametrize("cached", [0, 2000])
def test_the_step_is_as_long_as_it_may_be_and_no_longer(cost: StepCost, seconds: float, decodes: int, cached: int) -> None:
    tokens = tokens_in_time(cost, seconds, decodes, 64 * decodes, cached)
    assert step_s(cost, tokens, decodes, 64 * decodes, cached) <= seconds * (1 + 1e-9)
    assert step_s(cost, tokens + 1, decodes, 64 * decodes, cached) > seconds


def test_below_the_ridge_tokens_are_nearly_free() -> None:
    room = GPU.step_s(100, 0, 8, 0)
    assert tokens_in_time(GPU, room, 8, 0, 0) - 8 >= 99


@pytest.mark.parametrize("cost", [CPU, GPU])
def test_decodes_that_take_all_the_time_leave_prompts_a_little(cost: StepCost) -> None:
    alone_s = cost.step_s(0, 0, 64, 64_000)
    tokens = tokens_in_time(cost, 0.5 * alone_s, 64, 64_000)
    assert tokens > 64
    assert step_s(cost, tokens, 64, 64_000, 0) == pytest.approx((1 + STRETCH) * alone_s, rel=0.02)


def test_steps_that_take_no_time_have_no_bound() -> None:
    assert tokens_in_time(CPU.scaled(0.0), 0.1, 4, 100) == 4 + UNBOUNDED_TOKENS
