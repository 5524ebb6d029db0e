"""Readers of trace files, plain or gzip: five formats, recognised by their header line or first object.

    azure      CSV    TIMESTAMP (date and time, seven fractional digits), ContextTokens, GeneratedTokens
    mooncake   JSONL  timestamp (ms), input_length, output_length, hash_ids (one per block of the prompt)
    burstgpt   CSV    Timestamp (s), Request tokens, Response tokens, ...
    servegen   CSV    arrival_s, input_tokens, output_tokens, ...
    rows       JSONL  our own requests.jsonl: one arm's first round at one rate, with the lengths that were asked for

Every fault is a ConfigError that names file, line and column. Rows are sorted by arrival; the first instant of azure's clock becomes 0,
the others count from their own zero.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import itertools
import json
import math
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from disagg.errors import ConfigError, shorten
from disagg.trace import Trace, TraceRequest

TraceFormat = Literal["azure", "mooncake", "burstgpt", "servegen", "rows"]

COARSE_CLOCK_S = 1.0  # a clock whose distinct readings are all at least this far apart was rounded
MAX_TOKENS = 100_000_000
_INSTANT = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]+))?(Z|[+-][0-9]{2}:?[0-9]{2})?")
_BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class _Cell:
    """One value of a file and where it stands; parsing it raises the error that says so."""

    path: Path
    line: int
    column: str
    value: Any

    def fault(self, expected: str) -> ConfigError:
        message = f"{self.path}: line {self.line}, column {self.column}: got {shorten(self.value)}, expected {expected}"
        return ConfigError(message, key=f"line {self.line}, column {self.column}", value=self.value, expected=expected)

    def tokens(self) -> int:
        """A positive whole number."""
        number = self._number()
        if not (1 <= number <= MAX_TOKENS and number == int(number)):
            raise self.fault("a whole number of tokens, 1 or more")
        return int(number)

    def seconds(self, unit_s: float = 1.0) -> float:
        """A non-negative number of `unit_s`."""
        number = self._number()
        if not (number >= 0 and math.isfinite(number)):
            raise self.fault("a finite number, 0 or more")
        return number * unit_s

    def instant_s(self) -> float:
        """A date and time with up to seven fractional digits, as seconds; the seventh digit (100 ns) counts. UTC where it has no offset."""
        found = _INSTANT.fullmatch(str(self.value).strip())
        try:
            whole, digits, offset = found.groups() if found is not None else ("", None, None)
            moment = datetime.fromisoformat(whole + (offset or "").replace("Z", "+00:00"))
            return (moment if offset else moment.replace(tzinfo=UTC)).timestamp() + float(f"0.{digits or 0}")
        except (ValueError, OverflowError):
            raise self.fault("a date and time like 2023-11-16 18:15:46.6805900") from None

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            raise self.fault("a name")
        return self.value

    def hashes(self) -> tuple[int, ...]:
        ids = self.value
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self.fault("a list of whole numbers, one per block of the prompt")
        return tuple(ids)

    def _number(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float | str):
            raise self.fault("a number")
        try:
            return float(self.value)
        except (ValueError, OverflowError):
            raise self.fault("a number") from None


def read_trace(path: str | Path, format: TraceFormat | None = None, *, seed: int = 0, arm: str | None = None) -> Trace:  # noqa: A002
    """The trace in a file. `format`: None recognises it. `seed`: of arrivals spread inside the steps of a rounded clock.

    `arm`: which arm of a requests.jsonl (None: that of its first row). Raises ConfigError naming file, line and column.
    """
    file = Path(path)
    with _opened(file) as lines:
        first = next(lines, "")
        kind = format or _recognised(file, first)
        if kind not in get_args(TraceFormat):
            raise ConfigError(key="format", value=kind, expected=f"one of {', '.join(get_args(TraceFormat))}")
        rows = itertools.chain([first], lines)
        trace = _READERS[kind](file, rows, seed) if kind != "rows" else _read_rows(file, rows, arm)
    if not trace.requests:
        raise ConfigError(f"{file}: line 1: the trace has no request", key="line 1", expected="at least one request")
    return replace(trace, requests=tuple(sorted(trace.requests, key=lambda r: r.arrival_s)))


@contextmanager
def _opened(path: Path) -> Iterator[Iterator[str]]:
    """The file's lines, one by one; what goes wrong with the file itself becomes a ConfigError."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else path.open("rb") as stream:
            yield _decoded(path, stream)
    except FileNotFoundError:
        raise ConfigError(f"trace file {path} does not exist", key="file", value=str(path), expected="a trace file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: {error}", key=str(path), expected="a readable trace file, whole") from error


def _decoded(path: Path, lines: Iterable[bytes]) -> Iterator[str]:
    """Lines as text, without the byte order mark that spreadsheets begin a file with."""
    for number, line in enumerate(lines, start=1):
        try:
            yield (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode()
        except UnicodeDecodeError as error:
            at = f"line {number}, byte {error.start + 1}"
            raise ConfigError(f"{path}: {at}: not UTF-8 text", key=at, value=line, expected="a text file, or gzip of one") from error


def _recognised(path: Path, first: str) -> TraceFormat:
    if not first.strip():
        said = "is empty" if not first else "begins with an empty line"
        raise ConfigError(f"{path}: line 1: the file {said}", key="line 1", value=first, expected="a header, or one JSON object a line")
    if first.lstrip().startswith("{"):
        keys = _object(path, 1, first).keys()
        if {"timestamp", "input_length"} <= keys:
            return "mooncake"
        if {"due_s", "input_tokens"} <= keys:
            return "rows"
        columns = sorted(keys)
    else:
        columns = _header(path, csv.reader([first]))
        for kind, needed in _CSV_COLUMNS.items():
            if set(needed) <= set(columns):
                return kind
    expected = "; ".join(f"{kind}: {', '.join(needed)}" for kind, needed in _COLUMNS.items())
    message = f"{path}: line 1: no known trace has the columns {shorten(columns)}; known are {expected}"
    raise ConfigError(message, key="line 1", value=columns, expected=expected)


# ---- CSV


def _header(path: Path, reader: Iterator[list[str]]) -> list[str]:
    try:
        return [c.strip() for c in next(reader, [])]
    except csv.Error as error:
        raise ConfigError(f"{path}: line 1: {error}", key="line 1", expected="CSV") from error


def _csv_cells(path: Path, lines: Iterator[str], kind: TraceFormat) -> Iterator[Mapping[str, _Cell]]:
    """Each row's needed cells by column. Empty lines are skipped."""
    reader = csv.reader(lines)
    header = _header(path, reader)
    places = {}
    for column in _CSV_COLUMNS[kind]:
        if column not in header:
            message = f"{path}: line 1, column {column}: missing; a trace of format {kind} needs {', '.join(_CSV_COLUMNS[kind])}"
            raise ConfigError(message, key=f"line 1, column {column}", value=header, expected=", ".join(_CSV_COLUMNS[kind]))
        places[column] = header.index(column)
    try:
        for row in reader:
            if row:
                at = reader.line_num
                if any(cell.strip() for cell in row[len(header) :]):  # 1,234 without quotes: what follows is in the wrong column
                    message = f"{path}: line {at}, column {len(header) + 1}: {len(row)} cells, the header names {len(header)}"
                    raise ConfigError(message, key=f"line {at}, column {len(header) + 1}", value=row, expected=f"{len(header)} cells")
                yield {c: _Cell(path, at, c, row[i] if i < len(row) else None) for c, i in places.items()}
    except csv.Error as error:
        raise ConfigError(f"{path}: line {reader.line_num}: {error}", key=f"line {reader.line_num}", expected="CSV") from error


def _read_azure(path: Path, lines: Iterator[str], seed: int) -> Trace:
    rows = [
        (cells["TIMESTAMP"].instant_s(), cells["ContextTokens"].tokens(), cells["GeneratedTokens"].tokens())
        for cells in _csv_cells(path, lines, "azure")
    ]
    begin_s = min((at for at, _, _ in rows), default=0.0)
    # Instants of 1.7e9 s keep 0.2 us as floats: enough beside the clock's 0.1 us, and exact to the digit that is printed.
    return Trace(_stem(path), tuple(TraceRequest(round(at - begin_s, 7), given, wanted) for at, given, wanted in rows))


def _read_burstgpt(path: Path, lines: Iterator[str], seed: int) -> Trace:
    """A response of 0 tokens is a request that failed when it was recorded: it is left out, and counted in the notes."""
    requests, failed = [], 0
    for cells in _csv_cells(path, lines, "burstgpt"):
        answer = cells["Response tokens"]
        if str(answer.value).strip() == "0":
            failed += 1
            continue
        requests.append(TraceRequest(cells["Timestamp"].seconds(), cells["Request tokens"].tokens(), answer.tokens()))
    notes = (f"{failed} requests without an answer left out",) if failed else ()
    spread, said = _spread(requests, seed)
    return Trace(_stem(path), spread, notes=(*notes, *said))


def _read_servegen(path: Path, lines: Iterator[str], seed: int) -> Trace:
    rows = _csv_cells(path, lines, "servegen")
    return Trace(
        _stem(path),
        tuple(TraceRequest(c["arrival_s"].seconds(), c["input_tokens"].tokens(), c["output_tokens"].tokens()) for c in rows),
    )


# ---- JSON lines


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        column = getattr(error, "colno", 1)
        message = f"{path}: line {number}, column {column}: not JSON: {error}"
        raise ConfigError(message, key=f"line {number}, column {column}", value=line, expected="one JSON object a line") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: line {number}: got {shorten(found)}, expected one JSON object", key=f"line {number}", value=found)
    return found


def _objects(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, _object(path, number, line)


def _cell(path: Path, number: int, row: Mapping[str, Any], column: str) -> _Cell:
    if column not in row:
        message = f"{path}: line {number}, column {column}: missing"
        raise ConfigError(message, key=f"line {number}, column {column}", value=sorted(row), expected="a value")
    return _Cell(path, number, column, row[column])


def _read_mooncake(path: Path, lines: Iterator[str], seed: int) -> Trace:
    requests, ids = [], []
    for number, row in _objects(path, lines):
        cells = {c: _cell(path, number, row, c) for c in ("timestamp", "input_length", "output_length")}
        hashes = _cell(path, number, row, "hash_ids") if "hash_ids" in row else None
        given = cells["input_length"].tokens()
        blocks = () if hashes is None else hashes.hashes()
        if hashes is not None:
            ids.append((hashes, given, len(blocks)))
        requests.append(TraceRequest(cells["timestamp"].seconds(1e-3), given, cells["output_length"].tokens(), None, blocks))
    spread, said = _spread(requests, seed)
    return Trace(_stem(path), spread, prefix_block_tokens=_block_tokens(ids), notes=said)


def _block_tokens(ids: Sequence[tuple[_Cell, int, int]]) -> int:
    """Tokens per identity: the block size by which every prompt has as many identities as blocks."""
    fitting = list(_BLOCK_SIZES)
    for cell, given, count in ids:
        fitting = [size for size in fitting if -(-given // size) == count]
        if not fitting:
            raise cell.fault(f"one identity per block of {given} tokens, with one block size of {_BLOCK_SIZES} in the whole file")
    return fitting[0] if ids else 0


def _read_rows(path: Path, lines: Iterator[str], arm: str | None) -> Trace:
    """Each request once: rows of one arm, at the first rate and in the first round that the file has of it."""
    requests = []
    seen: set[str] = set()
    chosen = arm
    turn: Any = None
    for number, row in _objects(path, lines):
        name = _cell(path, number, row, "arm").text()
        seen.add(name)
        chosen = chosen or name
        if name != chosen:
            continue
        this = (_cell(path, number, row, "round").value, row.get("rate_rps"))
        turn = turn or this
        if this == turn:
            due, given, wanted, slo_class = (
                _cell(path, number, row, c) for c in ("due_s", "input_tokens", "max_output_tokens", "slo_class")
            )
            requests.append(TraceRequest(due.seconds(), given.tokens(), wanted.tokens(), slo_class.text()))
    if arm is not None and arm not in seen:
        raise ConfigError(f"{path}: no row of arm {arm!r}; it has {', '.join(sorted(seen))}", key="arm", value=arm)
    at = "" if turn is None or turn[1] is None else f", {turn[1]:g} requests/s" if isinstance(turn[1], int | float) else f", {turn[1]}"
    return Trace(_stem(path), tuple(requests), notes=(f"round {turn[0] if turn else 1} of arm {chosen}{at}",))


# ---- a rounded clock


def _spread(requests: Sequence[TraceRequest], seed: int) -> tuple[tuple[TraceRequest, ...], tuple[str, ...]]:
    """Arrivals of a rounded clock, spread inside its steps: uniform, seeded, in the file's order. Else latencies measure the rounding."""
    ordered = sorted(requests, key=lambda r: r.arrival_s)
    instants = sorted({r.arrival_s for r in ordered})
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(instants))
    # A drifting clock has a step a millisecond short now and then. Where every instant is alone, it is not known to be rounded.
    if len(gaps) < 2 or gaps[len(gaps) // 100] < COARSE_CLOCK_S * 0.99 or len(instants) == len(ordered):
        return tuple(ordered), ()
    step_s = gaps[len(gaps) // 2]
    rng = random.Random(f"spread/{seed}")
    spread: list[TraceRequest] = []
    for start_s, group in itertools.groupby(ordered, key=lambda r: r.arrival_s):
        members = list(group)
        offsets = sorted(rng.random() * step_s for _ in members)
        spread.extend(replace(r, arrival_s=start_s + offset) for r, offset in zip(members, offsets, strict=True))
    said = f"timestamps are rounded to {step_s:g} s: arrivals are spread inside each step, uniformly, seed {seed}"
    return tuple(spread), (said,)


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").rsplit(".", 1)[0]


_CSV_COLUMNS: dict[TraceFormat, tuple[str, ...]] = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "servegen": ("arrival_s", "input_tokens", "output_tokens"),
}
_COLUMNS: dict[TraceFormat, tuple[str, ...]] = {
    **_CSV_COLUMNS,
    "mooncake": ("timestamp", "input_length", "output_length", "hash_ids"),
    "rows": ("arm", "round", "due_s", "input_tokens", "max_output_tokens", "slo_class"),
}
_READERS: dict[TraceFormat, Callable[[Path, Iterator[str], int], Trace]] = {
    "azure": _read_azure,
    "burstgpt": _read_burstgpt,
    "servegen": _read_servegen,
    "mooncake": _read_mooncake,
}
