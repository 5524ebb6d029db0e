"""Predictions against end-to-end measurements that no constant was fitted on.

    python -m bench.perf_check --tables DIR [--table FILE] [--as GPU=KIN] [--json]

Reads from DIR, which is not part of this repository:

- measured_*.csv, as AIConfigurator publishes them: fixed lengths on one engine, by so many clients or at so many requests/s (columns
  system, model_path, precision, isl, osl, concurrency or request_rate, tp_size, silicon_ttft_ms, silicon_tpot_ms, all means; other
  headings, units and separators: perf_tables.py). Without precision it is what the model's name says, else bf16; without tp_size it is
  gpus, else what the GPU's name says (8xH100), else 1. What any row names of a GPU, a model or a type is found by its usual spellings; a
  row that cannot be simulated (pipeline or data parallelism, experts over more devices than tensors) is left out, with the reason.
  Whatever engine was measured, vLLM is computed. `--table FILE` reads one table of any name. The tables do not say how the client was set
  up: 10 requests for each client, lengths within 20 % (fixed ones would keep requests in lockstep, which the measured TTFTs rule out),
  prompts in steps of 8,192 tokens (vLLM's own choice on large GPUs), KV in fp8 where the weights are (several rows would not fit
  otherwise) and no column kv_dtype says another.
- vllm_requests/GPU_MODEL_requests.csv: one open run, request by request, replayed at its own arrivals (--step-tokens, --max-seqs).

`--as GPU=KIN` computes GPU with the kernel constants that were fitted on KIN: what to expect of devices that nobody fitted.

10 ms stand between client and engine in both (HTTP, tokenizer, vLLM's own queues). Exit 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import random
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.perf_tables import above_zero, table_rows
from disagg.config import SimulatedSettings, validated
from disagg.errors import ConfigError
from disagg.perf.hardware import DEVICES, Device, Dtype, find_device
from disagg.perf.model_config import dtype_in_name, find_dtype
from disagg.perf.shapes import find_shape
from disagg.sim.closed_loop import Served, closed_loop, open_loop

REQUESTS_PER_CLIENT = 10
SPREAD = 0.2
OVERHEAD_S = 0.010
OPEN_REQUESTS = 400  # of a row that says a rate
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
        load = f"x{row['concurrency'].removesuffix('.0')}" if row["concurrency"] else f"at {row['request_rate']}/s"
        engine = f" {row['engine']}" if row["engine"].lower() not in ("", "vllm") else ""
        tp, lengths = row["tp_size"].removesuffix(".0"), f"{row['isl']}/{row['osl']}"
        case = f"{row['model_path']} {row['precision']} {row['system']}{engine} tp{tp} {lengths} {load}"
        try:
            ttft_ms = above_zero(row, "silicon_ttft_ms")
            tpot_ms = above_zero(row, "silicon_tpot_ms") if above_zero(row, "osl") > 1 else None
            served = simulate_row(row)
        except (ConfigError, AssertionError) as error:
            print(f"left out: {case}: {error}", file=sys.stderr)
            continue
        yield Compared(case, "ttft", ttft_ms, 1e3 * _middle(row, "silicon_ttft_ms", [s.ttft_s for s in served]))
        if tpot_ms is not None and (tpots := _tpots(served)):
            yield Compared(case, "tpot", tpot_ms, 1e3 * _middle(row, "silicon_tpot_ms", tpots))


def _middle(row: Mapping[str, str], key: str, values: Sequence[float]) -> float:
    """What the table gives of `key`: a mean, or a median."""
    return statistics.median(values) if key in row["medians"] else statistics.mean(values)


def simulate_row(row: Mapping[str, str]) -> list[Served]:
    """What one row of a table is predicted to be. Raises ConfigError for what cannot be simulated."""
    for key in ("pp_size", "dp_size"):
        if row.get(key) and above_zero(row, key) != 1:
            raise ConfigError(key=key, value=row[key], expected="1: only tensor parallelism is modelled")
    inputs, outputs, tp = (round(above_zero(row, key)) for key in ("isl", "osl", "tp_size"))
    if row.get("ep_size") and above_zero(row, "ep_size") > tp:
        raise ConfigError(key="ep_size", value=row["ep_size"], expected=f"at most tp_size, {tp}: only tensor parallelism is modelled")
    dtype = _dtype(row["precision"], "precision")
    kv = _dtype(row["kv_dtype"], "kv_dtype") if row.get("kv_dtype") not in (None, "", "auto") else "fp8" if dtype == "fp8" else "bf16"
    given = {
        "gpu": find_device(row["system"]).name,
        "shape": find_shape(row["model_path"]).name,
        "tp": tp,
        "dtype": dtype,
        "kv_dtype": kv,
        "max_num_batched_tokens": CLOSED_STEP_TOKENS,
        "max_model_len": 2 * (inputs + outputs),
    }
    settings = validated(SimulatedSettings, given, "row")
    if row.get("concurrency"):
        clients = round(above_zero(row, "concurrency"))
        return closed_loop(settings, inputs, outputs, clients, clients * REQUESTS_PER_CLIENT, spread=SPREAD, overhead_s=OVERHEAD_S)
    rate_rps, rng = above_zero(row, "request_rate"), random.Random(0)
    gaps = itertools.accumulate(rng.expovariate(rate_rps) for _ in range(OPEN_REQUESTS))
    return open_loop(settings, [(at_s, inputs, outputs) for at_s in gaps], OVERHEAD_S)


def borrowed(own: Device, kin: Device) -> Device:
    """`own` with its peaks and memory, and the shares of them that `kin`'s kernels reach."""
    return replace(
        own,
        bf16=replace(kin.bf16, flops=own.bf16.flops),
        fp8=replace(kin.fp8, flops=own.fp8.flops),
        attention=kin.attention,
        fabric=kin.fabric,
    )


def _dtype(name: str, key: str) -> Dtype:
    """Also where more follows the type: "fp8_static" is fp8."""
    try:
        return find_dtype(name, key)
    except ConfigError:
        if "_" not in name:
            raise
        return find_dtype(name.split("_")[0], key)


def open_rows(path: Path, step_tokens: int, max_seqs: int) -> Iterable[Compared]:
    """Mean and p99 of TTFT and TPOT of one run. The file's name says GPU and model, and a degree above 1: H100_Llama-3.1-70B-tp4."""
    gpu, _, model = path.stem.removesuffix("_requests").partition("_")
    degree = re.search(r"[-_]tp(\d+)$", model, re.IGNORECASE)
    model = model[: degree.start()] if degree else model
    with path.open(newline="", encoding="utf-8-sig") as file:
        table = csv.DictReader(file)
        rows = list(table)
    wanted = ("arrival_s", "input_toks", "output_toks", "ttft_ms", "tpot_ms")
    if not rows or not set(wanted) <= set(table.fieldnames or ()):
        raise ConfigError(key="columns", value=", ".join(table.fieldnames or ()), expected=f"rows with {', '.join(wanted)}")
    settings = SimulatedSettings(
        gpu=find_device(gpu).name,
        shape=find_shape(model).name,
        tp=int(degree[1]) if degree else 1,
        dtype=_dtype(dtype_in_name(model), "model"),
        max_num_batched_tokens=step_tokens,
        max_num_seqs=max_seqs,
    )
    arrivals = sorted((float(r["arrival_s"]), int(r["input_toks"]), int(r["output_toks"])) for r in rows)
    served = open_loop(settings, arrivals, OVERHEAD_S)
    measured = {"ttft": [float(r["ttft_ms"]) for r in rows], "tpot": [float(r["tpot_ms"]) for r in rows if r["tpot_ms"]]}
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


def _arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parsed and checked; a device that `--as` gives other kernels has them from now on."""
    parser.add_argument("--tables", type=Path, help="folder of the measured tables")
    parser.add_argument("--table", type=Path, action="append", default=[], help="one closed-loop table of any name; repeatable")
    parser.add_argument("--json", action="store_true", help="rows and verdicts as JSON")
    parser.add_argument("--step-tokens", type=int, default=2048, help="max_num_batched_tokens of the open runs")
    parser.add_argument("--max-seqs", type=int, default=128, help="max_num_seqs of the open runs")
    parser.add_argument("--as", dest="kin", metavar="GPU=KIN", help="compute GPU with the kernel constants of KIN")
    args = parser.parse_args()
    if args.tables is None and not args.table:
        parser.error("--tables DIR or --table FILE is needed")
    for path in (*args.table, *([args.tables] if args.tables else [])):
        if not path.exists():
            parser.error(f"{path} does not exist")
    if args.kin:
        try:
            own, kin = (find_device(name) for name in args.kin.partition("=")[::2])
        except ConfigError as error:
            parser.error(f"--as: {error}")
        DEVICES[own.name] = borrowed(own, kin)
    return args


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args = _arguments(parser)
    rows: list[Compared] = []
    verdicts: list[dict[str, Any]] = []
    tables = [*args.table, *(sorted(args.tables.glob("measured_*.csv")) if args.tables else [])]
    for path in tables:
        try:
            found = list(closed_rows(path))
        except ConfigError as error:
            parser.error(str(error))
        rows += found
        verdicts += judge(path.stem, found, CLOSED_BOUNDS)
    for path in sorted(args.tables.glob("vllm_requests/*_requests.csv")) if args.tables else []:
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
