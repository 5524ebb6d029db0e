"""One granted request on its way through the simulated workers, as serving/coordinator.py and serving/worker.py drive it live. Pure.

colocated       submit ─> first token ─> tokens ─> end
disaggregated   outbox room ─> prefill leg ─> first token ──────────────> decode call ─┐
                     └─> inbox room ─> flow of the staged chunks ─> KV is whole ───────┴─> decode leg ─> tokens ─> end
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from disagg.sim.agenda import Agenda
from disagg.sim.engine import Leg
from disagg.sim.links import Flow, Links
from disagg.sim.outcome import Outcome
from disagg.sim.worker import Claim, SimWorker


class Gateway(Protocol):
    """Where word of an attempt goes; called at the instant at which the gateway hears of it."""

    def first_token(self, attempt: Attempt) -> None: ...

    def arrived(self, attempt: Attempt) -> None: ...

    def decoding(self, attempt: Attempt) -> None: ...

    def ended(self, attempt: Attempt) -> None:
        """The last token came."""
        ...

    def left(self, worker: SimWorker) -> None:
        """A request has left a worker, at the instant at which it does; the worker reports at once."""
        ...


class Attempt:
    """Owner of the legs, the flow and the room in both boxes. `cancel` frees all of it, in any phase."""

    def __init__(
        self,
        agenda: Agenda,
        links: Links,
        gateway: Gateway,
        outcome: Outcome,
        key: int,
        workers: tuple[SimWorker, SimWorker],
        *,
        network_s: float,
        box_bytes: int,
        wire_bytes_per_token: float,
        prefix: tuple[int, ...],
    ) -> None:
        self.outcome = outcome
        self.key = key
        self.source, self.sink = workers
        self._agenda = agenda
        self._links = links
        self._gateway = gateway
        self._network_s = network_s
        self._box_bytes = box_bytes
        self._wire_bytes_per_token = wire_bytes_per_token
        self._prefix = prefix
        self._is_over = False
        self._is_called = False  # the decode call has reached the decode worker
        self._is_whole = False  # so has all the KV
        self._outbox: Claim | None = None
        self._inbox: Claim | None = None
        self._flow: Flow | None = None
        self._prefill_leg: Leg | None = None
        self._decode_leg: Leg | None = None

    @property
    def is_colocated(self) -> bool:
        return self.source is self.sink

    @property
    def output_tokens(self) -> int:
        """Tokens sampled so far."""
        legs = ((self.source, self._prefill_leg), (self.sink, self._decode_leg))
        return sum(worker.engine.produced(leg) for worker, leg in legs if leg is not None)

    def start(self) -> None:
        """The call is on its way to the prefill worker."""
        self._later(self._reached_worker)

    def cancel(self) -> None:
        """Nobody wants it any more; the workers learn of it a message later. Idempotent."""
        self._is_over = True
        self._later(self._free)

    def _later(self, action: Callable[[], None]) -> None:
        self._agenda.call_after(self._network_s, action)

    def _free(self) -> None:
        for worker, leg in ((self.source, self._prefill_leg), (self.sink, self._decode_leg)):
            if leg is not None and not leg.is_over:
                worker.engine.cancel(leg)
                self._gateway.left(worker)
        if self._flow is not None:
            self._links.close(self._flow)
        for claim in (self._outbox, self._inbox):
            if claim is not None:
                claim.give_back()

    # ---- the prefill side, and the whole of a colocated request

    def _reached_worker(self) -> None:
        if self._is_over:
            return
        if self.is_colocated:
            self._submit_first(self.outcome.request.output_tokens)
        else:
            self._outbox = self.source.outbox.take(self._box_bytes, self._outbox_open)

    def _outbox_open(self) -> None:
        self._submit_first(1)
        if self.outcome.request.output_tokens > 1:
            self._later(self._ask_inbox)

    def _submit_first(self, remaining: int) -> None:
        given = self.outcome.request.input_tokens
        self._prefill_leg = Leg(given, owner=self, remaining=remaining, prefix=self._prefix)
        self.source.engine.submit(self._prefill_leg)

    def _ask_inbox(self) -> None:
        if not self._is_over:
            self._inbox = self.sink.inbox.take(self._box_bytes, self._inbox_open)

    def _inbox_open(self) -> None:
        total = self.outcome.request.input_tokens * self._wire_bytes_per_token
        self._flow = Flow(self.source.name, self.sink.name, total, self._kv_whole)
        self._links.open(self._flow)
        self._stage()

    def _stage(self) -> None:
        """What the prefill leg has computed may move. A preempted leg computes again, and moves nothing again."""
        if self._flow is not None and self._prefill_leg is not None:
            done = min(self._prefill_leg.num_computed, self.outcome.request.input_tokens)
            self._links.stage(self._flow, done * self._wire_bytes_per_token)

    # ---- what engines tell (LegOwner)

    def loaded(self, leg: Leg) -> None:
        if self._inbox is not None:
            self._inbox.give_back()

    def computed(self, leg: Leg) -> None:
        if leg is self._prefill_leg and not self.is_colocated:
            self._stage()

    def first_token(self, leg: Leg) -> None:
        if leg is self._prefill_leg:
            if not self.is_colocated:
                leg.num_computed = self.outcome.request.input_tokens
                self._stage()
            self.outcome.cached_tokens = leg.num_cached
            self._later(self._first_token_at_gateway)
        else:
            self._later(self._decoding_at_gateway)

    def ended(self, leg: Leg) -> None:
        worker = self.source if leg is self._prefill_leg else self.sink
        self._gateway.left(worker)
        is_last = self.is_colocated or leg is self._decode_leg or self.outcome.request.output_tokens == 1
        if is_last:
            if self._outbox is not None:
                self._outbox.give_back()
            self._later(self._ended_at_gateway)

    # ---- the transfer

    def _kv_whole(self) -> None:
        if self._outbox is not None:
            self._outbox.give_back()
        self._is_whole = True
        self._later(self._arrived_at_gateway)
        self._start_decode()

    def _reached_sink(self) -> None:
        self._is_called = True
        self._start_decode()

    def _start_decode(self) -> None:
        if self._is_over or not (self._is_called and self._is_whole):
            return
        request = self.outcome.request
        self._decode_leg = Leg(
            request.input_tokens + 1,
            num_ready=request.input_tokens,
            owner=self,
            remaining=request.output_tokens - 1,
            prefix=self._prefix,
        )
        self.sink.engine.submit(self._decode_leg)

    # ---- at the gateway

    def _first_token_at_gateway(self) -> None:
        if self._is_over:
            return
        self._gateway.first_token(self)
        if self.is_colocated:
            self._gateway.decoding(self)
        elif self.outcome.request.output_tokens > 1:
            self._later(self._reached_sink)

    def _arrived_at_gateway(self) -> None:
        if not self._is_over:
            self._gateway.arrived(self)

    def _decoding_at_gateway(self) -> None:
        if not self._is_over:
            self._gateway.arrived(self)
            self._gateway.decoding(self)

    def _ended_at_gateway(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self.source.engine.step_end_s is not None:
                legs = ((self.source, self._prefill_leg), (self.sink, self._decode_leg))
                self.outcome.legs = tuple((worker.engine, leg) for worker, leg in legs if leg is not None)
            self._gateway.ended(self)
