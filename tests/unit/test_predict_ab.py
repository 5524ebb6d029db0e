"""bench.predict_ab: what the simulator itself measured, it foresees to the instant; each round in its own time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.predict_ab import drift, foreseen, scaled
from disagg.ab.simulate import sim_rows, simulate_arms
from disagg.config import load_topology
from disagg.engine.simulated_settings import profiled_topology
from disagg.errors import ConfigError
from disagg.perf.profile import load_profile
from disagg.sim.settings import SimSettings
from disagg.trace import Trace
from tests.sim_rig import poisson
from tests.unit.test_profile import REPO, profile


def test_what_the_simulator_measured_it_foresees(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(profile().to_json())
    live = load_topology(REPO / "cluster/topologies/cpu-1p1d.yaml")
    live = live.model_copy(update={"engine": live.engine.model_copy(update={"profile": str(file)})})
    topology, measured = profiled_topology(live, file), load_profile(file)
    requests = tuple(replace(r, slo_class="chat") for r in poisson(0.5, 6, 200, 10))
    world = SimSettings(kv_bytes_per_token=23_040, timeout_s=60, link_bandwidth=3e9, link_latency_s=2e-3)
    (arm,) = simulate_arms({"disagg": topology}, Trace("made", requests), world, 1.0)
    first = list(sim_rows(arm, "s"))
    rounds = [*first, *[replace(row, round=2) for row in first]]
    found = foreseen(rounds, live, topology, measured, 60)
    assert [row.round for row in found] == [1] * 6 + [2] * 6
    for row, again in zip(first, found[:6], strict=True):
        assert (again.prefill_worker, again.decode_worker, again.outcome) == (row.prefill_worker, row.decode_worker, "completed")
        assert again.token_s == pytest.approx(row.token_s, abs=1e-5)
    for row, again in zip(first, found[6:], strict=True):  # the router knows more by then
        assert again.sent_s == pytest.approx(row.sent_s, abs=1e-5)
        assert again.tpot_s == pytest.approx(row.tpot_s, rel=0.5)


def test_one_factor_on_all_step_times_is_found_at_the_lightest_rate(tmp_path: Path) -> None:
    slow = scaled(profile(), 1.6)
    (tmp_path / "slow.json").write_text(slow.to_json())
    live = load_topology(REPO / "cluster/topologies/cpu-1p1d.yaml")
    topology = profiled_topology(live, tmp_path / "slow.json")
    world = SimSettings(kv_bytes_per_token=23_040, timeout_s=60, link_bandwidth=3e9, link_latency_s=2e-3)
    rows = []
    for rate in (0.2, 0.6):
        requests = tuple(replace(r, slo_class="chat") for r in poisson(rate, 8, 200, 20))
        (arm,) = simulate_arms({"disagg": topology}, Trace("made", requests), world, rate)
        rows += list(sim_rows(arm, "s"))
    factor, fitted_rps = drift({"disagg": rows}, {"disagg": live}, profile(), 60)
    assert fitted_rps == 0.2
    assert factor == pytest.approx(1.6, rel=0.03)
    with pytest.raises(ConfigError, match="several rates"):
        drift({"disagg": rows[:8]}, {"disagg": live}, profile(), 60)
