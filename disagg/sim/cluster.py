"""The discrete-event simulator: a topology of simulated engines under a trace, decided by the live policy objects. Pure.

    trace ─> gateway [dispatcher: queue, route, refuse] ─> Attempt ─> engines, boxes, links ─> Outcome

Nothing in it is random: the same topology, settings and trace give the same events, instant for instant.
"""

from __future__ import annotations

import contextlib
import gc
import math
import operator
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from disagg.config import SloClass, Topology
from disagg.engine.simulated_settings import simulated_model_info
from disagg.errors import ConfigError, InvalidRequestError, nearest
from disagg.kv.sizes import MAX_DEFAULT_BYTES
from disagg.perf.model_config import load_shape
from disagg.policy.decision import Grant, Refusal
from disagg.sim.agenda import Agenda, Appointment
from disagg.sim.attempt import Attempt
from disagg.sim.dispatch import SimDispatcher, make_dispatcher
from disagg.sim.fleet import FleetSettings, SimFleet
from disagg.sim.links import Links
from disagg.sim.outcome import Outcome, SimReport, Status, WorkerReport
from disagg.sim.settings import SimSettings
from disagg.sim.worker import SimWorker
from disagg.trace import TraceRequest
from disagg.types import Request, Sampling

_OBJECTS = 50_000  # made until Python looks for cycles among them
_SLICE_S = 1.0  # simulated seconds between two looks at who has ended
_PROGRESS_S = 1.0  # how often the dispatcher hears how long the answers have become


@dataclass(frozen=True, slots=True)
class SlowDown:
    """From `at_s` on, `worker`'s steps take `factor` times as long as the device's."""

    at_s: float
    worker: str
    factor: float


@dataclass(slots=True, eq=False)
class _Open:
    """One request between its arrival at the gateway and its end."""

    outcome: Outcome
    attempt: Attempt | None = None


class Simulation:
    """One run: build it, then once `run()` it, or take the outcomes from `stream()` as they come."""

    def __init__(
        self,
        topology: Topology,
        requests: Sequence[TraceRequest],
        settings: SimSettings | None = None,
        *,
        slow_downs: Sequence[SlowDown] = (),
        dispatcher: SimDispatcher | None = None,
        keep_events: bool = False,
        fleet: FleetSettings | None = None,
    ) -> None:
        """`requests` in the order of their arrival, from second 0 on. `fleet`: workers change roles as its controller asks.

        Raises ConfigError for what cannot be simulated.
        """
        self.settings = settings or SimSettings()
        self._topology = topology
        self._requests = requests
        self._agenda = Agenda()
        self._links = Links(self._agenda, self.settings.link_bandwidth, self.settings.link_latency_s)
        self.workers = _build_workers(self._agenda, topology, self.settings)
        first = topology.simulated(next(iter(topology.active_pools())))
        self._model = simulated_model_info(first, topology.model)
        self._wire_bytes = self.settings.kv_bytes_per_token or load_shape(first.shape).kv_bytes_per_token()
        self._classes = {c.name: c for c in topology.slo_classes}
        self._default_class = topology.slo_classes[0]
        self._dispatcher = dispatcher or make_dispatcher(topology, self._model)
        self._open: dict[int, _Open] = {}
        self._deadlines: deque[tuple[float, int]] = deque()  # the first of them has an appointment
        self._num_waiting = 0  # of them, without a route
        self._num_sent = 0
        self._ended: list[Outcome] = []  # and not given out yet
        self._end_s = 0.0  # of the last one that did
        self._events: list[tuple[float, str, int, str]] | None = [] if keep_events else None
        self._is_deciding = False
        self._wake: Appointment | None = None
        self._unreported: deque[SimWorker] = deque()
        self._reported: deque[SimWorker] = deque(self.workers.values())
        self._progress_s = 0.0
        self._in_flight_area = 0.0
        self._in_flight_since_s = 0.0
        self._in_flight = 0
        for name, worker in self.workers.items():
            self._dispatcher.join(name, worker.role, "host", worker.report(), 0.0)
        for slow in slow_downs:
            self._plan_slow_down(slow)
        self.fleet: SimFleet | None = None
        if fleet is not None:
            self.fleet = SimFleet(self._agenda, self.workers, self._dispatcher, fleet, self._is_over)

    def _is_over(self) -> bool:
        return self._num_sent == len(self._requests) and not self._open

    @property
    def num_events(self) -> int:
        """Appointments kept so far: what a run costs."""
        return self._agenda.done

    def run(self) -> SimReport:
        """Send the whole trace and wait until every request has ended. Outcomes are in the order of the trace."""
        outcomes = sorted(self.stream(), key=operator.attrgetter("index"))
        return self.report(outcomes)

    def stream(self) -> Generator[Outcome, None, None]:
        """The same; each outcome soon after its request has ended, in that order.

        Nothing of them is kept here: memory is that of what is in flight, however long the trace.
        """
        self._plan_arrival(0)
        with _rare_collections():
            while (next_s := self._agenda.next_s) is not None:
                self._agenda.run(next_s + _SLICE_S)
                ended, self._ended = self._ended, []
                yield from ended
        self._assert_empty()

    def report(self, outcomes: Sequence[Outcome] = ()) -> SimReport:
        """What the workers did, with those of the outcomes that the caller has kept."""
        span_s = self._end_s - (self._requests[0].arrival_s if self._requests else 0.0)
        return SimReport(
            outcomes=tuple(outcomes),
            workers=tuple(_worker_report(w) for w in self.workers.values()),
            end_s=self._end_s,
            mean_in_flight=self._in_flight_area / span_s if span_s > 0 else 0.0,
            moved_bytes=self._links.moved_bytes,
            events=tuple(self._events or ()),
        )

    def _assert_empty(self) -> None:
        assert not self._open, f"{len(self._open)} requests never ended"
        for worker in self.workers.values():
            worker.assert_empty()

    def _plan_slow_down(self, slow: SlowDown) -> None:
        if slow.worker not in self.workers:
            hint = nearest(slow.worker, self.workers)
            raise ConfigError(key="slow_downs.worker", value=slow.worker, expected=hint)
        self._agenda.at(slow.at_s, lambda: self.workers[slow.worker].engine.slow_down(slow.factor))

    # ---- arrivals

    def _plan_arrival(self, index: int) -> None:
        """One at a time, so that the agenda stays short."""
        if index < len(self._requests):
            self._agenda.at(self._requests[index].arrival_s, lambda: self._sent(index))

    def _sent(self, index: int) -> None:
        request = self._requests[index]
        slo_class = request.slo_class or self._default_class.name
        if slo_class not in self._classes:
            hint = nearest(slo_class, self._classes)
            raise ConfigError(key=f"request {index}: slo_class", value=slo_class, expected=f"a class of the topology: {hint}")
        outcome = Outcome(index, request, slo_class, self._agenda.now_s)
        self._num_sent += 1
        self._count(+1)
        self._agenda.call_after(self.settings.network_s, lambda: self._received(outcome))
        self._plan_arrival(index + 1)

    def _received(self, outcome: Outcome) -> None:
        now_s = self._agenda.now_s
        outcome.received_s = now_s
        self._note("received", outcome)
        request = self._request(outcome, self._classes[outcome.slo_class])
        try:
            key = self._dispatcher.submit(request, now_s, prefix=self._prefix(outcome.request))
        except InvalidRequestError as error:
            self._finish(outcome, "rejected", "InvalidRequestError", error.message)
            return
        entry = _Open(outcome)
        self._open[key] = entry
        self._deadlines.append((outcome.sent_s + self.settings.timeout_s, key))
        if len(self._deadlines) == 1:
            self._plan_deadline()
        self._num_waiting += 1
        if self.fleet is not None:
            self.fleet.arrived(outcome.request)
        self._decide_soon()

    def _request(self, outcome: Outcome, slo_class: SloClass) -> Request:
        return Request(
            request_id=str(outcome.index),
            prompt_token_ids=(0,) * outcome.request.input_tokens,
            sampling=self._sampling(outcome.request),
            slo_class=slo_class.name,
            priority=slo_class.priority,
            arrival_s=outcome.received_s,
            deadline_s=outcome.sent_s + self.settings.timeout_s,
        )

    def _sampling(self, request: TraceRequest) -> Sampling:
        most = self.settings.max_tokens
        if most is None:
            return Sampling(max_tokens=request.output_tokens, ignore_eos=True)
        room = self._model.max_model_len - request.input_tokens
        return Sampling(max_tokens=max(request.output_tokens, min(most, room)))

    def _plan_deadline(self) -> None:
        """The next one of a request that is still open: they come in the order of arrival, and nearly all of them for nothing."""
        while self._deadlines and self._deadlines[0][1] not in self._open:
            self._deadlines.popleft()
        if self._deadlines:
            self._agenda.at(self._deadlines[0][0], self._deadline)

    def _deadline(self) -> None:
        _, key = self._deadlines.popleft()
        entry = self._open.pop(key, None)
        self._plan_deadline()
        if entry is None:
            return
        if entry.attempt is None:
            self._num_waiting -= 1
            self._dispatcher.withdraw(key)
            self._finish(entry.outcome, "rejected", "RejectedError", "the deadline passed while it waited")
        else:
            entry.attempt.cancel()
            self._dispatcher.end(key, self._agenda.now_s, is_whole=False)
            self._finish(entry.outcome, "failed", "DeadlineError", "the deadline passed before the answer was whole")
        self._decide_soon()

    # ---- decisions

    def _decide_soon(self) -> None:
        """Decide at this instant, once, after everything else that happens at it."""
        if not self._is_deciding:
            self._is_deciding = True
            self._agenda.call_after(0.0, self._decide)

    def _decide(self) -> None:
        self._is_deciding = False
        now_s = self._agenda.now_s
        self._report(now_s)
        decisions = self._dispatcher.decide(now_s)
        for refusal in decisions.refusals:
            self._refused(refusal)
        for grant in decisions.grants:
            self._granted(grant)
        self._plan_wake(decisions.wake_at_s)

    def _plan_wake(self, wake_at_s: float | None) -> None:
        """Look again when asked to, and with the next report while somebody waits."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        now_s = self._agenda.now_s
        at_s = now_s + self.settings.report_interval_s if self._num_waiting else math.inf
        if wake_at_s is not None:
            at_s = min(at_s, max(wake_at_s, now_s + 1e-6))
        if at_s < math.inf:
            self._wake = self._agenda.at(at_s, self._decide_soon)

    def _report(self, now_s: float) -> None:
        """Workers report as their frames do: at intervals while tokens flow, and at once when a request has left."""
        while self._unreported:
            worker = self._unreported.popleft()
            worker.is_due = False
            self._dispatcher.report(worker.name, worker.report(), now_s)
        reported, due_s = self._reported, now_s - self.settings.report_interval_s
        while reported[0].reported_s <= due_s:
            worker = reported[0]
            worker.reported_s = now_s
            reported.rotate(-1)
            if worker.has_news:
                self._dispatcher.report(worker.name, worker.report(), now_s)
        if now_s - self._progress_s >= _PROGRESS_S:
            self._progress_s = now_s
            for key, entry in self._open.items():
                if entry.attempt is not None:
                    self._dispatcher.progress(key, entry.attempt.output_tokens, now_s)

    def _refused(self, refusal: Refusal) -> None:
        entry = self._open.pop(refusal.key)
        self._num_waiting -= 1
        error = "NoWorkerError" if refusal.no_worker else "RejectedError"
        self._finish(entry.outcome, "rejected", error, refusal.reason)

    def _granted(self, grant: Grant) -> None:
        entry = self._open[grant.key]
        self._num_waiting -= 1
        outcome = entry.outcome
        outcome.routed_s = self._agenda.now_s
        outcome.prefill_worker, outcome.decode_worker = grant.route.prefill, grant.route.decode
        outcome.predicted_ttft_s, outcome.predicted_tpot_s = grant.admitted.ttft_s, grant.admitted.tpot_s
        self._note("routed", outcome, f"{grant.route.prefill}>{grant.route.decode}")
        entry.attempt = Attempt(
            self._agenda,
            self._links,
            self,
            outcome,
            grant.key,
            (self.workers[grant.route.prefill], self.workers[grant.route.decode]),
            network_s=self.settings.network_s,
            box_bytes=outcome.request.input_tokens * self._model.kv_bytes_per_token,
            wire_bytes_per_token=self._wire_bytes,
            prefix=self._prefix(outcome.request),
        )
        if self.fleet is not None:
            self.fleet.granted(outcome.request, grant.route.prefill, grant.route.decode)
        entry.attempt.start()

    def _prefix(self, request: TraceRequest) -> tuple[int, ...]:
        """Identities of the prompt's full blocks; a partly filled last one is never shared."""
        size = self.settings.prefix_block_tokens
        return request.prefix_hashes[: request.input_tokens // size] if size else ()

    # ---- what attempts tell (attempt.Gateway)

    def first_token(self, attempt: Attempt) -> None:
        now_s = self._agenda.now_s
        attempt.outcome.first_token_s = now_s + self.settings.network_s
        self._note("first token", attempt.outcome, attempt.source.name)
        self._dispatcher.first_token(attempt.key, now_s, attempt.outcome.cached_tokens)
        self._decide_soon()

    def arrived(self, attempt: Attempt) -> None:
        if attempt.outcome.transferred_s is None:
            attempt.outcome.transferred_s = self._agenda.now_s
            self._note("arrived", attempt.outcome, attempt.sink.name)
        self._dispatcher.arrived(attempt.key, self._agenda.now_s)
        self._decide_soon()

    def decoding(self, attempt: Attempt) -> None:
        self._dispatcher.decoding(attempt.key, self._agenda.now_s)
        self._decide_soon()

    def ended(self, attempt: Attempt) -> None:
        outcome = attempt.outcome
        self._open.pop(attempt.key)
        outcome.output_tokens = outcome.request.output_tokens
        outcome.last_token_s = self._agenda.now_s + self.settings.network_s
        outcome.way_back_s = 2 * self.settings.network_s
        self._dispatcher.progress(attempt.key, outcome.output_tokens, self._agenda.now_s)
        self._dispatcher.end(attempt.key, self._agenda.now_s, is_whole=True)
        self._finish(outcome, "completed")
        self._decide_soon()

    def left(self, worker: SimWorker) -> None:
        if not worker.is_due:
            worker.is_due = True
            self._unreported.append(worker)

    # ---- the end of a request

    def _finish(self, outcome: Outcome, status: Status, error: str | None = None, message: str | None = None) -> None:
        assert outcome.status is None, "a request ends once"
        outcome.status = status
        if self.fleet is not None and error != "InvalidRequestError":
            if outcome.prefill_worker is not None and outcome.decode_worker is not None:
                self.fleet.ended(outcome.request, outcome.prefill_worker, outcome.decode_worker)
            else:
                self.fleet.dropped(outcome.request)
        outcome.error, outcome.message = error, message
        outcome.end_s = self._end_s = self._agenda.now_s + self.settings.network_s
        self._ended.append(outcome)
        self._note(status, outcome)
        self._agenda.call_after(self.settings.network_s, lambda: self._count(-1))

    def _count(self, change: int) -> None:
        now_s = self._agenda.now_s
        self._in_flight_area += self._in_flight * (now_s - self._in_flight_since_s)
        self._in_flight_since_s = now_s
        self._in_flight += change

    def _note(self, what: str, outcome: Outcome, worker: str = "") -> None:
        if self._events is not None:
            self._events.append((self._agenda.now_s, what, outcome.index, worker))


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Python looks for cycles after every 700 objects; here those live as long as their request, and each look finds nothing."""
    before = gc.get_threshold()
    gc.set_threshold(max(_OBJECTS, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _build_workers(agenda: Agenda, topology: Topology, settings: SimSettings) -> Mapping[str, SimWorker]:
    workers = {}
    outbox_bytes, inbox_bytes = topology.kv.box_bytes(MAX_DEFAULT_BYTES)  # a simulated host is not short of memory
    for role, pool in topology.active_pools().items():
        engine = topology.simulated(role)
        unit, rest = divmod(settings.prefix_block_tokens, engine.block_tokens)
        if rest:
            expected = f"a multiple of block_tokens ({engine.block_tokens})"
            raise ConfigError(key="prefix_block_tokens", value=settings.prefix_block_tokens, expected=expected)
        for number in range(pool.count):
            name = f"{role}-{number}"
            workers[name] = SimWorker(
                agenda,
                name,
                role,
                engine,
                outbox_bytes=outbox_bytes,
                inbox_bytes=inbox_bytes,
                prefix_unit_blocks=unit,
                keep_tokens=settings.keep_tokens,
            )
    return workers


def _worker_report(worker: SimWorker) -> WorkerReport:
    engine = worker.engine
    return WorkerReport(
        name=worker.name,
        role=worker.role.value,
        busy_s=engine.busy_s,
        steps=engine.num_steps,
        prefill_tokens=engine.prefill_tokens,
        decode_tokens=engine.decode_tokens,
        cached_tokens=engine.cached_tokens,
        preemptions=engine.scheduler.preemptions,
    )


def simulate(
    topology: Topology,
    requests: Sequence[TraceRequest],
    settings: SimSettings | None = None,
    *,
    slow_downs: Sequence[SlowDown] = (),
    keep_events: bool = False,
) -> SimReport:
    """Run `requests` on `topology`. Same input, same report."""
    return Simulation(topology, requests, settings, slow_downs=slow_downs, keep_events=keep_events).run()
