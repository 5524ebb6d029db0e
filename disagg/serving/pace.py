"""Coalescing under pressure: how long a writer of tokens should leave the event loop to others.

A write that is done at once says that nobody else wants the loop, and the next one may follow at any time. When writes take long, they
wait for the work of others; then the writer rests a multiple of that, and what comes meanwhile goes in one message. So relaying tokens
takes at most a share of a busy process, whatever its speed, and an idle one delays nothing.

A single write says little: in a process without a pause many are quick by luck, and in an idle one some are slow. So all writers of a kind
share one `Pace`, which goes by their mean.
"""

from __future__ import annotations

import math
import time

FREE_S = 0.001  # writes that take no longer wait for nobody
REST = 4.0
LONGEST_REST_S = 0.02  # less than a decode step of most engines: tokens that come at their pace are not held up
WEIGHT = 0.25  # of the last write in the mean
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
        return rest_s(self._mean_s)


def rest_s(write_s: float) -> float:
    """How long to rest when writes take `write_s` seconds."""
    return 0.0 if write_s < FREE_S else min(LONGEST_REST_S, REST * write_s)
