"""OpenTelemetry, where it is installed and asked for: W3C trace context, and where spans go.

The gateway's spans are made in front/tracing.py, the workers' in serving/spans.py. Needs the extra `tracing`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, TypedDict

from disagg.errors import ConfigError
from disagg.types import Request, Transfer

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
_FORMAT = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
# One vendor's entry: KEY=VALUE, the key perhaps TENANT@SYSTEM, the value printable ASCII without commas and equals signs.
_STATE = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")
MAX_STATES = 32
MAX_STATE_CHARS = 512  # as many as everybody on the way must pass on
_FLUSH_TIMEOUT_MS = 5_000


class TraceContext(TypedDict):
    """Of a request: the caller's span, and vendors' entries that go with it; each empty for none."""

    traceparent: str
    tracestate: str


def valid_traceparent(text: str) -> str:
    """The header when it is one (W3C trace context, version 00 or later); empty otherwise, as the standard asks."""
    return text if len(text) <= 64 and _FORMAT.fullmatch(text) and not text.startswith("ff") else ""


def valid_tracestate(text: str) -> str:
    """The header when it is one (entries of vendors, of which each is passed on as it came); empty otherwise, as the standard asks."""
    entries = [entry.strip(" \t") for entry in text.split(",")]
    states = [entry for entry in entries if entry]
    fits = len(text) <= MAX_STATE_CHARS and len(states) <= MAX_STATES
    return ",".join(states) if fits and all(map(_STATE.fullmatch, states)) else ""


def trace_context(headers: Mapping[str, str]) -> TraceContext:
    """What headers with lower-case names say. What is malformed counts as absent."""
    parent = valid_traceparent(headers.get(TRACEPARENT, ""))
    # A state belongs to its parent.
    return TraceContext(traceparent=parent, tracestate=valid_tracestate(headers.get(TRACESTATE, "")) if parent else "")


def make_provider(endpoint: str, instance: str) -> Any:
    """A TracerProvider whose spans go to `endpoint`, by OTLP over gRPC. Raises ConfigError when OpenTelemetry is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError(
            "gateway.traces_endpoint needs OpenTelemetry: pip install 'disagg[tracing]'",
            key="gateway.traces_endpoint",
            value=endpoint,
            expected="the extra `tracing` to be installed",
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "disagg", "service.instance.id": instance}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"))))
    return provider


def context_of(traced: Request | Transfer) -> Any:
    """The context that it carries, as a span's parent; None where it carries none."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers = {TRACEPARENT: traced.traceparent, **({TRACESTATE: traced.tracestate} if traced.tracestate else {})}
    return TraceContextTextMapPropagator().extract(headers) if traced.traceparent else None


def unix_ns(monotonic_s: float) -> int:
    """An instant of `time.monotonic()` as OpenTelemetry counts."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)


def close_provider(provider: Any) -> None:
    """Send what is left, for a few seconds at most. Blocks."""
    provider.force_flush(_FLUSH_TIMEOUT_MS)
    provider.shutdown()
