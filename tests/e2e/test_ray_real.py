"""The shipped CPU topology with real engines over Ray: it serves, and a killed worker or engine costs no answer and leaves no process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

from disagg.client import AsyncClient
from disagg.config import load_topology
from disagg.errors import DisaggError
from disagg.launch.deployment import Deployment
from disagg.launch.processes import ProcessId, descendants, find_marked, wait_gone
from disagg.launch.report import WorkerStatus
from disagg.launch.session import RaySession
from disagg.types import Token
from tests.machine import first_layers

pytestmark = [pytest.mark.real, pytest.mark.ray, pytest.mark.timeout(600)]

FILE = Path(__file__).parents[2] / "cluster" / "topologies" / "cpu-1p1d.yaml"
MAX_TOKENS = 48
# Logits are bf16: neighbours around 16 to 32 are 0.125 apart, so other batch shapes may swap tokens this close.
NEAR_TIE = 0.15
BACK_WITHIN_S = 180.0


@pytest.fixture(scope="module")
def deployment(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Its prefill worker, which is restarted once, compiles the model: that takes a core a minute. Two layers have all that six have."""
    model = first_layers(smollm2, tmp_path_factory.mktemp("models") / "two-layers", layers="2")
    overrides = {"gateway.port": 0, "gateway.http_port": None, "model": str(model), "pools.prefill.args.enforce_eager": False}
    topology = load_topology(FILE, overrides)
    with RaySession.start([topology]) as session:
        mark = session.mark or ""
        up = Deployment.up(session, topology, base_dir=FILE.parent)
        family = [each for worker in up.status().workers if worker.report for each in descendants(worker.report.pid)]
        assert family, "the engines have processes of their own"
        yield up
        up.down()
        assert [each for each in family if each.is_alive] == []
    assert find_marked(mark) == ()


@dataclass
class Stream:
    """One streamed answer with the two likeliest tokens at each place."""

    prompt: list[int]
    tokens: list[Token] = field(default_factory=list)
    error: DisaggError | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, client: AsyncClient) -> None:
        try:
            options = client.stream(self.prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2, timeout_s=240)
            async with contextlib.aclosing(options) as parts:
                async for part in parts:
                    self.tokens += part.tokens
                    if len(self.tokens) > 3:
                        self.begun.set()
        except DisaggError as error:
            self.error = error
        finally:
            self.begun.set()


def engine_of(worker_pid: int) -> ProcessId:
    """The process that computes, among a worker's children: the one with the most memory."""
    return max(descendants(worker_pid), key=lambda process: int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]))


def assert_same_or_near_tie(got: list[Token], right: list[Token]) -> None:
    """Equal, or the first difference is between tokens that are as likely as each other."""
    for mine, theirs in zip(got, right, strict=False):
        if mine.token_id != theirs.token_id:
            likely = {top.token_id: top.logprob for top in theirs.top}
            assert mine.token_id in likely
            assert theirs.logprob is not None
            assert abs(likely[mine.token_id] - theirs.logprob) <= NEAR_TIE
            return


async def workers(deployment: Deployment) -> dict[str, WorkerStatus]:
    return {worker.name: worker for worker in (await asyncio.to_thread(deployment.status)).workers}


async def answers(deployment: Deployment) -> list[Stream]:
    prompts = [[(index * 7919 + position * 31) % 49000 + 5 for position in range(40 + index)] for index in range(8)]
    streams = [Stream(prompt) for prompt in prompts]
    async with AsyncClient(deployment.endpoint) as client:
        await asyncio.gather(*(stream.run(client) for stream in streams))
    return streams


@pytest.mark.parametrize(("victim", "target"), [("prefill-0", "worker"), ("decode-0", "worker"), ("decode-0", "engine")])
async def test_a_killed_process_costs_no_answer_and_comes_back(deployment: Deployment, victim: str, target: str) -> None:
    before = await workers(deployment)
    report = before[victim].report
    assert report is not None
    right = await answers(deployment)
    assert [stream.error for stream in right] == [None] * 8
    processes = [process for process in (ProcessId.of(report.pid), *descendants(report.pid)) if process is not None]
    engine = engine_of(report.pid)
    streams = [Stream(stream.prompt) for stream in right]
    async with AsyncClient(deployment.endpoint) as client:
        running = [asyncio.create_task(stream.run(client)) for stream in streams]
        begun = [asyncio.create_task(stream.begun.wait()) for stream in streams]
        await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        os.kill(report.pid if target == "worker" else engine.pid, signal.SIGKILL)
        await asyncio.gather(*running, *begun)
    for stream, expected in zip(streams, right, strict=True):
        assert stream.error is not None or len(stream.tokens) == MAX_TOKENS
        assert_same_or_near_tie(stream.tokens, expected.tokens)
    assert await asyncio.to_thread(wait_gone, processes, 30.0) == ()
    async with asyncio.timeout(BACK_WITHIN_S):
        while True:
            now = (await workers(deployment))[victim]
            if now.is_live and now.report is not None and now.report.epoch != report.epoch:
                break
            await asyncio.sleep(0.5)
    after = await workers(deployment)
    assert all(after[name].report == before[name].report for name in after if name != victim)
    again = await answers(deployment)
    assert [stream.error for stream in again] == [None] * 8
    for stream, expected in zip(again, right, strict=True):
        assert_same_or_near_tie(stream.tokens, expected.tokens)
