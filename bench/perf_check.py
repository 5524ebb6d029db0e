"""Predictions against end-to-end measurements that no constant was fitted on.

    python -m bench.perf_check --tables DIR [--table FILE] [--as GPU=KIN] [--json]

Reads from DIR, which is not part of this repository:

- measured_*.csv, as AIConfigurator publishes them: fixed lengths on one engine, by so many clients or at so many requests/s (columns
  system, model_path, precision, isl, osl, concurrency or request_rate, tp_size, silicon_ttft_ms, silicon_tpot_ms, all means; other names:
  COLUMNS, written in any case, and times in s as well as in ms where the column's name ends so). Without precision it is what the model's
  name says, else bf16; without tp_size it is gpus, else 1. What any row names of a GPU, a model or a type is found by its usual spellings;
  a row that cannot be simulated is left out, with the reason. `--table FILE` reads one table of any name. The tables do not say how the
  client was set up: 10 requests for each client, lengths within 20 % (fixed ones would keep requests in lockstep, which the measured TTFTs
  rule out), prompts in steps of 8,192 tokens (vLLM's own choice on large GPUs), KV in fp8 where the weights are (several rows would not
  fit otherwise) and no column kv_dtype says another.
- vllm_requests/GPU_MODEL_requests.csv: one open run, request by request, replayed at its own arrivals (--step-tokens, --max-seqs).

`--as GPU=KIN` computes GPU with the kernel constants that were fitted on KIN: what to expect of devices that nobody fitted.

10 ms stand between client and engine in both (HTTP, tokenizer, vLLM's own queues). Exit 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import random
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from disagg.config import SimulatedSettings
from disagg.errors import ConfigError
from disagg.perf.hardware import DEVICES, Device, Dtype, find_device
from disagg.perf.model_config import dtype_in_name, find_dtype
from disagg.perf.shapes import find_shape
from disagg.sim.closed_loop import Served, closed_loop, open_loop

REQUESTS_PER_CLIENT = 10
SPREAD = 0.2
OVERHEAD_S = 0.010
_TTFT = ("silicon_ttft", "ttft", "mean_ttft", "ttft_mean", "avg_ttft", "ttft_avg", "time_to_first_token", "mean_time_to_first_token")
_TPOT = ("silicon_tpot", "tpot", "mean_tpot", "tpot_mean", "avg_tpot", "tpot_avg", "time_per_output_token", "mean_time_per_output_token",
         "itl", "mean_itl", "itl_mean", "avg_itl", "inter_token_latency", "mean_inter_token_latency")  # fmt: skip
COLUMNS = {  # what a column is called here: what tables call it, in lower case and with _ between words
    "system": ("system", "gpu", "device", "gpu_name", "gpu_type", "accelerator", "hardware"),
    "model_path": ("model_path", "model", "model_name", "model_id"),
    "isl": ("isl", "input_tokens", "input_len", "input_length", "prompt_tokens", "prompt_len", "random_input_len", "mean_input_tokens"),
    "osl": ("osl", "output_tokens", "output_len", "output_length", "completion_tokens", "random_output_len", "mean_output_tokens"),
    "silicon_ttft_ms": tuple(f"{name}_ms" for name in _TTFT),
    "silicon_tpot_ms": tuple(f"{name}_ms" for name in _TPOT),
}
OPTIONAL = {
    "precision": ("precision", "gemm_quant_mode", "dtype", "weight_dtype", "quantization", "quant"),
    "concurrency": ("concurrency", "clients", "max_concurrency", "batch_size", "num_clients", "users"),
    "request_rate": ("request_rate", "rate", "qps", "rps", "request_rate_rps"),
    "tp_size": ("tp_size", "tp", "tensor_parallel_size", "tensor_parallel", "tp_degree", "gpus", "num_gpus"),
    "kv_dtype": ("kv_dtype", "kv_cache_dtype", "kvcache_quant_mode"),
}
_ONE_ONLY = ("pp_size", "pp", "dp", "dp_size", "attention_dp_size", "pipeline_parallel_size", "data_parallel_size")
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
        case = (
            f"{row['model_path']} {row['precision']} {row['system']} tp{row['tp_size'].removesuffix('.0')} {row['isl']}/{row['osl']} {load}"
        )
        try:
            ttft_ms, tpot_ms = (above_zero(row, key) for key in ("silicon_ttft_ms", "silicon_tpot_ms"))
            served = simulate_row(row)
        except (ConfigError, AssertionError) as error:
            print(f"left out: {case}: {error}", file=sys.stderr)
            continue
        yield Compared(case, "ttft", ttft_ms, 1e3 * statistics.mean(s.ttft_s for s in served))
        yield Compared(case, "tpot", tpot_ms, 1e3 * statistics.mean(_tpots(served)))


def table_rows(path: Path) -> Iterable[dict[str, str]]:
    """Rows of a table with the columns' names as here, times in ms. Raises ConfigError where one is missing."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        table = csv.DictReader(file, skipinitialspace=True)
        given = [_plain(name) for name in table.fieldnames or ()]
        table.fieldnames = given
        named = {ours: next((name for name in theirs if name in _in_ms(given)), None) for ours, theirs in (COLUMNS | OPTIONAL).items()}
        missing = [f"{ours} (or {', '.join(theirs[1:])})" for ours, theirs in COLUMNS.items() if named[ours] is None]
        if named["concurrency"] is None and named["request_rate"] is None:
            missing.append(f"concurrency (or {', '.join((*OPTIONAL['concurrency'][1:], *OPTIONAL['request_rate']))})")
        if missing:
            raise ConfigError(key=f"{path.name}: columns", value=", ".join(given), expected=f"also {'; '.join(missing)}")
        for row in table:
            ours = {key: "" if name is None else _value(row, name) for key, name in named.items()}
            ours["precision"] = ours["precision"] or dtype_in_name(ours["model_path"])
            yield {**{key: value or "" for key, value in row.items() if key}, **ours, "tp_size": ours["tp_size"] or "1"}


def _plain(name: str) -> str:
    """ "Mean TTFT (ms)" as mean_ttft_ms."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _in_ms(given: Sequence[str]) -> set[str]:
    """The columns that there are, with those in seconds under the names that they would have in ms."""
    return {*given, *(re.sub(r"_(s|sec|seconds)$", "_ms", name) for name in given)}


def _value(row: dict[str, str], name: str) -> str:
    """Of column `name`, in ms where the row has it in seconds."""
    if name in row:
        return (row[name] or "").strip()
    text = next(row[found] for unit in ("s", "sec", "seconds") if (found := f"{name.removesuffix('ms')}{unit}") in row)
    try:
        return str(1e3 * float(text))
    except (TypeError, ValueError):
        return (text or "").strip()


def above_zero(row: dict[str, str], key: str) -> float:
    """Raises ConfigError for anything but a number above 0."""
    try:
        value = float(row[key])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(key=key, value=row[key], expected="a number above 0")
    return value


def simulate_row(row: dict[str, str]) -> list[Served]:
    """What one row of a table is predicted to be."""
    for key in _ONE_ONLY:
        if row.get(key) and above_zero(row, key) != 1:
            raise ConfigError(key=key, value=row[key], expected="1: only tensor parallelism is modelled")
    inputs, outputs, tp = (round(above_zero(row, key)) for key in ("isl", "osl", "tp_size"))
    dtype = _dtype(row["precision"], "precision")
    kv = _dtype(row["kv_dtype"], "kv_dtype") if row.get("kv_dtype") not in (None, "", "auto") else "fp8" if dtype == "fp8" else "bf16"
    settings = SimulatedSettings(
        gpu=find_device(row["system"]).name,
        shape=find_shape(row["model_path"]).name,
        tp=tp,
        dtype=dtype,
        kv_dtype=kv,
        max_num_batched_tokens=CLOSED_STEP_TOKENS,
        max_model_len=2 * (inputs + outputs),
    )
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
