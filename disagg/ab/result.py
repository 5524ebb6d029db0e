"""result.json: its schema, and how it follows from the rows.

    {"schema": 1,
     "workload": {...as run...}, "environment": {...},
     "rounds": [{"round": 1, "order": ["disagg", "colocated"], ...}],
     "arms": {"disagg": {"sent", "completed", "rejected", "failed", "ttft_s": {"count", "mean", "p50", ..., "max"}, "tpot_s": ..., "itl_s",
                         "e2e_s", "output_tokens_per_s", "input_tokens_per_s", "slo_attainment", "mean_concurrency", ...,
                         "classes": {NAME: the same}},
              "colocated": {...}},
     "verdict": {"choose": "disagg|colocated|either", "reason": "...", "comparisons": [...]}, "warnings": [...]}

Seconds everywhere. A percentile is null where the samples are too few for it (see slo.percentile); a figure is null where nothing
completed. Latencies and throughput are those of completed requests; attainment is of all sent ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from disagg import slo
from disagg.ab.rows import Row, span_s
from disagg.config import SloClass
from disagg.errors import ConfigError

SCHEMA = 1
LITTLE_TOLERANCE = 0.05


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Distribution(_Strict):
    """A distribution in seconds; fields as in slo.Summary."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    p999: float | None
    max: float | None


class Figures(_Strict):
    """Of one arm, or of one class of it. `errors`: how many of each error type. Means of lengths are of completed requests, in tokens."""

    sent: int
    completed: int
    rejected: int
    failed: int
    errors: dict[str, int]
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    output_tokens_per_s: float | None
    input_tokens_per_s: float | None
    slo_attainment: float | None
    mean_concurrency: float | None
    mean_input_tokens: float | None
    mean_output_tokens: float | None


class ClassFigures(Figures):
    """One SLO class. Targets in seconds, null = none."""

    ttft_target_s: float | None
    tpot_target_s: float | None


class LittlesLaw(_Strict):
    """Concurrency two ways: counted by the sender while it ran, and lambda x W from the rows."""

    measured: float
    arrivals_per_s: float
    mean_in_system_s: float
    expected: float
    agrees: bool


class ArmFigures(Figures):
    """One arm over all its rounds. `span_s`: measured seconds. `routes`: requests by "prefill worker > decode worker".

    `max_send_late_s`: how late the sender was at worst. `cached_tokens`: prompt tokens that prefix caches held.
    """

    span_s: float
    max_send_late_s: float
    cached_tokens: int
    retried: int
    routes: dict[str, int]
    littles_law: LittlesLaw | None
    classes: dict[str, ClassFigures]


class RoundReport(_Strict):
    """One round: the order in which the arms ran, and how well the sender kept its schedule in each (LoadReport's fields)."""

    round: int
    order: list[str]
    sender: dict[str, dict[str, float]]


class ComparisonReport(_Strict):
    """One measure of both arms. `low`/`high`: 95 % interval of disagg minus colocated. `better`: null when no difference is shown.

    `slo_class`: null for all requests together; a class's own show whom the choice helps and whom it costs.
    """

    measure: str
    slo_class: str | None
    unit: str
    disagg: float
    colocated: float
    low: float
    high: float
    better: Literal["disagg", "colocated"] | None


class VerdictReport(_Strict):
    """Which arm to choose for this model, workload and machine, and why, in words with the numbers."""

    choose: Literal["disagg", "colocated", "either"]
    reason: str
    comparisons: list[ComparisonReport]


class Result(_Strict):
    """The whole of result.json."""

    schema_version: Literal[1] = Field(1, alias="schema")
    workload: dict[str, Any]
    environment: dict[str, Any]
    rounds: list[RoundReport]
    arms: dict[str, ArmFigures]
    verdict: VerdictReport
    warnings: list[str]

    def to_json(self) -> str:
        """Indented JSON text, ending in a newline."""
        return self.model_dump_json(indent=2, by_alias=True) + "\n"


def read_result(path: Path) -> Result:
    """Read and check a result.json. Raises ConfigError."""
    try:
        return Result.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", key=str(path), expected="a result.json") from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a result.json of schema {SCHEMA}: {error}", key=str(path), expected="a result.json") from error


def row_meets(row: Row, slo_class: SloClass) -> bool:
    """Whether a request finished whole inside its class."""
    return slo.meets(whole=row.is_whole, ttft=row.ttft_s, tpot=row.tpot_s, ttft_target=slo_class.ttft_s, tpot_target=slo_class.tpot_s)


def arm_figures(rows: Sequence[Row], classes: Sequence[SloClass], mean_in_flight: Sequence[float] | None) -> ArmFigures:
    """One arm's figures from all its rows. `mean_in_flight`: what the sender counted in each round, in order; None when not known."""
    span = span_s(rows)
    by_class = {c.name: [r for r in rows if r.slo_class == c.name] for c in classes}
    return ArmFigures(
        **_figures(rows, {c.name: c for c in classes}, span),
        span_s=span,
        max_send_late_s=max((r.send_late_s for r in rows), default=0.0),
        cached_tokens=sum(r.cached_tokens or 0 for r in rows),
        retried=sum((r.attempts or 1) > 1 for r in rows),
        routes=dict(sorted(Counter(f"{r.prefill_worker} > {r.decode_worker}" for r in rows if r.is_whole).items())),
        littles_law=_littles_law(rows, mean_in_flight) if rows and mean_in_flight is not None else None,
        classes={
            c.name: ClassFigures(**_figures(by_class[c.name], {c.name: c}, span), ttft_target_s=c.ttft_s, tpot_target_s=c.tpot_s)
            for c in classes
            if by_class[c.name]
        },
    )


def _figures(rows: Sequence[Row], classes: Mapping[str, SloClass], span: float) -> dict[str, Any]:
    whole = [r for r in rows if r.is_whole]
    tokens_in, tokens_out = sum(r.input_tokens for r in whole), sum(r.output_tokens for r in whole)
    in_system_s = math.fsum(r.end_s - r.sent_s for r in rows)
    return {
        "sent": len(rows),
        "completed": len(whole),
        "rejected": sum(r.outcome == "rejected" for r in rows),
        "failed": sum(r.outcome == "failed" for r in rows),
        "errors": dict(Counter(r.error for r in rows if r.error is not None)),
        "ttft_s": _distribution(r.ttft_s for r in whole),
        "tpot_s": _distribution(r.tpot_s for r in whole),
        "itl_s": _distribution(gap for r in whole for gap in r.itl_s),
        "e2e_s": _distribution(r.e2e_s for r in whole),
        "output_tokens_per_s": slo.rate_per_s(tokens_out, span),
        "input_tokens_per_s": slo.rate_per_s(tokens_in, span),
        "slo_attainment": slo.attainment(sum(row_meets(r, classes[r.slo_class]) for r in rows), len(rows)),
        "mean_concurrency": in_system_s / span if span > 0 else None,
        "mean_input_tokens": tokens_in / len(whole) if whole else None,
        "mean_output_tokens": tokens_out / len(whole) if whole else None,
    }


def _distribution(samples: Any) -> Distribution:
    return Distribution(**asdict(slo.summarise([s for s in samples if s is not None])))


def _littles_law(rows: Sequence[Row], mean_in_flight: Sequence[float]) -> LittlesLaw:
    """Both sides of L = lambda x W over all rounds; each round counts with its length."""
    spans = [span_s([r for r in rows if r.round == number]) for number in sorted({r.round for r in rows})]
    total = sum(spans)
    measured = sum(n * s for n, s in zip(mean_in_flight, spans, strict=True)) / total if total > 0 else 0.0
    rate = slo.rate_per_s(len(rows), total) or 0.0
    mean_s = math.fsum(r.end_s - r.sent_s for r in rows) / len(rows)
    expected = slo.little(rate, mean_s)
    return LittlesLaw(
        measured=measured,
        arrivals_per_s=rate,
        mean_in_system_s=mean_s,
        expected=expected,
        agrees=math.isclose(measured, expected, rel_tol=LITTLE_TOLERANCE, abs_tol=1e-3),
    )
