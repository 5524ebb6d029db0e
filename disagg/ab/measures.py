"""What arms are compared in, and what each request contributes to it. Pure.

A failed or rejected request contributes no latency and misses its SLO. Measures stand in the order in which they decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from disagg import slo
from disagg.ab.rows import Row
from disagg.config import SloClass

Unit = Literal["share", "s", "tokens/s", "requests/s"]
Samples = Callable[[Row], Sequence[float]]
ATTAINMENT = "SLO attainment"
ATTAINMENT_OVER_RATES = "SLO attainment over all rates"
SHARE_FLOOR = 0.02  # of a share: a difference that somebody would act on


@dataclass(frozen=True, slots=True)
class Measure:
    """A percentile of what the requests contribute, or the mean for `percent` None. `slo_class`: None for all requests together.

    `floor`: the smallest difference between two values that somebody would act on.
    """

    name: str
    slo_class: str | None
    unit: Unit
    samples: Samples
    percent: float | None
    higher_is_better: bool
    floor: Callable[[float, float], float]


def row_meets(row: Row, slo_class: SloClass) -> bool:
    """Whether a request finished whole inside its class."""
    return slo.meets(whole=row.is_whole, ttft=row.ttft_s, tpot=row.tpot_s, ttft_target=slo_class.ttft_s, tpot_target=slo_class.tpot_s)


def gaps(row: Row) -> Sequence[float]:
    """Seconds between the tokens of a whole answer."""
    return row.itl_s if row.is_whole else ()


def tpot(row: Row) -> Sequence[float]:
    """TPOT of a whole answer."""
    seconds = row.tpot_s if row.is_whole else None
    return () if seconds is None else (seconds,)


def ttft(row: Row) -> Sequence[float]:
    """TTFT of a whole answer."""
    seconds = row.ttft_s if row.is_whole else None
    return () if seconds is None else (seconds,)


def e2e(row: Row) -> Sequence[float]:
    """E2E of a whole answer."""
    seconds = row.e2e_s if row.is_whole else None
    return () if seconds is None else (seconds,)


def attainment(classes: Mapping[str, SloClass], slo_class: str | None = None) -> Measure:
    """Share of sent requests inside their class; where no class has a target, the share that completed."""

    def met(row: Row) -> Sequence[float]:
        return (float(row_meets(row, classes[row.slo_class])),) if row.is_judged else ()

    targeted = any(c.ttft_s is not None or c.tpot_s is not None for c in classes.values())
    name = ATTAINMENT if targeted else "share completed"
    return Measure(name, slo_class, "share", _of_class(met, slo_class), None, True, lambda _a, _b: SHARE_FLOOR)


def compared(sides: Sequence[Sequence[Row]], classes: Mapping[str, SloClass]) -> list[Measure]:
    """What is compared between `sides`: over all requests, then over each class where there are several."""
    present = list(dict.fromkeys(row.slo_class for row in sides[0]))
    found = [attainment(classes), *_latencies(sides, None)]
    for name in present if len(present) > 1 else []:
        found += [attainment(classes, name), *_latencies(sides, name)]
    return found


def _latencies(sides: Sequence[Sequence[Row]], slo_class: str | None) -> Iterator[Measure]:
    yield from _tail(sides, "ITL", gaps, (99.9, 99, 95), 0.002, slo_class)
    yield from _tail(sides, "TPOT", tpot, (95, 90), 0.001, slo_class)
    yield from _tail(sides, "TPOT", tpot, (50,), 0.001, slo_class)
    yield from _tail(sides, "TTFT", ttft, (95, 90), 0.005, slo_class)
    yield from _tail(sides, "TTFT", ttft, (50,), 0.005, slo_class)


def _tail(
    sides: Sequence[Sequence[Row]], name: str, samples: Samples, percents: Sequence[float], floor_s: float, slo_class: str | None
) -> Iterator[Measure]:
    """The first of `percents` for which all sides have samples enough; none when there is none."""
    own = _of_class(samples, slo_class)
    counts = [sum(len(own(row)) for row in rows) for rows in sides]
    percent = next((p for p in percents if all(slo.enough(count, p) for count in counts)), None)
    if percent is not None:
        yield Measure(f"{name} p{percent:g}", slo_class, "s", own, percent, False, lambda a, b: max(floor_s, 0.05 * min(a, b)))


def _of_class(samples: Samples, slo_class: str | None) -> Samples:
    return lambda row: samples(row) if slo_class is None or row.slo_class == slo_class else ()
