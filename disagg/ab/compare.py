"""Two results side by side: what makes them comparable, and what differs between the same arm in both. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from disagg.ab.result import Result
from disagg.ab.rows import Row
from disagg.ab.verdict import Comparison, compare_arms
from disagg.config import SloClass

_NOT_WHAT_IS_SENT = ("rounds", "description")
_SAME_MACHINE = (("model", "the model"), ("cpu", "the processor"), ("cores", "the number of cores"), ("gpus", "the GPUs"))


@dataclass(frozen=True, slots=True)
class SideBySide:
    """`obstacles`: why differences must not be read as the arms' own, one sentence each; then no comparison says what is better.

    `comparisons`: second result minus first, by arm and rate; arms are named "A: NAME" (first) and "B: NAME" (second).
    """

    obstacles: tuple[str, ...]
    notes: tuple[str, ...]
    comparisons: tuple[tuple[float | None, Comparison], ...]


def obstacles(a: Result, b: Result) -> list[str]:
    """What forbids a comparison: other requests or other hardware."""
    found = []
    ours, theirs = (_sent(r.workload) for r in (a, b))
    different = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if different:
        parts = ", ".join(f"{key} {_short(ours.get(key))} against {_short(theirs.get(key))}" for key in different[:4])
        found.append(f"the workloads differ: {parts}")
    for key, what in _SAME_MACHINE:
        one, other = a.environment.get(key), b.environment.get(key)
        if one != other:
            found.append(f"{what} differs: {_short(one)} against {_short(other)}")
    if bool(a.environment.get("simulated")) != bool(b.environment.get("simulated")):
        found.append("one of them is simulated")
    if _targets(a) != _targets(b):
        found.append(f"the SLO classes differ: {_targets(a)} against {_targets(b)}")
    found += [f"{name} is not a result: {r.not_a_result}" for name, r in (("A", a), ("B", b)) if r.not_a_result is not None]
    return found


def side_by_side(
    a: Result, a_rows: Sequence[Row], b: Result, b_rows: Sequence[Row], classes: Sequence[SloClass], arms: tuple[str, str] | None = None
) -> SideBySide:
    """Every arm that both have, or `arms` (one of each); at every rate that both measured, over the requests that both were sent."""
    barred = obstacles(a, b)
    pairs = [arms] if arms is not None else [(name, name) for name in a.arms if name in b.arms]
    notes = [f"only in {side}: {', '.join(names)}" for side, names in _alone(a, b, arms) if names]
    simulated = bool(a.environment.get("simulated"))
    found: list[tuple[float | None, Comparison]] = []
    for ours, theirs in pairs:
        first, second = ([r for r in rows if r.arm == name] for rows, name in ((a_rows, ours), (b_rows, theirs)))
        rates = sorted({r.rate_rps for r in first} & {r.rate_rps for r in second}, key=lambda rate: rate or 0.0)
        if not rates:
            notes.append(f"{ours}: no rate was measured in both")
        for rate in rates:
            after, before = ([r for r in rows if r.rate_rps == rate] for rows in (second, first))
            same = _same_requests(after, before)
            if not same and not barred:
                barred.append(f"{ours} at {rate or 0:g}/s: the prompts are not the same ones (other seed or version?)")
            names, family = (f"B: {theirs}", f"A: {ours}"), len(pairs) * len(rates)
            compared = compare_arms(after, before, classes, names, num_pairs=family, simulated=simulated)
            found += [(rate, c) for c in compared]
    if barred:
        found = [(rate, replace(c, better=None)) for rate, c in found]
    return SideBySide(tuple(barred), tuple(notes), tuple(found))


def _same_requests(*sides: Sequence[Row]) -> bool:
    """Whether requests of one round and place had one prompt."""
    digests = [{(r.round, r.index): r.prompt_digest for r in rows} for rows in sides]
    shared = digests[0].keys() & digests[1].keys()
    return bool(shared) and all(digests[0][key] == digests[1][key] for key in shared)


def _alone(a: Result, b: Result, arms: tuple[str, str] | None) -> list[tuple[str, list[str]]]:
    if arms is not None:
        return []
    return [("A", [n for n in a.arms if n not in b.arms]), ("B", [n for n in b.arms if n not in a.arms])]


def _sent(workload: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in workload.items() if key not in _NOT_WHAT_IS_SENT}


def _targets(result: Result) -> dict[str, tuple[float | None, float | None]]:
    return {name: (c.ttft_target_s, c.tpot_target_s) for figures in result.arms.values() for name, c in figures.classes.items()}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
