"""What a scaler sees of a fleet and what it may ask for: workers change roles, come, or go. Pure values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from disagg.types import Role


@dataclass(frozen=True, slots=True)
class FleetObservation:
    """What happened in the `span_s` seconds before now, and how the fleet stands.

    `prompt_tokens`, `output_tokens`: of the requests that arrived (what their answers are expected to have). `waiting_tokens`: of prompts
    that no worker has begun. `prefill`, `decode`: workers that take requests; `moving` ones take none at the moment;
    `spare` ones are outside the fleet and could come in.
    """

    span_s: float
    arrivals: int
    prompt_tokens: int
    output_tokens: float
    waiting_tokens: int
    prefill: int
    decode: int
    moving: int = 0
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """One worker leaves `source` and joins `target`. None is outside the fleet: scale-ups come from there, scale-downs go there."""

    source: Role | None
    target: Role | None
    reason: str


class FleetController(Protocol):
    """Whoever decides. Called at intervals with what was observed since the last call."""

    def on_tick(self, observation: FleetObservation, now_s: float) -> Sequence[Move]:
        """Moves to begin now. A worker finishes what it holds before it joins its new pool."""
        ...
