"""An event that happens again and again: something changed, look again."""

from __future__ import annotations

import asyncio


class Signal:
    """Take `next()` *before* looking at the state, then wait on it: no change between the look and the wait is missed."""

    def __init__(self) -> None:
        self._event: asyncio.Event | None = None  # while somebody may wait for it

    def next(self) -> asyncio.Event:
        """The event of the next firing."""
        if self._event is None:
            self._event = asyncio.Event()
        return self._event

    def fire(self) -> None:
        """Wake all who wait for the next change."""
        if self._event is not None:
            self._event.set()
            self._event = None
