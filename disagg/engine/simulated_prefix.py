"""A prefix cache as vLLM's: blocks of finished and running prompts stay until their room is needed, the least recently used first. Pure.

The cache counts in units, runs of blocks with one identity each (a trace may know prefixes only by 512 tokens). Two prompts share
exactly the units up to their first unlike identity, so an identity stands for everything before it too.

    a sequence holds units (refs > 0)  --release-->  evictable (refs = 0), still found by `match`  --evict-->  gone
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from disagg.types import CacheChange

KEPT_CHANGES = 256  # the latest, for the router; a report comes more often than so many steps


class PrefixCache:
    """Owner of the cached units. `unit_blocks`: blocks of one unit. `stored` and `evicted` count units since the start.

    `changes`: the latest, as of the last `note_changes`.
    """

    def __init__(self, unit_blocks: int) -> None:
        assert unit_blocks >= 1
        self.unit_blocks = unit_blocks
        self.stored = 0
        self.evicted = 0
        self.changes: deque[CacheChange] = deque(maxlen=KEPT_CHANGES)
        self.num_changes = 0
        self._came: list[int] = []
        self._went: list[int] = []
        self._refs: dict[int, int] = {}
        self._evictable: dict[int, None] = {}  # least recently used first

    @property
    def evictable_blocks(self) -> int:
        """Blocks that hold units which nobody uses: free for whoever needs them."""
        return len(self._evictable) * self.unit_blocks

    @property
    def held_blocks(self) -> int:
        """Blocks of units that sequences hold."""
        return (len(self._refs) - len(self._evictable)) * self.unit_blocks

    def __contains__(self, identity: int) -> bool:
        return identity in self._refs

    def match(self, identities: Sequence[int]) -> int:
        """How many of the first `identities` are cached, without a gap."""
        refs = self._refs
        for count, identity in enumerate(identities):
            if identity not in refs:
                return count
        return len(identities)

    def evictable_among(self, identities: Sequence[int]) -> int:
        """Blocks of those of the cached `identities` that nobody holds."""
        return sum(i in self._evictable for i in identities) * self.unit_blocks

    def acquire(self, identities: Sequence[int]) -> int:
        """Hold cached units. Returns how many blocks stop being evictable by it."""
        woken = 0
        for identity in identities:
            if self._refs[identity] == 0:
                del self._evictable[identity]
                woken += 1
            self._refs[identity] += 1
        return woken * self.unit_blocks

    def store(self, identity: int) -> bool:
        """Cache a unit that a sequence has just filled and holds; False, and nothing changed, when an equal one is there already."""
        if identity in self._refs:
            return False
        self._refs[identity] = 1
        self.stored += 1
        self._came.append(identity)
        return True

    def release(self, identities: Sequence[int]) -> int:
        """Let go of held units, as one sequence ends. Returns how many blocks become evictable.

        The end of a prefix is evicted before its begin.
        """
        freed = 0
        for identity in reversed(identities):
            self._refs[identity] -= 1
            if self._refs[identity] == 0:
                self._evictable[identity] = None
                freed += 1
        return freed * self.unit_blocks

    def evict_to(self, most_blocks: int) -> None:
        """Evict until at most `most_blocks` blocks are evictable."""
        while self.evictable_blocks > most_blocks:
            identity = next(iter(self._evictable))
            del self._evictable[identity]
            del self._refs[identity]
            self.evicted += 1
            self._went.append(identity)

    def note_changes(self) -> None:
        """A step is over: what it changed is one entry of `changes`. What came and went within it is left out."""
        if self._came or self._went:
            self.num_changes += 1
            stored = tuple([i for i in dict.fromkeys(self._came) if i in self._refs])
            removed = tuple([i for i in dict.fromkeys(self._went) if i not in self._refs])
            self.changes.append(CacheChange(self.num_changes, stored, removed))
            self._came, self._went = [], []

    def assert_unheld(self) -> None:
        """No sequence holds a unit."""
        assert len(self._refs) == len(self._evictable), f"{len(self._refs) - len(self._evictable)} cached units are still held"
