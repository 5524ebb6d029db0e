"""One trace a request: the caller's context is taken, the workers get ours, and each phase has its span."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from disagg.errors import InvalidRequestError, RejectedError
from disagg.front.observed import ObservedCoordinator
from disagg.front.tracing import Tracing
from disagg.serving.spans import WorkerSpans
from disagg.tracing import valid_traceparent
from disagg.types import Request
from tests.builders import Cluster, cluster

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Recorder:
    """Tracing into memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.provider = provider
        self.tracing = Tracing(provider)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._exporter.get_finished_spans()}

    async def run(self, c: Cluster, request: Request) -> None:
        seen: list[Request] = []
        submit = c.coordinator.submit
        c.coordinator.submit = lambda r: seen.append(r) or submit(r)  # type: ignore[func-returns-value, method-assign]
        observed = ObservedCoordinator(c.coordinator, [], self.tracing)
        try:
            async with aclosing(observed.submit(request).chunks()) as chunks:
                async for _ in chunks:
                    pass
        finally:
            self.passed_on = seen[0].traceparent
            c.coordinator.submit = submit  # type: ignore[method-assign]


async def test_phases_hang_below_the_request_and_that_below_the_caller() -> None:
    recorder = Recorder()
    async with cluster(speed=2.0) as c:
        await recorder.run(c, replace(c.request(50, 6), traceparent=PARENT))
    spans: dict[str, Any] = recorder.spans
    root = spans["disagg.request"]
    assert set(spans) == {"disagg.request", "disagg.queue", "disagg.prefill", "disagg.transfer", "disagg.decode"}
    assert format(root.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(root.parent.span_id, "016x") == PARENT.split("-")[2]
    assert recorder.passed_on == f"00-{root.context.trace_id:032x}-{root.context.span_id:016x}-01"
    for name, span in spans.items():
        assert span.start_time <= span.end_time
        if name != "disagg.request":
            assert span.parent.span_id == root.context.span_id
            assert span.start_time >= root.start_time - 1_000_000
            assert span.end_time <= root.end_time + 1_000_000
    assert spans["disagg.prefill"].attributes["disagg.worker"] == "prefill-0"
    assert spans["disagg.decode"].attributes["disagg.worker"] == "decode-0"
    assert root.attributes["gen_ai.usage.output_tokens"] == 6
    assert root.attributes["disagg.outcome"] == "finished"


@pytest.mark.parametrize("mode", ["disagg", "colocated"])
async def test_workers_add_what_they_did_to_the_same_trace(mode: str) -> None:
    """Their spans hang below the gateway's span of the request, each with its worker's name."""
    recorder = Recorder()
    async with cluster(mode=mode, speed=2.0) as c:
        for server in c.workers.values():
            server._servicer.spans = WorkerSpans(recorder.provider, server.worker.name)
        for name, server in list(c.workers.items()):  # attach anew: a stream keeps the spans that it began with
            await c.pool.join(name, c.pool.members[name].role, server.target)
        await recorder.run(c, replace(c.request(50, 6), traceparent=PARENT))
    spans: dict[str, Any] = recorder.spans
    root = spans["disagg.request"]
    done = {name: span.attributes["disagg.worker"] for name, span in spans.items() if name.startswith("disagg.worker.")}
    assert done == (
        {"disagg.worker.prefill": "prefill-0", "disagg.worker.fetch": "decode-0", "disagg.worker.decode": "decode-0"}
        if mode == "disagg"
        else {"disagg.worker.generate": "colocated-0"}
    )
    for name in done:
        assert spans[name].context.trace_id == root.context.trace_id
        assert spans[name].parent.span_id == root.context.span_id
        assert spans[name].attributes["disagg.outcome"] == "done"


async def test_a_refused_request_is_an_error_and_has_no_phases_but_the_queue() -> None:
    recorder = Recorder()
    async with cluster() as c:
        with pytest.raises((InvalidRequestError, RejectedError)):
            await recorder.run(c, replace(c.request(50, 6), deadline_s=0.0001))
    spans: dict[str, Any] = recorder.spans
    assert "disagg.prefill" not in spans
    assert spans["disagg.request"].parent is None
    assert not spans["disagg.request"].status.is_ok


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        (PARENT, True),
        (PARENT.replace("00-", "01-", 1), True),
        (PARENT.upper(), False),
        (PARENT + "-extra", False),
        ("", False),
        ("00-" + "0" * 32 + "-00f067aa0ba902b7-01", False),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01", False),
        (PARENT.replace("00-", "ff-", 1), False),
    ],
)
def test_only_a_well_formed_context_is_taken(text: str, is_valid: bool) -> None:
    assert valid_traceparent(text) == (text if is_valid else "")
