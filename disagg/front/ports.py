"""Addresses of this machine: binding them, naming them to others, and who holds one that is taken (as far as /proc tells)."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from disagg.errors import PlacementError

_ANY_HOSTS = ("0.0.0.0", "::", "")
_LISTEN = "0A"


def listening_socket(host: str, port: int, key: str) -> socket.socket:
    """A TCP socket bound to the address (port 0: a free one). `key`: the topology's key of the port. Raises PlacementError.

    Reads /proc when the address is taken: not for an event loop.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise why_not_bound(host, port, key, str(error)) from None
    return sock


def why_not_bound(host: str, port: int, key: str, detail: str) -> PlacementError:
    """Why the address could not be bound. Reads /proc: not for an event loop."""
    address = f"{host}:{port}"
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError as cause:
            if cause.errno != errno.EADDRINUSE:
                return PlacementError(
                    f"gateway.host: cannot serve on {address}: {cause.strerror}",
                    key="gateway.host",
                    value=host,
                    expected="an address of this machine, such as 127.0.0.1 or 0.0.0.0",
                )
            return PlacementError(
                f"{key}: {port} is in use by {describe_holder(port)}; end it, take another port, or 0 for any free one",
                key=key,
                value=port,
                expected="a free port, or 0 for any",
            )
    return PlacementError(f"{key}: cannot serve on {address}: {detail}", key=key, value=port, expected="a free port")


def reachable_host(host: str) -> str:
    """An address at which others reach a server that is bound to `host`."""
    if host not in _ANY_HOSTS:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: it only asks the kernel which of our addresses leads outside.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def bracketed(host: str) -> str:
    """An IPv6 address as it stands before a port."""
    return f"[{host}]" if ":" in host else host


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
