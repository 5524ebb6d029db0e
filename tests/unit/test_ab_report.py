"""The report, advice, comparison of two results, phases and Little's law, on made-up rows."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from disagg.ab.advise import advise
from disagg.ab.compare import side_by_side
from disagg.ab.conclude import conclude, curves
from disagg.ab.curve import LoadPoint, concurrency_at, knee_of, regions
from disagg.ab.flip import target_flips
from disagg.ab.little import law_of, law_warning
from disagg.ab.phases import phases
from disagg.ab.replay import load_recording
from disagg.ab.report.busy import busy_workers
from disagg.ab.report.pick import same_requests
from disagg.ab.report.style import log_ticks
from disagg.ab.result import PointReport, Result, RoundReport, SetupReport, arm_figures, classes_of, priced, read_result
from disagg.ab.rows import Row, RowFile, read_rows
from disagg.cli import app
from disagg.cli_ab_report import print_report
from disagg.config import SloClass
from tests.synthetic_rows import Machine, served

CLASSES = (SloClass(name="chat", ttft_ms=500, tpot_ms=40),)
SLOPES = {"disagg": 0.1, "colocated": 0.6}


def rows_of(arm: str, rates: Sequence[float]) -> list[Row]:
    machines = {
        rate: Machine(drift=0.01, stall_s=0.02 if arm == "disagg" else 0.4, step_s=0.025 * (1 + SLOPES[arm] * rate)) for rate in rates
    }
    return [r for rate, m in machines.items() for r in served(arm, m, 5, rounds=2, duration_s=30, tokens=30, rate_rps=rate)]


def in_flight(rows: Sequence[Row]) -> list[float]:
    found = []
    for number in (1, 2):
        own = [r for r in rows if r.round == number]
        found.append(sum(r.end_s - r.sent_s for r in own) / (max(r.end_s for r in own) - min(r.sent_s for r in own)))
    return found


def write_result(folder: Path, rates: Sequence[float]) -> Result:
    rows = {arm: rows_of(arm, rates) for arm in SLOPES}
    setups = {arm: SetupReport(kind=arm, cores=2) for arm in SLOPES}
    verdict, reference = conclude(rows, CLASSES)
    points = []
    for rate in rates:
        own = {arm: [r for r in all_ if r.rate_rps == rate] for arm, all_ in rows.items()}
        rounds = [RoundReport(round=n, order=list(SLOPES), sender={}) for n in (1, 2)]
        figures = {arm: arm_figures(r, CLASSES, in_flight(r)) for arm, r in own.items()}
        points.append(PointReport(rate_rps=rate, probe=False, rounds=rounds, arms=figures, stopped="2 rounds, as asked"))
    at = next(p for p in points if p.rate_rps == reference)
    result = Result(
        schema=2,
        workload={"name": "made-up", "seed": 0, "rounds": 2},
        environment={"model": "a-model", "cpu": "a cpu", "cores": 2, "gpus": []},
        setups=setups,
        points=points,
        rate_rps=reference,
        rounds=at.rounds,
        arms=at.arms,
        curves=curves(rows, points, setups, CLASSES),
        verdict=verdict,
        warnings=["one with <b>brackets</b>"],
    )
    folder.mkdir(exist_ok=True)
    (folder / "result.json").write_text(result.to_json())
    with RowFile(folder / "requests.jsonl") as file:
        for own in rows.values():
            for row in own:
                file.append(row)
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report")
    write_result(path, (0.5, 2))
    return path


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_one_file_with_the_verdict_first_and_an_alternative_for_every_plot(folder: Path):
    ran = CliRunner().invoke(app, ["ab", "report", str(folder), "--price-per-gpu-hour", "0.04"])
    assert ran.exit_code == 0, ran.output
    text = (folder / "report.html").read_text()
    page = Page(text)
    outside = [v for _, attrs in page.tags for k, v in attrs.items() if k in ("src", "href") and not str(v).startswith("data:")]
    assert outside == []
    assert not any(tag in ("script", "link", "iframe") for tag, _ in page.tags)
    assert "url(" not in text
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) >= 8
    assert all(len(str(i["alt"])) > 20 for i in images)
    told = " ".join(page.text)
    assert re.search(
        r"Choose disagg for made-up with a-model on 2 cores.*What decides is goodput: .* requests/s against .* \(interval \+", told, re.S
    )
    assert "It would flip" in told or "No change of the TTFT or TPOT targets" in told
    assert "A million output tokens cost" in told
    assert "one with <b>brackets</b>" in told  # escaped in the file, whole for the reader
    pngs = {p.name for p in (folder / "plots").glob("*.png")}
    assert {"attainment.png", "distributions.png", "latency-throughput.png", "timeline.png", "utilisation.png"} <= pngs
    assert read_result(folder / "result.json").arms["disagg"].cost_per_million_output_tokens is not None


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(130, 450, [150, 200, 300]), (100, 700, [100, 200, 500]), (0.001, 1, [0.001, 0.01, 0.1, 1]), (170, 180, [171, 175, 179])],
)
def test_a_logarithmic_axis_has_a_few_round_numbers(low: float, high: float, expected: list[float]):
    assert log_ticks(low, high) == pytest.approx(expected)


def test_a_long_logarithmic_axis_has_seven_at_most():
    assert len(log_ticks(0.0, 1e6)) <= 7


def test_the_cost_of_tokens(folder: Path):
    result = read_result(folder / "result.json")
    figures = priced(result, 2.0).arms["colocated"]
    assert figures.output_tokens_per_s is not None
    assert figures.cost_per_million_output_tokens == pytest.approx(2.0 * 2 / 3600 / figures.output_tokens_per_s * 1e6)


def test_a_result_beside_itself_shows_no_difference_and_another_workload_is_not_compared(folder: Path, tmp_path: Path):
    result, rows = read_result(folder / "result.json"), read_rows(folder / "requests.jsonl")
    same = side_by_side(result, rows, result, rows, CLASSES)
    assert same.obstacles == ()
    assert {c.better for _, c in same.comparisons} == {None}
    assert {rate for rate, _ in same.comparisons} == {0.5, 2}
    crossed = side_by_side(result, rows, result, rows, CLASSES, ("colocated", "disagg"))
    assert any(c.better == "B: disagg" for _, c in crossed.comparisons)
    other = result.model_copy(update={"workload": {**result.workload, "seed": 1}, "environment": {**result.environment, "cpu": "another"}})
    barred = side_by_side(result, rows, other, rows, CLASSES, ("colocated", "disagg"))
    assert [o for o in barred.obstacles if "seed 0 against 1" in o]
    assert [o for o in barred.obstacles if "processor" in o]
    assert {c.better for _, c in barred.comparisons} == {None}
    changed = [dataclasses.replace(r, prompt_digest="x") for r in rows]
    assert any("prompts" in o for o in side_by_side(result, rows, result, changed, CLASSES).obstacles)


def test_compare_and_advise_on_the_command_line(folder: Path):
    compared = CliRunner().invoke(app, ["ab", "compare", str(folder), str(folder)])
    assert compared.exit_code == 0, compared.output
    assert "no difference" in compared.output
    wrong = CliRunner().invoke(app, ["ab", "compare", str(folder), str(folder), "--arms", "colocted,disagg"])
    assert wrong.exit_code == 2
    assert "colocated" in wrong.output
    advised = CliRunner().invoke(app, ["ab", "advise", str(folder), "--json"])
    assert advised.exit_code == 0, advised.output
    assert {a["rule"] for a in json.loads(advised.output)} >= {"TPOT misses its target"}


def test_what_is_no_subcommand_is_a_topology(tmp_path: Path):
    absent = CliRunner().invoke(app, ["ab", str(tmp_path / "absent.yaml")])
    assert absent.exit_code == 2
    assert "absent.yaml" in absent.output
    for command in ("run", "report", "compare", "advise", "replay"):
        assert CliRunner().invoke(app, ["ab", command, "--help"]).exit_code == 0


def figures_with(ttft: float = 0.2, step: float = 0.025, stall: float = 0.0, **changes: object) -> Result:
    rows = [dataclasses.replace(r, **changes) for r in served("colocated", Machine(step, ttft, stall), 1, rounds=2)]  # type: ignore[arg-type]
    arms = {"colocated": arm_figures(rows, CLASSES, in_flight(rows))}
    verdict, _ = conclude({"colocated": rows}, CLASSES)
    return Result(schema=2, workload={}, environment={}, rounds=[], arms=arms, verdict=verdict, warnings=[])


@pytest.mark.parametrize(
    ("result", "rule", "because", "do"),
    [
        (figures_with(step=0.01), "TPOT has headroom", r"TPOT p95 10\.\d ms against a target of 40\.0 ms", "max_num_seqs"),
        (figures_with(step=0.0375), "TPOT is near its target", r"\(9\d%\)", "quantise"),
        (figures_with(step=0.05), "TPOT misses its target", r"\(1\d\d%\)", "quantise"),
        (figures_with(ttft=0.9, prefill_s=0.8), "TTFT misses its target", "largest part is prefill", "prefix cache"),
        (figures_with(ttft=0.9, queue_s=0.7, prefill_s=0.1), "TTFT misses its target", "largest part is queue", "more workers"),
        (figures_with(stall=1.5, step=0.2), "the tail is long", r"ITL p99 .* is \d+\.\d x its p50", "preemptions"),
        (figures_with(transfer_s=0.02), "the KV transfer shows", "first gap waits", "carrier"),
    ],
)
def test_advice_carries_the_numbers_that_triggered_it(result: Result, rule: str, because: str, do: str):
    found = [a for a in advise(result) if a.rule == rule]
    assert found, [a.rule for a in advise(result)]
    assert re.search(because, found[0].because)
    assert do in found[0].do


def test_nothing_to_advise_when_all_is_well():
    assert [a.rule for a in advise(figures_with(step=0.03))] == []


def point(rate: float, tokens: float, seconds: float) -> LoadPoint:
    return LoadPoint(rate, tokens, seconds, rate * seconds)


def test_the_three_regions_and_the_knee():
    points = [point(1, 100, 1.0), point(2, 200, 1.1), point(4, 390, 1.4), point(6, 500, 4.0), point(8, 510, 12.0)]
    knee = knee_of(points)
    assert knee is not None
    assert knee.rate_rps == 4
    assert regions(points) == ["light", "light", "light", "saturating", "overloaded"]
    assert knee_of(points[:3]) is None  # the best is the last one measured
    assert concurrency_at(points, 3) == pytest.approx((2 * 1.1 + 4 * 1.4) / 2)
    assert concurrency_at(points, 99) == 8 * 12.0


def test_phases_sum_up_to_what_the_client_saw():
    row = served("a", Machine(), 1, rounds=1)[0]
    found = phases(row)
    assert found is not None
    assert found.queue_s + found.prefill_s + found.network_s == pytest.approx(row.ttft_s)
    assert (found.transfer_s or 0) + (found.waiting_s or 0) == pytest.approx(row.itl_s[0])
    assert phases(dataclasses.replace(row, queue_s=None)) is None
    assert phases(dataclasses.replace(row, outcome="failed")) is None


def test_littles_law_names_a_likely_cause():
    rows = served("a", Machine(), 1, rounds=2, duration_s=40)
    law = law_of(rows, in_flight(rows))
    assert law.agrees
    assert law_warning(law, sent=len(rows), lost=0, late_s=0.0) is None
    missing = [r for r in rows if r.index % 4]
    warning = law_warning(law_of(missing, in_flight(rows)), sent=len(rows), lost=0, late_s=0.0)
    assert warning is not None
    assert "rows are missing" in warning
    backlog = [dataclasses.replace(r, end_s=r.end_s + r.sent_s) for r in rows]
    growing = law_warning(law_of(backlog, in_flight(backlog)), sent=len(rows), lost=0, late_s=0.0)
    assert growing is not None
    assert "a backlog grew" in growing


def test_when_the_verdict_would_flip():
    quick_first = served("colocated", Machine(ttft_s=0.1, stall_s=0.5, step_s=0.03), 1, rounds=2)
    smooth = served("disagg", Machine(ttft_s=0.4, stall_s=0.0, step_s=0.03), 2, rounds=2)
    flips = {f.target: f for f in target_flips(smooth, quick_first, (SloClass(name="chat", ttft_ms=500, tpot_ms=35),))}
    assert flips["TTFT"].factor < 1  # a stricter first token speaks for colocated
    assert flips["TTFT"].other_attainment > flips["TTFT"].chosen_attainment
    assert target_flips(smooth, smooth, CLASSES) == []


def test_busy_workers_and_the_requests_that_are_shown():
    row = served("a", Machine(), 1, rounds=1)[0]
    one = dataclasses.replace(row, sent_s=0.0, token_s=(1.0, 2.0), end_s=4.0, prefill_s=1.0, prefill_worker="p", decode_worker="d")
    assert [(b.name, b.prefill, b.decode_only) for b in busy_workers([one])] == [("d", 0.0, 0.25), ("p", 0.25, 0.0)]
    both = {name: served(name, Machine(), seed, rounds=2) for seed, name in enumerate(("a", "b"))}
    shown = same_requests(both, 5)
    assert [r.index for r in shown["a"]] == [r.index for r in shown["b"]]
    assert len(shown["a"]) == 5


def test_a_recording_without_its_workload_keeps_lengths_and_times(folder: Path, tmp_path: Path):
    (tmp_path / "requests.jsonl").write_text((folder / "requests.jsonl").read_text())
    recording = load_recording(tmp_path / "requests.jsonl", "colocated")
    assert not recording.same_prompts
    assert set(recording.turns) == {(rate, n) for rate in (0.5, 2) for n in (1, 2)}
    rows = [r for r in read_rows(folder / "requests.jsonl") if r.arm == "colocated" and (r.rate_rps, r.round) == (2, 2)]
    again = recording.turns[(2, 2)]
    assert [(p.due_s, p.input_tokens, p.output_tokens, p.index) for p in again] == [
        (r.due_s, r.input_tokens, r.max_output_tokens, r.index) for r in rows
    ]
    assert classes_of(read_result(folder / "result.json")) == CLASSES


def test_without_matplotlib_the_result_stands_and_the_way_to_get_plots_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = CliRunner().invoke(app, ["ab", "report", str(folder)])
    assert ran.exit_code == 2
    assert "pip install 'disagg[bench]'" in ran.output
    print_report(folder)
    assert read_result(folder / "result.json").arms
