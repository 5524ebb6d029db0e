"""Little's law as a check of a run: the mean number of requests in the system must equal arrival rate times mean time in it. Pure.

Over a whole round both sides count the same requests, so a difference means wrong or missing rows. The law holds for any rate, also for one
that no arm sustains; then the time in the system grows while the round lasts, and a second check says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from disagg import slo
from disagg.ab.rows import Row, span_s

TOLERANCE = 0.05
_GROWTH = 1.5  # mean time in the system, last third of the arrivals against the first: from here on a backlog is likely
_LEAST_EACH = 4


@dataclass(frozen=True, slots=True)
class Law:
    """`measured`: counted by the sender. `expected`: lambda x W of the rows.

    `growth`: mean time in the system of the last third of the arrivals by the first third's, None where they are too few.
    """

    measured: float
    arrivals_per_s: float
    mean_in_system_s: float
    expected: float
    growth: float | None

    @property
    def agrees(self) -> bool:
        """Within 5 %."""
        return math.isclose(self.measured, self.expected, rel_tol=TOLERANCE, abs_tol=1e-3)


def law_of(rows: Sequence[Row], mean_in_flight: Sequence[float]) -> Law:
    """Both sides over all rounds, each with its length. `mean_in_flight`: what the sender counted in each round, in order."""
    rounds = [[r for r in rows if r.round == number] for number in sorted({r.round for r in rows})]
    spans = [span_s(own) for own in rounds]
    total = sum(spans)
    measured = sum(n * s for n, s in zip(mean_in_flight, spans, strict=True)) / total if total > 0 else 0.0
    rate = slo.rate_per_s(len(rows), total) or 0.0
    mean_s = math.fsum(r.end_s - r.sent_s for r in rows) / len(rows)
    return Law(measured, rate, mean_s, slo.little(rate, mean_s), _growth(rounds))


def _growth(rounds: Sequence[Sequence[Row]]) -> float | None:
    early, late = [], []
    for own in rounds:
        ordered = sorted(own, key=lambda r: r.sent_s)
        third = len(ordered) // 3
        early += [r.end_s - r.sent_s for r in ordered[:third]]
        late += [r.end_s - r.sent_s for r in ordered[len(ordered) - third :]]
    if min(len(early), len(late)) < _LEAST_EACH or math.fsum(early) <= 0:
        return None
    return (math.fsum(late) / len(late)) / (math.fsum(early) / len(early))


def law_warning(law: Law, *, sent: int, lost: int, late_s: float) -> str | None:
    """One sentence with the likely cause when L and lambda x W differ by over 5 %, or when a backlog grew; else None.

    `sent`, `lost`: requests in all, and those that did not complete. `late_s`: how late the sender was at worst.
    """
    if not law.agrees:
        said = f"{law.measured:.2f} requests were in flight on average, Little's law gives {law.expected:.2f}"
        if law.measured > law.expected:
            cause = "requests were counted that have no row: rows are missing, or a row's end was noted too early"
        elif late_s > 0.1 * law.mean_in_system_s:
            cause = f"the sender was up to {late_s:.2f} s late, so it counted requests later than their rows say"
        else:
            cause = "rows count that the sender did not see in flight: rows of another run, or a clock that jumped"
        return f"{said}; likely cause: {cause}"
    if law.growth is not None and law.growth > _GROWTH:
        why = f"{lost} of {sent} requests did not complete, and " if lost else ""
        return (
            f"{why}the last third of the requests stayed {law.growth:.1f} times as long in the system as the first third: a backlog grew, "
            "so the rate is above what this arm sustains, and its latencies depend on how long the round was"
        )
    return None
