"""The clock of a simulation: what happens when, in a fixed order. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Appointment:
    """One thing to happen at `at_s`; nothing any more when `action` is None."""

    at_s: float
    action: Callable[[], None] | None

    def cancel(self) -> None:
        """It does not happen. Idempotent, also after it has."""
        self.action = None


class Agenda:
    """Simulated seconds from 0, moved on by what is entered. Equal instants go in the order in which they were entered."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.done = 0
        self._heap: list[tuple[float, int, Appointment | Callable[[], None]]] = []
        self._numbers = 0

    def at(self, at_s: float, action: Callable[[], None]) -> Appointment:
        """Have `action` happen at `at_s`, not before now."""
        appointment = Appointment(at_s if at_s > self.now_s else self.now_s, action)
        self._numbers += 1
        heapq.heappush(self._heap, (appointment.at_s, self._numbers, appointment))
        return appointment

    def call_after(self, delay_s: float, action: Callable[[], None]) -> None:
        """`after`, for what is never called off: nearly everything, at half the price."""
        self._numbers += 1
        heapq.heappush(self._heap, (self.now_s + delay_s if delay_s > 0.0 else self.now_s, self._numbers, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> Appointment:
        """Have `action` happen `delay_s` from now."""
        return self.at(self.now_s + delay_s, action)

    def run(self, until_s: float | None = None) -> None:
        """Everything in order, until nothing is left or `until_s` is reached; then the clock stands there."""
        heap, pop, last_s = self._heap, heapq.heappop, math.inf if until_s is None else until_s
        while heap and heap[0][0] <= last_s:
            at_s, _, action = pop(heap)
            if isinstance(action, Appointment):
                appointment = action
                if appointment.action is None:
                    continue
                action, appointment.action = appointment.action, None
            self.now_s = at_s
            self.done += 1
            action()
        if until_s is not None:
            self.now_s = max(self.now_s, until_s)

    @property
    def next_s(self) -> float | None:
        """When the next thing happens; None: nothing is left."""
        return self._heap[0][0] if self._heap else None

    def assert_empty(self) -> None:
        """Nothing is left to happen."""
        assert not any(not isinstance(a, Appointment) or a.action for _, _, a in self._heap), f"{len(self._heap)} appointments are left"
