"""How the workers stand at one instant: worked out once, for all requests that are decided on then. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from disagg.policy.worker_book import WorkerBook


class Standing:
    """Valid for one instant and until something is granted. `sources`, `sinks`: live workers that may take a first and a second leg.

    Both come with the least recently used first; of workers that are equal, those come first in the orders here, too.
    """

    __slots__ = ("_by_busy", "_by_full", "levels", "now_s", "outlines", "sinks", "sources", "waits_s")

    def __init__(self, sources: Sequence[WorkerBook], sinks: Sequence[WorkerBook], now_s: float) -> None:
        self.sources = sources
        self.sinks = sinks
        self.now_s = now_s
        self.outlines = {w: w.outline(now_s) for w in (*sources, *sinks)}
        self.waits_s = {w: w.wait_s(now_s, self.outlines[w]) for w in sources}
        self.levels: list[tuple[float, float]] | None = None  # kept by policy/outlook.py
        self._by_busy: list[WorkerBook] | None = None
        self._by_full: list[WorkerBook] | None = None

    def least_busy(self, extra_s: Mapping[str, float]) -> list[WorkerBook]:
        """Sources, those first that could start a prompt soonest and disturb least. `extra_s`: seconds meant for some already."""
        if extra_s:
            return self._sorted_busy({w: wait_s + extra_s.get(w.name, 0.0) for w, wait_s in self.waits_s.items()})
        if self._by_busy is None:
            self._by_busy = self._sorted_busy(self.waits_s)
        return self._by_busy

    def _sorted_busy(self, waits_s: Mapping[WorkerBook, float]) -> list[WorkerBook]:
        keys = {w: waits_s[w] + 0.05 * w.accounts.decodes for w in self.sources}
        return sorted(self.sources, key=keys.__getitem__)

    def least_full(self) -> list[WorkerBook]:
        """Sinks, those first whose requests get their tokens quickest."""
        if self._by_full is None:
            keys = {w: self.outlines[w].gap_s for w in self.sinks}
            self._by_full = sorted(self.sinks, key=keys.__getitem__)
        return self._by_full
