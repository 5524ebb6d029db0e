"""Clients of one engine, and the check of predictions against tables: what it must find, and what it must not hide."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from bench import perf_check
from bench.perf_tables import table_rows
from disagg.config import SimulatedSettings
from disagg.errors import ConfigError
from disagg.perf.hardware import find_device
from disagg.perf.model_config import dtype_in_name
from disagg.sim.closed_loop import Served, closed_loop, open_loop

SETTINGS = SimulatedSettings(shape="llama-3.1-8b", gpu="h100", tp=1)
ROW = {
    "system": "h100_sxm", "model_path": "meta-llama/Llama-3.1-8B", "precision": "fp8", "isl": "256", "osl": "32", "concurrency": "4.0",
    "tp_size": "1.0", "pp_size": "1.0",
}  # fmt: skip


def in_flight(served: list[Served], at_s: float) -> int:
    return sum(s.sent_s <= at_s < s.end_s for s in served)


def test_each_client_has_one_request_under_way_until_none_is_left() -> None:
    served = closed_loop(SETTINGS, 200, 50, 8, 80, spread=0.3, overhead_s=0.01)
    assert len(served) == 80
    last_sent_s = max(s.sent_s for s in served)
    assert {in_flight(served, s.sent_s + 1e-9) for s in served if s.sent_s < last_sent_s} == {8}
    # Little: clients = rate x mean time in the system, while all of them are at work.
    full = [s for s in served if s.end_s <= last_sent_s]
    rate = len(full) / last_sent_s
    assert rate * statistics.mean(s.end_s - s.sent_s for s in full) == pytest.approx(8, rel=0.1)


def test_requests_come_at_their_instants_and_wait_their_turn() -> None:
    alone, late = open_loop(SETTINGS, [(0.0, 1000, 2), (100.0, 1000, 1)])
    assert late.tpot_s is None
    assert late.ttft_s == pytest.approx(alone.ttft_s)
    # One scheduler step of 2,048 tokens holds one such prompt: the second waits for the first.
    first, second = open_loop(SETTINGS, [(0.0, 2000, 1), (0.0, 2000, 1)])
    assert second.ttft_s > 1.8 * first.ttft_s


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def check(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    monkeypatch.setattr("sys.argv", ["perf_check", "--tables", str(folder), "--json"])
    code = perf_check.main()
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_right_tables_hold_and_wrong_ones_are_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = perf_check.simulate_row(ROW)
    ttft_ms = 1e3 * statistics.mean(s.ttft_s for s in served)
    tpot_ms = 1e3 * statistics.mean(s.tpot_s for s in served if s.tpot_s is not None)
    good = {**ROW, "silicon_ttft_ms": ttft_ms, "silicon_tpot_ms": tpot_ms}
    write(tmp_path / "measured_good.csv", [good, {**good, "pp_size": "2"}, {**good, "model_path": "nobody/knows"}])
    code, found, err = check(tmp_path, monkeypatch, capsys)
    assert code == 0
    assert [v["rows"] for v in found["verdicts"]] == [1, 1]
    assert all(abs(v["median_error"]) < 1e-6 for v in found["verdicts"])
    assert err.count("left out") == 2
    write(tmp_path / "measured_good.csv", [{**good, "silicon_tpot_ms": 1.2 * tpot_ms}])
    code, found, _ = check(tmp_path, monkeypatch, capsys)
    assert code == 1
    assert [v["holds"] for v in found["verdicts"]] == [True, False]


def test_a_folder_without_tables_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["perf_check", "--tables", str(tmp_path)])
    with pytest.raises(SystemExit):
        perf_check.main()


def test_columns_by_other_names_are_read_and_missing_ones_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "gpu": "NVIDIA H100 80GB HBM3", "model": "Llama-3.1-8B-Instruct", "dtype": "float16", "input_len": "64", "output_len": "8",
        "clients": "2", "tp": "1", "mean_ttft_ms": "", "mean_tpot_ms": "9",
    }  # fmt: skip
    write(tmp_path / "measured_named.csv", [row, {**row, "mean_ttft_ms": "30"}])
    _, found, err = check(tmp_path, monkeypatch, capsys)
    assert [r["measured_ms"] for r in found["rows"]] == [30, 9]
    assert "left out" in err
    assert "silicon_ttft_ms: got '', expected a number above 0" in err
    write(tmp_path / "measured_named.csv", [{k: v for k, v in row.items() if k != "clients"}])
    with pytest.raises(SystemExit):
        perf_check.main()
    assert "expected also concurrency (or clients, " in capsys.readouterr().err


def test_headings_for_people_times_in_seconds_and_what_a_row_may_leave_out(tmp_path: Path) -> None:
    path = tmp_path / "any.csv"
    path.write_text(
        "\ufeffGPU Name,Model Name,Input Length,Output Length,Request Rate,Mean TTFT (s),Mean TPOT (ms)\n"
        "NVIDIA L40S,Qwen/Qwen3-8B-FP8,64,8,2,0.5,20\n"
    )
    (row,) = table_rows(path)
    assert [row[key] for key in ("precision", "tp_size", "silicon_ttft_ms", "silicon_tpot_ms")] == ["fp8", "1", "500.0", "20"]
    assert [c.case for c in perf_check.closed_rows(path)] == ["Qwen/Qwen3-8B-FP8 fp8 NVIDIA L40S tp1 64/8 at 2/s"] * 2
    served = perf_check.simulate_row(row)
    sent_s = max(s.sent_s for s in served)
    assert len(served) / sent_s == pytest.approx(2, rel=0.15)


def test_kernels_of_another_device_under_the_own_peaks() -> None:
    own, kin = find_device("l40s"), find_device("h100")
    found = perf_check.borrowed(own, kin)
    assert (found.name, found.bandwidth, found.bf16.flops) == (own.name, own.bandwidth, own.bf16.flops)
    assert (found.bf16.compute, found.fp8.weights, found.attention) == (kin.bf16.compute, kin.fp8.weights, kin.attention)


def test_what_a_model_name_says_of_its_weights() -> None:
    names = ("Qwen2.5-7B-Instruct-GPTQ-Int8", "Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen3-8B-AWQ", "Qwen3-8B-FP8", "Qwen3-8B")
    assert [dtype_in_name(name) for name in names] == ["int8", "int4", "awq", "fp8", "bf16"]


TABLES = {
    "semicolons, seconds, thousands, a count before the GPU": (
        "GPU;Engine;Model;ISL;OSL;Conc;TTFT mean [s];ITL (ms)\n8xH100 SXM;TRT-LLM;Qwen/Qwen3-32B-FP8;1,024;128;4;0.2028;9,850.5 us\n",
        {"system": "H100 SXM", "tp_size": "8", "isl": "1024", "precision": "fp8", "engine": "TRT-LLM", "concurrency": "4",
         "silicon_ttft_ms": "202.8", "silicon_tpot_ms": "9.8505"},
    ),
    "tabs, lengths in one cell, ways to be parallel in another, tokens/s in the place of their time": (
        "# of somewhere\nhw\tmodel\tISL/OSL\tparallel\tqps\tP50 TTFT ms\tP99 TTFT ms\ttok/s/user\n"
        "b200\tdeepseek-v3\t1k / 8k\tTP8EP8\t2\t180\t900\t50\n",
        {"isl": "1024", "osl": "8192", "tp_size": "8", "ep_size": "8", "request_rate": "2", "silicon_ttft_ms": "180",
         "silicon_tpot_ms": "20.0", "medians": "silicon_ttft_ms"},
    ),
    "Markdown": (
        "| GPU | Model | ISL | OSL | Users | TTFT (ms) | TPOT (ms) |\n|---|:--|--:|---|---|---|---|\n"
        "| L4 x2 | qwen3-8b | 64 | 8 | 2 | 50 ms | 9 |\n",
        {"system": "L4", "tp_size": "2", "isl": "64", "concurrency": "2", "silicon_ttft_ms": "50", "silicon_tpot_ms": "9"},
    ),
    "means before medians, what is predicted beside what was measured": (
        "system,model,isl,osl,concurrency,predicted_ttft_ms,p99_ttft_ms,median_ttft_ms,mean_ttft_ms,tpot_ms,itl_ms,gpu_util\n"
        "h200,m,10,10,1,1,2,3,4,5,6,97%\n",
        {"silicon_ttft_ms": "4", "silicon_tpot_ms": "5", "medians": ""},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_other_tools_are_read(name: str, tmp_path: Path) -> None:
    text, expected = TABLES[name]
    (tmp_path / "t.csv").write_text(text)
    (row,) = table_rows(tmp_path / "t.csv")
    for key, value in expected.items():
        assert row[key] == value or float(row[key]) == pytest.approx(float(value)), key


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pp_size": "2"}, "pp_size: got '2', expected 1"),
        ({"attention_dp_size": "8"}, "dp_size: got '8', expected 1"),
        ({"moe_ep_size": "4"}, "ep_size: got '4', expected at most tp_size, 1"),
        ({"concurrency": "many"}, "concurrency: got 'many', expected a number above 0"),
        ({"silicon_ttft_ms": "n/a"}, "silicon_ttft_ms: got 'n/a', expected a number above 0"),
        ({"silicon_tpot_ms": "12%"}, "silicon_tpot_ms: got '12%', expected a number above 0"),
        ({"tp_size": "0.2"}, "row: tp"),
        ({"precision": "nvfp4"}, "one of bf16, fp8, int4, int8"),
        ({"system": "MI300X"}, "unknown device 'MI300X'"),
    ],
)
def test_rows_that_cannot_be_simulated_say_why(
    change: dict[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "t.csv", [{**ROW, "silicon_ttft_ms": "30", "silicon_tpot_ms": "9", **change}])
    assert list(perf_check.closed_rows(tmp_path / "t.csv")) == []
    assert said in capsys.readouterr().err


def test_a_row_of_one_output_token_has_no_time_per_token(tmp_path: Path) -> None:
    write(tmp_path / "t.csv", [{**ROW, "osl": "1", "silicon_ttft_ms": "30", "silicon_tpot_ms": ""}])
    assert [c.figure for c in perf_check.closed_rows(tmp_path / "t.csv")] == ["ttft"]


def test_a_latency_without_a_unit_is_asked_for_one(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("gpu,model,isl,osl,concurrency,ttft,tpot_ms\nh100,m,1,1,1,1,1\n")
    with pytest.raises(ConfigError, match="ttft_ms or ttft_s"):
        list(table_rows(tmp_path / "t.csv"))
    (tmp_path / "t.csv").write_text("")
    with pytest.raises(ConfigError, match="expected also system"):
        list(table_rows(tmp_path / "t.csv"))
