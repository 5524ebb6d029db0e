"""How long the hand-over of a prompt's KV takes, learned from those that were. Pure.

It is what lies between the first token and the second, beyond a decode step and what the decode side was seen to be busy with:

    seconds = fixed + per byte x bytes        least squares with forgetting, neither part negative

Some take far longer: the decode side was given prompts meanwhile, and who comes waits behind those. `surprises` keeps how much longer,
and how often.
"""

from __future__ import annotations

from collections import deque

FIXED_S = 5e-3  # until it is learned
FORGET = 1.0 / 200
PRIOR_WEIGHT = 2.0  # of FIXED_S, in hand-overs
REMEMBERED = 200  # of the latest hand-overs, what they took longer than expected
SUMMED_UP = 10  # hand-overs until those are summed up anew
SURPRISE_AT = (0.7, 0.9, 1.0)  # shares of them, the least first, between which they are taken together


class HandOver:
    """What was learned so far."""

    __slots__ = ("_late_s", "_learned", "_n", "_x", "_xx", "_xy", "_y", "fixed_s", "per_byte_s", "surprises")

    def __init__(self) -> None:
        self.fixed_s = FIXED_S
        self.per_byte_s = 0.0
        self.surprises: tuple[tuple[float, float], ...] = ((0.0, 1.0),)  # seconds beyond what is expected, and how likely
        self._late_s: deque[float] = deque(maxlen=REMEMBERED)
        self._learned = 0
        self._n = self._x = self._xx = self._xy = self._y = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Expected of a transfer of `num_bytes`."""
        return self.fixed_s + self.per_byte_s * num_bytes

    def learn(self, num_bytes: float, seconds: float) -> None:
        """One hand-over took so long."""
        self._late_s.append(max(0.0, seconds - self.seconds(num_bytes)))
        self._learned += 1
        if self._learned % SUMMED_UP == 0:
            self._sum_up()
        keep, x, y = 1.0 - FORGET, float(num_bytes), min(seconds, 4 * self.seconds(num_bytes) + 0.02)  # a hiccup teaches little
        self._n = keep * self._n + 1.0
        self._x = keep * self._x + x
        self._xx = keep * self._xx + x * x
        self._xy = keep * self._xy + x * y
        self._y = keep * self._y + y
        spread = self._xx - self._x * self._x / self._n
        slope = (self._xy - self._x * self._y / self._n) / spread if spread > 1e-3 * self._xx > 0 else 0.0  # sizes all alike tell none
        self.per_byte_s = max(0.0, slope)
        seen_s = self._y - self.per_byte_s * self._x
        self.fixed_s = max(0.0, (PRIOR_WEIGHT * FIXED_S + seen_s) / (PRIOR_WEIGHT + self._n))

    def _sum_up(self) -> None:
        late_s = sorted(self._late_s)
        ends = [round(len(late_s) * share) for share in SURPRISE_AT]
        parts = [late_s[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        self.surprises = tuple([(part[len(part) // 2], len(part) / len(late_s)) for part in parts if part])  # medians: a hiccup is none
