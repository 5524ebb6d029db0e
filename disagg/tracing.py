"""OpenTelemetry, where it is installed and asked for: W3C trace context, and where spans go.

The gateway's spans are made in front/tracing.py, the workers' in serving/spans.py. Needs the extra `tracing`.
"""

from __future__ import annotations

import re
import time
from typing import Any

from disagg.errors import ConfigError

TRACEPARENT = "traceparent"
_FORMAT = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_FLUSH_TIMEOUT_MS = 5_000


def valid_traceparent(text: str) -> str:
    """The header when it is one (W3C trace context, version 00 or later); empty otherwise, as the standard asks."""
    return text if len(text) <= 64 and _FORMAT.fullmatch(text) and not text.startswith("ff") else ""


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


def context_of(traceparent: str) -> Any:
    """The context that the header names, as a span's parent; None for an empty one."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent}) if traceparent else None


def unix_ns(monotonic_s: float) -> int:
    """An instant of `time.monotonic()` as OpenTelemetry counts."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)


def close_provider(provider: Any) -> None:
    """Send what is left, for a few seconds at most. Blocks."""
    provider.force_flush(_FLUSH_TIMEOUT_MS)
    provider.shutdown()
