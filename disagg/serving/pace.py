"""Coalescing under pressure: how long a writer of tokens should leave the event loop to others.

A write that is done at once says that nobody else wants the loop, and the next one may follow at any time. One that took long waited for
the work of others; then the writer rests a multiple of that, and what comes meanwhile goes in one message. So relaying tokens takes at
most a share of a busy process, whatever its speed, and an idle one delays nothing.
"""

from __future__ import annotations

FREE_S = 0.001  # a write that takes no longer waited for nobody
REST = 3.0
LONGEST_REST_S = 0.01


def rest_s(write_s: float) -> float:
    """How long to rest after a write that took `write_s` seconds."""
    return 0.0 if write_s < FREE_S else min(LONGEST_REST_S, REST * write_s)
