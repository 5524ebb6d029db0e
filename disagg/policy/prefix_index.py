"""Which worker holds which prompt prefix, as the engines' own cache events tell. Pure.

    worker's state (CacheChange) ──update──> blocks by worker <──learn── a first token that says how much was cached
    prompt's identities ──cached_tokens──> tokens that each worker is expected to hold

It is a hint. An event that is late or lost makes a prediction too long or too short, nothing else, and what a first token then says puts
it right. Memory is bounded by what the workers' caches can hold: of each worker at most so many blocks are remembered, the newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from disagg.types import CacheChange


class PrefixIndex:
    """Blocks by worker. Unknown workers are fine everywhere."""

    def __init__(self) -> None:
        self._blocks: dict[str, dict[int, None]] = {}  # oldest first
        self._most: dict[str, int] = {}
        self._last: dict[str, int] = {}  # number of the latest change

    def join(self, worker: str, most_blocks: int) -> None:
        """A new life of `worker`, whose cache is empty and holds `most_blocks` blocks at most."""
        self._blocks[worker], self._most[worker], self._last[worker] = {}, most_blocks, -1

    def leave(self, worker: str) -> None:
        """It is gone, and so is its cache."""
        for table in (self._blocks, self._most, self._last):
            table.pop(worker, None)

    def update(self, worker: str, changes: Iterable[CacheChange]) -> None:
        """Take in what a worker reports; changes that it has told of before do not count twice."""
        blocks = self._blocks.get(worker)
        if blocks is None:
            return
        for change in changes:
            if change.number <= self._last[worker]:
                continue
            self._last[worker] = change.number
            if change.is_cleared:
                blocks.clear()
            for identity in change.stored:
                blocks[identity] = None
            for identity in change.removed:
                blocks.pop(identity, None)
        self._bound(worker)

    def learn(self, worker: str, identities: Sequence[int], cached_blocks: int) -> None:
        """A prompt ran on `worker`, which had its first `cached_blocks` blocks: those after it were not there, and all of them are now."""
        blocks = self._blocks.get(worker)
        if blocks is None:
            return
        for identity in identities[cached_blocks:]:
            blocks.pop(identity, None)
        blocks.update(dict.fromkeys(identities))
        self._bound(worker)

    def cached_blocks(self, identities: Sequence[int]) -> Mapping[str, int]:
        """How many of the first `identities` each worker holds; workers without the first one are left out.

        A cache gives up a prefix from its end, so the last block that is there is found by halving.
        """
        found: dict[str, int] = {}
        if not identities:
            return found
        first = identities[0]
        for worker, blocks in self._blocks.items():
            if first in blocks:
                low, high = 1, len(identities) + 1  # the first `low` are there, the first `high` are not
                while high - low > 1:
                    middle = (low + high) // 2
                    low, high = (middle, high) if identities[middle - 1] in blocks else (low, middle)
                found[worker] = low
        return found

    def __len__(self) -> int:
        """Blocks that are remembered, of all workers."""
        return sum(map(len, self._blocks.values()))

    def _bound(self, worker: str) -> None:
        blocks, most = self._blocks[worker], self._most[worker]
        while len(blocks) > most:
            del blocks[next(iter(blocks))]
