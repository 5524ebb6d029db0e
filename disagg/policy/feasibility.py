"""Can a class ever be met by these pools, on an idle cluster? Said at start, with the numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from disagg.config import SloClass
from disagg.policy.step_cost import StepCost
from disagg.types import Mode, Role


def impossible(mode: Mode, classes: Sequence[SloClass], costs: Mapping[Role, StepCost]) -> tuple[str, ...]:
    """One sentence for each class that no pair of workers can meet, even with one prompt token on idle workers."""
    return tuple([said for each in classes if (said := _impossible(mode, each, costs))])


def _impossible(mode: Mode, slo: SloClass, costs: Mapping[Role, StepCost]) -> str:
    firsts = {role: cost.prefill_s(1, 0, 1) for role, cost in costs.items() if _may(mode, role, Role.PREFILL)}
    seconds = {role: cost.alone_s(1) for role, cost in costs.items() if _may(mode, role, Role.DECODE)}
    found = []
    for name, legs, target_s in (("a first token", firsts, slo.ttft_s), ("a further token", seconds, slo.tpot_s)):
        if target_s is not None and legs and min(legs.values()) > target_s:
            role = min(legs, key=lambda r: legs[r])
            found.append(f"{name} takes {legs[role] * 1e3:.1f} ms on the quickest worker ({role}), its target is {target_s * 1e3:g} ms")
    return f"class {slo.name} can never be met: {'; '.join(found)}" if found else ""


def _may(mode: Mode, role: Role, leg: Role) -> bool:
    """Whether a worker of `role` may take this leg."""
    return mode is not Mode.DISAGG or role is leg
