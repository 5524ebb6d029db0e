"""Who holds a TCP port of this machine, as far as /proc tells."""

from __future__ import annotations

import os
from pathlib import Path

_LISTEN = "0A"


def describe_holder(port: int) -> str:
    """`process 123 (python -m something)` for the process that listens on `port`, or a hint how to find it."""
    inodes = _listening_inodes(port)
    for process in Path("/proc").glob("[0-9]*"):
        if inodes and inodes & _socket_inodes(process):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            return f"process {process.name} ({command[:120]})"
    return f"another process (see `ss -ltnp 'sport = :{port}'`)"


def _listening_inodes(port: int) -> set[str]:
    """Inodes of the sockets that listen on `port`, IPv4 and IPv6."""
    found = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if not table.exists():
            continue
        for line in table.read_text().splitlines()[1:]:
            # sl, local address:port (hex), remote, state, ..., inode in the tenth column
            columns = line.split()
            if columns[3] == _LISTEN and int(columns[1].rsplit(":", 1)[1], 16) == port:
                found.add(columns[9])
    return found


def _socket_inodes(process: Path) -> set[str]:
    """Inodes of the sockets that a process holds; empty when it is not ours to see, or gone."""
    found = set()
    try:
        for file in (process / "fd").iterdir():
            target = os.readlink(file)  # noqa: PTH115 - the target is no path
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    except OSError:
        return found
    return found
