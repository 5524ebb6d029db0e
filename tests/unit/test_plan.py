"""`disagg plan`: one answer for one question, a topology that checks, the inverse by Little's law, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from disagg.cli import app
from disagg.config import SloClass, load_topology
from disagg.errors import ConfigError
from disagg.launch import check as launch_check
from disagg.launch.check import check_topology
from disagg.perf.hardware import find_device
from disagg.perf.profile import Profile, StepCoefficients
from disagg.plan import size
from disagg.plan.candidate import Candidate, PoolPlan
from disagg.plan.planner import Plan, make_plan
from disagg.plan.question import check
from disagg.plan.screen import Screen
from disagg.plan.search import screened
from disagg.plan.text import plan_json, plan_text, size_text
from disagg.plan.trial import Trials
from disagg.plan.write import topology_text
from disagg.slo import little
from disagg.types import Mode, Role
from tests.plan_rig import question

LONG_PROMPTS = SloClass(name="chat", ttft_ms=2000, tpot_ms=22, if_missed="reject")


@pytest.fixture(scope="module")
def found() -> Plan:
    return make_plan(question(inputs=3000, outputs=40, slo=LONG_PROMPTS, price=2.0, requests=45))


def test_the_same_question_has_the_same_answer(found: Plan) -> None:
    asked = question(inputs=3000, outputs=40, slo=LONG_PROMPTS, price=2.0, requests=45)
    assert screened(Screen(asked)) == screened(Screen(found.question))
    again = Trials(replace(asked, span_s=found.question.span_s))
    for trial in (found.chosen, found.colocated):
        assert trial.best is not None
        assert again.at(trial.candidate, trial.best.rate_rps) == trial.best


def test_long_prompts_and_quick_tokens_want_two_pools(found: Plan) -> None:
    assert found.chosen.candidate.mode is not Mode.COLOCATED
    assert found.ratio is not None
    assert found.ratio > 1.05
    assert "more goodput than the best colocated plan" in found.verdict
    assert len(found.flips) == 5


def test_long_answers_to_short_prompts_stay_colocated() -> None:
    # Enough requests that a run lasts longer than the TTFT target: what outlasts a run is missed by nobody in it.
    plan = make_plan(question(inputs=50, outputs=120, requests=240), with_flips=False)
    assert plan.chosen.candidate.mode is Mode.COLOCATED
    assert "colocated" in plan.verdict


def test_a_plan_in_words_and_as_values(found: Plan) -> None:
    text, values = plan_text(found), plan_json(found)
    assert found.verdict in text
    assert "limit: " in text
    assert "KV" in text
    best = values["plans"][0]
    assert best["goodput_rps_per_gpu"] == pytest.approx(best["goodput_rps"] / 8)
    assert best["cost_per_million_output_tokens"] == pytest.approx(8 * 2.0 / (best["goodput_rps"] * 40 * 3600) * 1e6)
    assert json.loads(json.dumps(values))["simulated"] is True


def test_its_topology_checks_in_every_mode(found: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_check.importlib.util, "find_spec", lambda name: None)  # importing vLLM takes seconds
    file = tmp_path / "plan.yaml"
    file.write_text(topology_text(found))
    loaded = load_topology(file)
    assert loaded.mode == found.chosen.candidate.mode.value
    simulated = {"engine.kind": "simulated", **{f"pools.{name}.gpus": 0 for name in ("prefill", "decode", "colocated")}}
    for mode in (Mode.DISAGG, Mode.COLOCATED):
        for changes, gpus in (({}, 4), (simulated, 0)):
            report = check_topology(load_topology(file, {"mode": mode.value, **changes}), tmp_path)
            assert report.problems == (), (mode, changes)
            assert {placed.spec.gpus for placed in report.placed} == {gpus}


def test_gpus_for_a_rate_by_littles_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size, "CELL_GPUS", 8)
    asked = question(inputs=800, outputs=30, requests=100)
    few, many = (size.find_sizes(asked, rate)[0] for rate in (8.0, 64.0))
    assert few.figures.attainment >= 0.9
    assert (few.cells, few.gpus) == (1, 4)
    assert many.cells > 1
    assert 12 <= many.gpus <= 8 * few.gpus
    text = size_text(asked, 64.0, [many])
    assert f"= {little(64.0, many.figures.e2e_s):,.0f} requests in flight" in text


def test_the_planner_simulates_unlike_gpus_and_speculation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_check.importlib.util, "find_spec", lambda name: None)  # importing vLLM takes seconds
    plan = make_plan(question(gpus=8, decode_device=find_device("h200"), dtype="fp8", kv_dtype="fp8", requests=60), with_flips=False)
    assert {p.device.name for trial in plan.trials for p in trial.candidate.pools.values()} == {"h100", "h200"}
    file = tmp_path / "plan.yaml"
    file.write_text(topology_text(plan))
    args = load_topology(file).engine.args
    assert (args["quantization"], args["kv_cache_dtype"]) == ("fp8", "fp8")
    report = check_topology(load_topology(file, {"mode": "disagg"}), tmp_path)
    assert report.problems == ()
    assert {placed.spec.role: report.memory[placed.spec.role].device for placed in report.placed} == {
        Role.PREFILL: "4 x h100",
        Role.DECODE: "4 x h200",
    }


def test_a_plan_asks_for_no_longer_requests_than_its_smallest_worker_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_check.importlib.util, "find_spec", lambda name: None)
    plan = make_plan(question(gpus=4, degrees=(2,), requests=60), with_flips=False)
    file = tmp_path / "plan.yaml"
    file.write_text(topology_text(plan))
    loaded = load_topology(file)
    assert 1100 <= loaded.engine.args["max_model_len"] < 131_072, "two H100s hold 26,000 tokens beside the weights"
    for mode in ("disagg", "colocated"):
        assert check_topology(load_topology(file, {"mode": mode}), tmp_path).problems == ()


@pytest.mark.parametrize(
    ("change", "key", "said"),
    [
        ({"gpus": 0}, "gpus", "at least 1"),
        ({"gpus": 1000}, "gpus", "at most 512"),
        ({"gpus": 1, "degrees": ()}, "gpus", "at least 2 h100 (tp 2)"),
        ({"degrees": (3,)}, "tp", "divide the 64 heads"),
        ({"slo": SloClass(name="fast", ttft_ms=500, tpot_ms=5)}, "fast.tpot_ms", "a step reads 141.1 GB of weights"),
        ({"slo": SloClass(name="fast", ttft_ms=10, tpot_ms=50)}, "fast.ttft_ms", "the prefill of 1,000 tokens"),
        ({"level": 1.5}, "attainment", "at most 1"),
    ],
)
def test_what_no_plan_can_do_is_refused_with_its_limit(change: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(question(**change))
    assert caught.value.key == key
    assert said in caught.value.message


def test_targets_that_physics_allows_but_no_engine_keeps() -> None:
    with pytest.raises(ConfigError, match="not even on idle workers"):
        make_plan(question(slo=SloClass(name="fast", ttft_ms=500, tpot_ms=11)))


WORKLOAD = """
name: small
duration_s: 30
streams: [{name: s, arrivals: {poisson_per_s: 3}, input_tokens: 500, output_tokens: 20}]
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "h1000"], "unknown device 'h1000'; did you mean"),
        (["--model", "llama-3.1-7b"], "unknown model shape 'llama-3.1-7b'; did you mean"),
        (["--slo", "chatt"], "did you mean 'chat'"),
        (["--slo", "mine=5"], "NAME=TTFT/TPOT"),
        (["--workload", "small.yml"], "small.yml"),
        (["--gpus", "0"], "at least 1"),
        (["--kv-dtype", "int4"], "bf16, fp8 or int8"),
        (["--kv-dtype", "fp4"], "bf16, fp8 or int8"),
        (["--slo", "mine=inf/50"], "NAME=TTFT/TPOT"),
        (["--tp", "8"], "degrees up to 2, the GPUs that there are"),
        (["--speculative", "4"], "TOKENS:ACCEPTANCE"),
        (["--link", "string"], "GB/s"),
        (["--rate", "-1"], "above 0"),
        (["--model", "opt-13b", "--workload", "sim-mixed"], "requests of at most 2,048 tokens, the model's context"),
    ],
)
def test_the_command_line_names_what_is_wrong(options: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    given = {"--model": "llama-3.1-8b", "--gpu": "h100", "--workload": str(tmp_path / "w.yaml"), "--slo": "chat", "--gpus": "2"}
    given |= dict(zip(options[::2], options[1::2], strict=True))
    result = CliRunner().invoke(app, ["plan", *[part for pair in given.items() for part in pair]])
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_processes_change_nothing_but_the_time(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    options = [
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "l40s",
        "--gpus",
        "2",
        "--tp",
        "1",
        "--workload",
        str(tmp_path / "w.yaml"),
        "--slo",
        "chat",
    ]
    one, two = (CliRunner().invoke(app, ["plan", *options, "--requests", "100", "--json", "--jobs", jobs]) for jobs in "12")
    assert one.exit_code == two.exit_code == 0, two.output
    assert one.stdout == two.stdout


def in_group(group: int) -> int:
    """Processes of a process group that are alive."""
    count = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            count += state != "Z" and int(pgrp) == group
    return count


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
def test_ctrl_c_ends_the_simulations_too(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    options = ["--model", "llama-3.1-8b", "--gpu", "h100", "--gpus", "64", "--workload", str(tmp_path / "w.yaml"), "--slo", "chat"]
    command = [sys.executable, "-c", "from disagg.cli import app; app()", "plan", *options, "--jobs", "2", "--requests", "50000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True) as process:
        until_s = time.monotonic() + 60
        while in_group(process.pid) < 5 and time.monotonic() < until_s:  # with multiprocessing's own two
            time.sleep(0.1)
        assert in_group(process.pid) == 5
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode != 0
    until_s = time.monotonic() + 10
    while in_group(process.pid) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert in_group(process.pid) == 0


def measured_worker(**changes: Any) -> Profile:
    """A core on which a prompt token takes 2 ms and a step of one 50 ms."""
    steps = StepCoefficients(base_s=0.05, over_s=0.0, prompt_token_s=2e-3, pair_s=1e-7, decode_s=2e-3, context_s=1e-7)
    made = Profile(
        model="smollm2-135m@abc", hardware="one core", args={"max_model_len": 4096, "block_size": 32, "max_num_seqs": 32}, steps=steps,
        kv_cache_tokens=20_000, block_tokens=32, kv_bytes_per_token=46_080, num_steps=200, median_error=0.05, measured_at="2026-11-30",
        link_bandwidth=2e9, link_latency_s=2e-3,
    )  # fmt: skip
    return replace(made, **changes)


def test_a_plan_from_a_profile_takes_its_times_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(measured_worker().to_json())
    (tmp_path / "w.yaml").write_text(WORKLOAD.replace("poisson_per_s: 3", "poisson_per_s: 0.2"))
    options = ["--model", "smollm2-135m", "--gpu", "cpu", "--gpus", "2", "--workload", str(tmp_path / "w.yaml"), "--slo", "chat=3000/80"]
    written = ["--profile", str(tmp_path / "p.json"), "--requests", "100", "--no-flips", "--json", "--out", str(tmp_path / "plan.yaml")]
    result = CliRunner().invoke(app, ["plan", *options, *written])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["question"]["profile"] == str(tmp_path / "p.json")
    assert answer["question"]["link"] == "the profile's link"
    one = answer["plans"][0]["at_rate"]["tpot"]["p50"]
    assert one == pytest.approx(0.052, rel=0.2)  # a step alone, and now and then one more decode: no roofline of `cpu` comes near it
    topology = load_topology(tmp_path / "plan.yaml")
    assert topology.engine.profile == str(tmp_path / "p.json")
    assert (topology.model, topology.engine.kind) == ("smollm2-135m", "vllm")
    assert [pool.gpus for pool in topology.active_pools().values()] == [0] * len(topology.active_pools())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "llama-3.1-8b"], "a profile of llama-3.1-8b; this one was measured on smollm2-135m"),
        (["--quantization", "int8"], "nothing beside --profile"),
        (["--tp", "2"], "1, that of the profile's worker"),
        (["--slo", "chat=3000/40"], "below the limit of the profile of 52.1 ms"),
    ],
)
def test_what_a_profile_does_not_cover_is_refused(options: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(measured_worker().to_json())
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    given = {"--model": "smollm2-135m", "--gpu": "cpu", "--workload": str(tmp_path / "w.yaml"), "--slo": "chat=3000/80", "--gpus": "2"}
    given |= {"--profile": str(tmp_path / "p.json"), **dict(zip(options[::2], options[1::2], strict=True))}
    result = CliRunner().invoke(app, ["plan", *[part for pair in given.items() for part in pair]])
    assert result.exit_code == 2, result.output
    assert said in result.stderr


def test_a_config_without_a_field_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    (tmp_path / "config.json").write_text(
        json.dumps({"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 99})
    )
    options = ["--model", str(tmp_path), "--gpu", "h100", "--gpus", "2", "--workload", str(tmp_path / "w.yaml"), "--slo", "chat"]
    result = CliRunner().invoke(app, ["plan", *options])
    assert result.exit_code == 2
    assert "num_attention_heads" in result.stderr


def test_a_model_that_is_not_bundled_is_planned_from_its_config(tmp_path: Path) -> None:
    config = {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16, "intermediate_size": 8192,
        "vocab_size": 128256, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    out = tmp_path / "plan.yaml"
    options = [
        "--model",
        str(tmp_path),
        "--gpu",
        "l40s",
        "--gpus",
        "1",
        "--tp",
        "1",
        "--workload",
        str(tmp_path / "w.yaml"),
        "--slo",
        "chat",
    ]
    result = CliRunner().invoke(app, ["plan", *options, "--no-flips", "--requests", "100", "--json", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["verdict"] == "colocated: the GPUs do not make two pools"
    assert load_topology(out).engine.kind == "simulated", "the folder has no weights to load"


def test_what_limits_a_plan_is_named() -> None:
    """Two prefill workers short of prompts' arithmetic, and decode workers whose step is just within the target."""
    trials = Trials(question(inputs=4000, outputs=20, slo=SloClass(name="chat", ttft_ms=1000, tpot_ms=100, if_missed="reject")))
    one = PoolPlan(1, 4, find_device("h100"), 8192, 256)
    prompts = trials.goodput(Candidate(Mode.DISAGG, prefill=one, decode=one), 3.0, tolerance=0.2)
    assert prompts.limit().startswith("first tokens (")
    assert prompts.beyond is not None
    assert sum(prompts.beyond.missed.values()) == round((1 - prompts.beyond.attainment) * prompts.beyond.counted)
    trials = Trials(question(inputs=100, outputs=200, slo=SloClass(name="chat", ttft_ms=5000, tpot_ms=17)))
    assert trials.goodput(Candidate(Mode.DISAGG, prefill=one, decode=one), 3.0, tolerance=0.2).limit().startswith("time per token (")
