"""What a run has behind it, on disk, so that an interrupted one goes on where it was.

asked.json          what was asked for (workload, arms), written before anything starts; a resumed run must ask for the same
run.json            what is measured: the same with the colocated arm's chunk as it was found
rounds.jsonl        one line per turn that ended, written when all of its rows are in requests.jsonl
requests.jsonl      the rows that count
requests-void.jsonl rows of turns that were cut off or measured again; they count nowhere
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from disagg.ab.rows import Row, move_rows, read_rows
from disagg.errors import ConfigError, DiskError, shorten

TurnKey = tuple[str, float, int]  # arm, rate_rps, round (from 1)


@dataclass(frozen=True, slots=True)
class Turn:
    """One arm's part of one round at one rate. `place`: its place in the round's order, from 0. `sender`: LoadReport's fields.

    `trouble`: what happened in it that should not (a worker died); `counts`: False when it was measured again for that. `preemptions`: of
    the engines meanwhile, None where it is not known.
    """

    arm: str
    rate_rps: float
    round: int
    place: int
    requests: int
    sender: dict[str, float]
    trouble: str | None = None
    counts: bool = True
    preemptions: int | None = None

    @property
    def key(self) -> TurnKey:
        return (self.arm, self.rate_rps, self.round)


class Journal:
    """The turns of a run, in memory and in `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.turns: list[Turn] = _read(path) if path.exists() else []

    @property
    def counted(self) -> dict[TurnKey, Turn]:
        """The turns that count: what was said last of each."""
        last = {turn.key: turn for turn in self.turns}
        return {key: turn for key, turn in last.items() if turn.counts}

    def append(self, turn: Turn) -> None:
        """Remember a turn. Raises DiskError."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(turn)) + "\n")
        except OSError as error:
            raise DiskError(f"cannot write {self._path}: {error.strerror}; the rows of this turn are kept") from error
        self.turns.append(turn)


def _read(path: Path) -> list[Turn]:
    """A cut last line, as a killed run leaves it, is a turn that did not end."""
    text = path.read_text(encoding="utf-8")
    whole, _, cut = text.rpartition("\n")
    if cut:
        path.write_text(whole + "\n" if whole else "", encoding="utf-8")
    try:
        return [Turn(**json.loads(line)) for line in whole.split("\n") if line]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {error}", key=str(path), expected="the rounds.jsonl of a run of this version") from error


def restore(journal: Journal, requests: Path, void: Path) -> list[Row]:
    """The rows of turns that count; rows of turns that did not end move to `void`, with a word in the journal.

    Raises ConfigError when requests.jsonl has not what the journal says, DiskError.
    """
    counted = journal.counted
    if not requests.exists() and not counted:
        return []
    rows = read_rows(requests) if requests.exists() else []
    orphans = sorted({key for row in rows if (key := _key(row)) not in counted})
    number: dict[TurnKey, int] = {}
    for row in rows:
        number[_key(row)] = number.get(_key(row), 0) + 1
    for key, turn in counted.items():
        if number.get(key, 0) != turn.requests:
            expected = f"{turn.requests} rows of round {turn.round} of arm {turn.arm}, as rounds.jsonl says; start anew in another folder"
            raise ConfigError(key=str(requests), value=f"{number.get(key, 0)} rows", expected=expected)
    move_rows(requests, void, lambda row: _key(row) not in counted)
    for key in orphans:
        journal.append(Turn(*key, place=0, requests=number[key], sender={}, trouble="the run was interrupted", counts=False))
    return [row for row in rows if _key(row) in counted]


def _key(row: Row) -> TurnKey:
    return (row.arm, row.rate_rps or 0.0, row.round)


def check_same_run(path: Path, now: Mapping[str, Any]) -> None:
    """That `path` (run.json or asked.json) describes the run that is to go on. Raises ConfigError that names what differs first."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        expected = "the folder of an interrupted run"
        message = f"--resume: {path} cannot be read ({type(error).__name__}); expected {expected}"
        raise ConfigError(message, key="--resume", value=str(path), expected=expected) from error
    for key, old, new in _differences("", before, json.loads(json.dumps(now))):
        raise ConfigError(
            f"--resume: {key} was {shorten(old)} in {path.parent}, and is {shorten(new)} now; another comparison needs another folder",
            key=key,
            value=new,
            expected=shorten(old),
        )


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            yield from _differences(f"{path}.{key}" if path else str(key), old.get(key), new.get(key))
    elif old != new:
        yield path, old, new
