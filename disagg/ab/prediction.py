"""How far what the router expected of a request was from what it got. Pure.

    error = expected / measured - 1

of each whole answer: expected when it was admitted, measured by the client, the network included. Medians, because one stall of
the machine says nothing of the router.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from disagg.ab.rows import Row


@dataclass(frozen=True, slots=True)
class Errors:
    """Shares (0.1 = 10 %) of `count` answers. `median_abs`: of the sizes; `bias`: of the errors with their sign, + for too long."""

    count: int
    median_abs: float
    bias: float


def ttft_errors(rows: Sequence[Row]) -> Errors | None:
    """Of the TTFT; None where no answer has both numbers."""
    return _errors(rows, lambda row: (row.predicted_ttft_s, row.ttft_s))


def tpot_errors(rows: Sequence[Row]) -> Errors | None:
    """Of the TPOT; None where no answer has both numbers."""
    return _errors(rows, lambda row: (row.predicted_tpot_s, row.tpot_s))


def _errors(rows: Sequence[Row], pair: Callable[[Row], tuple[float | None, float | None]]) -> Errors | None:
    pairs = [pair(row) for row in rows if row.is_whole]
    errors = [expected / measured - 1 for expected, measured in pairs if expected is not None and measured]
    if not errors:
        return None
    return Errors(len(errors), statistics.median(map(abs, errors)), statistics.median(errors))
