"""The search for the highest rate that holds."""

from __future__ import annotations

import pytest

from disagg.errors import ConfigError
from disagg.sim.goodput import find_goodput


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


@pytest.mark.parametrize("bad", [{"start": 0.0}, {"start": 1.0, "level": 0.0}, {"start": 1.0, "tolerance": 0.0}])
def test_bad_input_is_named(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        find_goodput(lambda _: 1.0, **bad)
    assert caught.value.key in bad
