"""How long answers will be, and what a delay before their second token therefore costs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from disagg.policy.outputs import OutputLengths
from disagg.policy.step_cost import StepCost
from disagg.policy.targets import late_regret, regret
from disagg.types import Request, Sampling


def request(max_tokens: int = 4096, *, ignore_eos: bool = False, prompt: int = 3) -> Request:
    return Request("r", (1,) * prompt, Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos), "chat", arrival_s=0.0)


def learned() -> OutputLengths:
    """One answer in ten has 5 tokens, the others 400."""
    lengths = OutputLengths()
    for index in range(480):
        lengths.learn(5 if index % 10 == 0 else 400)
    return lengths


def test_likely_lengths_keep_the_short_answers_apart() -> None:
    spread = learned().spread(request())
    assert sum(share for _, share in spread) == pytest.approx(1.0)
    assert [tokens for tokens, _ in spread] == sorted(tokens for tokens, _ in spread)
    assert sum(share for tokens, share in spread if tokens < 6) == pytest.approx(0.1, abs=0.03)
    assert sum(share for tokens, share in spread if 330 < tokens < 480) == pytest.approx(0.8, abs=0.15)


def test_likely_lengths_keep_to_what_the_request_says() -> None:
    lengths = learned()
    assert max(tokens for tokens, _ in lengths.spread(request(max_tokens=9))) == 8
    assert lengths.spread(request(max_tokens=33, ignore_eos=True)) == ((32, 1.0),)
    begun = replace(request(), prior_output=tuple(range(200)))
    assert all(1 <= tokens < 280 for tokens, _ in lengths.spread(begun))
    assert OutputLengths().spread(request())[0][0] > 100


def test_answers_that_run_on_are_not_forgotten() -> None:
    """One in ten has ended after 20 tokens, the others are at 900: a fresh class whose short answers end first."""
    lengths = OutputLengths()
    for index in range(200):
        if index % 10 == 0:
            lengths.learn(20)
        else:
            lengths.outlasts(1, 900)
    assert lengths.mean(request()) > 800
    assert sum(share for tokens, share in lengths.spread(request()) if tokens < 30) == pytest.approx(0.1, abs=0.05)


def test_what_was_guessed_at_first_may_be_forgotten_to_the_last_bit() -> None:
    """After 18,000 answers that are all shorter the guess is nothing beside them, and shares that are rounded may exceed 1 together."""
    lengths, few, many = OutputLengths(), 0.002, 5.0
    begun = replace(request(), prior_output=(1,) * 30)
    for shift in range(400):
        lengths._ended[17], lengths._ended[23], lengths._ended[36] = many + shift / 7, few + shift / 3, 1e-18
        lengths._outlasted[17:23] = [few + shift / 3] * 6
        lengths._outlasted[23:36] = [1e-18] * 13
        lengths._tokens = [20.0 * n for n in lengths._ended]
        lengths._sum_up()
        assert min(lengths._shares) >= 0.0
        assert min(lengths._reach) >= 0.0
        assert lengths.reserve(request()).variance >= 0
        assert lengths.reserve(begun, generated=10).tokens > 10


def test_room_is_kept_for_answers_together() -> None:
    """Half of the answers have 100 tokens, half 1,000: of many, half are gone when the others are long; one may be long itself."""
    lengths = OutputLengths()
    for index in range(400):
        lengths.learn(100 if index % 2 else 1000)
    keep = lengths.reserve(request())
    assert 450 < keep.tokens < 700
    assert keep.tokens + 2 * keep.variance**0.5 > 1000
    later = lengths.reserve(request(), generated=200)
    assert 1000 <= later.tokens < 1200
    assert later.variance < 200**2
    assert lengths.reserve(request(max_tokens=50)).tokens <= 50
    assert lengths.reserve(request(max_tokens=50, ignore_eos=True)) == (50, 0)
    assert lengths.reserve(request(), generated=4000).tokens > 4000


def test_a_delay_costs_what_the_short_answers_lose() -> None:
    """A second is 2.5 ms per token of 400, and 250 ms per token of 5: those miss a target of 100 ms."""
    spread = learned().spread(request())
    missed = regret(3.0) - regret(0.5)
    assert 0.05 * missed < late_regret(0.05, 1.0, spread, 0.1) < 0.3 * missed
    assert late_regret(0.05, 1.0, ((400.0, 1.0),), 0.1) < 0.002 * missed
    assert late_regret(0.05, 0.0, spread, 0.1) == pytest.approx(0.0)


def test_what_is_written_out_for_speed_is_what_it_stands_for() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        lengths = sorted(rng.choice([1.0, rng.uniform(1, 2000)]) for _ in range(rng.randrange(1, 7)))
        spread = tuple((tokens, 1.0 / len(lengths)) for tokens in lengths)
        tpot_s, delay_s, target_s = rng.uniform(0, 0.2), rng.choice([0.0, rng.uniform(0, 3)]), rng.uniform(0.02, 2.0)
        plain = sum(share * regret((tpot_s + delay_s / tokens) / target_s) for tokens, share in spread) - regret(tpot_s / target_s)
        assert late_regret(tpot_s, delay_s, spread, target_s) == pytest.approx(plain, abs=1e-9)
        cost = StepCost(*(rng.random() for _ in range(6)), ridge_tokens=rng.choice([0.0, 64.5]))
        tokens, cached, chunk, decodes = rng.randrange(1, 3000), rng.randrange(500), rng.randrange(1, 1000), rng.randrange(90)
        starts = range(0, tokens, chunk)
        sizes = [min(chunk, tokens - start) for start in starts]
        pairs = [size * (cached + start + (size + 1) / 2) for size, start in zip(sizes, starts, strict=True)]
        steps = sum(cost.step_s(size, pair, decodes, 7.0) for size, pair in zip(sizes, pairs, strict=True))
        assert cost.prefill_s(tokens, cached, chunk, decodes, 7.0) == pytest.approx(steps)


def test_a_few_long_prompts_with_short_answers_keep_room_for_those_answers() -> None:
    """Prompts are so long that the sum falls with the first that ends; of two, neither may have ended when both have grown."""
    lengths = OutputLengths()
    for index in range(400):
        lengths.learn(20 + 1000 * (index % 100) // 100)
    keep = lengths.reserve(request(prompt=10_000))
    assert keep.tokens + 2 * keep.variance**0.5 > 400
