"""The A/B against gateways over real gRPC: what it sends, in which order, what it keeps, and how it fails."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import sys
import time
from pathlib import Path

import pytest

from disagg.ab.advise import advise
from disagg.ab.conclude import conclude
from disagg.ab.result import arm_figures, read_result
from disagg.ab.rows import Row, read_rows
from disagg.ab.run import compare
from disagg.ab.workload import Workload
from disagg.config import validated
from disagg.errors import ConfigError, DisaggError
from disagg.types import Mode
from tests.ab_rig import ARMS, arms, by_round, comparison, eventually, rows_so_far, run, topology


async def test_both_arms_get_the_same_requests_at_the_same_times(tmp_path: Path):
    what = comparison()
    async with arms() as source:
        await run(what, source, tmp_path)
    rows = read_rows(tmp_path / "requests.jsonl")
    for round_ in (1, 2):
        one, two = (by_round(rows, arm, round_) for arm in ("disagg", "colocated"))
        sent = [
            [(r.stream, r.slo_class, r.input_tokens, r.max_output_tokens, r.due_s, r.prompt_digest) for r in side] for side in (one, two)
        ]
        assert sent[0] == sent[1]
        assert len(one) > 10
    digests = [r.prompt_digest for r in rows if r.arm == "disagg"]
    assert len(set(digests)) == len(digests)
    for gateway in source.gateways.values():
        received = [tuple(request.token_ids.ids) for _, request in gateway.requests]
        assert len(set(received)) == len(received)  # warm-ups included


async def test_order_flips_each_round_and_warm_up_is_not_in_the_rows(tmp_path: Path):
    async with arms() as source:
        result = await run(comparison(rounds=3, duration_s=0.5), source, tmp_path)
    d, c = Mode.DISAGG, Mode.COLOCATED
    assert source.used == [d, c, c, d, d, c]
    assert [r.order for r in result.rounds] == [["disagg", "colocated"], ["colocated", "disagg"], ["disagg", "colocated"]]
    rows = read_rows(tmp_path / "requests.jsonl")
    warm = [len(g.requests) - sum(r.arm == arm for r in rows) for arm, g in source.gateways.items()]
    assert warm == [4, 8]  # three lengths of chats and one of documents, for one prefill worker and for two colocated ones


async def test_an_arm_that_was_restarted_is_warmed_up_again(tmp_path: Path):
    async with arms(restarts=True) as source:
        await run(comparison(rounds=2, duration_s=0.5), source, tmp_path)
    rows = read_rows(tmp_path / "requests.jsonl")
    warm = [len(g.requests) - sum(r.arm == arm for r in rows) for arm, g in source.gateways.items()]
    assert warm == [8, 8]  # disagg, colocated | colocated (still up), disagg: twice 4, once 8


async def test_turns_do_not_overlap(tmp_path: Path):
    async with arms() as source:
        await run(comparison(rounds=2, duration_s=0.5), source, tmp_path)
        times = sorted((t, arm) for arm, g in source.gateways.items() for t, _ in g.requests)
        assert all(g.running == 0 for g in source.gateways.values())
    turns = [arm for i, (_, arm) in enumerate(times) if i == 0 or times[i - 1][1] != arm]
    assert turns == [Mode.DISAGG, Mode.COLOCATED, Mode.DISAGG]


async def test_the_sender_is_open_loop(tmp_path: Path):
    what = comparison(rounds=1, output=100, rate=30)
    async with arms() as source:
        for gateway in source.gateways.values():
            gateway.gap_s = 0.01  # answers of 1 s: one after another would take half a minute
        result = await run(what, source, tmp_path)
    figures = result.arms["disagg"]
    assert figures.mean_concurrency > 5
    assert figures.littles_law.agrees
    rows = read_rows(tmp_path / "requests.jsonl")
    assert all(r.sent_s >= r.due_s for r in rows)
    assert max(r.send_late_s for r in rows) < 5.0  # one after another, the last would leave half a minute late


async def test_result_json_follows_from_the_rows(tmp_path: Path):
    what = comparison()
    async with arms() as source:
        result = await run(what, source, tmp_path)
    assert read_result(tmp_path / "result.json") == result
    rows = read_rows(tmp_path / "requests.jsonl")
    classes = what.classes
    split = {arm: [r for r in rows if r.arm == arm] for arm in ARMS}
    for arm in ARMS:
        in_flight = [r.sender[arm.value]["mean_in_flight"] for r in result.rounds]
        assert arm_figures(split[arm], classes, in_flight) == result.arms[arm.value]
    assert conclude(split, classes)[0] == result.verdict
    assert result.environment["topologies"]["colocated"]["mode"] == "colocated"
    assert result.workload["seed"] == 3


async def test_a_slower_arm_loses(tmp_path: Path):
    async with arms() as source:
        source.gateways[Mode.COLOCATED].gap_s = 0.1
        result = await run(comparison(), source, tmp_path)
    assert result.verdict.choose == "disagg"
    assert result.arms["colocated"].tpot_s.p50 > 5 * result.arms["disagg"].tpot_s.p50


@pytest.mark.parametrize(
    ("fault", "outcome", "error"),
    [("reject", "rejected", "RejectedError"), ("short", "failed", "EngineError"), ("hang", "failed", "DeadlineError")],
)
async def test_what_did_not_complete_is_classified_and_not_in_latencies(tmp_path: Path, fault: str, outcome: str, error: str):
    what = comparison(rounds=1, duration_s=0.5, timeout_s=2.0)
    async with arms() as source:
        source.gateways[Mode.DISAGG].fault = fault
        source.gateways[Mode.DISAGG].sound_requests = 4  # the warm-up
        result = await run(what, source, tmp_path)
    broken, sound = result.arms["disagg"], result.arms["colocated"]
    assert broken.errors.get(error, 0) >= broken.sent - broken.completed > 0
    assert getattr(broken, outcome) == broken.sent - broken.completed
    assert broken.ttft_s.count == broken.completed
    assert sound.completed == sound.sent
    assert result.verdict.choose == "colocated"
    assert any("did not complete" in w for w in result.warnings)


async def test_a_gateway_that_dies_is_counted_and_the_run_goes_on(tmp_path: Path):
    async with arms() as source:
        source.gateways[Mode.DISAGG].dies_after = 10
        result = await run(comparison(rounds=1, duration_s=3.0), source, tmp_path)
    broken, sound = result.arms["disagg"], result.arms["colocated"]
    assert broken.failed >= broken.sent - 10
    assert set(broken.errors) <= {"GatewayUnreachableError", "UnavailableError", "EngineError", "CancelledRequestError"}
    assert broken.itl_s.count == 5 * (broken.completed - broken.classes["document"].completed)
    assert sound.completed == sound.sent
    assert result.verdict.choose == "colocated"


async def test_a_failing_warm_up_ends_the_run(tmp_path: Path):
    async with arms() as source:
        source.gateways[Mode.DISAGG].fault = "short"
        with pytest.raises(DisaggError, match=r"arm disagg: a warm-up request of .* failed: EngineError"):
            await run(comparison(), source, tmp_path)


async def test_an_arm_that_refuses_its_warm_up_is_measured_and_said_to_be_cold(tmp_path: Path):
    """A class whose admission refuses everything is a finding, not a fault of the run."""
    async with arms() as source:
        source.gateways[Mode.DISAGG].fault = "reject"
        result = await run(comparison(rounds=1, duration_s=0.4), source, tmp_path)
    assert result.arms["disagg"].rejected == result.arms["disagg"].sent
    assert any("disagg: a warm-up request of 4 tokens in, 6 out was refused" in w for w in result.warnings)
    assert result.environment["preemptions"] == {"disagg": 3, "colocated": 3}
    full = [advice for advice in advise(result) if advice.rule == "KV memory is full"]
    assert {(advice.arm, advice.because[:14]) for advice in full} == {("disagg", "3 preemptions "), ("colocated", "3 preemptions ")}


async def test_a_workload_longer_than_the_served_context_names_the_field(tmp_path: Path):
    async with arms() as source:
        source.gateways[Mode.DISAGG].max_model_len = 40
        with pytest.raises(ConfigError, match=r"streams\.1\.input_tokens.*at most 39 tokens"):
            await run(comparison(), source, tmp_path)


async def test_an_interrupted_run_keeps_its_rows_and_cancels_the_rest(tmp_path: Path):
    what = comparison(rounds=1, duration_s=30, output=200)
    async with arms() as source:
        task = asyncio.create_task(run(what, source, tmp_path))
        await eventually(lambda: len(rows_so_far(tmp_path)) >= 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: source.gateways[Mode.DISAGG].running == 0)
    assert len(read_rows(tmp_path / "requests.jsonl")) >= 3
    assert not (tmp_path / "result.json").exists()


_KILLED = """
import asyncio, pathlib, sys
sys.path.insert(0, {tests!r})
from tests import ab_rig
async def main():
    async with ab_rig.arms() as source:
        await ab_rig.run(ab_rig.comparison(rounds=1, duration_s=30), source, pathlib.Path({out!r}))
asyncio.run(main())
"""


def test_a_killed_run_keeps_what_it_measured(tmp_path: Path):
    import subprocess

    script = _KILLED.format(tests=str(Path(__file__).parents[2]), out=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        deadline_s = time.monotonic() + 60
        rows: list[Row] = []
        while len(rows) < 5 and time.monotonic() < deadline_s:
            time.sleep(0.1)
            rows = rows_so_far(tmp_path)
        process.send_signal(signal.SIGKILL)
    kept = read_rows(tmp_path / "requests.jsonl")
    assert len(kept) >= len(rows) >= 5
    assert all(r.is_whole for r in kept)


async def test_rows_are_json_objects_with_the_documented_columns(tmp_path: Path):
    async with arms() as source:
        await run(comparison(rounds=1, duration_s=0.3), source, tmp_path)
    first = json.loads((tmp_path / "requests.jsonl").read_text().splitlines()[0])
    assert list(first) == [f.name for f in dataclasses.fields(Row)]
    assert (first["prefill_worker"], first["decode_worker"], first["attempts"]) == ("p", "d", 1)


def test_a_class_that_the_topology_lacks_is_refused_before_anything_starts():
    raw = {
        "name": "x",
        "duration_s": 5,
        "streams": [{"name": "s", "slo_class": "chats", "arrivals": {"every_s": 1}, "input_tokens": 4, "output_tokens": 4}],
    }
    with pytest.raises(ConfigError, match="did you mean 'chat'"):
        compare(topology(), validated(Workload, raw, "x"), resident=True)
