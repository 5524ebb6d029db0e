"""Coalescing under pressure: how long a writer of tokens should leave the event loop to others.

A write that is done at once says that nobody else wants the loop, and the next one may follow at any time. When writes take long, they
wait for the work of others; then the writer rests a multiple of that, and what comes meanwhile goes in one message. So relaying tokens
takes at most a share of a busy process, whatever its speed, and an idle one delays nothing.

A single write says little: in a process without a pause many are quick by luck, and in an idle one some are slow. So all writers of a kind
share one `Pace`, which goes by their mean.
"""

from __future__ import annotations

import math
import threading
import time

FREE_S = 0.001  # writes that take no longer wait for nobody
REST = 4.0
LONGEST_REST_S = 0.02  # less than a decode step of most engines: tokens that come at their pace are not held up
WEIGHT = 0.25  # of the last write in the mean
BUSY_SHARE = 0.6  # a loop that wants a core for less of the time has pauses, in which it delays nobody
FULL_SHARE = 0.9
WINDOW_S = 0.02
MEMORY_S = 0.1  # time constant with which a mean without new writes is forgotten


class Pace:
    """What one kind of writes takes. `wrote` after each, `rest_s` before the next."""

    __slots__ = ("_at_s", "_mean_s")

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._at_s = -math.inf

    def wrote(self, write_s: float) -> float:
        """A write took so long; returns how long to rest now."""
        now_s = time.monotonic()
        self._mean_s *= math.exp(-max(0.0, now_s - write_s - self._at_s) / MEMORY_S)
        self._mean_s += WEIGHT * (write_s - self._mean_s)
        self._at_s = now_s
        return max(rest_s(self._mean_s), busy_rest_s(_loads.load.share(now_s)))


def rest_s(write_s: float) -> float:
    """How long to rest when writes take `write_s` seconds."""
    return 0.0 if write_s < FREE_S else min(LONGEST_REST_S, REST * write_s)


def busy_rest_s(share: float) -> float:
    """How long to rest when the event loop wants a core for `share` of the time."""
    return LONGEST_REST_S * min(1.0, max(0.0, (share - BUSY_SHARE) / (FULL_SHARE - BUSY_SHARE)))


class ThreadLoad:
    """The share of the time in which the calling thread has a core, or waits for one."""

    __slots__ = ("_at_s", "_share", "_wanted_s")

    def __init__(self) -> None:
        self._at_s = -math.inf
        self._wanted_s = 0.0
        self._share = 0.0

    def share(self, now_s: float) -> float:
        """Of the last WINDOW_S or somewhat longer."""
        elapsed_s = now_s - self._at_s
        if elapsed_s >= WINDOW_S:
            wanted_s = wanted_core_s()
            self._share = (wanted_s - self._wanted_s) / elapsed_s
            self._at_s, self._wanted_s = now_s, wanted_s
        return self._share


class _Loads(threading.local):
    def __init__(self) -> None:
        self.load = ThreadLoad()


_loads = _Loads()


def wanted_core_s() -> float:
    """Seconds so far in which the calling thread ran or waited for a core; only those in which it ran where Linux does not count."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            ran_ns, waited_ns, _ = file.read().split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(ran_ns) + int(waited_ns)) * 1e-9
