"""What bench.router_shows measures, in short runs: overload, a huge prompt among short ones, a worker that turns slow and recovers."""

from __future__ import annotations

import pytest

from bench.router_shows import load, long_prompt, serve, shares_of, topology


def test_overload_costs_neither_goodput_nor_the_urgent() -> None:
    """At three times what the workers can do, with lower and batch traffic; without admission, the same load is in time for few."""
    fits, over = (serve(topology("disagg"), rate, span_s=5.0, warm_s=2.0) for rate in (60.0, 180.0))
    assert fits.attainment > 0.95
    assert over.goodput_rps > 0.9 * fits.goodput_rps
    assert over.of_admitted > 0.95
    assert over.of_urgent > 0.99
    assert over.batch_done == 1.0
    off = serve(topology("disagg", by_slo=False), 180.0, span_s=5.0, warm_s=2.0)
    assert off.goodput_rps < 0.6 * over.goodput_rps


def test_short_prompts_hardly_notice_a_huge_one() -> None:
    assert long_prompt("adaptive") < 1.3


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_worker_five_times_slower_loses_its_share_and_gets_it_back(name: str) -> None:
    shares = shares_of(name, "disagg", 5.0, load(20.0, 30.0, {"batch": 1.0}), (5.0, 15.0))
    assert 0.08 < shares[0] < 0.17  # one of eight
    assert shares[2] < 0.25 * shares[0]
    assert shares[5] > 0.6 * shares[0]
