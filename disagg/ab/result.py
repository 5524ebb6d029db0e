"""result.json: its schema, and how it follows from the rows.

    {"schema": 2,
     "workload": {...as run...}, "environment": {...},
     "setups": {ARM: {"kind": "disagg", "prefill": 1, "decode": 1, ...}},     what each arm is
     "points": [{"rate_rps": 0.5, "probe": false, "rounds": [...], "arms": {ARM: figures}, "stopped": "..."}],    one per rate, ascending
     "rate_rps": 0.5,                                                         the point that the next two keys repeat
     "rounds": [{"round": 1, "order": ["disagg", "colocated"], ...}],
     "arms": {"disagg": {"sent", "completed", "rejected", "failed", "ttft_s": {"count", "mean", "p50", ..., "max"}, "tpot_s": ..., "itl_s",
                         "e2e_s", "output_tokens_per_s", "input_tokens_per_s", "slo_attainment", "mean_concurrency", ...,
                         "classes": {NAME: the same}},
              "colocated": {...}},
     "chunk_search": {...}, "warm_up": {ARM: ...}, "repeated": [...],         null or empty where there was none
     "verdict": {"choose": ARM or "either", "reason": "...", "comparisons": [...]}, "warnings": [...], "not_a_result": null or why}

Seconds everywhere. A percentile is null where the samples are too few for it (see slo.percentile); a figure is null where nothing
completed. Latencies and throughput are those of completed requests; attainment is of all sent ones. Files of schema 1 are read as well: one
rate, arms `disagg` and `colocated`, and no `points`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from disagg import slo
from disagg.ab.little import law_of, law_warning
from disagg.ab.measures import row_meets
from disagg.ab.phases import all_phases
from disagg.ab.prediction import Errors, tpot_errors, ttft_errors
from disagg.ab.rows import Row, span_s
from disagg.config import SloClass
from disagg.errors import ConfigError

SCHEMA = 2


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


class PhasesReport(_Strict):
    """Where the time went, of completed requests whose gateway told (phases.py): TTFT = queue + prefill + network, first gap = transfer +
    waiting."""

    queue_s: Distribution
    prefill_s: Distribution
    network_s: Distribution
    transfer_s: Distribution
    waiting_s: Distribution


class PredictionErrors(_Strict):
    """What the router expected of answers when it admitted them, by what they got, less 1 (prediction.py)."""

    count: int
    median_abs: float
    bias: float


class PredictionReport(_Strict):
    """Null where no answer has both numbers."""

    ttft: PredictionErrors | None
    tpot: PredictionErrors | None


class Figures(_Strict):
    """Of one arm, or of one class of it. `errors`: how many of each error type. Means of lengths are of completed requests, in tokens.

    `cancelled`: requests that their own client left, as the workload wanted; attainment does not count them.
    `phases`, `prediction`: null where no gateway of ours served them.
    """

    sent: int
    completed: int
    rejected: int
    failed: int
    cancelled: int = 0
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
    phases: PhasesReport | None = None
    prediction: PredictionReport | None = None


class ClassFigures(Figures):
    """One SLO class. Targets in seconds, null = none."""

    ttft_target_s: float | None
    tpot_target_s: float | None


class LittlesLaw(_Strict):
    """Concurrency two ways: counted by the sender while it ran, and lambda x W from the rows. `agrees`: within 5 %.

    `growth`: mean time in the system of the last third of the arrivals by that of the first third; null where they are too few. `warning`:
    null, or what is wrong and the likely cause.
    """

    measured: float
    arrivals_per_s: float
    mean_in_system_s: float
    expected: float
    agrees: bool
    growth: float | None = None
    warning: str | None = None


class ArmFigures(Figures):
    """One arm over all its rounds. `span_s`: measured seconds. `routes`: requests by "prefill worker > decode worker".

    `max_send_late_s`: how late the sender was at worst. `cached_tokens`: prompt tokens that prefix caches held.
    `cost_per_million_output_tokens`: in the currency of the price per hour that was given, null without one (see Result.price).
    """

    span_s: float
    max_send_late_s: float
    cached_tokens: int
    retried: int
    routes: dict[str, int]
    littles_law: LittlesLaw | None
    classes: dict[str, ClassFigures]
    cost_per_million_output_tokens: float | None = None


class RoundReport(_Strict):
    """One round: the order in which the arms ran, and how well the sender kept its schedule in each (LoadReport's fields)."""

    round: int
    order: list[str]
    sender: dict[str, dict[str, float]]


class PointReport(_Strict):
    """One rate. `rate_rps`: mean requests per second that the workload asked for. `arms`: figures over all its rounds.

    `probe`: measured to find the range of rates, in fewer rounds than the others. `stopped`: why no more rounds followed.
    """

    rate_rps: float
    probe: bool
    rounds: list[RoundReport]
    arms: dict[str, ArmFigures]
    stopped: str


class SetupReport(_Strict):
    """What an arm is. Counts are of workers, null where it has no such pool; `chunk_tokens`: prompt and decode tokens per engine step,
    `mixed_step_tokens`, `mixed_step_ms`: of one in which somebody decodes, where it has such a limit.

    `url`: of an external arm, of which nothing else is known. `prefix_cache`: null where it cannot be told.
    """

    kind: Literal["disagg", "colocated", "adaptive", "external"]
    prefill: int | None = None
    decode: int | None = None
    colocated: int | None = None
    cores: int | None = None
    gpus: int | None = None
    chunk_tokens: dict[str, int] = Field(default_factory=dict)
    mixed_step_tokens: dict[str, int] = Field(default_factory=dict)
    mixed_step_ms: dict[str, float] = Field(default_factory=dict)
    prefix_cache: bool | None = None
    url: str | None = None


class ChunkTrial(_Strict):
    """One chunk size of the colocated arm, as measured before the comparison. Not part of the arms' figures."""

    chunk_tokens: int
    sent: int
    slo_attainment: float | None
    ttft_p50_s: float | None
    tpot_p50_s: float | None
    itl_max_s: float | None
    e2e_mean_s: float | None
    output_tokens_per_s: float | None


class ChunkSearch(_Strict):
    """How the colocated arm's chunk was chosen: trials in the order in which they were measured, at `rate_rps`, decided by `rule`."""

    rate_rps: float
    trials: list[ChunkTrial]
    chosen_tokens: int
    rule: str


class WarmUpReport(_Strict):
    """Whether the warm-up was enough: median TPOT of the first third of an arm's first round, and of the same third of later rounds (with
    one round, of its other two thirds).

    `requests`: of the warm-up. `ratio`: first by later. `enough`: it is not above what noise explains. Null where the samples are too few.
    """

    requests: int
    first_tpot_s: float | None
    later_tpot_s: float | None
    ratio: float | None
    enough: bool | None


class RepeatedRound(_Strict):
    """A turn that was measured again, and why; its `requests` rows are in requests-void.jsonl and count nowhere."""

    arm: str
    rate_rps: float
    round: int
    requests: int
    reason: str


class CurveReport(_Strict):
    """One arm over all rates: how much it can take. Rates in requests/s, concurrency in requests in the system.

    `goodput_rps`: highest sustained rate with at least `level` of requests inside their class, with a 95 % interval. `goodput_bound`:
    `at_least` when no measured rate failed, `below` when the lightest did. `goodput_per_unit_rps`: per `unit`, a GPU or a core.
    `regions`: of each rate. `knee_rps`: null where it lies beyond the rates. `method`: how knee and regions are defined.
    """

    level: float
    goodput_rps: float
    goodput_low_rps: float
    goodput_high_rps: float
    goodput_bound: Literal["within", "at_least", "below"]
    goodput_per_unit_rps: float | None
    unit: Literal["GPU", "core"] | None
    regions: dict[str, Literal["light", "saturating", "overloaded"]]
    knee_rps: float | None
    recommended_rps: float
    recommended_concurrency: float
    method: str


class ComparisonReport(_Strict):
    """One measure of two arms. `low`/`high`: interval of first minus second, at 95 % for all measures of the
    verdict together, null where there is none. `better`: an arm; null when no difference is shown.

    `arms` and `values`: first, second. `slo_class`: null for all requests together; a class's own show whom the choice helps and whom it
    costs. `rate_rps`: the point it was taken from, null for schema 1.
    """

    measure: str
    slo_class: str | None
    unit: str
    arms: tuple[str, str]
    values: tuple[float, float]
    low: float | None
    high: float | None
    better: str | None
    rate_rps: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_schema_1(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "disagg" not in raw:
            return raw
        kept = {k: v for k, v in raw.items() if k not in ("disagg", "colocated")}
        return {**kept, "arms": ("disagg", "colocated"), "values": (raw["disagg"], raw["colocated"])}


class VerdictReport(_Strict):
    """Which arm to choose for this model, workload and machine, and why, in words with the numbers. `choose`: an arm, or "either"."""

    choose: str
    reason: str
    comparisons: list[ComparisonReport]


class Result(_Strict):
    """The whole of result.json. `arms` and `rounds` are those of the point `rate_rps`; with one rate that is everything.

    `curves`: by arm, from two rates on. `price`: per GPU-hour (core-hour on CPUs), null when none was given.
    `not_a_result`: why nobody should rely on it (the sender itself fell behind), null when it may be.
    """

    schema_version: Literal[1, 2] = Field(2, alias="schema")
    workload: dict[str, Any]
    environment: dict[str, Any]
    setups: dict[str, SetupReport] = Field(default_factory=dict)
    points: list[PointReport] = Field(default_factory=list)
    rate_rps: float | None = None
    rounds: list[RoundReport]
    arms: dict[str, ArmFigures]
    curves: dict[str, CurveReport] = Field(default_factory=dict)
    price: float | None = None
    chunk_search: ChunkSearch | None = None
    warm_up: dict[str, WarmUpReport] = Field(default_factory=dict)
    repeated: list[RepeatedRound] = Field(default_factory=list)
    verdict: VerdictReport
    warnings: list[str]
    not_a_result: str | None = None

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


def classes_of(result: Result) -> tuple[SloClass, ...]:
    """The SLO classes with their targets, as the figures of all rates tell them."""
    every = [result.arms, *(point.arms for point in result.points)]  # at a light rate a rare class may have no request
    found = {name: c for arms in every for figures in arms.values() for name, c in figures.classes.items()}
    return tuple(
        SloClass(
            name=name,
            ttft_ms=None if c.ttft_target_s is None else c.ttft_target_s * 1e3,
            tpot_ms=None if c.tpot_target_s is None else c.tpot_target_s * 1e3,
        )
        for name, c in found.items()
    )


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
    judged = [r for r in rows if r.is_judged]
    tokens_in, tokens_out = sum(r.input_tokens for r in whole), sum(r.output_tokens for r in whole)
    in_system_s = math.fsum(r.end_s - r.sent_s for r in rows)
    return {
        "sent": len(rows),
        "completed": len(whole),
        "rejected": sum(r.outcome == "rejected" for r in rows),
        "failed": sum(r.outcome == "failed" for r in rows),
        "cancelled": sum(r.outcome == "cancelled" for r in rows),
        "errors": dict(Counter(r.error for r in rows if r.error is not None)),
        "ttft_s": _distribution(r.ttft_s for r in whole),
        "tpot_s": _distribution(r.tpot_s for r in whole),
        "itl_s": _distribution(gap for r in whole for gap in r.itl_s),
        "e2e_s": _distribution(r.e2e_s for r in whole),
        "output_tokens_per_s": slo.rate_per_s(tokens_out, span),
        "input_tokens_per_s": slo.rate_per_s(tokens_in, span),
        "slo_attainment": slo.attainment(sum(row_meets(r, classes[r.slo_class]) for r in judged), len(judged)),
        "mean_concurrency": in_system_s / span if span > 0 else None,
        "mean_input_tokens": tokens_in / len(whole) if whole else None,
        "mean_output_tokens": tokens_out / len(whole) if whole else None,
        "phases": _phases(rows),
        "prediction": _prediction(rows),
    }


def _distribution(samples: Any) -> Distribution:
    return Distribution(**asdict(slo.summarise([s for s in samples if s is not None])))


def _phases(rows: Sequence[Row]) -> PhasesReport | None:
    found = all_phases(rows)
    if not found:
        return None
    names = ("queue_s", "prefill_s", "network_s", "transfer_s", "waiting_s")
    return PhasesReport(**{name: _distribution(getattr(p, name) for p in found) for name in names})


def _prediction(rows: Sequence[Row]) -> PredictionReport | None:
    ttft, tpot = ttft_errors(rows), tpot_errors(rows)
    if ttft is None and tpot is None:
        return None
    return PredictionReport(ttft=_errors(ttft), tpot=_errors(tpot))


def _errors(found: Errors | None) -> PredictionErrors | None:
    return None if found is None else PredictionErrors(**asdict(found))


def _littles_law(rows: Sequence[Row], mean_in_flight: Sequence[float]) -> LittlesLaw:
    law = law_of(rows, mean_in_flight)
    lost = sum(r.outcome in ("rejected", "failed") for r in rows)
    warning = law_warning(law, sent=len(rows), lost=lost, late_s=max(r.send_late_s for r in rows))
    return LittlesLaw(**asdict(law), agrees=law.agrees, warning=warning)


def priced(result: Result, price_per_hour: float) -> Result:
    """The result with what a million output tokens cost at each arm's measured throughput. The price is per GPU, on CPUs per core.

    An arm whose size is not known (an external one) has no cost. Raises ConfigError for what is no price.
    """
    if not (price_per_hour >= 0 and math.isfinite(price_per_hour)):
        raise ConfigError(key="--price-per-gpu-hour", value=price_per_hour, expected="a finite number, 0 or more")

    def with_cost(name: str, figures: ArmFigures) -> ArmFigures:
        setup = result.setups.get(name)
        units = (setup.gpus or setup.cores or 0) if setup is not None else 0
        tokens_per_s = figures.output_tokens_per_s or 0.0
        cost = price_per_hour * units / (tokens_per_s * 3600) * 1e6 if units and tokens_per_s else None
        return figures.model_copy(update={"cost_per_million_output_tokens": cost})

    points = [p.model_copy(update={"arms": {name: with_cost(name, f) for name, f in p.arms.items()}}) for p in result.points]
    arms = {name: with_cost(name, figures) for name, figures in result.arms.items()}
    return result.model_copy(update={"arms": arms, "points": points, "price": price_per_hour})
