"""A coordinator whose runs are looked at once, at their end: for metrics, traces and logs.

The doors submit here. Observers see each run, whatever its end was; they are plain calls, and a fault of one is logged.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

from disagg.errors import RejectedError
from disagg.front.tracing import Tracing
from disagg.policy.decision import Prediction
from disagg.serving.coordinator import Coordinator
from disagg.serving.run import Run
from disagg.types import Chunk, Phase, Request, Route

logger = logging.getLogger(__name__)

Observer = Callable[[Run], None]


class ObservedRun:
    """A run with the same outside; `chunks` tells the observers at its end."""

    def __init__(self, run: Run, on_end: Sequence[Observer]) -> None:
        """`on_end` are called with the run."""
        self._run = run
        self._on_end = on_end
        self.timeline = run.timeline

    @property
    def route(self) -> Route | None:
        return self._run.route

    @property
    def attempts(self) -> int:
        return self._run.attempts

    @property
    def cached_tokens(self) -> int:
        return self._run.cached_tokens

    @property
    def newly_cached_tokens(self) -> int:
        return self._run.newly_cached_tokens

    @property
    def prediction(self) -> Prediction | None:
        return self._run.prediction

    def end(self, phase: Phase) -> None:
        self._run.end(phase)

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        try:
            async with aclosing(self._run.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            for observe in self._on_end:
                try:
                    observe(self._run)
                except Exception:
                    logger.exception("an observer of request %s failed", self._run.request.request_id)


class ObservedCoordinator:
    """What the doors need of a coordinator."""

    def __init__(self, coordinator: Coordinator, on_end: Sequence[Observer], tracing: Tracing | None = None) -> None:
        self._coordinator = coordinator
        self._on_end = tuple(on_end)
        self._tracing = tracing

    def submit(self, request: Request) -> ObservedRun:
        if self._tracing is None:
            return ObservedRun(self._coordinator.submit(request), self._on_end)
        request, trace = self._tracing.begin(request)
        run = self._coordinator.submit(request)
        return ObservedRun(run, (*self._on_end, partial(self._tracing.end, trace)))

    def refusal(self, num_requests: int, priority: int) -> RejectedError | None:
        return self._coordinator.refusal(num_requests, priority)
