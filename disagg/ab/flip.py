"""By how much the SLO's targets would have to move for the verdict to flip, computed from the rows that were measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from disagg.ab.measures import row_meets
from disagg.ab.rows import Row
from disagg.ab.verdict import paired
from disagg.config import SloClass

_CLEAR = 0.02  # points of attainment that count, as in the verdict
_FACTORS = tuple(round(1.1**k, 3) for k in range(1, 25))  # to ten times as loose or strict
Target = Literal["TTFT", "TPOT"]


@dataclass(frozen=True, slots=True)
class TargetFlip:
    """With all classes' targets of this kind times `factor`, the other arm keeps more requests inside their class."""

    target: Target
    factor: float
    chosen_attainment: float
    other_attainment: float


def target_flips(chosen: Sequence[Row], other: Sequence[Row], classes: Sequence[SloClass]) -> list[TargetFlip]:
    """The nearest factor for TTFT and for TPOT targets at which attainment speaks against `chosen`, if any."""
    pairs = [pair for pair in paired(chosen, other) if pair[0].is_judged and pair[1].is_judged]
    if not pairs:
        return []
    found = []
    for target in ("TTFT", "TPOT"):
        candidates = [flip for way in (1, -1) if (flip := _nearest(pairs, classes, target, way)) is not None]
        found += sorted(candidates, key=lambda f: max(f.factor, 1 / f.factor))[:1]
    return found


def _nearest(pairs: Sequence[tuple[Row, Row]], classes: Sequence[SloClass], target: Target, way: int) -> TargetFlip | None:
    if not any((c.ttft_ms if target == "TTFT" else c.tpot_ms) is not None for c in classes):
        return None
    for factor in _FACTORS:
        scaled = _scaled(classes, target, factor**way)
        ours, theirs = (sum(row_meets(pair[side], scaled[pair[side].slo_class]) for pair in pairs) / len(pairs) for side in (0, 1))
        if theirs - ours >= _CLEAR:
            return TargetFlip(target, factor**way, ours, theirs)
    return None


def _scaled(classes: Sequence[SloClass], target: Target, factor: float) -> Mapping[str, SloClass]:
    field = "ttft_ms" if target == "TTFT" else "tpot_ms"
    return {c.name: c.model_copy(update={field: None if (own := getattr(c, field)) is None else own * factor}) for c in classes}
