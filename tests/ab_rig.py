"""Gateways that answer by themselves, over real gRPC, as the arms of an A/B; and a small comparison of them."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from rich.console import Console

from disagg.ab.arms import Serving
from disagg.ab.out import OutFolder
from disagg.ab.progress import RunProgress
from disagg.ab.rows import Row, read_rows
from disagg.ab.run import Comparison, compare, run_ab
from disagg.ab.workload import Workload
from disagg.client_types import ERROR_KEY
from disagg.config import Topology, parse_topology, validated
from disagg.errors import RejectedError, to_wire
from disagg.pb import inference_pb2 as pb
from disagg.pb.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from disagg.types import Mode

ARMS = (Mode.DISAGG, Mode.COLOCATED)


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
        self.slots: asyncio.Semaphore | None = None  # how many it answers at a time

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
        if self.slots is not None:
            await self.slots.acquire()
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
            if self.slots is not None:
                self.slots.release()


class Arms:
    """Two fake gateways. `restarts`: the arm that was used before goes down, as on a machine that holds one arm only."""

    def __init__(self, *, restarts: bool = False) -> None:
        self.gateways = {arm: FakeGateway() for arm in ARMS}
        self.endpoints: dict[str, str] = {}
        self.used: list[str] = []
        self.restarts = restarts
        self.workers: dict[str, str] = {}
        self.life = 0
        self.preempted = 0  # three more at each look

    async def use(self, arm: str) -> Serving:
        if not self.used or self.used[-1] != arm:
            self.life += 1
        self.used.append(arm)
        return Serving(self.endpoints[arm], self.life if self.restarts else 0)

    async def lives(self, arm: str) -> dict[str, str]:
        return dict(self.workers)

    async def preemptions(self, arm: str) -> int | None:
        self.preempted += 3
        return self.preempted

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
        return await asyncio.wait_for(run_ab(what, source, OutFolder(path), progress), 240)


def by_round(rows: list[Row], arm: str, round_: int) -> list[Row]:
    return sorted((r for r in rows if r.arm == arm and r.round == round_), key=lambda r: r.index)


def rows_so_far(path: Path) -> list[Row]:
    file = path / "requests.jsonl"
    return read_rows(file) if file.exists() else []


async def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never held")
