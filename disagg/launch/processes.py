"""Processes of this machine, told apart by pid *and* start time, so that a pid that the system gave to another process is never touched.

A local Ray session's processes carry a random mark in their environment, which their children inherit; `find_marked` finds all that
are left of a session whose owner was killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MARK = "DISAGG_SESSION"


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process life. `start_ticks`: when it started, in clock ticks since boot."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this pid now, or None (also for one that has ended and is not yet reaped)."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (OSError, UnicodeDecodeError):
            return None
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        return ProcessId.of(self.pid) == self

    def send(self, number: signal.Signals) -> None:
        """Signal it if it is still the same process; no error when it is gone."""
        with contextlib.suppress(ProcessLookupError, OSError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.is_alive:
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)


def me() -> ProcessId:
    """The calling process."""
    found = ProcessId.of(os.getpid())
    assert found is not None
    return found


def descendants(pid: int) -> tuple[ProcessId, ...]:
    """Children, their children, and so on, of the process that has this pid."""
    children: dict[int, list[ProcessId]] = {}
    for child, parent in _all():
        children.setdefault(parent, []).append(child)
    found: list[ProcessId] = []
    left = [pid]
    while left:
        for child in children.get(left.pop(), []):
            found.append(child)
            left.append(child.pid)
    return tuple(found)


def find_marked(mark: str) -> tuple[ProcessId, ...]:
    """Processes of this user whose environment at their start held the mark, and their descendants; never the caller.

    A process that changes its title (Ray's do) overwrites the beginning of that environment, so the name before the mark may be gone.
    """
    needle = mark.encode()
    found: dict[int, ProcessId] = {}
    for process, _ in _all():
        with contextlib.suppress(OSError):
            if process.pid != os.getpid() and needle in Path(f"/proc/{process.pid}/environ").read_bytes():
                found[process.pid] = process
    for pid in list(found):
        found |= {child.pid: child for child in descendants(pid) if child.pid != os.getpid()}
    return tuple(found.values())


def wait_gone(processes: Iterable[ProcessId], timeout_s: float) -> tuple[ProcessId, ...]:
    """Wait until the processes have ended; returns those still running after `timeout_s` seconds."""
    deadline_s = time.monotonic() + timeout_s
    left = [process for process in processes if process.is_alive]
    handles: dict[int, ProcessId] = {}
    poll = select.poll()
    try:
        for process in left:
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(process.pid)
                handles[handle] = process
                poll.register(handle, select.POLLIN)
        waiting = set(handles)
        while waiting and (remaining_s := deadline_s - time.monotonic()) > 0:
            for handle, _ in poll.poll(remaining_s * 1e3):
                poll.unregister(handle)
                waiting.discard(handle)
    finally:
        for handle in handles:
            os.close(handle)
    return tuple(process for process in left if process.is_alive)


def end(processes: Iterable[ProcessId], grace_s: float = 5.0) -> tuple[ProcessId, ...]:
    """Ask with SIGTERM, insist with SIGKILL after `grace_s`; returns what survives even that for 5 s (nothing, normally)."""
    asked = [process for process in processes if process.is_alive]
    for process in asked:
        process.send(signal.SIGTERM)
    left = wait_gone(asked, grace_s)
    for process in left:
        process.send(signal.SIGKILL)
    return wait_gone(left, 5.0)


def _all() -> Iterable[tuple[ProcessId, int]]:
    """Every process and its parent's pid."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            fields = Path(f"/proc/{entry.name}/stat").read_text().rpartition(")")[2].split()
        except (OSError, UnicodeDecodeError):
            continue
        if fields[0] not in "ZX":
            yield ProcessId(int(entry.name), int(fields[19])), int(fields[1])
