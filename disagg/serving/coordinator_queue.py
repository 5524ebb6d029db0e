"""Where requests wait for a route: the dispatcher decides (policy/dispatch.py), this file wakes it and those who wait.

It moves on events, never by polling: a request comes or goes, a worker joins, is lost or reports, a first token, an answer's end; and at
the instants that the dispatcher names.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection

from disagg.errors import DeadlineError, DisaggError, NoWorkerError, RejectedError
from disagg.policy.decision import Grant, Refusal, Verdict
from disagg.serving.decision_log import DecisionLog
from disagg.serving.pool import Pool, Reservation
from disagg.types import Request


class CoordinatorQueue:
    """Grants routes. `take` returns a reservation; whoever has it must close it.

    `decided` counts decisions by verdict and kind of reason: granted `disaggregated`, `colocated` or `retry`; rejected for `target` (its
    class cannot be met), `queue_full`, `deadline` or `no_worker`.
    """

    def __init__(self, pool: Pool, log: DecisionLog) -> None:
        self._pool = pool
        self._log = log
        self._waiting: dict[int, asyncio.Future[Reservation]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._is_closed = False
        self.decided: Counter[tuple[Verdict, str]] = Counter()

    async def take(self, request: Request, avoid: Collection[str] = (), attempt: int = 0) -> Reservation:
        """Wait for a route and book it. A retry (`attempt` > 0) is never refused for load.

        Raises InvalidRequestError (fits no worker), RejectedError (its class cannot be met, the queue is full, or its deadline passed in
        it), NoWorkerError (a pool stayed without a live worker for `worker_timeout_s`), DeadlineError (deadline over in a retry).
        """
        now_s = time.monotonic()
        if self._is_closed:
            raise NoWorkerError("the gateway is closing")
        if attempt and request.deadline_s is not None and request.deadline_s <= now_s:
            raise DeadlineError("the deadline passed before the answer was whole")
        dispatcher = self._pool.dispatcher
        self._pool.sync(now_s)
        key = dispatcher.submit(request, now_s, avoid, attempt)
        granted: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self._waiting[key] = granted
        try:
            self._decide(now_s)
            if not granted.done() and (self._watcher is None or self._watcher.done()):
                self._watcher = asyncio.create_task(self._watch())
            return await granted
        except BaseException:
            dispatcher.withdraw(key)
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                granted.result().close()  # granted in the very instant in which the wait ended
            raise
        finally:
            self._waiting.pop(key, None)

    def refusal(self, num_requests: int, priority: int) -> RejectedError | None:
        """Why so many further requests of this priority would be refused now, whatever they are; None when they may come."""
        found = self._pool.dispatcher.full(num_requests, time.monotonic(), priority)
        return None if found is None else RejectedError(f"rejected: {found[0]}", retry_after_s=found[1])

    async def _watch(self) -> None:
        """Runs only while somebody waits."""
        while self._waiting:
            changed = self._pool.changes.next()
            now_s = time.monotonic()
            self._pool.sync(now_s)
            wake_at_s = self._decide(now_s)
            if self._waiting:
                await _wait_event(changed, wake_at_s)

    def _decide(self, now_s: float) -> float | None:
        """Have the dispatcher, who is in sync with the pool, decide, and tell those concerned.

        Returns the instant at which to decide again at the latest.
        """
        decisions = self._pool.dispatcher.decide(now_s)
        for grant in decisions.grants:
            self._log.add(grant.record)
            self.decided[Verdict.GRANTED, _granted(grant)] += 1
            reservation = self._pool.reservation(grant)
            granted = self._waiting.pop(grant.key, None)
            if granted is None or granted.done():
                reservation.close()
            else:
                granted.set_result(reservation)
        for refusal in decisions.refusals:
            self._log.add(refusal.record)
            self.decided[Verdict.REJECTED, _rejected(refusal)] += 1
            granted = self._waiting.pop(refusal.key, None)
            if granted is not None and not granted.done():
                granted.set_exception(_error_of(refusal))
        return decisions.wake_at_s

    async def close(self) -> None:
        """End the queue: those that wait get NoWorkerError."""
        self._is_closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        for granted in list(self._waiting.values()):
            if not granted.done():
                granted.set_exception(NoWorkerError("the gateway is closing"))

    def assert_empty(self) -> None:
        """Nobody waits."""
        assert not self._waiting, f"{len(self._waiting)} requests wait"


def _granted(grant: Grant) -> str:
    if grant.record.attempt:
        return "retry"
    return "colocated" if grant.route.is_colocated else "disaggregated"


def _rejected(refusal: Refusal) -> str:
    record, deadline_s = refusal.record, refusal.request.deadline_s
    if refusal.no_worker:
        return "no_worker"
    if deadline_s is not None and deadline_s <= record.at_s:
        return "deadline"
    return "target" if record.candidates else "queue_full"


def _error_of(refusal: Refusal) -> DisaggError:
    if refusal.no_worker:
        return NoWorkerError(refusal.reason)
    if refusal.record.attempt:
        return DeadlineError(f"{refusal.reason}, on attempt {refusal.record.attempt + 1}")
    return RejectedError(f"rejected: {refusal.reason}", retry_after_s=refusal.retry_after_s)


async def _wait_event(event: asyncio.Event, until_s: float | None) -> None:
    """Until the event fires or the instant passes."""
    try:
        async with asyncio.timeout_at(until_s):
            await event.wait()
    except TimeoutError:
        return
