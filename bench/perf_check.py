"""Predictions against end-to-end measurements that no constant was fitted on.

    python -m bench.perf_check --tables DIR [--json]

Reads from DIR, which is not part of this repository:

- measured_*.csv, as AIConfigurator publishes them: closed loops of fixed lengths on one engine (columns system, model_path, precision,
  isl, osl, concurrency, tp_size, silicon_ttft_ms, silicon_tpot_ms, all means; other names of theirs: COLUMNS). What any row names of a GPU,
  a model or a type is found by its usual spellings; a row that cannot be simulated is left out, with the reason. The tables do
  not say how the client was set up: 10 requests for each client, lengths within 20 % (fixed ones would keep requests in lockstep, which
  the measured TTFTs rule out), prompts in steps of 8,192 tokens (vLLM's own choice on large GPUs), KV in fp8 where the weights are
  (several rows would not fit otherwise).
- vllm_requests/GPU_MODEL_requests.csv: one open run, request by request, replayed at its own arrivals (--step-tokens, --max-seqs).

10 ms stand between client and engine in both (HTTP, tokenizer, vLLM's own queues). Exit 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from disagg.config import SimulatedSettings
from disagg.errors import ConfigError
from disagg.perf.hardware import find_device
from disagg.perf.model_config import find_dtype
from disagg.perf.shapes import find_shape
from disagg.sim.closed_loop import Served, closed_loop, open_loop

REQUESTS_PER_CLIENT = 10
SPREAD = 0.2
OVERHEAD_S = 0.010
COLUMNS = {  # what a column is called here: what tables call it
    "system": ("system", "gpu", "device"),
    "model_path": ("model_path", "model"),
    "precision": ("precision", "gemm_quant_mode", "dtype"),
    "isl": ("isl", "input_tokens", "input_len"),
    "osl": ("osl", "output_tokens", "output_len"),
    "concurrency": ("concurrency", "clients"),
    "tp_size": ("tp_size", "tp"),
    "silicon_ttft_ms": ("silicon_ttft_ms", "ttft_ms", "mean_ttft_ms"),
    "silicon_tpot_ms": ("silicon_tpot_ms", "tpot_ms", "mean_tpot_ms"),
}
CLOSED_STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure: `error` is predicted / measured - 1."""

    case: str
    figure: str
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def closed_rows(path: Path) -> Iterable[Compared]:
    """Two figures for each row of a table that can be simulated; a row that cannot is said on standard error."""
    for row in table_rows(path):
        case = f"{row['model_path']} {row['precision']} {row['system']} tp{row['tp_size'].removesuffix('.0')} "
        case += f"{row['isl']}/{row['osl']} x{row['concurrency'].removesuffix('.0')}"
        try:
            ttft_ms, tpot_ms = (above_zero(row, key) for key in ("silicon_ttft_ms", "silicon_tpot_ms"))
            served = simulate_closed(row)
        except (ConfigError, AssertionError) as error:
            print(f"left out: {case}: {error}", file=sys.stderr)
            continue
        yield Compared(case, "ttft", ttft_ms, 1e3 * statistics.mean(s.ttft_s for s in served))
        yield Compared(case, "tpot", tpot_ms, 1e3 * statistics.mean(_tpots(served)))


def table_rows(path: Path) -> Iterable[dict[str, str]]:
    """Rows of a table with the columns' names as here. Raises ConfigError where one is missing."""
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        given = [name.strip() for name in table.fieldnames or ()]
        table.fieldnames = given
        named = {ours: next((name for name in theirs if name in given), None) for ours, theirs in COLUMNS.items()}
        if missing := [f"{ours} (or {', '.join(COLUMNS[ours][1:])})" for ours, name in named.items() if name is None]:
            raise ConfigError(key=f"{path.name}: columns", value=", ".join(given), expected=f"also {'; '.join(missing)}")
        for row in table:
            yield {**row, **{ours: (row[name] or "").strip() for ours, name in named.items() if name is not None}}


def above_zero(row: dict[str, str], key: str) -> float:
    """Raises ConfigError for anything but a number above 0."""
    try:
        value = float(row[key])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(key=key, value=row[key], expected="a number above 0")
    return value


def simulate_closed(row: dict[str, str]) -> list[Served]:
    if float(row.get("pp_size") or 1) != 1:
        raise ConfigError(key="pp_size", value=row["pp_size"], expected="1: pipeline parallelism is not modelled")
    clients, inputs, outputs, tp = (round(above_zero(row, key)) for key in ("concurrency", "isl", "osl", "tp_size"))
    dtype = find_dtype(row["precision"].split("_")[0], "precision")
    settings = SimulatedSettings(
        gpu=find_device(row["system"].replace("_", " ")).name,
        shape=find_shape(row["model_path"]).name,
        tp=tp,
        dtype=dtype,
        kv_dtype="fp8" if dtype == "fp8" else "bf16",
        max_num_batched_tokens=CLOSED_STEP_TOKENS,
        max_model_len=2 * (inputs + outputs),
    )
    return closed_loop(settings, inputs, outputs, clients, clients * REQUESTS_PER_CLIENT, spread=SPREAD, overhead_s=OVERHEAD_S)


def open_rows(path: Path, step_tokens: int, max_seqs: int) -> Iterable[Compared]:
    """Mean and p99 of TTFT and TPOT of one run. The file's name says GPU and model."""
    gpu, model = path.stem.removesuffix("_requests").split("_", 1)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    settings = SimulatedSettings(
        gpu=find_device(gpu).name,
        shape=find_shape(model).name,
        tp=1,
        max_num_batched_tokens=step_tokens,
        max_num_seqs=max_seqs,
    )
    arrivals = [(float(r["arrival_s"]), int(r["input_toks"]), int(r["output_toks"])) for r in rows]
    served = open_loop(settings, arrivals, OVERHEAD_S)
    measured = {"ttft": [float(r["ttft_ms"]) for r in rows], "tpot": [float(r["tpot_ms"]) for r in rows]}
    predicted = {"ttft": [1e3 * s.ttft_s for s in served], "tpot": [1e3 * t for t in _tpots(served)]}
    for figure in ("ttft", "tpot"):
        ours, theirs = np.array(predicted[figure]), np.array(measured[figure])
        yield Compared(path.stem, f"{figure} mean", float(theirs.mean()), float(ours.mean()))
        yield Compared(path.stem, f"{figure} p99", float(np.quantile(theirs, 0.99)), float(np.quantile(ours, 0.99)))


def _tpots(served: Sequence[Served]) -> list[float]:
    return [s.tpot_s for s in served if s.tpot_s is not None]


# What is promised: median over the rows of a closed-loop table, and each figure of an open run.
CLOSED_BOUNDS = {"ttft": 0.20, "tpot": 0.10}
OPEN_BOUNDS = {"ttft mean": 0.15, "ttft p99": 0.25, "tpot mean": 0.08, "tpot p99": 0.25}


def judge(name: str, rows: Sequence[Compared], bounds: dict[str, float]) -> list[dict[str, Any]]:
    found = []
    for figure, bound in bounds.items():
        errors = [row.error for row in rows if row.figure == figure]
        if errors:
            median = statistics.median(abs(e) for e in errors)
            found.append(
                {
                    "table": name, "figure": figure, "rows": len(errors), "median_error": round(median, 4),
                    "median_bias": round(statistics.median(errors), 4), "bound": bound, "holds": median <= bound,
                }
            )  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="folder of the measured tables")
    parser.add_argument("--json", action="store_true", help="rows and verdicts as JSON")
    parser.add_argument("--step-tokens", type=int, default=2048, help="max_num_batched_tokens of the open runs")
    parser.add_argument("--max-seqs", type=int, default=128, help="max_num_seqs of the open runs")
    args = parser.parse_args()
    rows: list[Compared] = []
    verdicts: list[dict[str, Any]] = []
    tables = sorted(args.tables.glob("measured_*.csv"))
    for path in tables:
        try:
            found = list(closed_rows(path))
        except ConfigError as error:
            parser.error(str(error))
        rows += found
        verdicts += judge(path.stem, found, CLOSED_BOUNDS)
    for path in sorted(args.tables.glob("vllm_requests/*_requests.csv")):
        try:
            found = list(open_rows(path, args.step_tokens, args.max_seqs))
        except ConfigError as error:
            parser.error(f"{path.name}: {error}")
        rows += found
        verdicts += judge(path.stem, found, OPEN_BOUNDS)
    if not rows and tables:
        parser.error(f"no row of {', '.join(path.name for path in tables)} could be simulated; what stands above says why")
    if not rows:
        parser.error(f"{args.tables} has neither measured_*.csv nor vllm_requests/*_requests.csv")
    if args.json:
        shown = [{"case": r.case, "figure": r.figure, "measured_ms": r.measured_ms, "predicted_ms": r.predicted_ms} for r in rows]
        print(json.dumps({"rows": shown, "verdicts": verdicts}, indent=1))
    else:
        for row in rows:
            print(
                f"{row.case:<64} {row.figure:<9} measured {row.measured_ms:10,.2f} predicted {row.predicted_ms:10,.2f} ms {row.error:+7.1%}"
            )
        for v in verdicts:
            print(
                f"{v['table']}: {v['figure']}: median |error| {v['median_error']:.1%} of {v['rows']} (bias {v['median_bias']:+.1%}), "
                f"bound {v['bound']:.0%}: {'holds' if v['holds'] else 'MISSED'}"
            )
    return 0 if all(v["holds"] for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
