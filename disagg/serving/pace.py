"""Coalescing under pressure: how long a writer of tokens should leave the event loop to others.

Two things say that others want it. A write that takes long waits for their work, while one that is done at once found nobody waiting. And a
loop that is never idle wants a core all the time: its writes may be quick, but each costs somebody else's turn. Then the writer rests, and
what comes meanwhile goes in one message. So relaying tokens takes at most a share of a busy process, whatever its speed, and an idle one
delays nothing.

A single write says little: in a process without a pause many are quick by luck, and in an idle one some are slow. So all writers of a kind
share one `Pace`, which goes by their mean; and a loop is busy when it was so in two looks in a row.
"""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path

FREE_S = 0.001  # writes that take no longer wait for nobody
REST = 4.0
LONGEST_REST_S = 0.02  # less than a decode step of most engines: tokens that come at their pace are not held up
URGENT_SHARE = 0.2  # of a rest, for what somebody waits for: a few ms bring several of those together, and all wait less for a core
SOON = 1.5  # rests: so long after a write somebody comes for whose sake it is worth while to rest
WEIGHT = 0.25  # of the last write in the mean
MEMORY_S = 0.1  # time constant with which a mean without new writes is forgotten
LOOK_S = 0.02  # between two looks at how busy the loop is
EASY_SHARE = 0.6  # a loop that wants a core for less of the time has pauses in which tokens are relayed
BUSY_SHARE = 0.75  # from here on it rests as long as may be
_COUNTS = Path("/proc/thread-self/schedstat")


class ThreadLoad:
    """The share of the time for which the calling thread has a core or waits for one."""

    __slots__ = ("_at_s", "_last", "_share", "_wanted_s")

    def __init__(self) -> None:
        self._at_s = -math.inf
        self._wanted_s = 0.0
        self._last = self._share = 0.0

    def share(self, now_s: float) -> float:
        """The smaller one of the last two looks; a new look when the latest is LOOK_S old."""
        elapsed_s = now_s - self._at_s
        if elapsed_s >= LOOK_S:
            wanted_s = wanted_core_s()
            found = (wanted_s - self._wanted_s) / elapsed_s
            self._share, self._last = min(self._last, found), found
            self._at_s, self._wanted_s = now_s, wanted_s
        return self._share


class _Counts(threading.local):
    """What the kernel counts of the calling thread, in a file that stays open: to find it anew takes far longer than to read it."""

    def __init__(self) -> None:
        self._thread_id, self._fd = 0, -1

    def read(self) -> bytes:
        thread_id = threading.get_native_id()
        if thread_id != self._thread_id:  # the first time; or this process was forked
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = os.open(_COUNTS, os.O_RDONLY | os.O_CLOEXEC)
            self._thread_id = thread_id
        return os.pread(self._fd, 128, 0)


_counts = _Counts()


class _Loads(threading.local):
    """One for each event loop: many writers of a process look at once."""

    def __init__(self) -> None:
        self.of_thread = ThreadLoad()


_loads = _Loads()


class Pace:
    """What one kind of writes takes. `wrote` after each, `rest_s` before the next. `load`: by default the calling thread's."""

    __slots__ = ("_at_s", "_load", "_mean_s")

    def __init__(self, load: ThreadLoad | None = None) -> None:
        self._mean_s = 0.0
        self._at_s = -math.inf
        self._load = load or _loads.of_thread

    def wrote(self, write_s: float, gap_s: float = 0.0) -> float:
        """A write took so long; returns how long to rest now. What was written came `gap_s` after the write before it.

        A rest that brought nothing, or would have, is none: such tokens come alone, and to wait for a timer costs as much as to relay one.
        """
        now_s = time.monotonic()
        self._mean_s *= math.exp(-max(0.0, now_s - write_s - self._at_s) / MEMORY_S)
        self._mean_s += WEIGHT * (write_s - self._mean_s)
        self._at_s = now_s
        rest = max(rest_s(self._mean_s), busy_rest_s(self._load.share(now_s)))
        return rest if gap_s < SOON * rest else 0.0


def rest_s(write_s: float) -> float:
    """How long to rest when writes take `write_s` seconds."""
    return 0.0 if write_s < FREE_S else min(LONGEST_REST_S, REST * write_s)


def busy_rest_s(share: float) -> float:
    """How long to rest when the event loop wants a core for `share` of the time."""
    return LONGEST_REST_S * min(1.0, max(0.0, (share - EASY_SHARE) / (BUSY_SHARE - EASY_SHARE)))


def wanted_core_s() -> float:
    """Seconds so far in which the calling thread ran or waited for a core; where the kernel does not count these, in which it ran."""
    try:
        ran_ns, waited_ns, _ = _counts.read().split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(ran_ns) + int(waited_ns)) * 1e-9 or time.thread_time()  # zeros: the file is there, but the counting is switched off
