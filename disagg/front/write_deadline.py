"""A deadline for each write to a client, by one timer for all of them: a timer of its own would cost more than a small write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

from disagg.errors import DeadlineError


class WriteDeadline:
    """`within` for each write; a task has one under way at a time. The timer runs only while somebody writes, and stops by itself."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since_s: dict[asyncio.Task[object], float] = {}  # of writes under way, oldest first
        self._overdue: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def within(self, write: Awaitable[object]) -> None:
        """Await `write`. Raises DeadlineError, and cancels it, when it takes longer than `timeout_s`."""
        task = asyncio.current_task()
        assert task is not None
        self._since_s[task] = time.monotonic()
        if self._timer is None:
            self._wait(self._timeout_s)
        try:
            await write
        except asyncio.CancelledError:
            if task not in self._overdue:
                raise
            task.uncancel()
            raise DeadlineError(f"the client took nothing of its answer for {self._timeout_s:g} s") from None
        finally:
            self._overdue.discard(task)
            self._since_s.pop(task, None)

    def _wait(self, wait_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._check)

    def _check(self) -> None:
        """Cancel what is overdue, and come back for the next one."""
        self._timer = None
        due_by_s = time.monotonic() - self._timeout_s
        for task, since_s in list(self._since_s.items()):
            if since_s > due_by_s:
                self._wait(since_s - due_by_s)
                return
            del self._since_s[task]
            self._overdue.add(task)
            task.cancel()
