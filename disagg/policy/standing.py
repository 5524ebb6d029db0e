"""How the workers stand at one instant, for all requests that are decided on then. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from disagg.policy.outline import Outline
from disagg.policy.worker_book import WorkerBook, all_looks, looks

SHORTLIST = 8  # so many of the least busy, and of the least full, workers are weighed


class Standing:
    """Valid for one instant and until something is granted. `sources`, `sinks`: live workers that may take a first and a second leg.

    Both come with the least recently used first; of workers that are equal, those come first in the orders here, too. No more than a
    SHORTLIST are all looked at; of more, a sketch of each says at whom to look.
    """

    __slots__ = ("_are_few", "_by_busy", "_by_full", "_waits_s", "levels", "now_s", "sinks", "sources")

    def __init__(self, sources: Sequence[WorkerBook], sinks: Sequence[WorkerBook], now_s: float) -> None:
        self.sources = sources
        self.sinks = sinks
        self.now_s = now_s
        self._are_few = max(len(sources), len(sinks)) <= SHORTLIST
        self.levels: list[tuple[float, float]] | None = None  # kept by policy/outlook.py
        self._waits_s: list[float] | None = None
        self._by_busy: list[WorkerBook] | None = None
        self._by_full: list[WorkerBook] | None = None

    def look(self, w: WorkerBook) -> Outline:
        """What is known of it without effort."""
        return w.outline(self.now_s) if self._are_few else w.sketch(self.now_s)

    def looks(self, books: Sequence[WorkerBook]) -> Iterator[Outline]:
        """`look` at each, when it is its turn."""
        return looks(books, self.now_s, in_detail=self._are_few)

    def all_looks(self, books: Sequence[WorkerBook]) -> list[Outline]:
        """`look` at each, now."""
        return all_looks(books, self.now_s, in_detail=self._are_few)

    def wait_s(self, w: WorkerBook) -> float:
        """Until a further prompt would start on it."""
        if w.prefilling:
            return abs(w.busy_until_s - self.now_s)
        return 0.0 if w.is_idle else w.wait_s(self.now_s, self.look(w))

    def waits_s(self) -> list[float]:
        """`wait_s` of each source."""
        if self._waits_s is not None:
            return self._waits_s
        now_s = self.now_s
        found = [abs(w.busy_until_s - now_s) if w.prefilling else -1.0 for w in self.sources]
        if -1.0 not in found:
            self._waits_s = found
            return found
        # Not kept: these hang on looks, which may be newer the next time.
        return [wait_s if wait_s >= 0.0 else self.wait_s(w) for w, wait_s in zip(self.sources, found, strict=True)]

    def least_busy(self, extra_s: Mapping[str, float], count: int) -> list[WorkerBook]:
        """The `count` sources that could start a prompt soonest and disturb least. `extra_s`: seconds meant for some already."""
        idle = [w for w in self.sources if not w.prefilling and w.is_idle and w.name not in extra_s]
        if len(idle) >= count:
            return idle[:count]
        if extra_s:
            return self._sorted_busy(extra_s)[:count]
        if self._by_busy is None:
            self._by_busy = self._sorted_busy(extra_s)
        return self._by_busy[:count]

    def _sorted_busy(self, extra_s: Mapping[str, float]) -> list[WorkerBook]:
        waits_s = self.waits_s()
        if extra_s:
            waits_s = [wait_s + extra_s.get(w.name, 0.0) for wait_s, w in zip(waits_s, self.sources, strict=True)]
        return _sorted_by(self.sources, [wait_s + 0.05 * w.accounts.decodes for wait_s, w in zip(waits_s, self.sources, strict=True)])

    def least_full(self) -> Iterator[WorkerBook]:
        """Sinks, those first whose requests get their tokens quickest."""
        if self._by_full is None:
            self._by_full = _sorted_by(self.sinks, [o.gap_s for o in self.all_looks(self.sinks)])
        return iter(self._by_full)


def _sorted_by(books: Sequence[WorkerBook], keys: Sequence[float]) -> list[WorkerBook]:
    return [books[i] for i in sorted(range(len(keys)), key=keys.__getitem__)]
