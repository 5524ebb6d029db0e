"""The measures: definitions that must hold for any instants, and percentiles that refuse what the samples cannot say."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from disagg import slo


def test_latencies_are_differences_of_instants():
    token_s = [1.5, 1.7, 2.3]
    assert slo.ttft_s(1.0, token_s) == pytest.approx(0.5)
    assert slo.itl_s(token_s) == pytest.approx((0.2, 0.6))
    assert slo.tpot_s(token_s) == pytest.approx(0.4)
    assert slo.e2e_s(1.0, token_s) == pytest.approx(1.3)


def test_e2e_is_ttft_plus_tpot_times_the_other_tokens():
    rng = random.Random(1)
    for count in (2, 3, 17, 400):
        sent = rng.uniform(0, 100)
        token_s = sorted(sent + rng.expovariate(3) for _ in range(count))
        ttft, tpot, e2e = slo.ttft_s(sent, token_s), slo.tpot_s(token_s), slo.e2e_s(sent, token_s)
        assert ttft is not None
        assert tpot is not None
        assert e2e == pytest.approx(ttft + tpot * (count - 1))
        assert sum(slo.itl_s(token_s)) == pytest.approx(tpot * (count - 1))


def test_one_token_has_no_tpot_and_no_gap_and_none_has_nothing():
    assert slo.tpot_s([3.0]) is None
    assert slo.itl_s([3.0]) == ()
    assert slo.e2e_s(1.0, [3.0]) == slo.ttft_s(1.0, [3.0]) == 2.0
    assert slo.ttft_s(1.0, []) is slo.e2e_s(1.0, []) is slo.tpot_s([]) is None
    assert slo.itl_s([]) == ()


@pytest.mark.parametrize(
    ("whole", "ttft", "tpot", "met"),
    [
        (True, 0.5, 0.05, True),
        (True, 1.0, 0.1, True),
        (True, 1.001, 0.05, False),
        (True, 0.5, 0.101, False),
        (True, 0.5, None, True),  # one token: TPOT is not counted
        (False, 0.5, 0.05, False),  # a rejected or failed request misses, however quick its tokens were
        (False, None, None, False),
    ],
)
def test_meets_its_class(whole: bool, ttft: float | None, tpot: float | None, met: bool):
    assert slo.meets(whole=whole, ttft=ttft, tpot=tpot, ttft_target=1.0, tpot_target=0.1) is met


def test_a_class_without_targets_asks_only_for_a_whole_answer():
    assert slo.meets(whole=True, ttft=1e6, tpot=1e6, ttft_target=None, tpot_target=None)
    assert not slo.meets(whole=False, ttft=0.1, tpot=0.1, ttft_target=None, tpot_target=None)


def test_attainment_is_a_share_of_what_was_sent():
    assert slo.attainment(9, 12) == 0.75
    assert slo.attainment(0, 0) is None


@pytest.mark.parametrize(("percent", "needed"), [(50, 2), (90, 10), (95, 20), (99, 100), (99.9, 1000)])
def test_a_percentile_needs_a_sample_beyond_it(percent: float, needed: int):
    assert slo.percentile([1.0] * needed, percent) == 1.0
    assert slo.percentile([1.0] * (needed - 1), percent) is None


@pytest.mark.parametrize("count", [2, 10, 37, 1000, 2500])
def test_percentiles_equal_numpys_default_method(count: int):
    rng = random.Random(count)
    samples = [rng.lognormvariate(0, 1) for _ in range(count)]
    for percent in (50, 90, 95, 99, 99.9):
        ours = slo.percentile(samples, percent)
        if ours is not None:
            assert ours == pytest.approx(float(np.percentile(samples, percent)))


@pytest.mark.parametrize("percent", [0, 100, -1, 101, math.nan])
def test_percent_is_inside_0_and_100(percent: float):
    with pytest.raises(ValueError, match="percent"):
        slo.percentile([1.0], percent)


def test_summary():
    summary = slo.summarise([float(i) for i in range(100, 0, -1)])
    assert (summary.count, summary.mean, summary.p50, summary.max) == (100, 50.5, 50.5, 100.0)
    assert summary.p99 == pytest.approx(99.01)
    assert summary.p999 is None
    empty = slo.summarise([])
    assert (empty.count, empty.mean, empty.p50, empty.max) == (0, None, None, None)


def test_littles_law_holds_for_a_window_that_starts_and_ends_empty():
    rng = random.Random(7)
    sent = sorted(rng.uniform(0, 50) for _ in range(300))
    stays = [rng.expovariate(0.5) for _ in sent]
    ended = [a + b for a, b in zip(sent, stays, strict=True)]
    span = max(ended) - sent[0]
    instants = [sent[0] + span * (i + 0.5) / 20_000 for i in range(20_000)]
    counted = np.searchsorted(sent, instants, "right") - np.searchsorted(sorted(ended), instants, "right")
    assert slo.little(len(sent) / span, sum(stays) / len(stays)) == pytest.approx(float(counted.mean()), rel=0.01)
    assert slo.rate_per_s(10, 0.0) is None
