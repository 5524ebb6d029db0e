"""Speculative decoding and quantised weights in the step times."""

from __future__ import annotations

import pytest

from disagg.errors import ConfigError
from disagg.perf.hardware import find_device
from disagg.perf.roofline import PrefillChunk, StepModel
from disagg.perf.shapes import find_shape
from disagg.perf.speculative import Speculation, SpeculativeSteps, parse_speculation

MODEL = StepModel(find_shape("llama-3.1-70b"), find_device("h100"), 4)


def test_expected_tokens_of_a_step() -> None:
    assert Speculation(4, 0.0).tokens_per_step == 1
    assert Speculation(4, 1.0).tokens_per_step == 5
    assert Speculation(2, 0.5).tokens_per_step == pytest.approx(1 + 0.5 + 0.25)


def test_it_helps_small_batches_and_hurts_where_arithmetic_is_the_limit() -> None:
    steps = SpeculativeSteps(MODEL, Speculation(4, 0.7))
    assert steps.decode_step_s(1, 1000) < 0.6 * MODEL.decode_step_s(1, 1000)
    assert steps.decode_step_s(1024, 1024 * 500) > MODEL.decode_step_s(1024, 1024 * 500)
    useless = SpeculativeSteps(MODEL, Speculation(4, 0.0))
    assert useless.decode_step_s(8, 8000) > MODEL.decode_step_s(8, 8000)


def test_time_per_token_is_affine_in_the_context_and_prompts_cost_what_they_add() -> None:
    steps = SpeculativeSteps(MODEL, Speculation(3, 0.8))
    near, middle, far = (steps.decode_step_s(16, c) for c in (10_000, 20_000, 30_000))
    assert far - middle == pytest.approx(middle - near)
    prompt = [PrefillChunk(512)]
    assert steps.step_s(prompt) == MODEL.step_s(prompt)
    added = steps.step_s(prompt, 16, 20_000) - middle
    assert 0.3 * MODEL.step_s(prompt) < added < MODEL.step_s(prompt)


@pytest.mark.parametrize("text", ["4", "x:0.5", "0:0.5", "4:1.5", "99:0.5", "4:-0.1", ""])
def test_bad_speculation_is_named(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_speculation(text)
    assert caught.value.key == "speculative"


def test_fewer_bits_make_decoding_quicker_and_leave_more_room() -> None:
    shape, device = find_shape("llama-3.1-70b"), find_device("h100")
    times = [StepModel(shape, device, 4, dtype).decode_step_s(4, 4000) for dtype in ("bf16", "fp8", "int4")]
    assert times == sorted(times, reverse=True)
    kv = [StepModel(shape, device, 4, "bf16", kv_dtype).decode_step_s(64, 64 * 8000) for kv_dtype in ("bf16", "fp8", "int8")]
    assert kv[0] > kv[1] == kv[2]
