"""OpenTelemetry spans, one trace a request: the request, and under it its phases as the gateway sees them.

W3C context is taken from the caller and passed on to the workers, which add spans of what they do (serving/spans.py); an engine that is
told where spans go (vLLM's `otlp_traces_endpoint`, in `engine.args`) adds its own to the same trace. Spans are made at a request's end,
from its timeline: nothing is paid per token. Without `gateway.traces_endpoint` the caller's context is passed on and nothing is recorded.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from disagg.serving.run import Run
from disagg.tracing import close_provider, context_of, make_provider, trace_context, unix_ns
from disagg.types import Phase, Request


@dataclass(frozen=True, slots=True)
class OpenTrace:
    """One request's span while it runs."""

    span: Any
    began_s: float


class Tracing:
    """Made once per gateway; `close` sends what is left."""

    def __init__(self, provider: Any) -> None:
        """`provider`: an OpenTelemetry TracerProvider."""
        self._provider = provider
        self._tracer = provider.get_tracer("disagg.gateway")

    @classmethod
    def to(cls, endpoint: str, deployment: str) -> Tracing:
        """Spans go to `endpoint`, by OTLP over gRPC. Raises ConfigError when OpenTelemetry is not installed."""
        return cls(make_provider(endpoint, deployment))

    def begin(self, request: Request) -> tuple[Request, OpenTrace]:
        """Open the request's span; the request that is returned carries it on to the workers."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = context_of(request)
        began_s = request.arrival_s or time.monotonic()
        span = self._tracer.start_span("disagg.request", context=parent, kind=SpanKind.SERVER, start_time=unix_ns(began_s))
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, context=set_span_in_context(span))
        return replace(request, **trace_context(carrier)), OpenTrace(span, began_s)

    def end(self, trace: OpenTrace, run: Run) -> None:
        """Close the span of a run that ended, with a span per phase that it went through."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        timeline, route, context = run.timeline, run.route, set_span_in_context(trace.span)
        ended_s = timeline.ended_s or time.monotonic()
        phases: tuple[tuple[str, float | None, float | None, dict[str, str]], ...] = (
            ("disagg.queue", timeline.received_s, timeline.routed_s or ended_s, {}),
            ("disagg.prefill", timeline.routed_s, timeline.first_token_s, {"disagg.worker": route.prefill if route else ""}),
            ("disagg.transfer", timeline.routed_s, timeline.transferred_s, {}),
            ("disagg.decode", timeline.first_token_s, timeline.last_token_s, {"disagg.worker": route.decode if route else ""}),
        )
        for name, begin_s, end_s, attributes in phases:
            if begin_s is not None and end_s is not None:
                child = self._tracer.start_span(name, context=context, start_time=unix_ns(begin_s), attributes=attributes)
                child.end(end_time=unix_ns(max(begin_s, end_s)))
        trace.span.set_attributes(
            {
                "gen_ai.request.id": run.request.request_id,
                "gen_ai.usage.input_tokens": run.request.num_prompt_tokens,
                "gen_ai.usage.output_tokens": run.output_tokens,
                "disagg.cached_tokens": run.cached_tokens,
                "disagg.slo_class": run.request.slo_class,
                "disagg.outcome": run.phase,
                "disagg.attempts": run.attempts,
            }
        )
        if run.phase in (Phase.FAILED, Phase.REJECTED):
            trace.span.set_status(Status(StatusCode.ERROR, run.phase))
        trace.span.end(end_time=unix_ns(ended_s))

    def close(self) -> None:
        """Send what is left, for a few seconds at most. Blocks."""
        close_provider(self._provider)
