"""The folder of a run. An older result in it is never overwritten: it moves to `older/DATE-TIME/` inside the folder.

What is in it: see journal.py, and result.json.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from disagg.errors import ConfigError, DiskError

FILES = (
    "result.json",
    "requests.jsonl",
    "requests-void.jsonl",
    "rounds.jsonl",
    "asked.json",
    "run.json",
    "machine.json",
    "chunk-search",
    "report.html",
    "plots",
)


class OutFolder:
    """`path` with the files of one run. Made, proven writable and cleared of older results at construction.

    `resume`: the run that is in it goes on, so nothing moves. Raises ConfigError when it can't be written.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
            self.moved_to = None if resume else self._move_older()
        except OSError as error:
            raise ConfigError(
                f"--out: {path} cannot be written: {error.strerror}", key="--out", value=str(path), expected="a folder that can be written"
            ) from error

    @property
    def requests(self) -> Path:
        return self.path / "requests.jsonl"

    @property
    def void(self) -> Path:
        return self.path / "requests-void.jsonl"

    @property
    def rounds(self) -> Path:
        return self.path / "rounds.jsonl"

    @property
    def asked(self) -> Path:
        return self.path / "asked.json"

    @property
    def run(self) -> Path:
        return self.path / "run.json"

    @property
    def machine(self) -> Path:
        return self.path / "machine.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    def write_result(self, text: str) -> None:
        """Write result.json whole or not at all. Raises DiskError."""
        self.write(self.result, text)

    def write(self, path: Path, text: str) -> None:
        """Write a file of this folder whole or not at all. Raises DiskError."""
        unfinished = path.with_name(path.name + ".unfinished")
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:
            raise DiskError(f"cannot write {path}: {error.strerror}; {self.requests} has every row") from error

    def _move_older(self) -> Path | None:
        """Move what an earlier run left into a folder named by when that run last wrote; None when there is nothing."""
        present = [self.path / name for name in FILES if (self.path / name).exists()]
        if not present:
            return None
        written = datetime.datetime.fromtimestamp(max(p.stat().st_mtime for p in present), datetime.UTC)
        older = self.path / "older"
        for number in range(1000):
            target = older / (written.strftime("%Y%m%d-%H%M%S") + (f"-{number}" if number else ""))
            try:
                target.mkdir(parents=True)
            except FileExistsError:
                continue
            for p in present:
                p.rename(target / p.name)
            return target
        raise ConfigError(key="--out", value=str(self.path), expected="a folder with fewer than 1,000 older results of one second")
