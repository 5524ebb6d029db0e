"""Who is there: a frozen snapshot of the pools, for doors, health and people."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.types import EngineState, Mode, ModelInfo, Role


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One live worker, with what it said of itself last."""

    name: str
    role: Role
    host_id: str
    state: EngineState


@dataclass(frozen=True, slots=True)
class PoolView:
    """All live workers at the monotonic instant `at_s`, and the model that they serve."""

    at_s: float
    mode: Mode
    model: ModelInfo
    workers: tuple[WorkerView, ...]

    def of(self, role: Role) -> tuple[WorkerView, ...]:
        """The live workers of one role."""
        return tuple(w for w in self.workers if w.role is role)

    @property
    def missing_role(self) -> Role | None:
        """A role that the mode needs and that no live worker has."""
        return missing_role(self.mode, {w.role for w in self.workers})


def missing_role(mode: Mode, present: set[Role]) -> Role | None:
    """A role that `mode` needs and that is not `present`. Adaptive serving does with any worker."""
    if mode is Mode.ADAPTIVE:
        return None if present else Role.PREFILL
    needed = (Role.COLOCATED,) if mode is Mode.COLOCATED else (Role.PREFILL, Role.DECODE)
    return next((role for role in needed if role not in present), None)
