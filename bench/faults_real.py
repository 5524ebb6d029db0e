"""`python -m bench.faults_real`: fault runs with two real vLLM engines, one core each; every answer is compared with the colocated one.

As `python -m bench.faults`, with one prefill and one decode worker of SmolLM2-135M, and without killing them. The right answer is what
the decode worker's engine says when it runs the whole request itself. After a retry the prompt is computed again in other chunks, which
may round differently: there a token may be the right answer's second best where the two are nearly equal; it is counted as `near tie`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from bench.faults import as_json, table, tell_progress
from disagg.config import Topology, parse_topology
from disagg.errors import DisaggError
from disagg.models import get_model
from disagg.serving import start
from disagg.serving.coordinator import Coordinator
from disagg.serving.pool import Pool
from disagg.serving.worker_rpc_server import WorkerServer
from disagg.types import Request, Role, Sampling, Token
from tests.fault_runs import SLACK_S, Injector, Scene, Summary, scene_of
from tests.faulty_wire import Harm

PROMPTS = (1, 31, 32, 33, 63, 64, 65, 200, 511, 512, 513, 700)
NEAR_TIE = 0.1  # difference of two natural-log probabilities, in bf16
SETTLE_S = 30.0
RAW: dict[str, Any] = {
    "model": "smollm2-135m",
    "engine": {
        "args": {
            "dtype": "fastest",
            "enforce_eager": True,
            "max_model_len": 2048,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 512 << 20,
            "enable_prefix_caching": False,  # so that every answer is computed whole
        }
    },
    "pools": {"prefill": {"count": 1}, "decode": {"count": 1}},
    "kv": {"lease_s": 5.0, "outbox_gib": 0.1, "inbox_gib": 0.1},
}


class RealRuns:
    """Two workers with injectors around their carriers, a coordinator, and what the runs came to."""

    def __init__(self, servers: list[WorkerServer], injectors: list[Injector], coordinator: Coordinator, summary: Summary) -> None:
        self.summary = summary
        self._servers = servers
        self._injectors = injectors
        self._coordinator = coordinator

    async def run(self, scene: Scene) -> None:
        """One run: the right answers first, then the same requests with the scene's fault."""
        start_s = time.monotonic()
        draw = random.Random(f"{self.summary.seed} {scene.number}")
        sampling = Sampling(max_tokens=scene.max_tokens, temperature=0.0, ignore_eos=True, logprobs=2)
        prompts = [tuple([draw.randrange(100, 49_000) for _ in range(length)]) for length in scene.prompts]
        right = [await self._colocated(Request(f"right-{scene.number}-{i}", prompt, sampling)) for i, prompt in enumerate(prompts)]
        self._arm(scene)
        deadline_s = time.monotonic() + scene.deadline_s
        requests = [Request(f"run-{scene.number}-{i}", prompt, sampling, deadline_s=deadline_s) for i, prompt in enumerate(prompts)]
        await asyncio.gather(*(self._ask(scene, request, answer) for request, answer in zip(requests, right, strict=True)))
        self._disarm()
        await self._check_nothing_left(scene)
        self.summary.num_runs += 1
        self.summary.seconds += time.monotonic() - start_s

    async def _colocated(self, request: Request) -> list[Token]:
        async with aclosing(self._servers[1].worker.generate(request)) as chunks:
            return [token async for chunk in chunks for token in chunk.tokens]

    async def _ask(self, scene: Scene, request: Request, right: list[Token]) -> None:
        run = self._coordinator.submit(request)
        got: list[Token] = []
        try:
            async with aclosing(run.chunks()) as chunks:
                async for chunk in chunks:
                    got += chunk.tokens
            outcome = "right" if run.attempts == 1 else "right, retried"
            if len(got) != len(right):
                outcome = "WRONG"
        except DisaggError as error:
            outcome = type(error).__name__
        fault = _difference(got, right)
        if fault and run.attempts > 1 and _is_near_tie(right[fault[0]], fault[1]):
            outcome = "near tie"
        elif fault or outcome == "WRONG":
            outcome = "WRONG"
            self._problem(scene, f"wrong answer to {request.num_prompt_tokens} tokens after {run.attempts} attempts: {got} not {right}")
        assert request.deadline_s is not None
        lateness_s = time.monotonic() - request.deadline_s
        self.summary.worst_lateness_s = max(self.summary.worst_lateness_s, lateness_s)
        if lateness_s > SLACK_S:
            self._problem(scene, f"hangs: ended {lateness_s:.1f} s after its deadline, {outcome}")
        self.summary.count(scene, outcome)

    def _arm(self, scene: Scene) -> None:
        for injector in self._injectors:
            if scene.place == "frame":
                injector.fault, injector.at_frame, injector.bit = scene.fault, scene.at, scene.bit  # type: ignore[assignment]
                injector.pulls_left = scene.num_pulls
            for wire in injector.wires if scene.place == "wire" else ():
                wire.arm(Harm(scene.fault, scene.to_source, scene.at, scene.num_bytes, scene.bit))  # type: ignore[arg-type]

    def _disarm(self) -> None:
        for injector in self._injectors:
            injector.fault = None
            self.summary.num_faults += injector.num_faults + sum(wire.num_faults for wire in injector.wires)
            injector.num_faults = 0
            for wire in injector.wires:
                wire.num_faults = 0
                wire.heal()

    async def _check_nothing_left(self, scene: Scene) -> None:
        deadline_s = time.monotonic() + SETTLE_S
        while True:
            await self._coordinator.settle()
            try:
                self._assert_empty()
            except AssertionError as error:
                if time.monotonic() > deadline_s:
                    self._problem(scene, f"left behind: {error}")
                    return
                await asyncio.sleep(0.05)
            else:
                return

    def _assert_empty(self) -> None:
        self._coordinator.assert_empty()
        for server in self._servers:
            server.worker.assert_empty()
            state = server.worker.engine.state()
            assert state.free_kv_tokens == state.total_kv_tokens, f"KV blocks of {server.worker.name}: {state}"
            assert state.running_requests == state.waiting_requests == 0, f"requests of {server.worker.name}: {state}"
            assert server.worker.is_alive, f"{server.worker.name} is dead"

    def _problem(self, scene: Scene, what: str) -> None:
        self.summary.problems.append(f"{self.summary.carrier} seed {self.summary.seed}: {what} ({scene})")


def _difference(got: list[Token], right: list[Token]) -> tuple[int, int] | None:
    """Position and token id of the first token that is not the right answer's."""
    return next(((i, g.token_id) for i, (g, r) in enumerate(zip(got, right, strict=False)) if g.token_id != r.token_id), None)


def _is_near_tie(right: Token, token_id: int) -> bool:
    assert right.logprob is not None
    return any(t.token_id == token_id and right.logprob - t.logprob < NEAR_TIE for t in right.top)


def real_scene(carrier: str, seed: int, number: int) -> Scene:
    """A scene for real engines: faults of frames and bytes in turn, prompts that take about a second, deadlines to match."""
    rng = random.Random(f"real {carrier} {seed} {number}")
    scene = scene_of(carrier, seed, number)
    salt = number
    while scene.place == "kill":
        salt += 1_000
        scene = scene_of(carrier, seed, salt)
    is_stall = scene.fault == "stall" and scene.place == "frame"
    prompts = tuple([rng.choice(PROMPTS) for _ in scene.prompts])
    at = rng.randint(-1, -(-prompts[0] // 160)) if scene.place == "frame" else rng.choice([scene.at, rng.randrange(20_000_000)])
    return replace(scene, number=number, prompts=prompts, at=at, max_tokens=rng.randint(2, 8), deadline_s=8.0 if is_stall else 60.0)


@contextlib.asynccontextmanager
async def real_runs(carrier: str, seed: int) -> AsyncIterator[RealRuns]:
    """Two engines on cores 0 and 1, for runs over one carrier."""
    topology: Topology = parse_topology({**RAW, "kv": {**RAW["kv"], "carrier": carrier}})
    folder = str(get_model(topology.model))
    injectors: list[Injector] = []
    plain = start.make_carriers

    def wrapped(of: Topology, host: str) -> dict[str, Any]:
        made = [Injector(k) for k in plain(of, host).values()]
        injectors.extend(made)
        return {k.name: k for k in made}

    start.make_carriers = wrapped
    servers: list[WorkerServer] = []
    try:
        for role, core in ((Role.PREFILL, 0), (Role.DECODE, 1)):
            servers.append(await start.start_worker(topology, role, f"{role}-0", folder, cores=[core]))
        engine: Any = servers[0].worker.engine
        pool = Pool(topology, engine.model_info)
        coordinator = Coordinator(pool, topology, engine.model_info)
        for role, server in zip((Role.PREFILL, Role.DECODE), servers, strict=True):
            await pool.join(f"{role}-0", role, server.target)
        yield RealRuns(servers, injectors, coordinator, Summary(f"{carrier}, real engines", seed))
        await coordinator.close()
        await pool.close()
    finally:
        start.make_carriers = plain
        for server in servers:
            await server.close()


async def run_all(carrier: str, seed: int, first: int, num_runs: int, seconds: float) -> Summary:
    """As many of the runs first .. first + num_runs - 1 as begin within `seconds`."""
    async with real_runs(carrier, seed) as runs:
        end_s = time.monotonic() + seconds
        for number in range(first, first + num_runs):
            if time.monotonic() > end_s:
                break
            await runs.run(real_scene(carrier, seed, number))
            tell_progress(runs.summary, num_runs)
    return runs.summary


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.faults_real", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--carrier", default="grpc", help="(default: %(default)s)")
    parser.add_argument("--runs", type=int, default=50, help="(default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no run begins later than this (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    summary = asyncio.run(run_all(options.carrier, options.seed, options.first, options.runs, options.seconds))
    print(json.dumps(as_json(summary), indent=1) if options.json else table(summary))
    return 1 if summary.problems else 0


if __name__ == "__main__":
    sys.exit(main())
