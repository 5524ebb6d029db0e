"""Workload files that replay a trace: which file, which part of it, scaled by which rule. Strict; examples: bench/workloads/traces/.

    name: azure-conv
    slo_class: chat
    trace: {file: azure2023_conv/AzureLLMInferenceTrace_conv.csv.gz, window_s: 600, max_total_tokens: 32768, over: drop}

Trace files are not part of disagg. A relative path is looked for in the folder that the caller names (`--traces`, or the environment
variable DISAGG_TRACES), then beside the workload file, then in the current folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from disagg.ab.arrivals import PositiveFloat, PositiveInt
from disagg.ab.workload import SHIPPED, Workload, load_workload, plan_round, shipped_workloads
from disagg.config import SloClass, validated
from disagg.errors import ConfigError, nearest
from disagg.trace import Scaling, Trace, TraceRequest, scale
from disagg.trace_files import TraceFormat, read_trace

TRACES_VARIABLE = "DISAGG_TRACES"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TraceSource(_Strict):
    """A trace file and how it is scaled; the scaling's fields are those of `disagg.trace.Scaling`, applied in that order.

    `format`: absent = recognised. `arm`: of a requests.jsonl. `path` is filled in when the file has been found.
    """

    file: Annotated[str, Field(min_length=1)]
    format: TraceFormat | None = None
    arm: str | None = None
    start_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    window_s: PositiveFloat | None = None
    input_factor: PositiveFloat = 1.0
    output_factor: PositiveFloat = 1.0
    max_input_tokens: PositiveInt | None = None
    max_output_tokens: PositiveInt | None = None
    max_total_tokens: Annotated[int, Field(ge=2)] | None = None
    over: Literal["clip", "drop"] = "clip"
    rate_factor: PositiveFloat = 1.0

    def scaling(self) -> Scaling:
        """The rule as a value."""
        return Scaling(**self.model_dump(exclude={"file", "format", "arm"}))


class TraceWorkload(_Strict):
    """A trace as a workload. `slo_class`: of rows that name none; absent: the topology's first. `seed`: of spread arrivals."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    description: str = ""
    trace: TraceSource
    slo_class: str | None = None
    rounds: Annotated[int, Field(ge=1, le=100)] = 1
    timeout_s: PositiveFloat = 120.0
    seed: int = 0


def shipped_traces() -> list[str]:
    """Names of the trace workloads that come with disagg (their trace files do not)."""
    return sorted(p.stem for p in (SHIPPED / "traces").glob("*.yaml"))


def load_any_workload(name_or_path: str) -> Workload | TraceWorkload:
    """A workload of either kind, shipped or from a file. Raises ConfigError."""
    path = Path(name_or_path)
    if not path.exists() and name_or_path in shipped_traces():
        path = SHIPPED / "traces" / f"{name_or_path}.yaml"
    if not path.is_file():
        known = [*shipped_workloads(), *shipped_traces()]
        if path.suffix not in (".yaml", ".yml") and name_or_path not in known:
            expected = f"a YAML file or a shipped workload: {nearest(name_or_path, known)}"
            raise ConfigError(key="workload", value=name_or_path, expected=expected)
        return load_workload(name_or_path)
    raw = _read(path)
    if not isinstance(raw, dict) or "trace" not in raw:
        return load_workload(path)
    return _beside(validated(TraceWorkload, raw, str(path)), path.parent)


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: not a YAML file: {error}", key=str(path), expected="a YAML mapping") from error


def _beside(workload: TraceWorkload, folder: Path) -> TraceWorkload:
    """A trace that lies beside the workload file is named by its full path from here on."""
    near = folder / workload.trace.file
    if not near.is_file():
        return workload
    return workload.model_copy(update={"trace": workload.trace.model_copy(update={"file": str(near)})})


def find_trace(file: str, traces: Path | None) -> Path:
    """Where a trace file is. Raises ConfigError that lists where it was looked for."""
    named = os.environ.get(TRACES_VARIABLE)
    folders = [f for f in (traces, Path(named) if named else None, Path()) if f is not None]
    places = [folder / file for folder in folders]
    for place in places:
        if place.is_file():
            return place
    looked = ", ".join(map(str, places))
    message = f"trace.file: {file} is not there (looked for {looked}); say where traces are with --traces or {TRACES_VARIABLE}"
    raise ConfigError(message, key="trace.file", value=file, expected="a trace file")


def workload_trace(
    workload: Workload | TraceWorkload, classes: Sequence[SloClass], traces: Path | None = None, *, seed: int | None = None, round_: int = 0
) -> Trace:
    """The requests of one round as a trace, every one with a class of the topology. Raises ConfigError."""
    if isinstance(workload, Workload):
        planned = plan_round(workload, classes, workload.seed if seed is None else seed, round_)
        return Trace(workload.name, tuple(TraceRequest(p.due_s, p.input_tokens, p.output_tokens, p.slo_class) for p in planned))
    source = workload.trace
    raw = read_trace(find_trace(source.file, traces), source.format, seed=workload.seed if seed is None else seed, arm=source.arm)
    scaled = scale(raw, source.scaling())
    default = workload.slo_class or classes[0].name
    requests = tuple(r if r.slo_class is not None else replace(r, slo_class=default) for r in scaled.requests)
    known = [c.name for c in classes]
    for number, request in enumerate(requests):
        if request.slo_class not in known:
            hint = nearest(str(request.slo_class), known)
            key = "slo_class" if request.slo_class == default else f"request {number}: slo_class"
            raise ConfigError(key=key, value=request.slo_class, expected=f"a class of the topology: {hint}")
    return replace(scaled, name=workload.name, requests=requests)
