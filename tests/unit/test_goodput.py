"""The search for the highest rate that holds."""

from __future__ import annotations

import math

import pytest

from disagg.config import SloClass
from disagg.engine.simulated_timing import step_model
from disagg.errors import ConfigError
from disagg.sim.cluster import Simulation
from disagg.sim.goodput import find_goodput
from disagg.sim.settings import SimSettings
from disagg.types import Role
from tests.sim_rig import EagerDispatcher, poisson, sim_topology


@pytest.mark.parametrize("edge", [0.07, 0.9, 1.0, 3.7, 250.0])
@pytest.mark.parametrize("start", [0.5, 1.0, 40.0])
def test_the_edge_is_found_from_either_side(edge: float, start: float) -> None:
    found = find_goodput(lambda rate: 1.0 if rate <= edge else 0.0, start=start, tolerance=0.01)
    assert found.rate <= edge <= found.rate * 1.01
    assert found.failing_rate is not None
    assert len(found.probes) < 25


def test_a_nearer_start_takes_fewer_probes() -> None:
    near, far = (len(find_goodput(lambda rate: float(rate < 10), start=s).probes) for s in (9.9, 0.1))
    assert near < far


def test_what_never_holds_and_what_always_does() -> None:
    assert find_goodput(lambda _: 0.5, start=1.0).rate == 0.0
    always = find_goodput(lambda _: 0.95, start=1.0)
    assert always.failing_rate is None
    assert always.rate > 1e3


def test_it_stops_once_it_cannot_reach_what_is_enough() -> None:
    full = find_goodput(lambda rate: float(rate < 10), start=1.0, tolerance=1e-4)
    short = find_goodput(lambda rate: float(rate < 10), start=1.0, tolerance=1e-4, enough=30.0)
    assert len(short.probes) < len(full.probes)
    assert short.failing_rate is not None
    assert short.failing_rate < 30


def wait_within(limit_s: float, rate: float, service_s: float) -> float:
    """P(wait <= limit) of an M/D/1 queue, by Erlang and Crommelin: (1 - R D) sum_k (R (k D - t))^k / k! e^(-R (k D - t)), k D <= t."""
    total = 0.0
    for k in range(int(limit_s / service_s) + 1):
        x = rate * (k * service_s - limit_s)
        total += x**k / math.factorial(k) * math.exp(-x)
    return (1 - rate * service_s) * total


def test_goodput_of_eight_workers_agrees_with_the_closed_form() -> None:
    """Prompts of one step each, sent at random to eight workers: each is an M/D/1 queue, whose waiting times are known."""
    topology = sim_topology("colocated", prefill=4, decode=4)
    service_s = step_model(topology.simulated(Role.COLOCATED)).prefill_s(2048)
    target = SloClass(name=topology.slo_classes[0].name, ttft_ms=3.5e3 * service_s)
    settings = SimSettings(network_s=0.0, timeout_s=1e6, keep_tokens=False)

    def simulated(rate: float) -> float:
        trace = poisson(rate, 8_000, 2048, 1, seed=7)
        report = Simulation(topology, trace, settings, dispatcher=EagerDispatcher(seed=1)).run()
        return report.attainment([target]) or 0.0

    exact = find_goodput(lambda rate: wait_within(2.5 * service_s, rate / 8, service_s), start=5 / service_s, tolerance=0.001)
    found = find_goodput(simulated, start=exact.rate, tolerance=0.01)  # a nearer start takes fewer probes
    assert found.rate == pytest.approx(exact.rate, rel=0.05)
    assert 0.3 < exact.rate / 8 * service_s < 0.9, "a queue that matters"


@pytest.mark.parametrize("bad", [{"start": 0.0}, {"start": 1.0, "level": 0.0}, {"start": 1.0, "tolerance": 0.0}])
def test_bad_input_is_named(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        find_goodput(lambda _: 1.0, **bad)
    assert caught.value.key in bad
