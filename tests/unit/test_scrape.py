"""Rates and percentiles between two looks at a gateway's metrics."""

from __future__ import annotations

import math

import pytest

from disagg.front.scrape import Scrape, interpolate


def scrape(at_s: float, **values: float) -> Scrape:
    """Keywords `name__class` hold counters; `h_<bound>__class` buckets of the histogram `h`."""
    samples = {}
    for key, value in values.items():
        name, slo_class = key.split("__")
        if name.startswith("h_"):
            bound = name[2:].replace("_", ".").replace("inf", "+Inf")
            samples[("h_bucket", frozenset({("slo_class", slo_class), ("le", bound)}))] = value
        else:
            samples[(name, frozenset({("slo_class", slo_class)}))] = value
    return Scrape(at_s, samples)


def test_rates_by_label_and_over_all() -> None:
    before, now = scrape(10.0, n__chat=5, n__batch=1), scrape(12.0, n__chat=9, n__batch=1)
    assert now.rate(before, "n", slo_class="chat") == 2.0
    assert now.rate(before, "n", slo_class="batch") == 0.0
    assert now.rate(before, "n") == 2.0
    assert now.rate(before, "unknown") == 0.0
    assert now.rate(now, "n") == 0.0


def test_a_restarted_gateway_counts_from_zero() -> None:
    assert scrape(12.0, n__chat=4).rate(scrape(10.0, n__chat=900), "n") == 2.0


def test_quantiles_are_of_the_time_between() -> None:
    before = scrape(0.0, h_0_1__a=100, h_1_0__a=100, h_inf__a=100)
    now = scrape(1.0, h_0_1__a=100, h_1_0__a=110, h_inf__a=110)
    assert now.quantile(before, "h", 0.5) == pytest.approx(0.1 + 0.9 * 0.5)
    assert now.quantile(now, "h", 0.5) is None
    assert now.quantile(before, "h", 0.5, slo_class="b") is None


@pytest.mark.parametrize(
    ("q", "expected"),
    [(0.25, 0.5), (0.5, 1.0), (0.75, 2.0), (1.0, 3.0)],
)
def test_interpolation_inside_a_bucket(q: float, expected: float) -> None:
    assert interpolate([(1.0, 10), (3.0, 20), (math.inf, 20)], q) == pytest.approx(expected)


def test_beyond_the_last_bound_is_the_last_bound() -> None:
    assert interpolate([(1.0, 0), (math.inf, 5)], 0.5) == 1.0
    assert interpolate([], 0.5) is None
