"""Deployments over real Ray with simulated engines: up, right answers, workers killed, refusals, down with nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from ray.util import placement_group_table  # noqa: E402

from disagg.client import Answer, AsyncClient  # noqa: E402
from disagg.config import Topology, load_topology, parse_topology  # noqa: E402
from disagg.engine.simulated_model import expected_tokens  # noqa: E402
from disagg.errors import ConfigError, DisaggError, EngineError, PlacementError  # noqa: E402
from disagg.launch.deployment import Deployment, names  # noqa: E402
from disagg.launch.processes import ProcessId, descendants, find_marked  # noqa: E402
from disagg.launch.report import DeploymentStatus, WorkerStatus  # noqa: E402
from disagg.launch.session import RaySession  # noqa: E402
from disagg.types import Role  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SHIPPED = Path(__file__).parents[2] / "cluster" / "topologies"
BACK_WITHIN_S = 60.0


def make(name: str, prefill: int = 1, decode: int = 1, **overrides: Any) -> Topology:
    """A small simulated deployment on a free port; slow enough to be hit in the middle of something."""
    raw = {
        "name": name,
        "model": "simulated",
        "engine": {"kind": "simulated", "simulated": {"speed": 0.5, "tp": 4, "kv_bytes_per_token": 64}},
        "pools": {"prefill": {"count": prefill}, "decode": {"count": decode}},
        "kv": {"outbox_gib": 0.01, "inbox_gib": 0.01},
        "gateway": {"port": 0},
        "admission": {"worker_timeout_s": 30},
        "ray": {"startup_timeout_s": 120},
    }
    return parse_topology(raw, overrides={key.replace("__", "."): value for key, value in overrides.items()})


MAIN = make("main", prefill=2, decode=2)
SIXTY_FOUR = load_topology(SHIPPED / "sim-64.yaml", {"gateway.port": 0})


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    """One Ray for the module, with cores for what its tests run at the same time."""
    before = {process.pid for process in descendants(os.getpid())}
    with RaySession.start([MAIN, SIXTY_FOUR]) as started:
        mark, temp_dir = started.mark, started.temp_dir
        yield started
    assert mark is not None
    assert temp_dir is not None
    assert find_marked(mark) == ()
    assert {process.pid for process in descendants(os.getpid())} <= before
    assert not temp_dir.exists()


@pytest.fixture(scope="module")
def main(session: RaySession) -> Iterator[Deployment]:
    deployment = Deployment.up(session, MAIN)
    yield deployment
    with gone_after(session, deployment):
        deployment.down()


@contextlib.contextmanager
def gone_after(session: RaySession, deployment: Deployment) -> Iterator[None]:
    """What is inside takes the deployment down: afterwards no process, shared memory or placement group of it is left."""
    status = deployment.status()
    processes = [ProcessId.of(pid) for pid in (status.gateway_pid, *(w.report.pid for w in status.workers if w.report))]
    assert all(process is not None and process.is_alive for process in processes)
    boxes = [process.pid for process in processes if process is not None and _memfds(process.pid)]
    assert len(boxes) == len(status.workers)
    yield
    assert not any(process is not None and process.is_alive for process in processes)
    assert deployment.name not in names(session)
    table = placement_group_table().values()
    assert [e["name"] for e in table if e["name"].startswith(f"{deployment.name}/") and e["state"] != "REMOVED"] == []


def _memfds(pid: int) -> list[str]:
    """Boxes that the process has open. What it closes while this looks is none: they stay."""
    links = []
    with contextlib.suppress(OSError):  # the process has ended
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(str(file.readlink()))
    return [link for link in links if link.startswith("/memfd:") and "box" in link]


def prompt_of(index: int, num_tokens: int) -> list[int]:
    return [(index * 7919 + position * 31) % 31990 + 5 for position in range(num_tokens)]


def right_answer(topology: Topology, prompt: list[int], max_tokens: int) -> tuple[int, ...]:
    return expected_tokens(topology.simulated(Role.DECODE), prompt, max_tokens)


async def ask(client: AsyncClient, topology: Topology, prompt: list[int], max_tokens: int) -> Answer:
    """One greedy answer, checked."""
    answer = await client.generate(prompt, max_tokens=max_tokens, temperature=0.0, timeout_s=120)
    assert answer.token_ids == right_answer(topology, prompt, max_tokens)
    return answer


async def until(what: Callable[[], Awaitable[bool]], timeout_s: float = BACK_WITHIN_S) -> None:
    """Wait for a state that only `status` shows."""
    async with asyncio.timeout(timeout_s):
        while not await what():  # noqa: ASYNC110 -- a gateway tells nobody of its changes
            await asyncio.sleep(0.2)


def by_name(status: DeploymentStatus) -> dict[str, WorkerStatus]:
    return {worker.name: worker for worker in status.workers}


@dataclass
class Stream:
    """One streamed request: its tokens so far, and how it ended."""

    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    error: DisaggError | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, client: AsyncClient) -> None:
        try:
            stream = client.stream(self.prompt, max_tokens=self.max_tokens, temperature=0.0, timeout_s=120)
            async with contextlib.aclosing(stream) as parts:
                async for part in parts:
                    self.tokens += [token.token_id for token in part.tokens]
                    self.begun.set()
        except DisaggError as error:
            self.error = error
        finally:
            self.begun.set()


async def test_answers_are_right_and_status_tells_it(main: Deployment) -> None:
    async with AsyncClient(main.endpoint) as client:
        answers = await asyncio.gather(*(ask(client, MAIN, prompt_of(i, 40 + i), 6 + i) for i in range(8)))
    assert {answer.usage.prefill_worker for answer in answers} == {"prefill-0", "prefill-1"}
    assert {answer.usage.decode_worker for answer in answers} == {"decode-0", "decode-1"}
    status = main.status()
    assert status.is_healthy
    assert status.endpoint == main.endpoint
    assert sorted(by_name(status)) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    for worker in status.workers:
        assert worker.report is not None
        assert worker.state is not None
        assert worker.state.epoch == worker.report.epoch
        assert worker.state.free_kv_tokens == worker.state.total_kv_tokens


@pytest.mark.parametrize("victim", ["prefill-1", "decode-0"])
async def test_a_killed_worker_costs_no_answer_and_comes_back(main: Deployment, victim: str) -> None:
    before = by_name(main.status())
    report = before[victim].report
    assert report is not None
    async with AsyncClient(main.endpoint) as client:
        streams = [Stream(prompt_of(i, 1500), 60) for i in range(8)]
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(stream.run(client))
            begun = [group.create_task(stream.begun.wait()) for stream in streams]
            await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            assert any(len(stream.tokens) < stream.max_tokens for stream in streams)
            os.kill(report.pid, signal.SIGKILL)
        for stream in streams:
            assert stream.error is not None or tuple(stream.tokens) == right_answer(MAIN, stream.prompt, stream.max_tokens)
            if stream.error is not None:
                assert tuple(stream.tokens) == right_answer(MAIN, stream.prompt, stream.max_tokens)[: len(stream.tokens)]
        assert sum(stream.error is None for stream in streams) >= 4

        async def is_back() -> bool:
            worker = by_name(await asyncio.to_thread(main.status))[victim]
            return worker.is_live and worker.report is not None and worker.report.epoch != report.epoch

        await until(is_back)

        async def serves() -> bool:
            answers = await asyncio.gather(*(ask(client, MAIN, prompt_of(i, 50), 5) for i in range(8)))
            return any(victim in (answer.usage.prefill_worker, answer.usage.decode_worker) for answer in answers)

        await until(serves)
    after = by_name(main.status())
    assert after[victim].restarts == before[victim].restarts + 1
    for name in set(after) - {victim}:
        assert after[name].report == before[name].report
    assert main.status().endpoint == main.endpoint


async def test_a_killed_gateway_comes_back_with_its_workers(session: RaySession) -> None:
    """The workers outlive it; their epochs stay."""
    topology = make("reborn", gateway__port=_free_port())
    deployment = await asyncio.to_thread(Deployment.up, session, topology)
    before = deployment.status()
    os.kill(before.gateway_pid, signal.SIGKILL)

    async def is_back() -> bool:
        with contextlib.suppress(DisaggError):
            status = await asyncio.to_thread(deployment.status)
            return status.gateway_pid != before.gateway_pid and status.is_healthy and len(status.workers) == 2
        return False

    await until(is_back)
    assert {w.name: w.report for w in deployment.status().workers} == {w.name: w.report for w in before.workers}
    async with AsyncClient(deployment.endpoint) as client:
        await ask(client, topology, prompt_of(1, 30), 5)
    with gone_after(session, deployment):
        deployment.down()


def test_two_deployments_live_side_by_side_and_end_alone(session: RaySession, main: Deployment) -> None:
    other = Deployment.up(session, make("other", mode="colocated"))
    assert set(names(session)) >= {"main", "other"}
    assert {worker.role for worker in other.status().workers} == {Role.COLOCATED}
    found = Deployment.find(session, "other")
    assert found is not None
    assert found.endpoint == other.endpoint
    found.down()
    other.down()
    assert "other" not in names(session)
    assert main.status().is_healthy


def test_a_session_leaves_this_process_its_children(session: RaySession) -> None:
    """Ray ignores SIGCHLD in its driver, which makes every exit status read as 0."""
    assert subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=False).returncode == 3


def test_a_second_one_of_the_same_name_is_refused(session: RaySession, main: Deployment) -> None:
    with pytest.raises(ConfigError, match="named 'main' is up already"):
        Deployment.up(session, MAIN)
    assert main.status().is_healthy


def test_more_workers_than_there_is_room_for(session: RaySession) -> None:
    """Refused at once, by this machine's measure and by what is free in the Ray."""
    start_s = time.monotonic()
    with pytest.raises(
        PlacementError, match=r"asks 500 x prefill \(1 core\), 1 x decode \(1 core\); the cluster has host .*: short of \d+ cores"
    ):
        Deployment.up(session, make("large", prefill=500))
    assert time.monotonic() - start_s < MAIN.ray.startup_timeout_s / 4
    assert "large" not in names(session)


def test_port_in_use_is_told_before_any_worker_loads(session: RaySession) -> None:
    lines: list[str] = []
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PlacementError, match=f"{port} is in use"):
            Deployment.up(session, make("held", gateway__port=port), progress=lines.append)
    assert not any("loading" in line for line in lines)
    assert "held" not in names(session)


def test_a_worker_that_cannot_start_says_why(session: RaySession) -> None:
    """Its pool's settings alone are wrong, so only the worker's own start finds out."""
    topology = make("broken", pools__decode__simulated={"kv_cache_tokens": 1})
    with pytest.raises((ConfigError, EngineError), match="kv_cache_tokens"):
        Deployment.up(session, topology)
    assert "broken" not in names(session)
    table = placement_group_table().values()
    assert [entry for entry in table if entry["name"].startswith("broken/") and entry["state"] != "REMOVED"] == []


def test_one_session_per_process(session: RaySession) -> None:
    with pytest.raises(ConfigError, match="has a Ray session already"):
        RaySession.start([MAIN])
    assert ray.is_initialized()


@pytest.mark.timed  # not that it reads a clock: it wants all cores
async def test_64_workers_serve_2000_requests(session: RaySession) -> None:
    deployment = await asyncio.to_thread(Deployment.up, session, SIXTY_FOUR)
    try:
        await _serves_2000_requests(deployment)
        with gone_after(session, deployment):
            deployment.down()
    finally:
        deployment.down()


async def _serves_2000_requests(deployment: Deployment) -> None:
    assert len(deployment.status().workers) == 64
    gate = asyncio.Semaphore(64)

    async def one(client: AsyncClient, index: int) -> Answer:
        async with gate:
            return await ask(client, SIXTY_FOUR, prompt_of(index, 16 + index % 50), 4 + index % 5)

    async with AsyncClient(deployment.endpoint) as client:
        answers = await asyncio.gather(*(one(client, index) for index in range(2000)))
    # 64 processes share a few cores here: some look slow for a while, and get little.
    assert len({answer.usage.prefill_worker for answer in answers}) >= 24
    assert len({answer.usage.decode_worker for answer in answers}) >= 24
    status = deployment.status()
    assert status.is_healthy
    assert all(worker.restarts == 0 for worker in status.workers)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
