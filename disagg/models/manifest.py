"""The manifest of a stored model: size and SHA-256 of each file, written last, so its presence means the model is whole."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

FILE_NAME = "manifest.json"
SCHEMA = 1


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(folder: Path, about: dict[str, Any]) -> None:
    """Hash every file of `folder` and write the manifest; `about` is kept in it as it is.

    The files reach the disk before the manifest does.
    """
    files = {}
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = {"sha256": sha256_of(path), "num_bytes": path.stat().st_size}
    manifest = folder / FILE_NAME
    manifest.write_text(json.dumps({"schema": SCHEMA, **about, "files": files}, indent=2) + "\n")
    with manifest.open("rb") as file:
        os.fsync(file.fileno())


def faults(folder: Path, *, rehash: bool) -> list[str]:
    """What is wrong with a stored model, one sentence each; empty when it is whole.

    Without `rehash` only presence and sizes are compared (microseconds); with it every byte is read.
    """
    try:
        files = json.loads((folder / FILE_NAME).read_text())["files"]
        expected = [(str(name), int(entry["num_bytes"]), str(entry["sha256"])) for name, entry in files.items()]
    except FileNotFoundError:
        return [f"{FILE_NAME} is missing"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{FILE_NAME} cannot be read ({error})"]
    found = []
    for name, num_bytes, sha256 in expected:
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != num_bytes:
            found.append(f"{name} has {path.stat().st_size} bytes instead of {num_bytes}")
        elif rehash and sha256_of(path) != sha256:
            found.append(f"{name} does not match its checksum")
    return found
