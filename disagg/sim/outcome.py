"""What a simulation brings: what became of each request, and what each worker did. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from disagg import slo
from disagg.config import SloClass
from disagg.sim.engine import Leg, SimEngine
from disagg.trace import TraceRequest

Status = Literal["completed", "rejected", "failed"]


@dataclass(slots=True, eq=False)
class Outcome:
    """One request; instants are seconds since the simulation's begin, None when never reached.

    `sent_s` and the token instants are the client's, `received_s` and `routed_s` the gateway's. `transferred_s`: the KV was whole on the
    decode side, as the gateway learned it. `legs` made its tokens, and their engines know when; empty where token times are not kept.
    """

    index: int
    request: TraceRequest
    slo_class: str
    sent_s: float
    received_s: float = 0.0
    routed_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    transferred_s: float | None = None
    end_s: float | None = None
    status: Status | None = None
    error: str | None = None
    message: str | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    legs: tuple[tuple[SimEngine, Leg], ...] = ()
    way_back_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        return self.status == "completed"

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Of a whole answer; None for one token."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    def token_times_s(self) -> np.ndarray:
        """When the client received each token: [output_tokens] float64."""
        times = [engine.token_times_s(leg) for engine, leg in self.legs]
        return np.concatenate(times) + self.way_back_s if times else np.empty(0)

    def meets(self, slo_class: SloClass) -> bool:
        """Whether it finished whole inside its class."""
        return slo.meets(
            whole=self.is_whole, ttft=self.ttft_s, tpot=self.tpot_s, ttft_target=slo_class.ttft_s, tpot_target=slo_class.tpot_s
        )


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one worker did. `busy_s`: seconds in steps. `cached_tokens`: prompt tokens that its prefix cache saved."""

    name: str
    role: str
    busy_s: float
    steps: int
    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class SimReport:
    """A finished simulation. `events`: (seconds, what, request index, worker), empty unless they were asked for."""

    outcomes: tuple[Outcome, ...]
    workers: tuple[WorkerReport, ...]
    end_s: float
    mean_in_flight: float
    moved_bytes: float
    events: tuple[tuple[float, str, int, str], ...] = ()

    def attainment(self, classes: Sequence[SloClass]) -> float | None:
        """Share of sent requests that finished whole inside their class."""
        by_name = {c.name: c for c in classes}
        return slo.attainment(sum(o.meets(by_name[o.slo_class]) for o in self.outcomes), len(self.outcomes))

    @property
    def num_preemptions(self) -> int:
        return sum(w.preemptions for w in self.workers)
