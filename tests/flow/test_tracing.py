"""One trace a request: the caller's context is taken, the workers get ours, and each phase has its span."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from disagg.client import AsyncClient
from disagg.errors import DisaggError, InvalidRequestError, RejectedError
from disagg.front.observed import ObservedCoordinator
from disagg.front.tracing import Tracing
from disagg.pb import inference_pb2 as pb
from disagg.serving.spans import WorkerSpans
from disagg.tracing import valid_traceparent, valid_tracestate
from disagg.types import Request
from tests.builders import Cluster, cluster, sim_topology
from tests.flow.test_gateway import served

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
STATE = "rojo=00f067aa0ba902b7,tenant@congo=t61rcWkgMzE"


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


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector: whose spans came, by name."""

    def __init__(self) -> None:
        self.spans: dict[str, tuple[str, Any]] = {}

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        for resource in request.resource_spans:
            instance = {a.key: a.value.string_value for a in resource.resource.attributes}["service.instance.id"]
            self.spans |= {span.name: (instance, span) for scope in resource.scope_spans for span in scope.spans}
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    server, servicer = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    await server.stop(0.0)


def exporting_to(endpoint: str) -> Any:
    topology = sim_topology()
    return topology.model_copy(update={"gateway": topology.gateway.model_copy(update={"traces_endpoint": endpoint})})


async def test_one_request_is_one_trace_at_a_collector() -> None:
    """By OTLP, over a socket: from the gateway and from both workers, each under its own name."""
    async with collector() as (found, endpoint):
        async with served(exporting_to(endpoint)) as s:
            await s.client.generate([1, 2, 3], max_tokens=4, traceparent=PARENT, tracestate=STATE)
        owners = {name: owner for name, (owner, _) in found.spans.items()}
        gateway = dict.fromkeys(
            ("disagg.request", "disagg.queue", "disagg.prefill", "disagg.transfer", "disagg.decode"), exporting_to(endpoint).name
        )
        workers = {"disagg.worker.prefill": "prefill-0", "disagg.worker.fetch": "decode-0", "disagg.worker.decode": "decode-0"}
        assert owners == gateway | workers
        spans = {name: span for name, (_, span) in found.spans.items()}
        assert {span.trace_id.hex() for span in spans.values()} == {PARENT.split("-")[1]}
        assert {span.trace_state for span in spans.values()} == {STATE}
        root = spans.pop("disagg.request")
        assert root.parent_span_id.hex() == PARENT.split("-")[2]
        assert {span.parent_span_id for span in spans.values()} == {root.span_id}


async def test_a_collector_that_is_away_hinders_no_request() -> None:
    away = Tracing.to("http://127.0.0.1:9", "alone")
    try:
        async with cluster() as c, aclosing(ObservedCoordinator(c.coordinator, [], away).submit(c.request(50, 6)).chunks()) as chunks:
            assert [token for chunk in [chunk async for chunk in chunks] for token in chunk.tokens]
    finally:
        async with asyncio.timeout(60):
            await asyncio.to_thread(away.close)


async def test_a_context_that_is_none_is_named_by_the_client() -> None:
    async with AsyncClient("127.0.0.1:9") as client:
        with pytest.raises(DisaggError, match="traceparent"):
            await client.generate([1], traceparent="mine")
        for context in ({"traceparent": PARENT, "tracestate": "mine"}, {"tracestate": STATE}):
            with pytest.raises(DisaggError, match="tracestate"):
                await client.generate([1], **context)


async def test_a_context_reaches_both_workers_whole_without_a_collector() -> None:
    """In parts, as gRPC metadata and HTTP headers may repeat a name; and a state of nothing we know is dropped, not the request."""
    async with served(sim_topology()) as s:
        seen: list[tuple[str, str]] = []
        for name, server in s.cluster.workers.items():
            worker = server.worker
            ask = worker.prefill if name.startswith("prefill") else worker.fetch

            async def watched(first: Any, *more: Any, ask: Any = ask) -> Any:
                seen.append((first.traceparent, first.tracestate))
                return await ask(first, *more)

            setattr(worker, "prefill" if name.startswith("prefill") else "fetch", watched)
        for states, want in ((STATE.split(","), STATE), (["no state"], ""), (["a=1"] * 33, "")):
            call: Any = s.client._stub.Generate(
                pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3])),
                metadata=(("traceparent", PARENT), *(("tracestate", state) for state in states)),
            )
            assert [part async for part in call]
            assert seen == [(PARENT, want)] * 2
            seen.clear()


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


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (STATE, STATE),
        (" a=1 ,, b=2", "a=1,b=2"),
        ("a=1=2", ""),
        ("A=1", ""),
        ("a=" + "x" * 600, ""),
        ("a=\n", ""),
        ("", ""),
    ],
)
def test_only_a_well_formed_state_is_taken(text: str, kept: str) -> None:
    assert valid_tracestate(text) == kept
