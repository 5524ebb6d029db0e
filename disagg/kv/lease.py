"""Deadlines and memories of ended transfers: what keeps boxes clean when a peer or a gateway goes silent."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")

TOMBSTONES = 16384  # ended transfers remembered; a message later than that many transfers meets an unknown id, and waits for its lease


class Leases:
    """Deadlines by transfer id, on one timer that exists only while a lease runs (so an idle worker cleans up, and never spins)."""

    def __init__(self, lease_s: float, expire: Callable[[str], None]) -> None:
        self.lease_s = lease_s
        self._expire = expire
        self._deadlines: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._deadlines

    def start(self, transfer_id: str) -> None:
        """Let the lease run from now; starting again renews it."""
        loop = asyncio.get_running_loop()
        self._deadlines[transfer_id] = loop.time() + self.lease_s
        if self._timer is None:
            self._timer = loop.call_later(self.lease_s, self._fire)

    def stop(self, transfer_id: str) -> None:
        """No deadline any more. Idempotent."""
        self._deadlines.pop(transfer_id, None)
        if not self._deadlines and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for transfer_id in [i for i, deadline_s in self._deadlines.items() if deadline_s <= now_s]:
            self._deadlines.pop(transfer_id, None)
            self._expire(transfer_id)
        if self._deadlines and self._timer is None:
            self._timer = loop.call_at(min(self._deadlines.values()), self._fire)


class Tombstones(Generic[ValueT]):
    """What became of the latest ended transfers, by id; the oldest are forgotten."""

    def __init__(self, capacity: int = TOMBSTONES) -> None:
        self._capacity = capacity
        self._ended: OrderedDict[str, ValueT] = OrderedDict()

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._ended

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, transfer_id: str, value: ValueT) -> None:
        """Remember how a transfer ended; what is known already stays."""
        self._ended.setdefault(transfer_id, value)
        if len(self._ended) > self._capacity:
            self._ended.popitem(last=False)

    def get(self, transfer_id: str) -> ValueT | None:
        """How it ended, or None when it is unknown (or when None was remembered)."""
        return self._ended.get(transfer_id)
