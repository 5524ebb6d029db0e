"""`disagg profile` on an engine whose step times are known: they come out again, and the simulator takes the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from disagg.cli import app
from disagg.config import SimulatedSettings
from disagg.engine.simulated_timing import step_model
from disagg.perf.profile import load_profile
from disagg.perf.roofline import PrefillChunk

TOPOLOGY = """
name: profiled
model: llama-3.1-8b
engine:
  kind: simulated
  simulated: {shape: llama-3.1-8b, gpu: l40s, tp: 1, max_num_seqs: 16, max_model_len: 4096, kv_cache_tokens: 40000}
pools:
  prefill: {count: 1}
  decode: {count: 1}
  colocated: {count: 2}
kv: {outbox_gib: 0.01, inbox_gib: 0.01}
slo_classes: [{name: chat, ttft_ms: 2000, tpot_ms: 100}]
"""


def test_a_known_engine_is_measured_and_simulated(tmp_path: Path) -> None:
    topology, out = tmp_path / "t.yaml", tmp_path / "p.json"
    topology.write_text(TOPOLOGY)
    result = CliRunner().invoke(app, ["profile", str(topology), "--out", str(out), "--quick", "--workers", "2"])
    assert result.exit_code == 0, result.output
    assert "median error" in result.output
    profile = load_profile(out)
    truth = step_model(SimulatedSettings(shape="llama-3.1-8b", gpu="l40s", tp=1))
    # The steps' own times were told, not timed: only the linear form can be off.
    for chunks, batch, context in (((PrefillChunk(2000),), 0, 0), ((), 1, 500), ((), 16, 8000)):
        assert profile.step_s(chunks, batch, context) == pytest.approx(truth.step_s(chunks, batch, context), rel=0.3)
    assert profile.kv_cache_tokens == 40_000
    sim = CliRunner().invoke(app, ["sim", str(topology), "--profile", str(out), "--workload", "short-chat", "--out", str(tmp_path / "sim")])
    assert sim.exit_code == 0, sim.output
