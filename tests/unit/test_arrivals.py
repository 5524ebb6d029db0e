"""Kinds of arrivals, sessions, clients that go away, and the scaling of rates: that they are what a workload file says."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from disagg.ab.arrivals import Arrivals
from disagg.ab.trace_plan import at_rate, mean_rate_rps
from disagg.ab.workload import Workload, check_workload, plan_round
from disagg.config import SloClass, validated
from disagg.errors import ConfigError

CLASSES = (SloClass(name="chat"),)


def arrivals(**raw: object) -> Arrivals:
    return validated(Arrivals, raw, "test")


def gaps_s(kind: Arrivals, duration_s: float = 4000) -> list[float]:
    return [b - a for a, b in itertools.pairwise(kind.instants_s(duration_s, random.Random(1)))]


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_gamma_gaps_have_their_mean_and_cv(cv: float):
    gaps = gaps_s(arrivals(gamma_per_s=5, cv=cv))
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.2, rel=0.1)
    assert statistics.pstdev(gaps) / mean == pytest.approx(cv, rel=0.1)


def test_a_ramp_goes_in_a_straight_line():
    due = arrivals(ramp={"from_per_s": 1, "to_per_s": 9}).instants_s(1000, random.Random(2))
    quarters = [sum(250 * i <= at < 250 * (i + 1) for at in due) for i in range(4)]
    assert quarters == [pytest.approx(250 * rate, rel=0.1) for rate in (2, 4, 6, 8)]
    assert len(arrivals(ramp={"from_per_s": 0, "to_per_s": 2}, first_s=50).instants_s(100, random.Random(2))) == pytest.approx(50, rel=0.4)


@pytest.mark.parametrize(
    "raw",
    [
        {"poisson_per_s": 2},
        {"gamma_per_s": 2, "cv": 2},
        {"ramp": {"from_per_s": 1, "to_per_s": 3}},
        {"every_s": 2, "requests": 4},
    ],
)
def test_each_kind_has_its_mean_rate_and_can_be_faster(raw: dict):
    kind = arrivals(**raw)
    assert kind.mean_per_s() == pytest.approx(2)
    assert kind.faster(3).mean_per_s() == pytest.approx(6)
    assert len(kind.faster(3).instants_s(2000, random.Random(3))) == pytest.approx(12_000, rel=0.06)


def test_a_burst_stays_as_large_when_it_comes_more_often():
    due = arrivals(every_s=4, requests=3, first_s=2).faster(2).instants_s(5, random.Random(0))
    assert due == [1.0] * 3 + [3.0] * 3


@pytest.mark.parametrize("raw", [{}, {"gamma_per_s": 1}, {"poisson_per_s": 1, "cv": 2}, {"ramp": {"from_per_s": 0, "to_per_s": 0}}])
def test_half_a_kind_is_refused(raw: dict):
    with pytest.raises(ConfigError, match=r"exactly one|go together|must be above 0"):
        arrivals(**raw)


def workload(**stream: object) -> Workload:
    base = {"name": "s", "arrivals": {"poisson_per_s": 1}, "input_tokens": 10, "output_tokens": 5}
    return validated(Workload, {"name": "w", "duration_s": 200, "streams": [{**base, **stream}]}, "w")


def test_a_sessions_turns_hold_the_turns_before_them():
    w = workload(sessions={"turns": 3, "gap_s": 4}, shared_prefix_tokens=2)
    planned = plan_round(w, CLASSES, 0, 0)
    first = sorted((r for r in planned if r.session == 0), key=lambda r: r.due_s)
    assert [r.input_tokens for r in first] == [10, 25, 40]
    assert [b.due_s - a.due_s for a, b in itertools.pairwise(first)] == [pytest.approx(4)] * 2
    prompts = [r.prompt_ids(1000) for r in first]
    assert prompts[1][:10] == prompts[0]
    assert prompts[2][:25] == prompts[1]
    other = next(r for r in planned if r.session == 1)
    assert other.prompt_ids(1000)[:2] == prompts[0][:2]
    assert other.prompt_ids(1000)[2:] != prompts[0][2:]
    with pytest.raises(ConfigError, match=r"streams\.0\.input_tokens"):
        check_workload(w, CLASSES, 44)
    check_workload(w, CLASSES, 45)


def test_a_share_of_the_clients_goes_away():
    w = workload(cancel={"share": 0.25, "after_tokens": {"uniform": [1, 3]}}, arrivals={"poisson_per_s": 20})
    planned = plan_round(w, CLASSES, 0, 0)
    leaving = [r for r in planned if r.cancel_after_tokens is not None]
    assert len(leaving) / len(planned) == pytest.approx(0.25, rel=0.1)
    assert {r.cancel_after_tokens for r in leaving} == {1, 2, 3}
    assert [(r.due_s, r.input_tokens) for r in planned] == [
        (r.due_s, r.input_tokens) for r in plan_round(workload(arrivals={"poisson_per_s": 20}), CLASSES, 0, 0)
    ]


def test_a_workload_has_one_mean_rate_and_takes_another():
    w = workload(sessions={"turns": 2, "gap_s": 1})
    assert mean_rate_rps(w, CLASSES) == pytest.approx(2)
    faster = at_rate(w, CLASSES, 10)
    assert mean_rate_rps(faster, CLASSES) == pytest.approx(10)
    assert len(plan_round(faster, CLASSES, 0, 0)) == pytest.approx(2000, rel=0.1)
