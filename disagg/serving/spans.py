"""A worker's spans: what it did for a request, below the gateway's span of that request (front/tracing.py), in the same trace."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from disagg.errors import DisaggError
from disagg.tracing import close_provider, context_of, make_provider, unix_ns
from disagg.types import Request, Transfer

_NO_SPAN = contextlib.nullcontext()


class WorkerSpans:
    """One per worker; `close` sends what is left. A span is made at the end of what it covers: nothing is paid per token."""

    def __init__(self, provider: Any, worker: str) -> None:
        """`provider`: an OpenTelemetry TracerProvider, None to record nothing."""
        self._provider = provider
        self._worker = worker
        self._tracer = provider.get_tracer("disagg.worker") if provider is not None else None

    @classmethod
    def to(cls, endpoint: str | None, worker: str) -> WorkerSpans:
        """Spans go to `endpoint`, nowhere when it is None. Raises ConfigError when OpenTelemetry is not installed."""
        return cls(make_provider(endpoint, worker) if endpoint is not None else None, worker)

    def span(self, name: str, below: Request | Transfer, **attributes: str | int) -> AbstractContextManager[None]:
        """Covers the block. A request without a trace leaves no span. How it failed, or that it was cancelled, is the span's status."""
        if self._tracer is None or not below.traceparent:
            return _NO_SPAN
        return self._covering(name, below, attributes)

    @contextlib.contextmanager
    def _covering(self, name: str, below: Request | Transfer, attributes: dict[str, str | int]) -> Iterator[None]:
        began_s = time.monotonic()
        outcome = "done"
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except DisaggError as error:
            outcome = type(error).__name__
            raise
        finally:
            self._add(name, below, began_s, outcome, attributes)

    def _add(self, name: str, below: Request | Transfer, began_s: float, outcome: str, attributes: dict[str, str | int]) -> None:
        from opentelemetry.trace import Status, StatusCode

        assert self._tracer is not None
        every = {"disagg.worker": self._worker, "disagg.outcome": outcome, **{f"disagg.{key}": value for key, value in attributes.items()}}
        span = self._tracer.start_span(name, context=context_of(below), start_time=unix_ns(began_s), attributes=every)
        if outcome not in ("done", "cancelled"):
            span.set_status(Status(StatusCode.ERROR, outcome))
        span.end()

    async def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        if self._provider is not None:
            await asyncio.to_thread(close_provider, self._provider)
