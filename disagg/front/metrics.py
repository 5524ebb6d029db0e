"""What the gateway tells Prometheus: each request once, at its end, and pools and queue as they are when they are asked for.

Names follow Prometheus' conventions, with the unit at the end. Labels are bounded: outcomes, SLO classes, workers, roles, error classes.
Histograms hold what the gateway sees; a client adds its network.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from functools import cache

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from disagg.config import SloClass, Topology
from disagg.policy.decision import Verdict
from disagg.policy.view import PoolView, WorkerView
from disagg.serving.coordinator import Coordinator
from disagg.serving.pool import Pool
from disagg.serving.run import Run
from disagg.types import KvCounters, Phase

# Dense where targets lie: TTFT from 20 ms to a minute, TPOT from 2 ms to a second.
TTFT_BUCKETS_S = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 10.0, 20.0, 60.0)
TPOT_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.065, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 900.0)
SPAN_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
TOKEN_BUCKETS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
DECISIONS = (
    *((Verdict.GRANTED, reason) for reason in ("disaggregated", "colocated", "retry")),
    *((Verdict.REJECTED, reason) for reason in ("target", "queue_full", "deadline", "no_worker")),
)
OUTCOMES = (Phase.FINISHED, Phase.REJECTED, Phase.FAILED, Phase.CANCELLED)


class Metrics:
    """Made once per gateway. `observe` is called with each run that ended; `exposition` is what a scrape gets."""

    def __init__(self, topology: Topology, pool: Pool, coordinator: Coordinator) -> None:
        self.registry = CollectorRegistry()
        self._classes = {known.name: known for known in topology.slo_classes}
        self._make_families()
        self.registry.register(_PoolCollector(topology, pool, coordinator))
        for name in self._classes:  # so that rates start at 0 instead of with the first request
            for outcome in OUTCOMES:
                self._requests(outcome, name)

    def _make_families(self) -> None:
        """Each family by its `labels`, remembered: to look a series up costs more than to count in it."""
        registry = self.registry
        labels = ["slo_class"]

        def counter(name: str, text: str, *more: str) -> Callable[..., Counter]:
            return cache(Counter(name, text, [*more, *labels], registry=registry).labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Callable[..., Histogram]:
            return cache(Histogram(name, text, labels, buckets=buckets, registry=registry).labels)

        self._requests = counter("disagg_requests", "Requests that ended, by outcome.", "outcome")
        self._slo_met = counter("disagg_requests_slo_met", "Finished requests, TTFT and TPOT in their class.")
        self._prompt = counter("disagg_prompt_tokens", "Prompt tokens of requests that got a first token.")
        self._cached = counter("disagg_cached_prompt_tokens", "Prompt tokens found in a prefix cache.")
        self._output = counter("disagg_output_tokens", "Tokens handed out.")
        self._ttft = histogram("disagg_ttft_seconds", "Received to first token.", TTFT_BUCKETS_S)
        self._tpot = histogram("disagg_tpot_seconds", "Mean seconds per token after the first, per request.", TPOT_BUCKETS_S)
        self._e2e = histogram("disagg_request_duration_seconds", "Received to ended, of finished requests.", E2E_BUCKETS_S)
        self._queue = histogram("disagg_queue_seconds", "Received to routed.", SPAN_BUCKETS_S)
        self._prefill = histogram("disagg_prefill_seconds", "Routed to first token.", TTFT_BUCKETS_S)
        self._transfer = histogram("disagg_transfer_exposed_seconds", "First token to KV complete: the wait not hidden.", SPAN_BUCKETS_S)
        self._prompt_length = histogram("disagg_prompt_length_tokens", "Prompt length of each request.", TOKEN_BUCKETS)
        self._output_length = histogram("disagg_output_length_tokens", "Answer length of each finished request.", TOKEN_BUCKETS)

    def observe(self, run: Run) -> None:
        """Count a run that ended."""
        name, timeline = run.request.slo_class, run.timeline
        self._requests(run.phase, name).inc()
        self._queue(name).observe(timeline.queue_s)
        self._prompt_length(name).observe(run.request.num_prompt_tokens)
        if timeline.first_token_s is None:
            return
        self._prompt(name).inc(run.request.num_prompt_tokens)
        self._cached(name).inc(run.cached_tokens)
        self._output(name).inc(run.output_tokens)
        self._ttft(name).observe(timeline.ttft_s)
        self._prefill(name).observe(timeline.prefill_s)
        if run.route is not None and not run.route.is_colocated and timeline.transferred_s is not None:
            self._transfer(name).observe(timeline.transfer_s)
        tpot_s = timeline.decode_s / (run.output_tokens - 1) if run.output_tokens > 1 else None
        if tpot_s is not None:
            self._tpot(name).observe(tpot_s)
        if run.phase is Phase.FINISHED:
            self._e2e(name).observe(timeline.total_s)
            self._output_length(name).observe(run.output_tokens)
            if _in_time(self._classes[name], timeline.ttft_s, tpot_s):
                self._slo_met(name).inc()

    def exposition(self) -> tuple[str, bytes]:
        """(content type, text) of a scrape."""
        return CONTENT_TYPE_LATEST, generate_latest(self.registry)


def _in_time(slo_class: SloClass, ttft_s: float, tpot_s: float | None) -> bool:
    is_ttft_met = slo_class.ttft_s is None or ttft_s <= slo_class.ttft_s
    return is_ttft_met and (slo_class.tpot_s is None or tpot_s is None or tpot_s <= slo_class.tpot_s)


_WORKER_GAUGES: dict[str, tuple[str, Callable[[WorkerView], float]]] = {
    "disagg_worker_running_requests": ("Requests in the engine's batch.", lambda w: w.state.running_requests),
    "disagg_worker_waiting_requests": ("Requests in the engine without a token yet.", lambda w: w.state.waiting_requests),
    "disagg_worker_waiting_tokens": ("Prompt tokens that the engine has still to compute.", lambda w: w.state.waiting_tokens),
    "disagg_worker_kv_free_tokens": ("KV cache tokens that are free.", lambda w: w.state.free_kv_tokens),
    "disagg_worker_kv_total_tokens": ("KV cache tokens in all.", lambda w: w.state.total_kv_tokens),
    "disagg_worker_outbox_free_bytes": ("Room for KV that waits to be fetched.", lambda w: w.state.outbox_free_bytes),
    "disagg_worker_outbox_total_bytes": ("Size of the outbox.", lambda w: w.state.outbox_total_bytes),
    "disagg_worker_inbox_free_bytes": ("Room for KV that waits to be loaded.", lambda w: w.state.inbox_free_bytes),
    "disagg_worker_inbox_total_bytes": ("Size of the inbox.", lambda w: w.state.inbox_total_bytes),
    "disagg_worker_step_seconds": ("Smoothed duration of the engine's steps.", lambda w: w.state.step_s),
}

_KV_COUNTERS: dict[str, tuple[str, Callable[[KvCounters], float]]] = {
    "disagg_kv_sent_bytes": ("KV handed to peers.", lambda kv: kv.sent_bytes),
    "disagg_kv_sent_frames": ("Frames of KV handed to peers.", lambda kv: kv.sent_frames),
    "disagg_kv_received_bytes": ("KV that arrived and was verified.", lambda kv: kv.received_bytes),
    "disagg_kv_received_frames": ("Frames of KV that arrived and were verified.", lambda kv: kv.received_frames),
    "disagg_kv_transfer_seconds": ("First message to last block verified, summed over completed pulls.", lambda kv: kv.transfer_s),
    "disagg_kv_completed_transfers": ("Pulls that brought the whole KV.", lambda kv: kv.completed),
    "disagg_kv_failed_transfers": ("Pulls that did not; their requests take another route.", lambda kv: kv.failed),
    "disagg_kv_released_transfers": ("Pulls that nobody wanted any more.", lambda kv: kv.released),
    "disagg_kv_corrupt_transfers": ("Failed pulls that met a wrong digest, length or order.", lambda kv: kv.corrupt),
    "disagg_kv_fenced_entries": ("Entries of outbox or inbox whose lease ran out.", lambda kv: kv.fenced),
    "disagg_kv_refused_pulls": ("Pulls of what the outbox does not have for them.", lambda kv: kv.refused),
    "disagg_kv_late_messages": ("Calls and messages after a transfer's end, or said twice; ignored.", lambda kv: kv.late),
    "disagg_kv_garbage_connections": ("Connections to the KV port that did not speak as a peer does.", lambda kv: kv.garbage),
    "disagg_kv_turned_away_connections": ("Connections to the KV port beyond the most at once.", lambda kv: kv.turned_away),
}


class _PoolCollector(Collector):
    """Reads pools and coordinator when asked: what is live costs nothing between scrapes."""

    def __init__(self, topology: Topology, pool: Pool, coordinator: Coordinator) -> None:
        self._topology = topology
        self._pool = pool
        self._coordinator = coordinator

    def describe(self) -> list[Metric]:
        """Registering must not collect: workers are not there yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        view = self._pool.view(time.monotonic())
        yield from self._pools(view)
        yield from self._workers(view)
        running = GaugeMetricFamily("disagg_open_requests", "Requests under way, by phase.", labels=["phase"])
        phases = Tally(run.phase for run in self._coordinator.open_runs)
        for phase in Phase:
            if phase not in OUTCOMES:
                running.add_metric([phase], phases[phase])
        yield running
        retries = CounterMetricFamily("disagg_route_retries", "Routes taken after a failure, by its error.", labels=["error"])
        for error, count in self._coordinator.retries.items():
            retries.add_metric([error], count)
        yield retries
        decided = CounterMetricFamily("disagg_decisions", "The router's decisions, by kind of reason.", labels=["verdict", "reason"])
        for verdict, reason in DECISIONS:
            decided.add_metric([verdict, reason], self._coordinator.decided.get((verdict, reason), 0))
        yield decided

    def _pools(self, view: PoolView) -> Iterator[Metric]:
        live = GaugeMetricFamily("disagg_pool_live_workers", "Workers that take requests.", labels=["role"])
        wanted = GaugeMetricFamily("disagg_pool_wanted_workers", "Workers that the topology asks for.", labels=["role"])
        for role, pool in self._topology.active_pools().items():
            live.add_metric([role], len(view.of(role)))
            wanted.add_metric([role], pool.count)
        yield live
        yield wanted
        info = GaugeMetricFamily("disagg_gateway_info", "Always 1; what this gateway serves.", labels=["model", "mode", "deployment"])
        info.add_metric([self._topology.model, self._topology.mode, self._topology.name], 1)
        yield info

    def _workers(self, view: PoolView) -> Iterator[Metric]:
        for name, (text, read) in _WORKER_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["worker", "role"])
            for worker in view.workers:
                gauge.add_metric([worker.name, worker.role], read(worker))
            yield gauge
        for name, (text, count) in _KV_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["worker", "role"])
            for worker in view.workers:
                counter.add_metric([worker.name, worker.role], count(worker.state.kv))
            yield counter
        preemptions = CounterMetricFamily("disagg_worker_preemptions", "Requests that the engine put back.", labels=["worker", "role"])
        for worker in view.workers:
            preemptions.add_metric([worker.name, worker.role], worker.state.preemptions)
        yield preemptions
