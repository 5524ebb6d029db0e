"""The gateway's queue: requests wait here for room, by priority, then by arrival. It moves on events, never by polling."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Container
from dataclasses import dataclass, field

from disagg.config import AdmissionSettings
from disagg.errors import DeadlineError, NoWorkerError, RejectedError
from disagg.policy.admission import Admit, Reject, decide, retry_after_s
from disagg.policy.router import NoRoute, pick
from disagg.policy.view import PoolView, QueueView
from disagg.serving.pool import Pool, Reservation
from disagg.types import Request


@dataclass(order=True, slots=True)
class _Waiter:
    priority: int  # negated: the highest goes first
    arrival_s: float
    number: int
    request: Request = field(compare=False)
    avoid: Container[str] = field(compare=False)
    granted: asyncio.Future[Reservation] = field(compare=False)
    queued_s: float = field(compare=False)

    @property
    def waits(self) -> bool:
        return not self.granted.done()


class CoordinatorQueue:
    """Grants routes. `take` returns a reservation; whoever has it must close it."""

    def __init__(self, pool: Pool, settings: AdmissionSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._heap: list[_Waiter] = []
        self._numbers = itertools.count()
        self._dispatcher: asyncio.Task[None] | None = None
        self._starved_since_s: float | None = None

    async def take(self, request: Request, avoid: Container[str] = (), *, is_retry: bool = False) -> Reservation:
        """Wait for a route and book it. A retry is never rejected for the length of the queue.

        Raises InvalidRequestError (fits no worker), RejectedError (queue full, or deadline over while queued), NoWorkerError (a pool
        stayed without a live worker for `worker_timeout_s`), DeadlineError (deadline over before a retry).
        """
        now_s = time.monotonic()
        view = self._pool.view(now_s)
        waiter = self._waiter(request, avoid, now_s)
        queue = self._queue_view(waiter)
        if is_retry:
            if request.deadline_s is not None and request.deadline_s <= now_s:
                raise DeadlineError("the deadline passed before the answer was whole")
            queue = QueueView(0, 0, queue.ahead)
        verdict = decide(request, view, queue, self._settings, now_s, avoid)
        if isinstance(verdict, Reject):
            raise RejectedError(f"rejected: {verdict.reason}", retry_after_s=verdict.retry_after_s)
        if isinstance(verdict, Admit):
            return self._pool.reserve(verdict.route, request)
        return await self._wait(waiter, verdict.reason)

    async def _wait(self, waiter: _Waiter, reason: str) -> Reservation:
        heapq.heappush(self._heap, waiter)
        if self._dispatcher is None or self._dispatcher.done():
            self._dispatcher = asyncio.create_task(self._dispatch_until_empty())
        granted = waiter.granted
        try:
            async with asyncio.timeout_at(waiter.request.deadline_s):
                return await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                granted.result().close()  # granted in the very instant in which the wait ended
            granted.cancel()
            if isinstance(error, TimeoutError):
                hint_s = retry_after_s(self._pool.view(time.monotonic()), self._queue_view(waiter))
                raise RejectedError(f"rejected: the deadline passed while it waited ({reason})", retry_after_s=hint_s) from None
            raise

    async def _dispatch_until_empty(self) -> None:
        """Runs only while somebody waits."""
        while self._heap:
            changed = self._pool.changes.next()
            view = self._dispatch()
            if self._heap:
                await _wait_event(changed, self._starved_until_s(view))

    def _dispatch(self) -> PoolView:
        """Grant routes in order until the first waiter that must go on waiting. Returns the view after that."""
        while True:
            view = self._pool.view(time.monotonic())
            while self._heap and not self._heap[0].waits:
                heapq.heappop(self._heap)
            if not self._heap:
                return view
            first = self._heap[0]
            choice = pick(first.request, view, self._settings, first.avoid)
            if isinstance(choice, NoRoute):
                return view
            heapq.heappop(self._heap)
            first.granted.set_result(self._pool.reserve(choice, first.request))

    def _starved_until_s(self, view: PoolView) -> float | None:
        """The instant at which the next waiter gives up because a pool has no live worker; those that are due give up now."""
        if view.missing_role is None:
            self._starved_since_s = None
            return None
        now_s = time.monotonic()
        if self._starved_since_s is None:
            self._starved_since_s = now_s
        due_s = []
        for waiter in self._heap:
            until_s = max(self._starved_since_s, waiter.queued_s) + self._settings.worker_timeout_s
            if until_s > now_s:
                due_s.append(until_s)
            elif waiter.waits:
                waited = f"none came within {self._settings.worker_timeout_s:g} s"
                waiter.granted.set_exception(NoWorkerError(f"no live {view.missing_role} worker, and {waited}"))
        return min(due_s, default=now_s)

    def refusal(self, num_requests: int) -> RejectedError | None:
        """Why so many further requests would be refused now, whatever they are; None when they may come."""
        waiting = [w.request for w in self._heap if w.waits]
        if not waiting or len(waiting) + num_requests <= self._settings.max_queued_requests:
            return None
        queue = QueueView(len(waiting), sum(r.num_context_tokens for r in waiting))
        hint_s = retry_after_s(self._pool.view(time.monotonic()), queue)
        return RejectedError(f"rejected: {len(waiting)} requests wait already", retry_after_s=hint_s)

    async def close(self) -> None:
        """End the queue: those that wait get NoWorkerError."""
        if self._dispatcher is not None:
            self._dispatcher.cancel()
        for waiter in self._heap:
            if waiter.waits:
                waiter.granted.set_exception(NoWorkerError("the gateway is closing"))
        self._heap.clear()

    def assert_empty(self) -> None:
        """Nobody waits."""
        assert not any(w.waits for w in self._heap), f"{len(self._heap)} requests wait"

    def _waiter(self, request: Request, avoid: Container[str], now_s: float) -> _Waiter:
        granted: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        return _Waiter(-request.priority, request.arrival_s, next(self._numbers), request, avoid, granted, now_s)

    def _queue_view(self, waiter: _Waiter) -> QueueView:
        waiting = [w for w in self._heap if w.waits and w is not waiter]
        tokens = sum(w.request.num_context_tokens for w in waiting)
        return QueueView(len(waiting), tokens, sum(w < waiter for w in waiting))


async def _wait_event(event: asyncio.Event, until_s: float | None) -> None:
    """Until the event fires or the instant passes."""
    try:
        async with asyncio.timeout_at(until_s):
            await event.wait()
    except TimeoutError:
        return
