"""Profiles: found again from noisy steps, refused when they are not physical, taken by simulator, router and simulated engine."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import SimulatedSettings, Topology, load_topology
from disagg.engine.simulated_settings import kv_cache_tokens, profiled_topology
from disagg.engine.simulated_timing import step_model
from disagg.errors import ConfigError
from disagg.perf.profile import Profile, StepCoefficients, load_profile
from disagg.perf.profile_fit import fit_steps
from disagg.perf.roofline import PrefillChunk
from disagg.policy.priors import priors_of
from disagg.types import Role, StepRecord

CPU = StepCoefficients(base_s=18e-3, over_s=0.0, prompt_token_s=0.7e-3, pair_s=0.15e-6, decode_s=0.9e-3, context_s=0.4e-6)
GPU = StepCoefficients(6e-3, 25e-6, 2e-6, 0.2e-9, 12e-6, 0.02e-6, ridge_tokens=256)
REPO = Path(__file__).parents[2]


def records(steps: StepCoefficients, noise: float = 0.05, count: int = 300) -> list[StepRecord]:
    rng = random.Random(7)
    made = []
    for number in range(count):
        decodes = rng.choice([0, 1, 2, 4, 8, 16, 32]) if number % 2 else rng.choice([1, 4, 16])
        tokens = rng.choice([32, 128, 256, 512, 2048]) if number % 2 else 0
        pairs = tokens * (rng.choice([0, 512, 2000]) + (tokens + 1) / 2)
        context = decodes * rng.choice([64, 512, 2000])
        seconds = steps.seconds(tokens, pairs, decodes, context) * rng.lognormvariate(0, noise) * (5 if rng.random() < 0.03 else 1)
        made.append(StepRecord(number, seconds, tokens, pairs, decodes, context))
    return made


def profile(**changes: Any) -> Profile:
    made = Profile(
        model="smollm2-135m@abc", hardware="one core", args={"max_num_seqs": 32}, steps=CPU, kv_cache_tokens=46_000, block_tokens=32,
        kv_bytes_per_token=23_040, num_steps=300, median_error=0.03, measured_at="2026-11-29", link_bandwidth=3e9, link_latency_s=2e-3,
    )  # fmt: skip
    return replace(made, **changes)


@pytest.mark.parametrize("truth", [CPU, GPU], ids=["cpu", "gpu"])
def test_the_coefficients_are_found_again_through_noise_and_hiccups(truth: StepCoefficients) -> None:
    found = fit_steps(records(truth)).steps
    for tokens, pairs, decodes, context in ((0, 0, 1, 500), (0, 0, 32, 64_000), (2048, 2048 * 1024, 0, 0), (512, 512 * 256, 8, 4000)):
        assert found.seconds(tokens, pairs, decodes, context) == pytest.approx(truth.seconds(tokens, pairs, decodes, context), rel=0.08)
    assert (found.ridge_tokens > 0) == (truth.ridge_tokens > 0)


def test_steps_that_cost_less_the_more_they_do_are_refused_by_name() -> None:
    odd = [replace(r, seconds=max(1e-3, r.seconds - 0.8e-3 * r.decode_requests)) for r in records(replace(CPU, decode_s=0.0), noise=0.01)]
    with pytest.raises(ConfigError, match=r"decode_s = -"):
        fit_steps(odd)


def test_too_few_steps_and_steps_of_one_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 40"):
        fit_steps(records(CPU)[:10])
    with pytest.raises(ConfigError, match="steps with prompts and steps without"):
        fit_steps([r for r in records(CPU) if r.prefill_tokens])


def test_a_file_is_read_back_and_a_bad_one_names_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(profile().to_json())
    assert load_profile(file) == profile()
    for change, text in (
        ({"version": 9}, "version"),
        ({"colour": "red"}, "colour"),
        ({"steps": {**asdict(CPU), "pair_s": -1e-9}}, r"steps\.pair_s.*-1e-09"),
        ({"steps": {**asdict(CPU), "base_s": float("nan")}}, r"steps\.base_s"),
        ({"kv_cache_tokens": "many"}, "kv_cache_tokens: got 'many'"),
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token: got 0"),
        ({"args": None}, "args: got None, expected a JSON object"),
        ({"link_bandwidth": -1.0}, "link_bandwidth"),
        ({"link_bandwidth": None, "link_latency_s": 1e-3}, "link_latency_s"),
    ):
        file.write_text(json.dumps({**json.loads(profile().to_json()), **change}))
        with pytest.raises(ConfigError, match=text):
            load_profile(file)
    with pytest.raises(ConfigError, match="disagg profile"):
        load_profile(tmp_path / "none.json")


def test_a_simulated_engine_computes_with_a_profile_of_its_model_only(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(profile().to_json())
    settings = SimulatedSettings(shape="smollm2-135m", profile=str(file))
    model = step_model(settings)
    assert model.step_s([PrefillChunk(100, 50)], 2, 300) == pytest.approx(CPU.seconds(100, 100 * 100.5, 2, 300))
    assert model.step_s([]) == 0
    assert kv_cache_tokens(settings) == 46_000
    with pytest.raises(ConfigError, match=r"smollm2-135m.*a profile of llama-3\.1-8b"):
        step_model(SimulatedSettings(shape="llama-3.1-8b", profile=str(file)))


def cpu_topology() -> Topology:
    return load_topology(REPO / "cluster/topologies/cpu-1p1d.yaml")


def test_a_real_topology_is_simulated_with_its_own_engine_arguments(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(profile().to_json())
    topology = profiled_topology(cpu_topology(), file)
    prefill, decode = topology.simulated(Role.PREFILL), topology.simulated(Role.DECODE)
    assert (prefill.max_num_batched_tokens, prefill.long_prefill_tokens, decode.max_num_seqs) == (512, 416, 32)
    assert (prefill.mixed_step_ms, prefill.max_model_len, prefill.block_tokens, prefill.kv_bytes_per_token) == (90, 4096, 32, 23_040)
    assert priors_of(topology)[Role.PREFILL].token_s == CPU.prompt_token_s
    file.write_text(profile(model="qwen3-8b@abc").to_json())
    with pytest.raises(ConfigError, match="a profile of smollm2-135m"):
        profiled_topology(cpu_topology(), file)


def test_a_profile_beside_the_topology_is_where_the_router_starts(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(profile().to_json())
    text = (REPO / "cluster/topologies/cpu-1p1d.yaml").read_text().replace("  kind: vllm\n", "  kind: vllm\n  profile: p.json\n")
    (tmp_path / "t.yaml").write_text(text)
    topology = load_topology(tmp_path / "t.yaml")
    assert topology.engine.profile == str(tmp_path / "p.json")
    assert priors_of(topology)[Role.DECODE].pair_s == CPU.pair_s
