"""KV transfers as flows: the bytes that are staged move at the rate which the sender's and the receiver's links leave them. Pure.

    rate = min(sender's bandwidth / flows that leave it, receiver's bandwidth / flows that enter it)

Only flows with bytes to move count. Rates change when a flow begins or ends to have some; between, they are constant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.sim.agenda import Agenda, Appointment

_DUST_BYTES = 1e-3  # rounding of rate x time


@dataclass(slots=True, eq=False)
class Flow:
    """One transfer. `staged_bytes` of `total_bytes` may move; `moved_bytes` have."""

    source: str
    sink: str
    total_bytes: float
    done: Callable[[], None]
    staged_bytes: float = 0.0
    moved_bytes: float = 0.0
    is_open: bool = False
    is_over: bool = False
    rate: float = 0.0
    since_s: float = 0.0
    next: Appointment | None = field(default=None)


class Links:
    """Full-duplex links, one per worker, `bandwidth` bytes/s each way; `latency_s` from the last byte sent to the transfer complete."""

    def __init__(self, agenda: Agenda, bandwidth: float, latency_s: float) -> None:
        self._agenda = agenda
        self._bandwidth = bandwidth
        self._latency_s = latency_s
        self._leaving: dict[str, dict[Flow, None]] = {}
        self._entering: dict[str, dict[Flow, None]] = {}
        self.moved_bytes = 0.0

    def open(self, flow: Flow) -> None:
        """The receiver has room: what is staged may move."""
        flow.is_open = True
        self._changed(flow)

    def stage(self, flow: Flow, staged_bytes: float) -> None:
        """In all `staged_bytes` of the flow may move now; never less than before."""
        if not flow.is_over and staged_bytes > flow.staged_bytes:
            flow.staged_bytes = min(staged_bytes, flow.total_bytes)
            self._changed(flow)

    def close(self, flow: Flow) -> None:
        """Nobody wants it any more. Idempotent; `done` is not called afterwards."""
        if not flow.is_over:
            flow.is_over = True
            self._changed(flow)

    def _changed(self, flow: Flow) -> None:
        """The flow may have begun or ceased to have bytes to move: settle and re-rate whoever shares a link with it."""
        out, into = self._leaving.setdefault(flow.source, {}), self._entering.setdefault(flow.sink, {})
        touched = {**out, **into, flow: None}
        now_s = self._agenda.now_s
        for other in touched:
            moved = other.rate * (now_s - other.since_s)
            moved = min(moved, other.staged_bytes - other.moved_bytes)
            other.moved_bytes += moved
            self.moved_bytes += moved
            other.since_s = now_s
        has_bytes = flow.is_open and not flow.is_over and flow.staged_bytes - flow.moved_bytes > _DUST_BYTES
        if has_bytes:
            out[flow] = into[flow] = None
        else:
            out.pop(flow, None)
            into.pop(flow, None)
            flow.rate = 0.0
        for other in touched:
            self._rate(other)

    def _rate(self, flow: Flow) -> None:
        if flow.next is not None:
            flow.next.cancel()
            flow.next = None
        out, into = self._leaving[flow.source], self._entering[flow.sink]
        if flow in out:
            flow.rate = self._bandwidth / max(len(out), len(into))
            left = flow.staged_bytes - flow.moved_bytes
            flow.next = self._agenda.after(left / flow.rate, lambda: self._drained(flow))
        elif flow.is_open and not flow.is_over and flow.total_bytes - flow.moved_bytes <= _DUST_BYTES:
            flow.is_over = True
            self._agenda.call_after(self._latency_s, flow.done)

    def _drained(self, flow: Flow) -> None:
        flow.next = None
        left = flow.staged_bytes - flow.moved_bytes
        self.moved_bytes += left
        flow.moved_bytes = flow.staged_bytes
        flow.since_s = self._agenda.now_s
        self._changed(flow)
