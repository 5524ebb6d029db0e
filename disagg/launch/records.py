"""What this user has running: one small JSON file per deployment, so that `disagg status` and `disagg down` find it from any terminal.

The files lie in $XDG_STATE_HOME/disagg (~/.local/state/disagg). A record is claimed before anything starts; of two `up` of one
name, one loses.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Self

from disagg.errors import ConfigError
from disagg.launch.processes import ProcessId, me

Kind = Literal["local", "cluster"]


@dataclass(frozen=True, slots=True)
class Record:
    """One deployment. `local`: in a Ray of its own, which `owner` holds. `cluster`: in the Ray at `address`; `owner` is None when detached.

    `address` and `endpoint` are empty while it starts. `mark`, `temp_dir`: of the local Ray (see session.py).
    """

    name: str
    kind: Kind
    owner: ProcessId | None
    address: str = ""
    endpoint: str = ""
    mark: str = ""
    temp_dir: str = ""
    log: str = ""

    @property
    def is_abandoned(self) -> bool:
        """True when the process that held it is gone without having cleaned up."""
        return self.owner is not None and not self.owner.is_alive

    @classmethod
    def claim(cls, name: str, kind: Kind, log: str = "") -> Self:
        """A new record for the calling process. Raises ConfigError when one of that name is there, also an abandoned one."""
        record = cls(name, kind, me(), log=log)
        path = _path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        _write(fresh, record)
        try:
            os.link(fresh, path)  # unlike a rename, fails when the name is taken
        except FileExistsError:
            raise _taken(name) from None
        finally:
            fresh.unlink()
        return record

    def update(self, **changes: object) -> Self:
        """The record with these fields changed, written in one piece."""
        record = replace(self, **changes)  # type: ignore[arg-type]
        fresh = _path(self.name).with_suffix(f".{os.getpid()}")
        _write(fresh, record)
        fresh.replace(_path(self.name))
        return record

    def remove(self) -> None:
        """Forget it. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            _path(self.name).unlink()


def _write(file: Path, record: Record) -> None:
    """Readable by this user only: a local Ray's mark opens it."""
    file.touch(mode=0o600)
    file.write_text(json.dumps(asdict(record)))


def _taken(name: str) -> ConfigError:
    found = read_record(name)
    where = f" at {found.endpoint}" if found and found.endpoint else ""
    what = "was abandoned" if found and found.is_abandoned else f"is up already{where}"
    return ConfigError(
        f"the deployment {name!r} {what}; run `disagg down --name {name}` first, or choose another name with --name",
        key="name",
        value=name,
        expected="a name that is not in use",
    )


def read_record(name: str) -> Record | None:
    """The record of that name, or None. An unreadable one (of another release) counts as none."""
    try:
        fields = json.loads(_path(name).read_text())
        owner = fields.pop("owner")
        return Record(owner=ProcessId(**owner) if owner else None, **fields)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def all_records() -> list[Record]:
    """Every record of this user, by name."""
    files = sorted(state_dir().glob("deployments/*.json"))
    return [record for file in files if (record := read_record(file.stem)) is not None]


def state_dir() -> Path:
    """Where records and logs of background deployments lie."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "disagg"


def log_dir(name: str) -> Path:
    """Where the logs of the deployment of that name are kept."""
    return state_dir() / "logs" / name


def _path(name: str) -> Path:
    return state_dir() / "deployments" / f"{name}.json"
