"""Measured tables of any tool: their headings, units and spellings, as rows with the names that `perf_check` computes with. Pure.

Headings are read in any case, with blanks, underscores, brackets or units around: "Mean TTFT (s)" and `silicon_ttft_ms` say the same. Times
may be in s, ms or us; of a latency the mean is taken, where there is none the median, and time per token may be told as its inverse,
tokens/s for each user. Numbers may have thousands separators and their unit behind them. Comma, semicolon, tab or | may separate cells,
and lines that begin with # are skipped.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from disagg.errors import ConfigError
from disagg.perf.model_config import dtype_in_name

COLUMNS = {  # what a column is called here: what tables call it, in lower case and with _ between words
    "system": ("system", "gpu", "device", "gpu_name", "gpu_type", "accelerator", "hardware", "hw"),
    "model_path": ("model_path", "model", "model_name", "model_id"),
    "isl": ("isl", "input_tokens", "input_len", "input_length", "prompt_tokens", "prompt_len", "prompt_length", "random_input_len",
            "mean_input_tokens", "num_input_tokens", "input_sequence_length"),
    "osl": ("osl", "output_tokens", "output_len", "output_length", "completion_tokens", "generated_tokens", "random_output_len",
            "mean_output_tokens", "num_output_tokens", "output_sequence_length"),
}  # fmt: skip
OPTIONAL = {
    "precision": ("precision", "gemm_quant_mode", "dtype", "weight_dtype", "quantization", "quant"),
    "concurrency": ("concurrency", "clients", "max_concurrency", "batch_size", "num_clients", "users", "conc", "con", "num_users"),
    "request_rate": ("request_rate", "rate", "qps", "rps", "request_rate_rps", "requests_per_second", "requests_s", "req_s"),
    "tp_size": ("tp_size", "tp", "tensor_parallel_size", "tensor_parallel", "tp_degree", "gpus", "num_gpus"),
    "pp_size": ("pp_size", "pp", "pipeline_parallel_size", "pipeline_parallel"),
    "dp_size": ("dp_size", "dp", "attention_dp_size", "attention_dp", "data_parallel_size", "data_parallel"),
    "ep_size": ("ep_size", "ep", "moe_ep_size", "moe_ep", "expert_parallel_size", "expert_parallel"),
    "parallel": ("parallel", "parallelism", "parallelization"),
    "lengths": ("isl_osl", "input_output", "input_output_tokens", "input_output_length"),
    "engine": ("backend", "engine", "framework", "inference_engine", "server"),
    "kv_dtype": ("kv_dtype", "kv_cache_dtype", "kvcache_quant_mode"),
}
# The two latencies: what their names come down to without unit, statistic and where they come from. In the order in which they count.
_LATENCIES = {
    "silicon_ttft_ms": ("ttft", "time_to_first_token", "first_token_latency"),
    "silicon_tpot_ms": ("tpot", "time_per_output_token", "itl", "inter_token_latency", "intertoken_latency", "time_between_tokens", "tbt"),
}
_PER_USER = ("tokens_s_user", "tok_s_user", "tps_user", "tps_per_user", "tokens_per_second_per_user", "tokens_per_s_per_user",
             "output_tokens_s_user", "output_tok_s_user", "interactivity")  # fmt: skip
_UNITS = {"ms": 1.0, "msec": 1.0, "millisecond": 1.0, "milliseconds": 1.0, "s": 1e3, "sec": 1e3, "secs": 1e3, "second": 1e3,
          "seconds": 1e3, "us": 1e-3, "usec": 1e-3, "microseconds": 1e-3}  # fmt: skip
_STATISTICS = {"mean": "mean", "avg": "mean", "average": "mean", "median": "median", "p50": "median"}
_SOURCES = frozenset(("silicon", "measured", "actual", "real", "observed"))
_NUMBER = re.compile(r"([+-]?(?:\d{1,3}(?:[,_ ]\d{3})+|\d+)?(?:\.\d+)?(?:e[+-]?\d+)?)\s*([a-z]*)", re.IGNORECASE)
_WAYS = re.compile(r"(tp|pp|dp|ep)[ _=:-]*(\d+)", re.IGNORECASE)
_COUNT = re.compile(r"^(\d+) ?[x×*] ?(?=[a-z])|[ _-][x×*] ?(\d+)$", re.IGNORECASE)


def table_rows(path: Path) -> Iterable[dict[str, str]]:
    """Rows of a table with the columns' names as here, latencies in ms. Raises ConfigError where a column is missing, with what there is.

    `medians` of a row names those latencies that are medians; others are means. A cell that is no number stays as it is.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip() and not line.startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(key=str(path), expected=f"a table as text ({error})") from error
    head = lines[0] if lines else ""
    delimiter = max(",;\t|", key=head.count)
    if delimiter == "|":  # Markdown's: bars at both ends, and a line of dashes
        lines = [line.strip().strip("|") for line in lines if not set(line) <= set("|-: ")]
    table = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True)
    given = [_plain(name) for name in table.fieldnames or ()]
    table.fieldnames = given
    named = {ours: next((name for name in theirs if name in given), None) for ours, theirs in (COLUMNS | OPTIONAL).items()}
    times = _times(given)
    per_user = next((name for name in _PER_USER if name in given), None)
    _check(path, given, named, {*times, *(["silicon_tpot_ms"] if per_user else [])})
    for cells in table:
        row = {key: value.strip() for key, value in cells.items() if key and isinstance(value, str)}
        ours = {key: "" if name is None else row.get(name, "") for key, name in named.items()}
        ours |= {key: _scaled(row.get(name, ""), scale) for key, (name, scale, _) in times.items()}
        if per_user and not ours.get("silicon_tpot_ms"):
            ours["silicon_tpot_ms"] = _inverse(row.get(per_user, ""))
        medians = [key for key, (_, _, statistic) in times.items() if statistic == "median"]
        yield {**row, **_completed(ours), "medians": " ".join(medians)}


def _check(path: Path, given: list[str], named: Mapping[str, str | None], times: set[str]) -> None:
    needed = [ours for ours in COLUMNS if not (named["lengths"] and ours in ("isl", "osl"))]
    missing = [f"{ours} (or {', '.join(COLUMNS[ours][1:])})" for ours in needed if named[ours] is None]
    for ours, bases in _LATENCIES.items():
        if ours not in times:
            unitless = next((name for name in given if _latency(name)[0] in bases), None)
            hint = f"the column {unitless} with a unit, {unitless}_ms or {unitless}_s" if unitless else f"{bases[0]}_ms, mean_{bases[0]}_s"
            missing.append(f"{ours} (or {hint})")
    if named["concurrency"] is None and named["request_rate"] is None:
        missing.append(f"concurrency (or {', '.join((*OPTIONAL['concurrency'][1:], *OPTIONAL['request_rate']))})")
    if missing:
        raise ConfigError(key=f"{path.name}: columns", value=", ".join(given), expected=f"also {'; '.join(missing)}")


def _times(given: list[str]) -> dict[str, tuple[str, float, str]]:
    """(column, its unit in ms, statistic) of each latency that has a unit: means before medians, and those said to be before others."""
    found = {}
    for ours, bases in _LATENCIES.items():
        read = [(name, *_latency(name)) for name in given]
        columns = [(s == "median", bases.index(base), not is_said, name, scale, s)
                   for name, base, scale, s, is_said in read if base in bases and scale and s]  # fmt: skip
        if columns:
            found[ours] = min(columns)[3:]
    return found


def _latency(column: str) -> tuple[str, float, str, bool]:
    """(what it is, its unit in ms or 0, mean or median or "" for another, whether it says that)."""
    unit, statistic, is_said, rest = 0.0, "mean", False, []
    for word in column.split("_"):
        if word in _UNITS and not unit:
            unit = _UNITS[word]
        elif word in _STATISTICS or re.fullmatch(r"p\d+|std|stdev|min|max|stddev", word):
            statistic, is_said = _STATISTICS.get(word, ""), True
        elif word not in _SOURCES:
            rest.append(word)
    return "_".join(rest), unit, statistic, is_said


def _completed(ours: dict[str, str]) -> dict[str, str]:
    """What one cell says for several: `TP8 EP8`, `1024/128`, `8xH100`; and what a row may leave out."""
    for way, number in _WAYS.findall(ours["parallel"]):
        key = f"{way.lower()}_size"
        ours[key] = ours[key] or number
    lengths = re.split(r"\s*[/|:x]\s*", ours["lengths"])
    if len(lengths) == 2:
        ours["isl"], ours["osl"] = ours["isl"] or lengths[0], ours["osl"] or lengths[1]
    count = _COUNT.search(ours["system"])
    if count is not None:
        ours["system"] = _COUNT.sub("", ours["system"]).strip(" _-")
        ours["tp_size"] = ours["tp_size"] or count[1] or count[2]
    ours["tp_size"] = ours["tp_size"] or "1"
    ours["precision"] = ours["precision"] or dtype_in_name(ours["model_path"])
    for key in ("isl", "osl", "concurrency", "request_rate", "tp_size", "pp_size", "dp_size", "ep_size"):
        ours[key] = plain_number(ours[key])
    return ours


def _plain(name: str) -> str:
    """ "Mean TTFT (ms)" as mean_ttft_ms."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower().replace("µ", "u")).strip("_")


def plain_number(text: str) -> str:
    """ "1,024" as 1024 and "8k" as 8192; what is no such number as it is."""
    found = _NUMBER.fullmatch(text.strip())
    if found is None or not found[1] or found[2].lower() not in ("", "k"):
        return text
    digits = re.sub(r"[,_ ]", "", found[1])
    return digits if not found[2] else f"{float(digits) * 1024:g}"


def _scaled(text: str, scale: float) -> str:
    """A latency in ms, of a number in the column's unit or in the one that stands behind it; what is no number as it is."""
    found = _NUMBER.fullmatch(text.strip())
    if found is None or not found[1] or (found[2] and found[2].lower() not in _UNITS):
        return text
    digits = re.sub(r"[,_ ]", "", found[1])
    factor = _UNITS[found[2].lower()] if found[2] else scale
    return digits if factor == 1 else str(factor * float(digits))


def _inverse(text: str) -> str:
    """Tokens/s of one user as ms for each token."""
    try:
        return str(1e3 / float(plain_number(text)))
    except (ValueError, ZeroDivisionError):
        return text


def above_zero(row: Mapping[str, str], key: str) -> float:
    """Raises ConfigError for anything but a number above 0."""
    try:
        value = float(row[key])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(key=key, value=row[key], expected="a number above 0")
    return value
