"""Results of odd runs: a single request, nothing completed, one token, everything late or cancelled, classes that a rate lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from disagg.ab.advise import advise
from disagg.ab.conclude import conclude, curves
from disagg.ab.curve import LoadPoint, knee_of, regions
from disagg.ab.measures import ttft
from disagg.ab.replay import load_recording
from disagg.ab.report.bands import latency_bands
from disagg.ab.report.page import write_report
from disagg.ab.result import PointReport, Result, RoundReport, SetupReport, arm_figures, classes_of, priced, read_result
from disagg.ab.rows import Row, RowFile
from disagg.ab.table import render
from disagg.ab.verdict import judge
from disagg.cli import app
from disagg.config import SloClass
from disagg.errors import ConfigError
from tests.synthetic_rows import Machine, served

CLASSES = (SloClass(name="chat", ttft_ms=500, tpot_ms=40), SloClass(name="document", ttft_ms=5000))
Rows = Mapping[str, Sequence[Row]]


def written(folder: Path, rows: Rows, workload: str = "made-up") -> Result:
    """The result of these rows, in the folder as a run leaves it."""
    folder.mkdir()
    rates = sorted({row.rate_rps or 0.0 for own in rows.values() for row in own})
    verdict, reference = conclude(rows, CLASSES)
    points = []
    for rate in rates:
        at = {arm: [r for r in own if (r.rate_rps or 0.0) == rate] for arm, own in rows.items()}
        numbers = sorted({r.round for own in at.values() for r in own})
        rounds = [RoundReport(round=n, order=list(rows), sender={}) for n in numbers]
        figures = {arm: arm_figures(own, CLASSES, None) for arm, own in at.items()}
        points.append(PointReport(rate_rps=rate, probe=False, rounds=rounds, arms=figures, stopped="as asked"))
    at_reference = next(p for p in points if p.rate_rps == reference)
    setups = {arm: SetupReport(kind="colocated", cores=2) for arm in rows}
    result = Result(
        schema=2,
        workload={"name": workload},
        environment={"model": "m [/b]", "cpu": "a cpu", "cores": 2, "gpus": []},
        setups=setups,
        points=points,
        rate_rps=reference,
        rounds=at_reference.rounds,
        arms=at_reference.arms,
        curves=curves(rows, points, setups, CLASSES),
        verdict=verdict,
        warnings=[],
    )
    (folder / "result.json").write_text(result.to_json())
    with RowFile(folder / "requests.jsonl") as file:
        for own in rows.values():
            for row in own:
                file.append(row)
    return result


def at_rates(arm: str, rates: Sequence[float] = (0.5, 1, 2), **changes: object) -> list[Row]:
    made = [r for rate in rates for r in served(arm, Machine(), 3, rounds=1, duration_s=15, tokens=5, rate_rps=rate)]
    return [dataclasses.replace(row, **changes) for row in made]  # type: ignore[arg-type]


LOST = {"outcome": "failed", "error": "EngineError", "message": "x", "token_s": (), "queue_s": None, "prefill_s": None}
ONE = dataclasses.replace(at_rates("colocated", (1.0,))[0], rate_rps=0.0)
CASES: dict[str, Rows] = {
    "one request": {"colocated": [ONE], "disagg": [dataclasses.replace(ONE, arm="disagg")]},
    "nothing completed": {arm: at_rates(arm, **LOST) for arm in ("colocated", "disagg")},
    "one arm completed nothing": {"colocated": at_rates("colocated"), "external": at_rates("external", **LOST)},
    "one token": {
        arm: [dataclasses.replace(r, token_s=r.token_s[:1], end_s=r.token_s[0]) for r in at_rates(arm)] for arm in ("colocated", "disagg")
    },
    "all late": {arm: [dataclasses.replace(r, sent_s=r.sent_s - 9) for r in at_rates(arm)] for arm in ("colocated", "disagg")},
    "all left": {arm: at_rates(arm, outcome="cancelled") for arm in ("colocated", "disagg")},
    "all refused": {arm: at_rates(arm, **LOST | {"outcome": "rejected", "error": "RejectedError"}) for arm in ("colocated", "disagg")},
    "a class that the lightest rate lacks": {
        arm: at_rates(arm, (0.5,)) + at_rates(arm, (2.0,), slo_class="document", outcome="failed") for arm in ("colocated", "disagg")
    },
}


@pytest.mark.parametrize("case", CASES)
def test_every_command_takes_the_result_of_an_odd_run(tmp_path: Path, case: str):
    result = written(tmp_path / "a", CASES[case], workload="a [/bold] name")
    written(tmp_path / "b", CASES["a class that the lightest rate lacks"])
    console = Console(width=100, record=True)
    console.print(render(result))
    assert "a [/bold] name" in console.export_text()
    priced(result, 1.0)
    write_report(tmp_path / "a")
    for arguments in (["advise", "a"], ["advise", "a", "--json"], ["compare", "a", "a"], ["compare", "a", "b"], ["compare", "b", "a"]):
        ran = CliRunner().invoke(app, ["ab", arguments[0], *(x if x.startswith("-") else str(tmp_path / x) for x in arguments[1:])])
        assert ran.exit_code == 0, (arguments, ran.output, ran.exception)
    load_recording(tmp_path / "a" / "requests.jsonl")
    read_result(tmp_path / "a" / "result.json")


def test_an_arm_that_completes_nothing_has_no_knee():
    assert knee_of([LoadPoint(rate, 0.0, 0.0, 1.0) for rate in (1, 2, 4)]) is None


def test_goodput_below_the_lightest_rate_is_only_known_to_lie_there(tmp_path: Path):
    curve = written(tmp_path / "a", CASES["nothing completed"]).curves["colocated"]
    assert (curve.goodput_bound, curve.goodput_low_rps, curve.goodput_high_rps) == ("below", 0.0, 0.5)


def test_classes_are_known_that_the_reference_rate_lacks(tmp_path: Path):
    result = written(tmp_path / "a", CASES["a class that the lightest rate lacks"])
    assert set(result.arms["colocated"].classes) == {"chat"}
    assert {c.name for c in classes_of(result)} == {"chat", "document"}


def test_failures_are_advised_on_and_never_called_well(tmp_path: Path):
    failed = written(tmp_path / "a", CASES["nothing completed"])
    found = [a for a in advise(failed) if a.rule == "requests fail"]
    assert [a.arm for a in found] == ["colocated", "disagg"]
    assert "4 of 4 requests failed (4 x EngineError)" in found[0].because
    written(tmp_path / "b", CASES["one request"] | {"disagg": [dataclasses.replace(ONE, arm="disagg", sent_s=ONE.sent_s - 9)]})
    assert "too little was measured to say why" in CliRunner().invoke(app, ["ab", "advise", str(tmp_path / "b")]).output


def test_what_no_rate_keeps_is_not_said_to_be_kept_at_a_lower_one(tmp_path: Path):
    slow = {arm: at_rates(arm, sent_s=-60.0) for arm in ("colocated", "disagg")}
    (advice, *_) = [a for a in advise(written(tmp_path / "a", slow)) if a.rule == "operated past its goodput"]
    assert "no measured rate keeps 90%" in advice.because


def test_each_class_has_a_tail_of_its_own():
    """A document takes twenty times as long as a chat whatever is tuned."""
    chats = served("colocated", Machine(stall_s=0.0), 1, rounds=2, rate_rps=4)
    documents = [
        dataclasses.replace(r, slo_class="document", index=r.index + 10_000, token_s=tuple(t + 3 for t in r.token_s), end_s=r.end_s + 3)
        for r in chats[::20]
    ]
    figures = arm_figures([*chats, *documents], CLASSES, None)
    assert figures.ttft_s.p99 is not None
    assert figures.ttft_s.p50 is not None
    assert figures.ttft_s.p99 > 3 * figures.ttft_s.p50
    verdict, _ = conclude({"colocated": chats}, CLASSES)
    result = Result(schema=2, workload={}, environment={}, rounds=[], arms={"colocated": figures}, verdict=verdict, warnings=[])
    assert [a.because for a in advise(result) if a.rule == "the tail is long"] == []


def test_a_price_is_a_number(tmp_path: Path):
    result = written(tmp_path / "a", CASES["one request"])
    for price in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ConfigError, match="--price-per-gpu-hour"):
            priced(result, price)


def test_a_replay_is_not_replayed_under_its_own_name(tmp_path: Path):
    written(tmp_path / "a", {"colocated": at_rates("colocated"), "replay": at_rates("replay")})
    recording = load_recording(tmp_path / "a" / "requests.jsonl", "replay")
    assert recording.arm == "replay-before"
    assert {r.arm for r in recording.rows} == {"replay-before"}


def test_an_answer_that_ended_by_itself_is_asked_for_at_its_length(tmp_path: Path):
    written(tmp_path / "a", {"colocated": at_rates("colocated", max_output_tokens=500)})
    recording = load_recording(tmp_path / "a" / "requests.jsonl")
    assert {p.output_tokens for planned in recording.turns.values() for p in planned} == {5}


def test_many_requests_lost_by_turns_are_tested_in_no_time():
    ours = [dataclasses.replace(ONE, index=i, **LOST if i % 2 else {}) for i in range(12_000)]  # type: ignore[arg-type]
    theirs = [dataclasses.replace(ONE, index=i, arm="b", **{} if i % 2 else LOST) for i in range(12_000)]  # type: ignore[arg-type]
    verdict = judge(ours, theirs, CLASSES, ("a", "b"), simulated=True)
    completed = next(c for c in verdict.comparisons if c.measure == "completed")
    assert (completed.values, completed.better) == ((0.5, 0.5), None)


def test_a_round_with_fewer_requests_than_its_rate_says_is_not_overloaded():
    """At 10/s the arrivals of a short round happened to be no more than 5.4/s: all of them were answered."""
    asked = {2.0: 300.0, 6.0: 900.0, 10.0: 1000.0}
    points = [LoadPoint(rate, 0.8 * tokens, 3.0, 1.0, tokens) for rate, tokens in asked.items()]
    assert regions(points) == ["light", "light", "light"]
    assert regions([dataclasses.replace(p, asked_tokens_per_s=None) for p in points])[-1] == "overloaded"
    stuck = [*points[:2], LoadPoint(10.0, 740.0, 30.0, 9.0, 1500.0)]
    assert regions(stuck)[-1] == "overloaded"


def test_what_was_asked_for_is_taken_from_the_rows(tmp_path: Path):
    assert set(written(tmp_path / "a", {"colocated": at_rates("colocated")}).curves["colocated"].regions.values()) == {"light"}


def test_a_band_of_a_latency_stays_above_zero():
    rows = [dataclasses.replace(r, token_s=tuple(t + (3 if r.index % 12 == 0 else 0) for t in r.token_s)) for r in at_rates("a", (4.0,))]
    (band,) = latency_bands(rows, ttft, (90,))["p90"]
    assert 0 < band.low < band.value < band.high
