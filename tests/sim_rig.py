"""For tests of the simulator: small topologies, traces from closed-form processes, and a dispatcher with no mind of its own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Sequence
from typing import Any

from disagg.config import Topology, parse_topology
from disagg.policy.decision import DecisionRecord, Decisions, Grant, Prediction, Verdict
from disagg.trace import TraceRequest
from disagg.types import EngineState, Request, Role, Route


def sim_topology(mode: str = "colocated", prefill: int = 1, decode: int = 1, box_gib: float = 1.0, **simulated: Any) -> Topology:
    """Llama-3.1-70B on four H100s per worker; further keywords are SimulatedSettings. Mode colocated has prefill + decode workers."""
    return parse_topology(
        {
            "model": "simulated",
            "mode": mode,
            "engine": {"kind": "simulated", "simulated": simulated},
            "pools": {"prefill": {"count": prefill}, "decode": {"count": decode}},
            "kv": {"outbox_gib": box_gib, "inbox_gib": box_gib},
        }
    )


def poisson(rate_rps: float, count: int, input_tokens: int, output_tokens: int, seed: int = 0) -> list[TraceRequest]:
    """`count` requests of fixed lengths with exponential gaps."""
    rng = random.Random(seed)
    arrivals = itertools.accumulate(rng.expovariate(rate_rps) for _ in range(count))
    return [TraceRequest(at_s, input_tokens, output_tokens) for at_s in arrivals]


def random_trace(rng: random.Random, count: int, rate_rps: float, most_in: int, most_out: int) -> list[TraceRequest]:
    """Requests of random lengths, some of them one token, some with a prefix of 512-token blocks that others have too."""
    at_s = 0.0
    requests = []
    for number in range(count):
        at_s += rng.expovariate(rate_rps)
        given = rng.choice([1, 2, rng.randint(1, most_in), rng.randint(1, most_in)])
        family = rng.randrange(3)
        blocks = tuple(family * 1000 + i if i < 4 else number * 1000 + i for i in range(-(-given // 512)))
        requests.append(TraceRequest(at_s, given, rng.choice([1, 2, rng.randint(1, most_out)]), None, blocks))
    return requests


class EagerDispatcher:
    """Grants at once: first legs in turns over the prefill side, second legs in turns over the decode side. Checks what it is told.

    `seed`: first legs at random instead, so that a Poisson stream splits into Poisson streams.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._rng = None if seed is None else random.Random(seed)
        self._first: list[str] = []
        self._second: list[str] = []
        self._keys = itertools.count()
        self._turns = itertools.count()
        self._waiting: dict[int, Request] = {}
        self.granted: set[int] = set()
        self.heard: list[tuple[str, int]] = []

    def join(self, name: str, role: Role, host_id: str, state: EngineState, now_s: float) -> None:
        if role is not Role.DECODE:
            self._first.append(name)
        if role is Role.DECODE:
            self._second.append(name)

    def leave(self, name: str, now_s: float) -> None:
        self._first = [n for n in self._first if n != name]
        self._second = [n for n in self._second if n != name]

    def report(self, name: str, state: EngineState, now_s: float) -> None:
        assert 0 <= state.free_kv_tokens <= state.total_kv_tokens
        assert 0 <= state.outbox_free_bytes <= state.outbox_total_bytes

    def submit(
        self, request: Request, now_s: float, avoid: Collection[str] = (), attempt: int = 0, prefix: Sequence[int] | None = None
    ) -> int:
        key = next(self._keys)
        self._waiting[key] = request
        return key

    def withdraw(self, key: int) -> None:
        self._waiting.pop(key, None)

    def decide(self, now_s: float) -> Decisions:
        grants = tuple(self._grant(key, request, now_s) for key, request in self._waiting.items())
        self._waiting.clear()
        return Decisions(grants)

    def _grant(self, key: int, request: Request, now_s: float) -> Grant:
        turn = next(self._turns)
        first = self._first[turn % len(self._first)] if self._rng is None else self._rng.choice(self._first)
        second = self._second[turn % len(self._second)] if self._second else first
        self.granted.add(key)
        record = DecisionRecord(request.request_id, now_s, 0.0, Verdict.GRANTED, "", request.slo_class, 0, 0, 0, None, None, 0)
        nothing = Prediction(0.0, 0.0)
        return Grant(key, request, Route(first, second, "in turn"), nothing, record, nothing)

    def first_token(self, key: int, now_s: float, cached_tokens: int = 0) -> None:
        self._hear("first_token", key)

    def arrived(self, key: int, now_s: float) -> None:
        self._hear("arrived", key)

    def decoding(self, key: int, now_s: float) -> None:
        self._hear("decoding", key)

    def progress(self, key: int, output_tokens: int, now_s: float) -> None:
        assert output_tokens >= 0
        self._hear("progress", key)

    def end(self, key: int, now_s: float, *, is_whole: bool) -> None:
        self._hear("end", key)
        self.granted.remove(key)

    def _hear(self, what: str, key: int) -> None:
        assert key in self.granted, f"{what} of a request that is not under way"
        self.heard.append((what, key))


def times(values: Sequence[float | None]) -> list[float]:
    """Those that are there."""
    return [v for v in values if v is not None]
