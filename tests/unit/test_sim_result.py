"""A simulation as rows, as result.json and on the command line; trace workloads and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from disagg.ab.result import read_result
from disagg.ab.rows import read_rows
from disagg.ab.simulate import sim_rows, simulate_arms, simulated_result
from disagg.ab.trace_workload import TraceWorkload, find_trace, load_any_workload, shipped_traces, workload_trace
from disagg.ab.workload import Workload
from disagg.cli import app
from disagg.config import SloClass
from disagg.errors import ConfigError
from disagg.sim.settings import SimSettings
from disagg.trace import Trace
from tests.sim_rig import poisson, sim_topology

TOPOLOGY = Path(__file__).parents[2] / "cluster" / "topologies" / "sim-h100-4p4d.yaml"
SERVEGEN = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{i / 4},{200 + 10 * i},{20 + i}\n" for i in range(40))


@pytest.fixture
def trace_workload(tmp_path: Path) -> Path:
    (tmp_path / "t.csv").write_text(SERVEGEN)
    path = tmp_path / "w.yaml"
    path.write_text("name: mine\nslo_class: chat\ntrace: {file: t.csv, rate_factor: 2}\n")
    return path


def test_rows_and_figures_agree_with_the_simulation() -> None:
    trace = Trace("t", tuple(poisson(5.0, 120, 700, 40)))
    topologies = {mode: sim_topology(mode, prefill=2, decode=2) for mode in ("disagg", "colocated")}
    settings = SimSettings()
    arms = simulate_arms(topologies, trace, settings, 5.0)
    rows = {arm.name: list(sim_rows(arm, trace.name)) for arm in arms}
    result = simulated_result(arms, rows, trace, {"name": "t"}, settings)
    for arm in arms:
        for row, outcome in zip(rows[arm.name], arm.report.outcomes, strict=True):
            assert row.is_whole
            assert row.output_tokens == 40
            assert row.ttft_s == pytest.approx(outcome.ttft_s, abs=2e-6)
            assert row.tpot_s == pytest.approx(outcome.tpot_s, abs=1e-6)
            parts = (row.queue_s or 0) + (row.prefill_s or 0) + 2 * settings.network_s
            assert row.ttft_s == pytest.approx(parts, abs=5e-6)
        law = result.arms[arm.name].littles_law
        assert law is not None
        assert law.measured == pytest.approx(law.expected, rel=1e-4)
    assert result.environment["simulated"] is True
    assert set(result.arms) == {"disagg", "colocated"}


def test_command_line_writes_what_the_ab_writes(tmp_path: Path, trace_workload: Path) -> None:
    out = tmp_path / "out"
    arguments = ["sim", str(TOPOLOGY), "--workload", str(trace_workload), "--mode", "disagg", "--mode", "adaptive", "--out", str(out)]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert "arrivals 2 x as fast" in ran.output
    result = read_result(out / "result.json")
    assert set(result.arms) == {"disagg", "adaptive"}
    assert result.arms["disagg"].sent == 40
    assert len(read_rows(out / "requests.jsonl")) == 80
    assert json.loads((out / "result.json").read_text())["environment"]["simulated"] is True


def test_a_topology_that_cannot_be_simulated_leaves_what_was_there(tmp_path: Path, trace_workload: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "result.json").write_text("an older one")
    arguments = ["sim", str(TOPOLOGY), "--workload", str(trace_workload), "--set", "engine.simulated.speed=0", "--out", str(out)]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 2
    assert "speed: got 0" in " ".join(ran.output.split())
    assert [path.name for path in out.iterdir()] == ["result.json"]


def test_a_seed_is_part_of_the_result_so_that_two_of_them_are_not_compared(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        arguments = ["sim", str(TOPOLOGY), "--workload", "sim-mixed", "--rate", "0.05", "--seed", seed, "--no-report", "--out"]
        assert CliRunner().invoke(app, [*arguments, str(tmp_path / seed)]).exit_code == 0
    assert read_result(tmp_path / "2" / "result.json").workload["seed"] == 2
    ran = CliRunner().invoke(app, ["ab", "compare", str(tmp_path / "1"), str(tmp_path / "2")])
    assert "not comparable: the workloads differ: seed 1 against 2" in " ".join(ran.output.split())


def test_a_trace_without_a_rate_is_not_scaled_to_one(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,input_tokens,output_tokens\n0,50,5\n")
    (tmp_path / "w.yaml").write_text("name: mine\ntrace: {file: t.csv}\n")
    ran = CliRunner().invoke(app, ["sim", str(TOPOLOGY), "--workload", str(tmp_path / "w.yaml"), "--rates", "1", "--out", str(tmp_path)])
    assert ran.exit_code == 2
    assert "a rate of its own" in " ".join(ran.output.split())


def test_several_rates_in_one_call_give_what_an_ab_with_rates_gives(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(
        "name: w\nduration_s: 20\n"
        "streams: [{name: s, arrivals: {poisson_per_s: 2}, input_tokens: 4000, output_tokens: 20, slo_class: chat}]\n"
    )
    out = tmp_path / "out"
    small = ["--set", "pools.prefill.count=1", "--set", "pools.decode.count=1", "--set", "pools.colocated.count=2"]
    arguments = ["sim", str(TOPOLOGY), "--workload", str(tmp_path / "w.yaml"), "--mode", "disagg", "--mode", "colocated", *small]
    ran = CliRunner().invoke(app, [*arguments, "--rates", "12,1,4", "--no-report", "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    result, rows = read_result(out / "result.json"), read_rows(out / "requests.jsonl")
    assert [point.rate_rps for point in result.points] == [1.0, 4.0, 12.0]
    asked = [point.arms["disagg"].sent for point in result.points]
    assert asked == [sum(row.rate_rps == rate and row.arm == "disagg" for row in rows) for rate in (1.0, 4.0, 12.0)]
    assert asked[2] > 2 * asked[1] > 4 * asked[0], "streams send for as long at every rate"
    assert result.rate_rps in (1.0, 4.0)
    assert result.arms == next(point.arms for point in result.points if point.rate_rps == result.rate_rps)
    assert {name: curve.goodput_bound for name, curve in result.curves.items()} == {"disagg": "within", "colocated": "within"}


@pytest.mark.parametrize(
    "options", [["--rates", "2,-1"], ["--rates", "two"], ["--rates", "2", "--rate", "3"], ["--rates", "2", "--goodput"]]
)
def test_rates_that_cannot_be_are_named(options: list[str]) -> None:
    ran = CliRunner().invoke(app, ["sim", str(TOPOLOGY), *options])
    assert ran.exit_code == 2
    assert "--rates" in ran.stderr


def test_command_line_finds_the_goodput(trace_workload: Path) -> None:
    ran = CliRunner().invoke(app, ["sim", str(TOPOLOGY), "--workload", str(trace_workload), "--goodput", "--rate", "8"])
    assert ran.exit_code == 0, ran.output
    assert ran.output.startswith("disagg: ")
    assert "requests/s" in ran.output


def test_shipped_trace_workloads_are_valid() -> None:
    assert {"azure-conv", "azure-code", "mooncake-conversation", "servegen-r1"} <= set(shipped_traces())
    for name in shipped_traces():
        workload = load_any_workload(name)
        assert isinstance(workload, TraceWorkload)
        assert workload.name == name
    assert isinstance(load_any_workload("demo"), Workload)


def test_a_trace_is_found_in_the_folder_in_the_variable_or_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.csv").write_text(SERVEGEN)
    assert find_trace("t.csv", tmp_path) == tmp_path / "t.csv"
    monkeypatch.setenv("DISAGG_TRACES", str(tmp_path))
    assert find_trace("t.csv", None) == tmp_path / "t.csv"
    monkeypatch.delenv("DISAGG_TRACES")
    with pytest.raises(ConfigError, match="--traces or DISAGG_TRACES"):
        find_trace("t.csv", None)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("name: x\ntrace: {file: t.csv, rate_facter: 2}\n", "trace.rate_facter"),
        ("name: x\ntrace: {file: t.csv, over: keep}\n", "trace.over"),
        ("name: x\ntrace: {file: t.csv, rate_factor: 0}\n", "trace.rate_factor"),
        ("name: x\ntrace: {file: absent.csv}\n", "trace.file"),
        ("name: x\nslo_class: chatt\ntrace: {file: t.csv}\n", "slo_class"),
        ("name: x\ntrace: {file: t.csv, max_total_tokens: 2, over: drop}\n", "window_s"),
    ],
)
def test_a_wrong_trace_workload_is_named(tmp_path: Path, text: str, key: str) -> None:
    (tmp_path / "t.csv").write_text(SERVEGEN)
    path = tmp_path / "w.yaml"
    path.write_text(text)
    classes = [SloClass(name="chat")]

    def load() -> Any:
        return workload_trace(load_any_workload(str(path)), classes)

    with pytest.raises(ConfigError) as caught:
        load()
    assert caught.value.key == key


@pytest.mark.parametrize(("option", "said"), [(["--mode", "disag"], "disagg"), (["--workload", "azure-con"], "azure-conv")])
def test_a_wrong_name_on_the_command_line_gets_the_nearest(option: list[str], said: str) -> None:
    ran = CliRunner().invoke(app, ["sim", str(TOPOLOGY), *option])
    assert ran.exit_code == 2
    assert said in ran.output
