"""The planner's formulas: known values of queueing theory, and the directions that physics gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from disagg.config import SloClass
from disagg.perf.hardware import find_device
from disagg.perf.links import find_link
from disagg.plan.candidate import Candidate, PoolPlan
from disagg.plan.load import cached_share, stretched, with_cached
from disagg.plan.screen import Screen, erlang_c
from disagg.plan.search import screened
from disagg.trace import Trace, TraceRequest
from disagg.types import Mode
from tests.plan_rig import question

H100 = find_device("h100")


def pools(prefill: int = 1, decode: int = 1, chunk: int = 8192) -> Candidate:
    return Candidate(Mode.DISAGG, PoolPlan(prefill, 4, H100, chunk, 256), PoolPlan(decode, 4, H100, 2048, 256))


def colocated(count: int = 2, chunk: int = 512) -> Candidate:
    return Candidate(Mode.COLOCATED, colocated=PoolPlan(count, 4, H100, chunk, 256))


def test_erlangs_delay_formula() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)  # M/M/1: the share of time that it is busy
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(3, 5.0) == 1.0


def test_one_prefill_worker_waits_as_m_d_1() -> None:
    """The mean of P(wait > t) over t is M/D/1's mean wait, R D^2 / (2 (1 - R D)) (Poisson gaps: burstiness 1)."""
    screen = Screen(question(inputs=4096, outputs=1))
    screen.load.__dict__["burstiness"] = 1.0
    _, service, _ = screen.worker(H100, 4).prefill(screen.load.sample, 8192)
    service_s = float(service[0])
    rate = 0.7 / service_s
    grid = np.linspace(0, 40 * service_s, 2001)
    in_time = [float(found[0]) for t in grid if (found := screen._in_time(rate, 1, service, np.array([t]))) is not None]
    mean_s = float(np.trapezoid(1 - np.array(in_time), grid))
    assert mean_s == pytest.approx(rate * service_s**2 / (2 * (1 - rate * service_s)), rel=0.02)
    assert screen._in_time(1.01 / service_s, 1, service, service) is None, "more work than the server has time"


def test_the_decode_batch_keeps_littles_law() -> None:
    screen = Screen(question(outputs=201))
    worker = screen.worker(H100, 4)
    batch = screen._batch(worker, 5.0, 256)
    assert batch is not None
    assert batch == pytest.approx(5.0 * 200 * worker.decode_s(batch, screen.context), rel=0.02)
    assert screen._batch(worker, 500.0, 256) is None


@pytest.mark.parametrize("candidate", [pools(), colocated()], ids=["disagg", "colocated"])
def test_attainment_falls_with_the_rate_and_goodput_is_where_it_crosses(candidate: Candidate) -> None:
    screen = Screen(question())
    shares = [screen.attainment(candidate, rate) for rate in (0.5, 4.0, 8.0, 64.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.99
    assert shares[-1] == 0.0
    goodput = screen.goodput_rps(candidate)
    assert screen.attainment(candidate, goodput) >= 0.9 > screen.attainment(candidate, goodput * 1.02)


def test_what_helps_and_what_does_not() -> None:
    own = Screen(question())
    assert own.goodput_rps(pools(2, 2)) > 1.5 * own.goodput_rps(pools(1, 1))
    slow = Screen(question(link=find_link("0.2")))
    assert slow.goodput_rps(pools()) < 0.5 * own.goodput_rps(pools()), "a slow link"
    long = Screen(question().with_load(stretched(question().load, inputs=2.0)))
    assert long.goodput_rps(colocated()) < own.goodput_rps(colocated())
    cached = Screen(question().with_load(with_cached(question().load, 0.5)))
    assert cached.goodput_rps(pools(1, 2)) > own.goodput_rps(pools(1, 2))
    strict = SloClass(name="chat", ttft_ms=500, tpot_ms=22)
    assert Screen(question(slo=strict)).goodput_rps(colocated()) < own.goodput_rps(colocated())


def test_prompt_heavy_loads_get_more_prefill_workers_and_answer_heavy_ones_more_decode_workers() -> None:
    def ratio(inputs: int, outputs: int) -> float:
        found = screened(Screen(question(inputs, outputs, gpus=32)))
        best = next(s.candidate for s in found if s.candidate.mode is Mode.DISAGG)
        assert best.prefill is not None
        assert best.decode is not None
        return best.prefill.count / best.decode.count

    assert ratio(4000, 30) > 2 > 0.5 > ratio(100, 1000)


def test_the_search_uses_up_the_gpus_and_holds_the_model() -> None:
    found = screened(Screen(question(gpus=16, degrees=())))
    assert all(12 < s.candidate.gpus <= 16 for s in found if s.estimate_rps)
    assert all(pool.tp >= 2 for s in found for pool in s.candidate.pools.values()), "70B does not fit one H100"
    unlike = replace(question(gpus=16), decode_device=find_device("h200"))
    kinds = {tuple(p.device.name for p in s.candidate.pools.values()) for s in screened(Screen(unlike))}
    assert kinds == {("h100",), ("h200",), ("h100", "h200")}


def test_cached_share_counts_what_came_before_in_the_same_place() -> None:
    requests = (
        TraceRequest(0.0, 1000, 1, None, (1, 2)),
        TraceRequest(1.0, 1000, 1, None, (1, 3)),
        TraceRequest(2.0, 1000, 1, None, (4, 2)),
    )
    assert cached_share(Trace("t", requests, prefix_block_tokens=512)) == pytest.approx(512 / 3000)
    assert question().load.cached_share == 0.0


def test_sending_keeps_bursts_and_starts_again_at_the_end() -> None:
    load = question().load
    twice = load.sent(2 * load.rate_rps, 450)
    assert len(twice) == 450
    gaps = np.diff([r.arrival_s for r in twice])
    assert gaps.min() >= 0
    own = np.diff([r.arrival_s for r in load.trace.requests])
    assert gaps[:199] == pytest.approx(own / 2)
    assert 449 / (twice[-1].arrival_s - twice[0].arrival_s) == pytest.approx(2 * load.rate_rps, rel=0.02)
