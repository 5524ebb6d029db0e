"""How busy each worker was, from the rows alone: a prompt ran there, or only streams were decoded, or nothing did. Pure.

A prefill is taken to run during the row's `prefill_s` up to its first token (it may have waited inside the engine for a part of that);
a stream is decoded between its first and its last token. It is what the worker had to do, not what its hardware was used for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.ab.rows import Row

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Busy:
    """Shares of the measured time, 0 to 1."""

    name: str
    prefill: float
    decode_only: float


def busy_workers(rows: Sequence[Row]) -> list[Busy]:
    """Every worker that served a whole answer, by name. `rows`: of one arm at one rate."""
    rounds: dict[int, list[Row]] = {}
    for row in rows:
        rounds.setdefault(row.round, []).append(row)
    names = sorted({name for r in rows if r.is_whole for name in (r.prefill_worker, r.decode_worker) if name is not None})
    total = sum(max(r.end_s for r in own) - min(r.sent_s for r in own) for own in rounds.values())
    found = []
    for name in names:
        prefill = decode = 0.0
        for own in rounds.values():
            prompts = [s for r in own if r.prefill_worker == name and (s := _prompt(r)) is not None]
            streams = [(r.token_s[0], r.token_s[-1]) for r in own if r.is_whole and r.decode_worker == name and r.token_s]
            running = _covered(prompts)
            prefill += running
            decode += _covered([*prompts, *streams]) - running
        found.append(Busy(name, prefill / total if total > 0 else 0.0, decode / total if total > 0 else 0.0))
    return found


def _prompt(row: Row) -> Span | None:
    if not row.is_whole or row.prefill_s is None or not row.token_s:
        return None
    return (row.token_s[0] - row.prefill_s, row.token_s[0])


def _covered(spans: Sequence[Span]) -> float:
    """Seconds that the union of the spans covers."""
    total, upto = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, upto))
        upto = max(upto, end)
    return total
