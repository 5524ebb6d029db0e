"""One request under way at the gateway, as its owner (the front door) sees it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable

from disagg.policy.decision import Prediction
from disagg.serving.timeline import Timeline
from disagg.types import Chunk, Phase, Request, Route

ENDS = frozenset({Phase.FINISHED, Phase.REJECTED, Phase.FAILED, Phase.CANCELLED})


class Run:
    """Nothing happens until `chunks()` is iterated; nothing is left once that iterator is closed.

    `prediction` is what the router expected when it admitted the request, `route` the latest one. `attempts` counts routes tried,
    `cached_tokens` are prompt tokens that the first prefill found in its cache, `newly_cached_tokens` those that it left there,
    `output_tokens` those handed out so far. `phase` ends in exactly one of finished, rejected, failed, cancelled.
    """

    def __init__(self, request: Request, serve: Callable[[Run], AsyncGenerator[Chunk, None]]) -> None:
        self.request = request
        self.timeline = Timeline(received_s=request.arrival_s)
        self.phase = Phase.QUEUED
        self.route: Route | None = None
        self.prediction: Prediction | None = None
        self.attempts = 0
        self.cached_tokens = 0
        self.newly_cached_tokens = 0
        self.output_tokens = 0
        self._serve: Callable[[Run], AsyncGenerator[Chunk, None]] | None = serve

    def chunks(self) -> AsyncGenerator[Chunk, None]:
        """The answer's chunks, the first token at once; the last chunk carries `finish`. Call it once.

        Use it in `contextlib.aclosing`: closing, or cancelling the task that iterates, ends the request on all workers. Raises typed
        errors (disagg/errors.py); an iterator that ends without an error has yielded the whole answer.
        """
        assert self._serve is not None, "a run is iterated once"
        serve, self._serve = self._serve, None
        return serve(self)

    @property
    def has_ended(self) -> bool:
        return self.phase in ENDS

    def end(self, phase: Phase) -> None:
        """Enter an end phase; only the first end counts."""
        if not self.has_ended:
            self.phase = phase
            self.timeline.ended_s = time.monotonic()
