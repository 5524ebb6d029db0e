"""How the workers stand at one instant, for all requests that are decided on then. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from disagg.policy.outline import Outline
from disagg.policy.worker_book import WorkerBook, outlines, sketches

SHORTLIST = 8  # so many of the least busy, and of the least full, workers are weighed


class Standing:
    """Valid for one instant and until something is granted. `sources`, `sinks`: live workers that may take a first and a second leg.

    Both come with the least recently used first; of workers that are equal, those come first in the orders here, too. No more than a
    SHORTLIST are all looked at; of more, a sketch of each says at whom to look.
    """

    __slots__ = ("_by_busy", "_by_full", "_look", "_look_at_all", "levels", "now_s", "sinks", "sources")

    def __init__(self, sources: Sequence[WorkerBook], sinks: Sequence[WorkerBook], now_s: float) -> None:
        self.sources = sources
        self.sinks = sinks
        self.now_s = now_s
        are_few = max(len(sources), len(sinks)) <= SHORTLIST
        self._look, self._look_at_all = (WorkerBook.outline, outlines) if are_few else (WorkerBook.sketch, sketches)
        self.levels: list[tuple[float, float]] | None = None  # kept by policy/outlook.py
        self._by_busy: list[WorkerBook] | None = None
        self._by_full: list[WorkerBook] | None = None

    def look(self, w: WorkerBook) -> Outline:
        """What is known of it without effort."""
        return self._look(w, self.now_s)

    def wait_s(self, w: WorkerBook) -> float:
        """Until a further prompt would start on it."""
        if w.prefilling or w.is_idle:
            return abs(w.busy_until_s - self.now_s) if w.prefilling else 0.0
        return w.wait_s(self.now_s, self._look(w, self.now_s))

    def least_busy(self, extra_s: Mapping[str, float], count: int) -> list[WorkerBook]:
        """The `count` sources that could start a prompt soonest and disturb least. `extra_s`: seconds meant for some already."""
        idle = list(itertools.islice((w for w in self.sources if w.is_idle and w.name not in extra_s), count))
        if len(idle) == count:
            return idle
        if extra_s:
            return self._sorted_busy(extra_s)[:count]
        if self._by_busy is None:
            self._by_busy = self._sorted_busy(extra_s)
        return self._by_busy[:count]

    def _sorted_busy(self, extra_s: Mapping[str, float]) -> list[WorkerBook]:
        keys = {w: self.wait_s(w) + extra_s.get(w.name, 0.0) + 0.05 * w.accounts.decodes for w in self.sources}
        return sorted(self.sources, key=keys.__getitem__)

    def least_full(self) -> Iterator[WorkerBook]:
        """Sinks, those first whose requests get their tokens quickest."""
        if self._by_full is None:
            gaps_s = [o.gap_s for o in self._look_at_all(self.sinks, self.now_s)]
            self._by_full = [self.sinks[i] for i in sorted(range(len(gaps_s)), key=gaps_s.__getitem__)]
        return iter(self._by_full)
