"""The A/B over several rates and any arms: what is measured again, what is kept, what is found, and servers that are not ours."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from disagg.ab.arms import Arm, Serving
from disagg.ab.out import OutFolder
from disagg.ab.progress import RunProgress
from disagg.ab.result import Result, read_result
from disagg.ab.rows import read_rows
from disagg.ab.rules import RangeSearch, RoundRule
from disagg.ab.run import Comparison, begin, run_ab
from disagg.ab.turns import check_external
from disagg.ab.workload import Cancellations, Lengths
from disagg.errors import ConfigError, DiskError
from disagg.types import Mode
from tests.ab_rig import Arms, arms, comparison, eventually, rows_so_far, run, silent
from tests.openai_stub import ODD, OpenAiServer, serving


def at_rates(*rates: float, rounds: int = 1, duration_s: float = 0.5) -> Comparison:
    return replace(comparison(duration_s=duration_s), rates=rates, rounds=RoundRule(rounds, rounds))


async def test_each_rate_is_a_point_with_its_own_requests_and_prompts(tmp_path: Path):
    async with arms() as source:
        result: Result = await run(at_rates(10, 40, rounds=2), source, tmp_path)
    assert [p.rate_rps for p in result.points] == [10, 40]
    few, many = (p.arms["disagg"].sent for p in result.points)
    assert many > 2 * few
    rows = read_rows(tmp_path / "requests.jsonl")
    assert sorted({(r.rate_rps, r.round, r.arm) for r in rows}) == [
        (rate, number, arm) for rate in (10, 40) for number in (1, 2) for arm in ("colocated", "disagg")
    ]
    digests = [r.prompt_digest for r in rows if r.arm == "disagg"]
    assert len(set(digests)) == len(digests)
    assert result.rate_rps in (10, 40)
    assert result.setups["disagg"].prefill == 1
    assert {p.stopped for p in result.points} == {"2 rounds, as asked"}


async def test_a_resumed_run_measures_only_what_is_missing(tmp_path: Path):
    what = at_rates(10, 20, rounds=2, duration_s=0.6)
    async with arms() as source:
        task = asyncio.create_task(run(what, source, tmp_path))
        # Three turns are behind it, and rows of a fourth one are there, which will be cut off.
        await eventually(lambda: len({(r.arm, r.rate_rps, r.round) for r in rows_so_far(tmp_path)}) == 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    with (tmp_path / "requests.jsonl").open("a") as file:
        file.write('{"arm":"disagg","rou')  # as a kill -9 leaves it
    async with arms() as source:
        with silent() as progress:
            result = await run_ab(what, source, OutFolder(tmp_path, resume=True), progress, resume=True)
        sent = sum(len(gateway.requests) for gateway in source.gateways.values())
    whole = await whole_run(what, tmp_path / "whole")
    rows = read_rows(tmp_path / "requests.jsonl")
    assert sent < sum(p.arms[a].sent for p in result.points for a in p.arms)
    assert {(r.arm, r.rate_rps, r.round, r.index) for r in rows} == {(r.arm, r.rate_rps, r.round, r.index) for r in whole}
    assert len(rows) == len(whole)
    assert [r.reason for r in result.repeated] == ["the run was interrupted"]
    assert len(read_rows(tmp_path / "requests-void.jsonl")) == result.repeated[0].requests


async def whole_run(what: Comparison, path: Path) -> list[Any]:
    async with arms() as source:
        await run(what, source, path)
    return read_rows(path / "requests.jsonl")


async def test_a_resumed_run_must_be_the_same_comparison(tmp_path: Path):
    async with arms() as source:
        await run(at_rates(10), source, tmp_path)
        other = replace(at_rates(10), workload=comparison(output=7).workload)
        with silent() as progress, pytest.raises(ConfigError, match=r"workload\..*another comparison needs another folder"):
            await run_ab(other, source, OutFolder(tmp_path, resume=True), progress, resume=True)


async def test_a_run_resumed_for_other_rates_and_fewer_rounds_has_whole_rounds_only(tmp_path: Path):
    """What was measured before stays a point; a round that not every arm has counts nowhere."""
    async with arms() as source:
        task = asyncio.create_task(run(at_rates(10, 20, rounds=3), source, tmp_path))
        await eventually(lambda: (tmp_path / "rounds.jsonl").exists() and (tmp_path / "rounds.jsonl").read_text().count("\n") == 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again = at_rates(20, rounds=1)
        with silent() as progress:
            result = await run_ab(again, source, OutFolder(tmp_path, resume=True), progress, resume=True)
    assert [(p.rate_rps, len(p.rounds), p.probe) for p in result.points] == [(10, 1, False), (20, 1, False)]
    rows = read_rows(tmp_path / "requests.jsonl")
    assert {(r.rate_rps, r.round) for r in rows} == {(10, 1), (20, 1)}
    assert any("does not count: the round was interrupted" in w for w in result.warnings)
    assert {r.round for r in read_rows(tmp_path / "requests-void.jsonl")} == {2}


async def test_a_run_that_ended_before_it_measured_goes_on_and_another_one_is_refused_before_it_starts(tmp_path: Path):
    what = at_rates(10)
    folder = OutFolder(tmp_path)
    begin(what, folder, resume=False)
    begin(what, folder, resume=True)
    with pytest.raises(ConfigError, match=r"workload\..*another comparison needs another folder"):
        begin(replace(what, workload=comparison(output=7).workload), folder, resume=True)
    with pytest.raises(ConfigError, match="the folder of an interrupted run"):
        begin(what, OutFolder(tmp_path / "empty", resume=True), resume=True)
    async with arms() as source:
        with silent() as progress:
            result = await run_ab(what, source, OutFolder(tmp_path, resume=True), progress, resume=True)
    assert result.arms["disagg"].sent > 0


class DyingArms(Arms):
    """One of the disagg arm's workers is started anew during some of its turns."""

    def __init__(self, deaths: int) -> None:
        super().__init__()
        self.deaths = deaths
        self.epoch = 0
        self.looks = 0

    async def lives(self, arm: str) -> dict[str, str]:
        if arm == "disagg":
            self.looks += 1
            if self.looks % 2 == 0 and self.epoch < self.deaths:
                self.epoch += 1
        return {"prefill-0": "a", "decode-0": str(self.epoch)}


@pytest.mark.parametrize(("deaths", "tries"), [(1, 2), (9, 3)])
async def test_a_turn_in_which_a_worker_died_is_measured_again_and_said(tmp_path: Path, deaths: int, tries: int):
    source = DyingArms(deaths)
    source.endpoints = {arm: await gateway.start() for arm, gateway in source.gateways.items()}
    try:
        result: Result = await run(at_rates(10), source, tmp_path)
    finally:
        await source.close()
    rows = [r for r in read_rows(tmp_path / "requests.jsonl") if r.arm == "disagg"]
    assert len(result.repeated) == tries - 1
    assert {(r.arm, r.reason) for r in result.repeated} == {("disagg", "decode-0 died")}
    assert len(rows) == result.arms["disagg"].sent == len({r.index for r in rows})
    assert len(read_rows(tmp_path / "requests-void.jsonl")) == (tries - 1) * len(rows)
    assert any("was measured again: decode-0 died" in w for w in result.warnings)
    assert any("it counts as it was" in w for w in result.warnings) == (tries == 3)


class DyingInWarmUp(Arms):
    """A worker of the disagg arm dies during its first warm-up, and is back afterwards."""

    async def lives(self, arm: str) -> dict[str, str]:
        gateway = self.gateways[Mode.DISAGG]
        if arm == "disagg" and gateway.requests and gateway.fault is not None:
            gateway.fault = None
            self.workers = {"prefill-0": "second life"}
        return dict(self.workers)


async def test_a_worker_that_dies_in_the_warm_up_does_not_end_the_run(tmp_path: Path):
    source = DyingInWarmUp()
    source.workers = {"prefill-0": "first life"}
    source.gateways[Mode.DISAGG].fault = "short"
    source.endpoints = {arm: await gateway.start() for arm, gateway in source.gateways.items()}
    try:
        result: Result = await run(at_rates(10), source, tmp_path)
    finally:
        await source.close()
    assert result.arms["disagg"].completed == result.arms["disagg"].sent
    assert source.gateways[Mode.DISAGG].fault is None


async def test_the_range_is_found_by_bisection_and_reaches_past_saturation(tmp_path: Path):
    what = replace(at_rates(duration_s=0.5), rates=(), search=RangeSearch(points=2, most_probes=4, resolution=2.0))
    what = replace(what, classes=tuple(c.model_copy(update={"ttft_ms": 300}) for c in what.classes))
    async with arms() as source:
        for gateway in source.gateways.values():
            gateway.gap_s, gateway.slots = 0.02, asyncio.Semaphore(4)  # about 30 requests/s
        result: Result = await run(what, source, tmp_path)
    probes = [p for p in result.points if p.probe]
    points = [p for p in result.points if not p.probe]
    assert len(points) == 2
    assert len(probes) >= 2
    assert min(p.rate_rps for p in probes) < points[-1].rate_rps < max(p.rate_rps for p in probes)


async def test_a_time_limit_ends_the_rounds_and_the_first_is_whole(tmp_path: Path):
    async with arms() as source:
        result: Result = await run(replace(at_rates(10, 20), rounds=RoundRule(5, 5, limit_s=1.0)), source, tmp_path)
    assert [len(p.rounds) for p in result.points] == [1, 1]
    assert all(p.stopped.startswith("after round 1: a further round of about ") for p in result.points)


async def test_a_sender_that_falls_behind_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import time

    from disagg.ab.workload import PlannedRequest

    made = PlannedRequest.prompt_ids

    def slow(self: PlannedRequest, vocab_size: int) -> tuple[int, ...]:
        time.sleep(0.03 if self.round >= 0 else 0)
        return made(self, vocab_size)

    monkeypatch.setattr(PlannedRequest, "prompt_ids", slow)
    async with arms() as source:
        result: Result = await run(at_rates(100), source, tmp_path)
    assert "fell behind" in (result.not_a_result or "")
    assert any("fell behind" in w for w in result.warnings)
    rows = [r for r in read_rows(tmp_path / "requests.jsonl") if r.arm == "disagg"]
    assert len(rows) == result.arms["disagg"].sent  # late, not skipped
    assert max(r.send_late_s for r in rows) > 0.1
    assert read_result(tmp_path / "result.json").not_a_result == result.not_a_result


async def test_a_full_disk_is_an_error_of_its_own_and_what_was_measured_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from disagg.ab import rows as module

    real, count = module.json.dumps, 0

    def full(value: Any, **options: Any) -> str:
        nonlocal count
        if isinstance(value, dict) and "token_s" in value:
            count += 1
            if count > 5:
                raise OSError(28, "No space left on device")
        return real(value, **options)

    monkeypatch.setattr(module.json, "dumps", full)
    async with arms() as source:
        with pytest.raises(DiskError, match=r"No space left on device; the rows before this one are kept"):
            await run(at_rates(20), source, tmp_path)
        assert all(gateway.running == 0 for gateway in source.gateways.values())
    assert len(read_rows(tmp_path / "requests.jsonl")) == 5


async def test_a_client_that_goes_away_as_planned_neither_meets_nor_misses(tmp_path: Path):
    what = at_rates(10)
    stream = what.workload.streams[0].model_copy(update={"cancel": Cancellations(share=0.5, after_tokens=Lengths(fixed=2))})
    what = replace(what, workload=what.workload.model_copy(update={"streams": (stream, *what.workload.streams[1:])}))
    async with arms() as source:
        result: Result = await run(what, source, tmp_path)
    figures = result.arms["disagg"]
    rows = [r for r in read_rows(tmp_path / "requests.jsonl") if r.arm == "disagg" and r.outcome == "cancelled"]
    assert figures.cancelled == len(rows) > 0
    assert {r.output_tokens for r in rows} == {2}
    assert figures.completed + figures.cancelled == figures.sent
    assert (figures.slo_attainment, figures.failed) == (1.0, 0)
    assert figures.ttft_s.count == figures.completed


# ---- servers that are not ours


class WithExternal(Arms):
    """The colocated gateway, and a server elsewhere."""

    url = ""

    async def use(self, arm: str) -> Serving:
        return Serving(self.url, 0) if arm.startswith("external") else await super().use(arm)


async def run_with(server: OpenAiServer, path: Path, timeout_s: float = 10.0) -> Result:
    source = WithExternal()
    source.endpoints = {arm: await gateway.start() for arm, gateway in source.gateways.items()}
    async with serving(server) as source.url:
        what = at_rates(20, duration_s=0.8)
        what = replace(what, workload=what.workload.model_copy(update={"timeout_s": timeout_s}))
        colocated = next(arm for arm in what.arms if arm.name == "colocated")
        try:
            return await run(replace(what, arms=(colocated, Arm("external", "external", url=source.url))), source, path)
        finally:
            await source.close()


@pytest.mark.parametrize(("tokens", "names_ids"), [(1, True), (3, True), (1, False), (3, False)])
async def test_an_external_server_gets_the_same_prompts_and_its_tokens_are_counted(tmp_path: Path, tokens: int, names_ids: bool):
    server = OpenAiServer(tokens_a_message=tokens, names_ids=names_ids)
    result = await run_with(server, tmp_path)
    external, ours = result.arms["external"], result.arms["colocated"]
    assert external.completed == external.sent == ours.sent > 5
    rows = read_rows(tmp_path / "requests.jsonl")
    prompts = {arm: {r.index: r.prompt_digest for r in rows if r.arm == arm} for arm in ("external", "colocated")}
    assert prompts["external"] == prompts["colocated"]
    assert all(r.output_tokens == r.max_output_tokens for r in rows)
    assert result.setups["external"].url is not None
    body = server.bodies[-1]
    assert (body["stream"], body["stream_options"], body["ignore_eos"], body["model"]) == (True, {"include_usage": True}, True, "a-model")


@pytest.mark.parametrize(
    ("fault", "outcome", "error"),
    [
        ("busy", "rejected", "RejectedError"),
        ("broken", "failed", "EngineError"),
        ("cut", "failed", "EngineError"),
        ("garbage", "failed", "EngineError"),
        ("other letters", "failed", "EngineError"),
        ("a page", "failed", "EngineError"),
        *((odd, "failed", "EngineError") for odd in ODD),
    ],
)
async def test_an_external_servers_errors_are_classified_and_never_latencies(tmp_path: Path, fault: str, outcome: str, error: str):
    result = await run_with(OpenAiServer(fault), tmp_path)
    external = result.arms["external"]
    assert external.sent == getattr(external, outcome) + external.completed
    assert getattr(external, outcome) > 0
    assert set(external.errors) == {error}
    assert external.ttft_s.count == external.completed
    assert result.arms["colocated"].completed == result.arms["colocated"].sent


async def test_an_external_server_that_answers_no_request_is_counted_and_the_run_goes_on(tmp_path: Path):
    """Its warm-up fails as well; other arms may have been measured for an hour by then."""
    server = OpenAiServer("broken")
    server.sound_requests = 0
    result = await run_with(server, tmp_path)
    external = result.arms["external"]
    assert (external.failed, external.errors) == (external.sent, {"EngineError": external.sent})
    assert any(w.startswith("external: a warm-up request of ") and "HTTP 500" in w for w in result.warnings)
    assert result.verdict.choose == "colocated"


async def test_an_external_server_that_never_answers_runs_into_its_deadline(tmp_path: Path):
    server = OpenAiServer("silence")
    server.sound_requests = 0
    result = await run_with(server, tmp_path, timeout_s=1.0)
    external = result.arms["external"]
    assert (external.failed, external.errors) == (external.sent, {"DeadlineError": external.sent})
    assert external.ttft_s.count == 0


async def test_an_external_server_that_is_gone_in_the_middle_is_counted(tmp_path: Path):
    source = WithExternal()
    source.endpoints = {arm: await gateway.start() for arm, gateway in source.gateways.items()}
    what = at_rates(20, rounds=2, duration_s=0.4)
    own = next(arm for arm in what.arms if arm.name == "colocated")
    try:
        async with serving(OpenAiServer()) as source.url:
            what = replace(what, arms=(own, Arm("external", "external", url=source.url)))
            task = asyncio.create_task(run(what, source, tmp_path))
            await eventually(lambda: len({(r.arm, r.round) for r in rows_so_far(tmp_path)}) == 2 and not unfinished(tmp_path))
        result: Result = await task
    finally:
        await source.close()
    external = result.arms["external"]
    assert external.completed > 0
    assert external.failed > 0
    assert set(external.errors) <= {"GatewayUnreachableError", "UnavailableError"}


def unfinished(path: Path) -> bool:
    """Whether the external arm's first turn is not over."""
    file = path / "rounds.jsonl"
    return not file.exists() or '"external"' not in file.read_text()


async def test_external_servers_are_asked_before_anything_starts():
    what = at_rates(10)
    async with serving(OpenAiServer()) as url:
        external = Arm("external", "external", url=url)
        await check_external([external], what.workload, what.classes)
        long = what.workload.streams[1].model_copy(update={"input_tokens": Lengths(fixed=9000)})
        with pytest.raises(ConfigError, match="at most 4095 tokens"):
            await check_external([external], what.workload.model_copy(update={"streams": (long,)}), what.classes)
    with pytest.raises(ConfigError, match="that is up"):
        await check_external([external], what.workload, what.classes)


async def test_an_external_url_where_nothing_answers_is_refused_at_the_start(tmp_path: Path):
    what = at_rates(10)
    source = WithExternal()
    source.url = "http://127.0.0.1:9/v1"
    with RunProgress(Console(file=io.StringIO())) as progress, pytest.raises(ConfigError, match="that is up"):
        await run_ab(replace(what, arms=(Arm("external", "external", url=source.url),)), source, OutFolder(tmp_path), progress)
