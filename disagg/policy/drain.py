"""A worker that takes no more answers until a large one fits: without it smaller ones take for ever what comes free. Pure."""

from __future__ import annotations

from collections.abc import Container

from disagg.policy.router import Ask, has_room
from disagg.policy.standing import Standing
from disagg.policy.waiting import Waiter


class Drain:
    """At most one worker empties at a time, for the request that has waited longest."""

    __slots__ = ("_waiter", "_worker")

    def __init__(self) -> None:
        self._waiter: Waiter | None = None
        self._worker = ""

    @property
    def waiter(self) -> Waiter | None:
        """For whom a worker empties."""
        return self._waiter

    def begin(self, waiter: Waiter, ask: Ask, standing: Standing) -> None:
        """`waiter` finds room nowhere: the emptiest worker that could hold it takes no others. Nothing happens when one empties already."""
        able = [w for w in standing.sinks if w.state.total_kv_tokens >= ask.whole_tokens]
        if self._waiter is None and able and not any(has_room(w, ask, standing) for w in able):
            self._waiter = waiter
            self._worker = max(able, key=lambda w: w.outline(standing.now_s).free_kv_tokens).name

    def look_anew(self, waiting: Container[int], workers: Container[str]) -> None:
        """It is over when the request waits no more, or the worker is gone. `waiting`: keys."""
        if self._waiter is not None and (self._waiter.key not in waiting or self._worker not in workers):
            self._waiter = None

    def kept_from(self, waiter: Waiter) -> str | None:
        """The worker that `waiter` must leave alone. Who is more urgent than the one for whom it empties need not."""
        if self._waiter is None or waiter is self._waiter or waiter.request.priority > self._waiter.request.priority:
            return None
        return self._worker
