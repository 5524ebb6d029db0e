"""requests.jsonl: one row a request, appended as requests end, so that a killed run keeps what it measured.

Instants in a row are seconds since its round began, rounded to a microsecond when the row is made: every figure of result.json
can be computed again from the file, digit for digit.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any, Literal, get_args

from disagg import slo
from disagg.errors import ConfigError, DiskError, shorten

Outcome = Literal["completed", "rejected", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one request.

    `round` counts from 1. `rate_rps`: the mean rate of the point that it belongs to, None in files of older versions. `due_s`: when the
    workload wanted it sent; `sent_s`: when it was. `token_s`: when each output token was received.
    `end_s`: when its stream ended, however it did. `prompt_digest`: a hash of the prompt's token ids, equal in all arms.
    `outcome`: completed = the whole answer came; rejected = admission refused it; cancelled = its client went away, as the workload wanted;
    failed = anything else, with `error` the type and `message` its sentence. Worker names, attempts and the gateway's own durations
    (`queue_s` ...) are there for whole answers only, and so is what its router expected when the request came (`predicted_ttft_s` ...).
    """

    arm: str
    round: int
    index: int
    stream: str
    slo_class: str
    input_tokens: int
    max_output_tokens: int
    prompt_digest: str
    due_s: float
    sent_s: float
    end_s: float
    token_s: tuple[float, ...]
    outcome: Outcome
    error: str | None = None
    message: str | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    attempts: int | None = None
    cached_tokens: int | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    rate_rps: float | None = None
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None

    @property
    def is_whole(self) -> bool:
        """It ended with a complete answer; only then do its latencies count."""
        return self.outcome == "completed"

    @property
    def is_judged(self) -> bool:
        """Whether it can meet or miss its class: a request that its own client cancelled does neither."""
        return self.outcome != "cancelled"

    @property
    def output_tokens(self) -> int:
        """Tokens received."""
        return len(self.token_s)

    @property
    def send_late_s(self) -> float:
        """How much later than due it was sent. The sender never skips a request; a late one is sent late."""
        return max(0.0, self.sent_s - self.due_s)

    @property
    def ttft_s(self) -> float | None:
        return slo.ttft_s(self.sent_s, self.token_s)

    @property
    def tpot_s(self) -> float | None:
        return slo.tpot_s(self.token_s)

    @property
    def itl_s(self) -> tuple[float, ...]:
        return slo.itl_s(self.token_s)

    @property
    def e2e_s(self) -> float | None:
        return slo.e2e_s(self.sent_s, self.token_s)


_NAMES = ("arm", "stream", "slo_class", "prompt_digest")
_NUMBERS = ("round", "index", "input_tokens", "max_output_tokens", "due_s", "sent_s", "end_s")


class RowFile:
    """A requests.jsonl that grows. Each row is handed to the kernel before `append` returns; close it, or use it in a `with`.

    `resume`: go on behind the rows that a run before has left; a last line that it left cut is cut off.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self._path = path
        try:
            if resume and path.exists():
                _drop_cut_line(path)
            self._file: IO[str] = path.open("a" if resume else "x", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}", key="out", value=str(path), expected="a folder that can be written") from error

    def append(self, row: Row) -> None:
        """Write one row. Raises DiskError when the file cannot take it."""
        try:
            self._file.write(json.dumps(asdict(row), separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise DiskError(f"cannot write {self._path}: {error.strerror}; the rows before this one are kept") from error

    def close(self) -> None:
        """What a full disk did not take has been reported by `append`."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _drop_cut_line(path: Path) -> None:
    with path.open("rb+") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)


def move_rows(source: Path, target: Path, leaves: Callable[[Row], bool]) -> int:
    """Move the rows that `leaves` picks from one file to the end of another; returns how many. Whole or not at all for the reader.

    Killed between its two steps it leaves rows in both files, never in none. Raises DiskError.
    """
    rows = read_rows(source)
    moved = [row for row in rows if leaves(row)]
    if not moved:
        return 0
    unfinished = source.with_name(source.name + ".unfinished")
    try:
        with RowFile(target, resume=True) as file:
            for row in moved:
                file.append(row)
        with unfinished.open("w", encoding="utf-8") as kept:
            kept.writelines(json.dumps(asdict(row), separators=(",", ":")) + "\n" for row in rows if not leaves(row))
        unfinished.replace(source)
    except OSError as error:
        raise DiskError(f"cannot write {source}: {error.strerror}; every row is still in it") from error
    return len(moved)


def read_rows(path: Path) -> list[Row]:
    """The rows of a requests.jsonl. A cut last line, as a killed run leaves it, is ignored; any other fault is a ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}", key=str(path), expected="a readable requests.jsonl") from error
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(_row(json.loads(line)))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            expected = "one JSON object a line, as disagg wrote it"
            raise ConfigError(f"{path}: line {number}: {error}", key=f"line {number}", value=line, expected=expected) from error
    return rows


def _row(raw: Any) -> Row:
    if not isinstance(raw, dict):
        raise TypeError(f"got {shorten(raw)}, expected an object")
    if unknown := raw.keys() - {f.name for f in fields(Row)}:
        raise ValueError(f"unknown column {min(unknown)!r}")
    if raw["outcome"] not in get_args(Outcome):
        raise ValueError(f"outcome: got {raw['outcome']!r}, expected one of {', '.join(get_args(Outcome))}")
    row = Row(**{**raw, "token_s": tuple(map(float, raw["token_s"]))})
    for name in _NAMES:
        if not isinstance(getattr(row, name), str):
            raise TypeError(f"column {name!r}: got {shorten(getattr(row, name))}, expected a text")
    numbers = [getattr(row, name) for name in _NUMBERS] + [row.rate_rps or 0.0]
    instants = (row.due_s, row.sent_s, row.end_s, *row.token_s)
    if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers) or not all(map(math.isfinite, instants)):
        raise TypeError(f"a number is expected in {', '.join(_NUMBERS)}, and finite ones in token_s; got {shorten(numbers)}")
    return row


def span_s(rows: Iterable[Row]) -> float:
    """Measured time of one arm: the sum over its rounds of (last end - first send)."""
    rounds: dict[int, list[Row]] = {}
    for row in rows:
        rounds.setdefault(row.round, []).append(row)
    return sum(max(r.end_s for r in rows_) - min(r.sent_s for r in rows_) for rows_ in rounds.values())
