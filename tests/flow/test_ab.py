"""The A/B against gateways over real gRPC: what it sends, in which order, what it keeps, and how it fails."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from rich.console import Console

from disagg.ab.arms import ARMS, Serving
from disagg.ab.out import OutFolder
from disagg.ab.progress import RunProgress
from disagg.ab.result import arm_figures, read_result
from disagg.ab.rows import Row, read_rows
from disagg.ab.run import Comparison, compare, run_ab, verdict_report
from disagg.ab.verdict import judge
from disagg.ab.workload import Workload
from disagg.client_types import ERROR_KEY
from disagg.config import Topology, parse_topology, validated
from disagg.errors import ConfigError, DisaggError, RejectedError, to_wire
from disagg.pb import inference_pb2 as pb
from disagg.pb.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from disagg.types import Mode


class FakeGateway(InferenceServicer):
    """Answers with as many tokens as asked, `gap_s` apart; remembers what it was asked and when."""

    def __init__(self, gap_s: float = 0.002, max_model_len: int = 4096) -> None:
        self.gap_s = gap_s
        self.max_model_len = max_model_len
        self.requests: list[tuple[float, Any]] = []
        self.fault: str | None = None
        self.sound_requests = 0  # before the fault sets in
        self.dies_after: int | None = None
        self.death: asyncio.Task[None] | None = None
        self.running = 0

    async def start(self) -> str:
        self.server = grpc.aio.server()
        add_InferenceServicer_to_server(self, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return f"127.0.0.1:{port}"

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ModelInfo(model="fake", max_model_len=self.max_model_len, vocab_size=2000, mode="disagg", engine="fake")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.requests.append((time.monotonic(), request))
        if self.dies_after is not None and len(self.requests) > self.dies_after:
            # In a task of its own: the stop cancels every call, and one that awaited it would cut it short.
            self.death = self.death or asyncio.create_task(self.server.stop(None))
            await asyncio.sleep(60)
        fault = self.fault if len(self.requests) > self.sound_requests else None
        if fault == "reject":
            context.set_trailing_metadata(((ERROR_KEY, to_wire(RejectedError("full", retry_after_s=1.0))),))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        self.running += 1
        try:
            count = request.sampling.max_tokens // (2 if fault == "short" else 1)
            for i in range(count):
                await asyncio.sleep(self.gap_s)
                yield pb.GenerateResponse(tokens=[pb.Token(id=i)])
            if fault == "hang":
                await asyncio.sleep(60)
            usage = pb.Usage(
                prompt_tokens=len(request.token_ids.ids), output_tokens=count, prefill_worker="p", decode_worker="d", attempts=1
            )
            yield pb.GenerateResponse(finish_reason=pb.FINISH_REASON_LENGTH, usage=usage)
        finally:
            self.running -= 1


class Arms:
    """Two fake gateways. `restarts`: the arm that was used before goes down, as on a machine that holds one arm only."""

    def __init__(self, *, restarts: bool = False) -> None:
        self.gateways = {arm: FakeGateway() for arm in ARMS}
        self.endpoints: dict[Mode, str] = {}
        self.used: list[Mode] = []
        self.restarts = restarts
        self.life = 0

    async def use(self, arm: Mode) -> Serving:
        if not self.used or self.used[-1] != arm:
            self.life += 1
        self.used.append(arm)
        return Serving(self.endpoints[arm], self.life if self.restarts else 0)

    async def close(self) -> None:
        for gateway in self.gateways.values():
            await (gateway.death or gateway.server.stop(None))


@asynccontextmanager
async def arms(*, restarts: bool = False) -> AsyncIterator[Arms]:
    source = Arms(restarts=restarts)
    source.endpoints = {arm: await gateway.start() for arm, gateway in source.gateways.items()}
    try:
        yield source
    finally:
        await source.close()


def topology() -> Topology:
    classes = [{"name": "chat", "ttft_ms": 2000, "tpot_ms": 500}, {"name": "document"}]
    return parse_topology({"model": "fake", "pools": {"prefill": {"count": 1}, "decode": {"count": 1}}, "slo_classes": classes})


def comparison(*, rounds: int = 2, duration_s: float = 0.8, timeout_s: float = 10.0, output: int = 6, rate: float = 20) -> Comparison:
    chat = {
        "name": "chat",
        "slo_class": "chat",
        "arrivals": {"poisson_per_s": rate},
        "input_tokens": {"uniform": [4, 9]},
        "output_tokens": output,
    }
    long = {"name": "long", "slo_class": "document", "arrivals": {"every_s": 0.4, "requests": 2}, "input_tokens": 50, "output_tokens": 1}
    raw = {"name": "flow", "duration_s": duration_s, "timeout_s": timeout_s, "streams": [chat, long]}
    return compare(topology(), validated(Workload, raw, "flow"), resident=True, rounds=rounds, seed=3)


def silent() -> RunProgress:
    return RunProgress(Console(file=io.StringIO(), force_terminal=False))


async def run(what: Comparison, source: Arms, path: Path) -> Any:
    with silent() as progress:
        return await asyncio.wait_for(run_ab(what, source, OutFolder(path), progress), 60)


def by_round(rows: list[Row], arm: str, round_: int) -> list[Row]:
    return sorted((r for r in rows if r.arm == arm and r.round == round_), key=lambda r: r.index)


def rows_so_far(path: Path) -> list[Row]:
    file = path / "requests.jsonl"
    return read_rows(file) if file.exists() else []


async def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never held")


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
    assert max(r.send_late_s for r in rows) < 1.0


async def test_result_json_follows_from_the_rows(tmp_path: Path):
    what = comparison()
    async with arms() as source:
        result = await run(what, source, tmp_path)
    assert read_result(tmp_path / "result.json") == result
    rows = read_rows(tmp_path / "requests.jsonl")
    classes = what.any_topology.slo_classes
    split = {arm: [r for r in rows if r.arm == arm] for arm in ARMS}
    for arm in ARMS:
        in_flight = [r.sender[arm.value]["mean_in_flight"] for r in result.rounds]
        assert arm_figures(split[arm], classes, in_flight) == result.arms[arm.value]
    assert verdict_report(judge(split[Mode.DISAGG], split[Mode.COLOCATED], classes)) == result.verdict
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
        result = await run(comparison(rounds=1), source, tmp_path)
    broken, sound = result.arms["disagg"], result.arms["colocated"]
    assert broken.failed >= broken.sent - 10
    assert set(broken.errors) <= {"GatewayUnreachableError", "UnavailableError", "EngineError", "CancelledRequestError"}
    assert broken.itl_s.count == 5 * (broken.completed - broken.classes["document"].completed)
    assert sound.completed == sound.sent
    assert result.verdict.choose == "colocated"


async def test_a_failing_warm_up_ends_the_run(tmp_path: Path):
    async with arms() as source:
        source.gateways[Mode.DISAGG].fault = "reject"
        with pytest.raises(DisaggError, match=r"arm disagg: a warm-up request of .* failed: RejectedError"):
            await run(comparison(), source, tmp_path)


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
import test_ab
async def main():
    async with test_ab.arms() as source:
        await test_ab.run(test_ab.comparison(rounds=1, duration_s=30), source, pathlib.Path({out!r}))
asyncio.run(main())
"""


def test_a_killed_run_keeps_what_it_measured(tmp_path: Path):
    import subprocess

    script = _KILLED.format(tests=str(Path(__file__).parent), out=str(tmp_path))
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
