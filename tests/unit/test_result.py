"""From rows to result.json, verdict and table."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from disagg import slo
from disagg.ab.conclude import verdict_report
from disagg.ab.out import OutFolder
from disagg.ab.result import Result, RoundReport, arm_figures, read_result
from disagg.ab.rows import Row, RowFile, read_rows
from disagg.ab.table import render
from disagg.ab.verdict import judge
from disagg.config import SloClass
from disagg.errors import ConfigError

CLASSES = (SloClass(name="chat", ttft_ms=500, tpot_ms=60), SloClass(name="document"))


def row(index: int = 0, *, ttft: float = 0.2, gaps: tuple[float, ...] = (0.02,) * 9, sent: float | None = None, **changes: object) -> Row:
    sent = float(index) if sent is None else sent
    token_s = [sent + ttft]
    for gap in gaps:
        token_s.append(token_s[-1] + gap)
    base = Row(
        arm="disagg",
        round=1,
        index=index,
        stream="chat",
        slo_class="chat",
        input_tokens=64,
        max_output_tokens=len(token_s),
        prompt_digest="0",
        due_s=sent,
        sent_s=sent,
        end_s=token_s[-1],
        token_s=tuple(token_s),
        outcome="completed",
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def arm(name: str, *, stall: float, ttft: float, seed: int = 0, rounds: int = 2, count: int = 40) -> list[Row]:
    """Chats of which every fifth has one long gap."""
    rng = random.Random(seed)
    rows = []
    for round_ in range(1, rounds + 1):
        for i in range(count):
            gaps = [rng.uniform(0.018, 0.022) for _ in range(30)]
            if i % 5 == 0:
                gaps[rng.randrange(30)] += stall
            rows.append(row(i, ttft=ttft * rng.uniform(0.8, 1.2), gaps=tuple(gaps), arm=name, round=round_))
    return rows


def test_failed_requests_are_misses_and_never_latencies():
    rows = [
        row(0),
        row(1, outcome="rejected", token_s=(), end_s=1.1, error="RejectedError"),
        row(2, outcome="failed", token_s=(9.0, 99.0), end_s=99.0, error="WorkerLostError"),
        row(3, ttft=0.9),
    ]
    figures = arm_figures(rows, CLASSES, None)
    assert (figures.sent, figures.completed, figures.rejected, figures.failed) == (4, 2, 1, 1)
    assert figures.errors == {"RejectedError": 1, "WorkerLostError": 1}
    assert figures.slo_attainment == 0.25
    assert figures.ttft_s.count == 2
    assert figures.ttft_s.max == pytest.approx(0.9)
    assert figures.itl_s.max == pytest.approx(0.02)
    assert figures.output_tokens_per_s == pytest.approx(20 / 99)
    assert figures.input_tokens_per_s == pytest.approx(128 / 99)


def test_one_token_answers_count_in_ttft_only():
    figures = arm_figures([row(0, gaps=()), row(1)], CLASSES, None)
    assert (figures.ttft_s.count, figures.tpot_s.count, figures.itl_s.count, figures.e2e_s.count) == (2, 1, 9, 2)
    assert figures.slo_attainment == 1.0


def test_spans_of_rounds_add_up_without_the_pause_between():
    rows = [row(0, round=1), row(1, round=1), row(0, round=2), row(5, round=2)]
    first, second = (1 + 0.2 + 0.18), (5 + 0.2 + 0.18)
    figures = arm_figures(rows, CLASSES, None)
    assert figures.span_s == pytest.approx(first + second)
    assert figures.mean_concurrency == pytest.approx(4 * 0.38 / (first + second))


def test_classes_are_broken_down_with_their_own_targets():
    rows = [row(0), row(1, ttft=0.9), row(2, slo_class="document", ttft=5.0)]
    figures = arm_figures(rows, CLASSES, None)
    assert figures.slo_attainment == pytest.approx(2 / 3)
    assert figures.classes["chat"].slo_attainment == 0.5
    assert figures.classes["document"].slo_attainment == 1.0
    assert (figures.classes["chat"].ttft_target_s, figures.classes["document"].ttft_target_s) == (0.5, None)
    assert sum(c.sent for c in figures.classes.values()) == figures.sent
    assert list(arm_figures([row(0)], CLASSES, None).classes) == ["chat"]


def test_littles_law_is_checked_against_the_senders_count():
    rows = [row(i) for i in range(10)]
    expected = 10 * 0.38 / (9 + 0.38)
    law = arm_figures(rows, CLASSES, [expected * 1.01]).littles_law
    assert law is not None
    assert law.expected == pytest.approx(expected)
    assert law.agrees
    off = arm_figures(rows, CLASSES, [expected * 1.2]).littles_law
    assert off is not None
    assert not off.agrees


def test_an_arm_that_completed_nothing_has_figures_too():
    rows = [row(i, outcome="failed", token_s=(), error="GatewayUnreachableError") for i in range(3)]
    figures = arm_figures(rows, CLASSES, [0.0])
    assert (figures.failed, figures.slo_attainment, figures.ttft_s.mean, figures.mean_input_tokens) == (3, 0.0, None, None)
    verdict = judge(rows, [row(i, arm="colocated") for i in range(3)], CLASSES)
    assert verdict.reason


def test_rows_survive_the_file_digit_for_digit(tmp_path: Path):
    rows = [row(0), row(1, outcome="failed", error="E", message="m", token_s=(), attempts=2), row(2, sent=1 / 3)]
    with RowFile(tmp_path / "requests.jsonl") as file:
        for r in rows:
            file.append(r)
    assert read_rows(tmp_path / "requests.jsonl") == rows


def test_a_cut_last_line_is_ignored_and_any_other_fault_names_its_line(tmp_path: Path):
    path = tmp_path / "requests.jsonl"
    with RowFile(path) as file:
        file.append(row(0))
        file.append(row(1))
    text = path.read_text()
    path.write_text(text[:-30])
    assert read_rows(path) == [row(0)]
    odd = [
        {"outcome": "fine"},
        {"sent_s": "1"},
        {"end_s": float("nan")},
        {"token_s": [1, None]},
        {"rate_rps": "1"},
        {"arm": 3},
        {"round": None},
    ]
    odd_rows = [json.dumps({**dataclasses.asdict(row(0)), **changes}) + "\n" for changes in odd]
    for fault in ("{}\n", "not json\n", "[1]\n", "[" * 100_000 + "\n", '{"arm": 1, "colour": 2}\n', *odd_rows):
        path.write_text(text + fault)
        with pytest.raises(ConfigError, match="line 3"):
            read_rows(path)
    with pytest.raises(ConfigError, match=r"absent\.jsonl"):
        read_rows(tmp_path / "absent.jsonl")


def test_long_gaps_in_one_arm_choose_the_other_and_a_worse_ttft_is_said():
    verdict = judge(arm("disagg", stall=0, ttft=0.4, seed=1), arm("colocated", stall=0.5, ttft=0.2, seed=2), CLASSES)
    assert verdict.choose == "disagg"
    gaps = next(c for c in verdict.comparisons if c.measure.startswith("ITL"))
    assert gaps.better == "disagg"
    assert gaps.high < 0
    assert gaps.value("disagg") == pytest.approx(
        float(np.percentile([g for r in arm("disagg", stall=0, ttft=0.4, seed=1) for g in r.itl_s], 99.9))
    )
    assert gaps.value("colocated") > 0.4 > 0.05 > gaps.value("disagg")
    assert re.search(r"^Disagg is better in .* It is worse in TTFT p95 \(\d+ ms against \d+ ms\)", verdict.reason)
    assert all(c.slo_class is None for c in verdict.comparisons)
    mirrored = judge(arm("disagg", stall=0.5, ttft=0.2, seed=2), arm("colocated", stall=0, ttft=0.4, seed=1), CLASSES)
    assert mirrored.choose == "colocated"


def test_attainment_decides_before_the_gaps():
    slow_first = arm("disagg", stall=0, ttft=0.9, seed=1)
    verdict = judge(slow_first, arm("colocated", stall=0.05, ttft=0.2, seed=2), CLASSES)
    assert verdict.choose == "colocated"
    assert verdict.comparisons[0].measure == "SLO attainment"
    assert verdict.comparisons[0].better == "colocated"
    assert "It is worse in ITL" in verdict.reason


@pytest.mark.parametrize("seed", range(6))
def test_equal_arms_show_no_difference(seed: int):
    verdict = judge(arm("disagg", stall=0.3, ttft=0.3, seed=seed), arm("colocated", stall=0.3, ttft=0.3, seed=seed + 100), CLASSES)
    assert verdict.choose == "either"
    assert verdict.reason.startswith("No difference shown")


def test_a_difference_that_one_round_contradicts_is_none():
    ours = arm("disagg", stall=0, ttft=0.9, rounds=1) + [dataclasses.replace(r, round=2) for r in arm("x", stall=0, ttft=0.1, rounds=1)]
    theirs = arm("colocated", stall=0, ttft=0.2, rounds=2)
    ttft = next(c for c in judge(ours, theirs, (SloClass(name="chat"),)).comparisons if c.measure.startswith("TTFT"))
    assert ttft.value("disagg") > ttft.value("colocated")
    assert ttft.better is None


def test_lower_throughput_in_every_round_is_shown():
    slow = [dataclasses.replace(r, end_s=r.end_s + 30) for r in arm("disagg", stall=0, ttft=0.2)]
    comparison = judge(slow, arm("colocated", stall=0, ttft=0.2), CLASSES).comparisons[-1]
    assert (comparison.measure, comparison.better) == ("throughput", "colocated")


def test_a_class_that_pays_is_named():
    def mixed(name: str, chat_ttft: float, stall: float) -> list[Row]:
        chats = arm(name, stall=stall, ttft=chat_ttft, seed=1)
        documents = [dataclasses.replace(r, index=r.index + 1000, slo_class="document") for r in arm(name, stall=stall, ttft=3.0, seed=2)]
        return chats + documents

    verdict = judge(mixed("disagg", 0.4, 0), mixed("colocated", 0.1, 0.5), CLASSES)
    assert verdict.choose == "disagg"
    costs = verdict.reason.partition("It is worse in")[2].partition("Within the noise")[0]
    assert "chat TTFT p50" in costs
    assert "document TTFT" not in costs
    gaps = {c.slo_class: c for c in verdict.comparisons if c.measure.startswith("ITL")}
    assert set(gaps) == {None, "chat", "document"}


def test_a_class_that_misses_its_slo_decides_before_the_gaps():
    def mixed(name: str, chat_ttft: float, stall: float) -> list[Row]:
        chats = arm(name, stall=stall, ttft=chat_ttft, seed=1, count=12)
        documents = [
            dataclasses.replace(r, index=r.index + 1000, slo_class="document") for r in arm(name, stall=stall, ttft=3.0, seed=2, count=600)
        ]
        return chats + documents

    verdict = judge(mixed("disagg", 0.9, 0), mixed("colocated", 0.1, 0.5), CLASSES)
    assert verdict.comparisons[0].better is None  # 24 chats of 1,224 requests are less than 2 points
    assert verdict.choose == "colocated"
    assert verdict.reason.startswith("Colocated is better in TTFT p95") or "chat SLO attainment (100% against 0%)" in verdict.reason


def make_result() -> Result:
    arms = {"disagg": arm("disagg", stall=0, ttft=0.4), "colocated": arm("colocated", stall=0.5, ttft=0.2)}
    figures = {name: arm_figures(rows, CLASSES, [1.0, 1.0]) for name, rows in arms.items()}
    return Result(
        schema=2,
        workload={"name": "test"},
        environment={"model": "a-model", "cpu": "A Rather Long Name of a Processor @ 2.00GHz with many words"},
        rounds=[RoundReport(round=1, order=["disagg", "colocated"], sender={})],
        arms=figures,
        verdict=verdict_report(judge(arms["disagg"], arms["colocated"], CLASSES)),
        warnings=["a warning [with brackets]"],
    )


def test_result_json_has_the_documented_keys_and_reads_back(tmp_path: Path):
    result = make_result()
    path = tmp_path / "result.json"
    path.write_text(result.to_json())
    raw = json.loads(path.read_text())
    assert raw["schema"] == 2
    assert {"workload", "environment", "arms", "verdict"} <= raw.keys()
    for figures in raw["arms"].values():
        assert {"sent", "completed", "rejected", "failed", "ttft_s", "tpot_s", "itl_s", "e2e_s", "slo_attainment"} <= figures.keys()
        assert {"output_tokens_per_s", "input_tokens_per_s", "mean_concurrency", "classes"} <= figures.keys()
        assert {"mean", "p50", "p90", "p95", "p99", "max"} <= figures["ttft_s"].keys()
    assert raw["verdict"]["choose"] in {"disagg", "colocated", "either"}
    assert read_result(path) == result
    path.write_text(path.read_text().replace('"schema": 2', '"schema": 3'))
    with pytest.raises(ConfigError, match="schema"):
        read_result(path)


def test_the_table_fits_100_columns_and_is_plain_in_a_pipe(capsys: pytest.CaptureFixture[str]):
    Console(width=100).print(render(make_result()))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 100
    for word in (
        "TTFT p50 / p95 / p99",
        "ITL p50 / p99 / p99.9 / max",
        "within SLO",
        "verdict: disagg",
        "a warning [with brackets]",
        "chat",
    ):
        assert word in text


def test_many_arms_get_several_tables_and_no_cell_is_broken(capsys: pytest.CaptureFixture[str]):
    result = make_result()
    figures = list(result.arms.values())
    names = ["disagg-1p3d", "disagg-2p2d", "disagg-3p1d", "colocated", "adaptive", "external-a-rather-long-name"]
    Console(width=100).print(render(result.model_copy(update={"arms": {name: figures[i % 2] for i, name in enumerate(names)}})))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert all(name in text for name in names)
    assert "…" not in text
    assert len([line for line in text.splitlines() if "ITL p50 / p99 / p99.9 / max" in line and line.count(" ms ") >= 2]) == 2 * 3


def test_an_older_result_is_kept(tmp_path: Path):
    out = OutFolder(tmp_path / "out")
    assert out.moved_to is None
    out.requests.write_text("rows")
    out.write_result("first")
    moved = [OutFolder(tmp_path / "out").moved_to]
    out.write_result("second")
    moved.append(OutFolder(tmp_path / "out").moved_to)
    assert not out.result.exists()
    assert moved[0] is not None
    assert moved[1] is not None
    assert (moved[0] / "requests.jsonl").read_text() == "rows"
    assert [(m / "result.json").read_text() for m in moved if m is not None] == ["first", "second"]


def test_an_out_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(ConfigError, match=r"--out.*cannot be written"):
            OutFolder(path)


def test_percentiles_of_the_result_are_those_of_slo():
    rows = arm("disagg", stall=0.3, ttft=0.3, count=50)
    figures = arm_figures(rows, CLASSES, None)
    assert figures.itl_s.p999 == slo.percentile([g for r in rows for g in r.itl_s], 99.9)
    assert figures.ttft_s.p99 == slo.percentile([r.ttft_s or 0 for r in rows], 99)


def test_a_result_of_schema_1_is_read(tmp_path: Path):
    raw = json.loads(make_result().to_json())
    for new in ("setups", "points", "rate_rps", "chunk_search", "warm_up", "repeated", "not_a_result"):
        del raw[new]
    raw["schema"] = 1
    for c in raw["verdict"]["comparisons"]:
        del c["rate_rps"]
        (c["disagg"], c["colocated"]), _ = c.pop("values"), c.pop("arms")
    (tmp_path / "result.json").write_text(json.dumps(raw))
    read = read_result(tmp_path / "result.json")
    assert read.verdict == make_result().verdict
    assert read.arms == make_result().arms
    assert read.points == []
