"""Learning a worker's speed: from any start, through a change of pace and back, and never to something unphysical."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from disagg.perf.hardware import find_device
from disagg.perf.roofline import PrefillChunk, StepModel
from disagg.perf.shapes import find_shape
from disagg.policy.step_cost import GENERIC, StepCost, from_roofline
from disagg.policy.step_fit import StepFit
from disagg.types import StepRecord

MODEL = StepModel(find_shape("llama-3.1-70b"), find_device("h100"), 4)
TRUE = from_roofline(MODEL)


def record(rng: random.Random, number: int, factor: float = 1.0, noise: float = 0.05, *, prompts: bool = True) -> StepRecord:
    decodes = rng.randrange(1, 200)
    context = decodes * rng.randrange(300, 3000)
    tokens, pairs = 0, 0.0
    if prompts and rng.random() < 0.3:
        tokens, cached = rng.choice([64, 512, 2048]), rng.randrange(4000)
        pairs = tokens * (cached + (tokens + 1) / 2)
    return StepRecord(
        number, TRUE.step_s(tokens, pairs, decodes, context) * factor * rng.lognormvariate(0, noise), tokens, pairs, decodes, context
    )


def error(fit: StepFit, factor: float = 1.0) -> float:
    """Median relative error over typical steps."""
    rng = random.Random(99)
    errors = []
    for number in range(60):
        r = record(rng, number, factor, noise=0.0)
        errors.append(abs(fit.cost.step_s(r.prefill_tokens, r.prefill_pairs, r.decode_requests, r.context_tokens) / r.seconds - 1))
    return sorted(errors)[30]


@pytest.mark.parametrize("shape", ["llama-3.1-70b", "llama-3.1-8b", "qwen3-32b"])
def test_the_roofline_is_read_off_closely(shape: str) -> None:
    model = StepModel(find_shape(shape), find_device("h100"), 2)
    cost = from_roofline(model)
    for chunks, decodes, context in (((), 1, 500), ((), 64, 64_000), ((PrefillChunk(64),), 0, 0), ((PrefillChunk(2048, 4000),), 30, 9000)):
        tokens, pairs = sum(c.num_tokens for c in chunks), sum(c.attention_pairs for c in chunks)
        assert cost.step_s(tokens, pairs, decodes, context) == pytest.approx(model.step_s(chunks, decodes, context), rel=0.02)
    for tokens in (192, 256, 320, 384, 512):  # about the ridge neither weights nor arithmetic bounds a step alone
        chunk = PrefillChunk(tokens)
        assert 0.0 <= model.step_s([chunk], 30, 30_000) / cost.step_s(tokens, chunk.attention_pairs, 30, 30_000) - 1 < 0.15


def test_prefill_in_chunks_is_the_sum_of_its_steps() -> None:
    steps = [TRUE.step_s(n, n * (start + (n + 1) / 2), 10, 5000) for start, n in ((100, 512), (612, 512), (1124, 76))]
    assert TRUE.prefill_s(1100, 100, 512, 10, 5000) == pytest.approx(sum(steps))
    assert TRUE.prefill_s(0, 100, 512) == 0


@pytest.mark.parametrize(
    ("prior", "after", "bound"), [(TRUE, 5, 0.1), (TRUE.scaled(2), 60, 0.1), (TRUE.scaled(0.3), 60, 0.1), (GENERIC, 60, 0.15)]
)
def test_it_finds_the_truth_from_any_start(prior: StepCost, after: int, bound: float) -> None:
    rng, fit = random.Random(1), StepFit(prior)
    for number in range(after):
        fit.add(record(rng, number), number * 0.02)
    assert error(fit) < bound


@pytest.mark.parametrize("factor", [0.05, 0.5, 1.0, 5.0, 40.0])
def test_few_prompts_are_heard_whatever_the_speed_of_the_device(factor: float) -> None:
    """Each dozen steps a prompt: what they cost is known after few of them, also where the device is far from what was believed."""
    truth = replace(GENERIC, base_s=1.2 * GENERIC.base_s, token_s=2.5 * GENERIC.token_s).scaled(factor)
    rng, fit = random.Random(5), StepFit(GENERIC)
    found = []
    for number in range(120):
        tokens = rng.choice([64, 150, 600]) if number % 12 == 3 else 0
        pairs, decodes = tokens * (tokens + 1) / 2, rng.randrange(1, 12)
        seconds = truth.step_s(tokens, pairs, decodes, 300 * decodes) * rng.lognormvariate(0, 0.05)
        fit.add(StepRecord(number, seconds, tokens, pairs, decodes, 300 * decodes), number * 0.02)
        if number >= 36:  # three prompts
            found.append(fit.cost.step_s(600, 600 * 300.5, 0, 0) / truth.step_s(600, 600 * 300.5, 0, 0))
    assert min(found[0], found[-1]) > 0.8
    assert max(found[0], found[-1]) < 1.25
    assert 0.9 < found[-1] < 1.1


@pytest.mark.parametrize("factor", [0.2, 5.0, 15.0])
def test_a_slow_device_is_believed_slow_with_prompts_that_none_has_run(factor: float) -> None:
    rng, fit = random.Random(6), StepFit(GENERIC)
    for number in range(40):
        decodes = rng.randrange(1, 12)
        seconds = GENERIC.scaled(factor).step_s(0, 0.0, decodes, 300 * decodes)
        fit.add(StepRecord(number, seconds, 0, 0.0, decodes, 300 * decodes), number * 0.02)
    for cost in (fit.cost, fit.own_cost()):
        assert cost.step_s(600, 600 * 300.5, 0, 0) / GENERIC.scaled(factor).step_s(600, 600 * 300.5, 0, 0) == pytest.approx(1.0, rel=0.05)


def test_a_recovery_is_believed_sooner_than_a_slow_spell() -> None:
    """A step may be slow by accident, but not quick: one that idles for being slow is given few to show that it has recovered."""
    rng, fit = random.Random(3), StepFit(TRUE)
    for number in range(100):
        fit.add(record(rng, number), 0.0)
    found = []
    for factor in (5.0, 1.0):
        for number in range(3):
            fit.add(record(rng, number, factor), 0.0)
        found.append(fit.pace_s / StepFit(TRUE).pace_s)
        for number in range(60):
            fit.add(record(rng, number, factor), 0.0)
    assert found[0] < 2.5, "three slow steps are half believed"
    assert found[1] < 2.0, "three quick ones after many slow ones nearly whole"


def test_a_change_of_pace_is_noticed_within_20_steps_both_ways() -> None:
    rng, fit = random.Random(2), StepFit(TRUE)
    for number in range(300):
        fit.add(record(rng, number), 0.0)
    for factor in (5.0, 1.0):
        for number in range(20):
            fit.add(record(rng, number, factor), 0.0)
        assert error(fit, factor) < 0.15
        for number in range(100):
            fit.add(record(rng, number, factor), 0.0)


def test_an_hour_of_decoding_does_not_forget_what_a_prompt_costs() -> None:
    rng, fit = random.Random(3), StepFit(TRUE.scaled(1.7))
    for number in range(300):
        fit.add(record(rng, number), 0.0)
    for number in range(3000):
        fit.add(record(rng, number, prompts=False), 0.0)
    assert fit.cost.prefill_s(2000, 0, 512) == pytest.approx(TRUE.prefill_s(2000, 0, 512), rel=0.1)


def test_a_prompt_among_a_hundred_decode_steps_is_not_missed() -> None:
    """Believed to be four times quicker with prompts than it is, a worker that mostly decodes is found out by its first few."""
    rng, fit = random.Random(5), StepFit(replace(TRUE, over_s=TRUE.over_s / 4, pair_s=TRUE.pair_s / 4))
    for number in range(5 * 129):
        r = record(rng, number, prompts=False)
        if number % 129 == 128:
            r = replace(r, prefill_tokens=2048, prefill_pairs=2048 * 1024.5)
            r = replace(r, seconds=TRUE.step_s(2048, r.prefill_pairs, r.decode_requests, r.context_tokens))
        fit.add(r, 0.0)
    assert fit.num_prompt_steps == 5
    assert fit.cost.prefill_s(4096, 0, 2048) == pytest.approx(TRUE.prefill_s(4096, 0, 2048), rel=0.15)


def test_who_has_seen_no_prompt_leans_on_those_that_have() -> None:
    rng, fit = random.Random(6), StepFit(replace(TRUE, over_s=TRUE.over_s / 4, pair_s=TRUE.pair_s / 4))
    for number in range(200):
        fit.add(record(rng, number, prompts=False), 0.0)
    assert fit.cost.prefill_s(4096, 0, 2048) < 0.8 * TRUE.prefill_s(4096, 0, 2048)
    fit.lean_on(TRUE)
    for number in range(64):
        fit.add(record(rng, number, prompts=False), 0.0)
    assert fit.cost.prefill_s(4096, 0, 2048) == pytest.approx(TRUE.prefill_s(4096, 0, 2048), rel=0.15)
    assert error(fit) < 0.1


def test_coefficients_stay_physical_whatever_is_reported() -> None:
    rng, fit = random.Random(4), StepFit(GENERIC)
    for number in range(500):
        seconds = rng.choice([1e-6, 1e-3, 0.02, 3.0, 0.0, -1.0])
        fit.add(StepRecord(number, seconds, rng.choice([0, 500]), rng.random() * 1e6, rng.randrange(30), rng.randrange(10**6)), 0.0)
        c = fit.cost
        assert min(c.base_s, c.over_s, c.token_s, c.pair_s, c.decode_s, c.context_s) >= 0
        assert c.step_s(512, 131_000, 8, 8000) < 1e3
