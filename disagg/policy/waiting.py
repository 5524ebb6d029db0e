"""The gateway's queue: who waits, in which order. Pure.

Order: requests that can still meet their class before those that cannot (best effort); then the higher priority; then the earlier TTFT
deadline; then first come. `oldest` is there so that nothing starves: the dispatcher gives it a turn now and then.
"""

from __future__ import annotations

import heapq
import math
import operator
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from disagg.policy.decision import Prediction
from disagg.policy.outputs import Keep
from disagg.policy.router import Known
from disagg.policy.targets import NO_TTFT_DEADLINE_S, Spread, Targets
from disagg.types import Request

Place = tuple[bool, int, float, int]  # best effort, priority negated, deadline, key


@dataclass(slots=True)
class Waiter:
    """One request in the queue. `work_s`: seconds of prefill on a typical worker. `prefix`: identities of its context's blocks, and
    `cached` the tokens of it that workers hold. `is_checked`: admission has looked at it, and `admitted` is what it predicted then.
    `known`: what the router keeps of one look at the workers for the next."""

    key: int
    request: Request
    targets: Targets
    queued_s: float
    attempt: int
    avoid: Collection[str]
    output_tokens: float
    spread: Spread
    spread_tokens: float
    keep: Keep
    work_s: float
    box_bytes: int
    prefix: Sequence[int] = ()
    cached: dict[str, int] = field(default_factory=dict)
    is_best_effort: bool = False
    is_checked: bool = False
    admitted: Prediction | None = None
    known: Known = field(default_factory=Known)

    @property
    def place(self) -> Place:
        """Where it stands; the least goes first."""
        wanted_s = self.targets.ttft_s if self.targets.ttft_s is not None else NO_TTFT_DEADLINE_S
        return (self.is_best_effort, -self.request.priority, self.request.arrival_s + wanted_s, self.key)


_is_best_effort = operator.itemgetter(0)  # of a place


class WaitingQueue:
    """Owner of the order. Keys are unique."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._work_s: list[float] = []  # parallel to _places
        self._waiters: dict[int, Waiter] = {}  # in order of arrival in the queue
        self._expiries: list[tuple[float, int]] = []
        self.tokens = 0
        self.work_s = 0.0  # of all that wait
        self._targets_s = 0.0
        self._by_priority: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, key: object) -> bool:
        return key in self._waiters

    def add(self, waiter: Waiter) -> None:
        """Take in a waiter that is not there."""
        self._waiters[waiter.key] = waiter
        self.tokens += waiter.request.num_context_tokens
        self.work_s += waiter.work_s
        self._targets_s += waiter.targets.ttft_scale_s
        self._by_priority[waiter.request.priority] += 1
        self._place(waiter)
        if waiter.request.deadline_s is not None:
            heapq.heappush(self._expiries, (waiter.request.deadline_s, waiter.key))

    def remove(self, key: int) -> Waiter | None:
        """Take out a waiter; None when it is not there."""
        waiter = self._waiters.pop(key, None)
        if waiter is not None:
            self.tokens -= waiter.request.num_context_tokens
            self.work_s = max(0.0, self.work_s - waiter.work_s) if self._waiters else 0.0
            self._targets_s = self._targets_s - waiter.targets.ttft_scale_s if self._waiters else 0.0
            self._by_priority[waiter.request.priority] -= 1
            self._unplace(waiter)
        return waiter

    @property
    def mean_target_s(self) -> float:
        """Mean of the TTFT that those who wait ask for."""
        return max(1e-3, self._targets_s / max(1, len(self._waiters)))

    def not_below(self, priority: int) -> int:
        """How many wait that are of this priority or a higher one."""
        return sum(count for other, count in self._by_priority.items() if other >= priority)

    def demote(self, waiter: Waiter) -> None:
        """From now on it is served as well as may be, after all that can still be in time."""
        self._unplace(waiter)
        waiter.is_best_effort = True
        self._place(waiter)

    def in_order(self) -> Iterator[Waiter]:
        """All waiters, first to go first. The queue may lose waiters meanwhile."""
        index = 0
        while index < len(self._places):
            place = self._places[index]
            yield self._waiters[place[3]]
            index = bisect_right(self._places, place)

    def unchecked(self) -> list[Waiter]:
        """Waiters that admission has not looked at, in order of arrival."""
        found = []
        for waiter in reversed(self._waiters.values()):
            if waiter.is_checked:
                break
            found.append(waiter)
        return found[::-1]

    def first(self) -> Waiter | None:
        """The one that goes first."""
        return self._waiters[self._places[0][3]] if self._places else None

    def oldest(self) -> Waiter | None:
        """The one that came first."""
        return next(iter(self._waiters.values()), None)

    def last_new(self) -> Waiter | None:
        """The one that goes last of those of the lowest priority, retries left out.

        That is the last one of all, or the last one that can still be in time: each part is in order of priority.
        """
        begin = bisect_left(self._places, True, key=_is_best_effort)
        late, timely = self._last_new(begin, len(self._places)), self._last_new(0, begin)
        if late is None or timely is None:
            return late or timely
        return timely if timely.request.priority < late.request.priority else late

    def _last_new(self, begin: int, end: int) -> Waiter | None:
        places = (self._places[index] for index in range(end - 1, begin - 1, -1))
        return next((w for place in places if not (w := self._waiters[place[3]]).attempt), None)

    def ahead(self, waiter: Waiter) -> tuple[int, float]:
        """How many go before `waiter`, and their work in seconds."""
        index = bisect_left(self._places, waiter.place)
        if 2 * index > len(self._work_s):  # the shorter part is summed
            return index, max(0.0, self.work_s - math.fsum(self._work_s[index:]))
        return index, math.fsum(self._work_s[:index])

    def expired(self, now_s: float) -> list[Waiter]:
        """Waiters whose own deadline is over; they stay until removed."""
        found = []
        while self._expiries and self._expiries[0][0] <= now_s:
            _, key = heapq.heappop(self._expiries)
            if key in self._waiters:
                found.append(self._waiters[key])
        return found

    def next_expiry_s(self) -> float | None:
        """The earliest deadline of a waiter."""
        while self._expiries and self._expiries[0][1] not in self._waiters:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def _place(self, waiter: Waiter) -> None:
        place = waiter.place
        index = bisect_left(self._places, place)
        insort(self._places, place)
        self._work_s.insert(index, waiter.work_s)

    def _unplace(self, waiter: Waiter) -> None:
        index = bisect_left(self._places, waiter.place)
        del self._places[index]
        del self._work_s[index]
