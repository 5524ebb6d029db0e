"""Admit, queue or reject: decided purely, with a reason; and what is promised is given back, whatever happens."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.config import AdmissionSettings
from disagg.errors import InvalidRequestError
from disagg.policy.admission import Admit, Queue, Reject, decide
from disagg.policy.router import pick
from disagg.policy.view import PoolView, QueueView, need_of
from disagg.serving.pool import Member, Reservation
from disagg.serving.signal import Signal
from disagg.types import EngineState, KvAddress, Mode, Role, Route
from tests.unit.test_router import MODEL, STATE, d, p, request, view

SETTINGS = AdmissionSettings(max_queued_requests=3, max_queued_tokens=1000)
POOL = view(p("p0"), d("d0"))
FULL = view(p("p0", prefills=2, prefill_tokens=5000, prefill_s_per_token=1e-3), d("d0"))
NOW_S = 100.0


def test_room_and_no_queue_is_admitted() -> None:
    verdict = decide(request(), POOL, QueueView(), SETTINGS, NOW_S)
    assert isinstance(verdict, Admit)
    assert verdict.route.prefill == "p0"
    assert verdict.reason


def test_nobody_overtakes_the_queue() -> None:
    verdict = decide(request(), POOL, QueueView(2, 100, ahead=1), SETTINGS, NOW_S)
    assert isinstance(verdict, Queue)
    assert "1 requests go before" in verdict.reason
    assert isinstance(decide(request(), POOL, QueueView(2, 100, ahead=0), SETTINGS, NOW_S), Admit)


def test_no_room_queues_until_the_queue_is_full() -> None:
    assert isinstance(decide(request(), FULL, QueueView(2, 100), SETTINGS, NOW_S), Queue)
    verdict = decide(request(), FULL, QueueView(3, 100), SETTINGS, NOW_S)
    assert isinstance(verdict, Reject)
    assert "3 requests wait" in verdict.reason


def test_queued_tokens_are_bounded_but_one_large_request_may_wait() -> None:
    assert isinstance(decide(request(400), FULL, QueueView(1, 601), SETTINGS, NOW_S), Reject)
    assert isinstance(decide(request(400), FULL, QueueView(1, 600), SETTINGS, NOW_S), Queue)
    assert isinstance(decide(request(5000), FULL, QueueView(), SETTINGS, NOW_S), Queue)


def test_retry_after_follows_the_work_that_waits() -> None:
    short = decide(request(), FULL, QueueView(3, 1_000), SETTINGS, NOW_S)
    long = decide(request(), FULL, QueueView(3, 20_000), SETTINGS, NOW_S)
    assert isinstance(short, Reject)
    assert isinstance(long, Reject)
    assert short.retry_after_s == pytest.approx(6.0)
    assert long.retry_after_s == pytest.approx(25.0)


def test_a_passed_deadline_is_rejected() -> None:
    assert isinstance(decide(replace(request(), deadline_s=99.0), POOL, QueueView(), SETTINGS, NOW_S), Reject)


def test_a_missing_pool_queues_and_says_so() -> None:
    verdict = decide(request(), view(p("p0")), QueueView(), SETTINGS, NOW_S)
    assert isinstance(verdict, Queue)
    assert verdict.no_worker


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"),
    [(10_001, 1, "prompt"), (9_000, 1_001, "max_tokens"), (9_999, 1, None), (9_000, 1_000, None)],
)
def test_what_fits_no_worker_is_invalid(prompt: int, max_tokens: int, field: str | None) -> None:
    if field is None:
        decide(request(prompt, max_tokens), POOL, QueueView(), SETTINGS, NOW_S)
        return
    with pytest.raises(InvalidRequestError) as refusal:
        decide(request(prompt, max_tokens), POOL, QueueView(), SETTINGS, NOW_S)
    assert refusal.value.field == field
    assert "at most" in refusal.value.expected


def test_boxes_bound_what_moves_only() -> None:
    small = replace(STATE, inbox_total_bytes=5000)
    pool = view(p("p0"), d("d0", state=small))
    with pytest.raises(InvalidRequestError, match="at most 50 tokens: the largest inbox"):
        decide(request(51, 2), pool, QueueView(), SETTINGS, NOW_S)
    decide(request(50, 2), pool, QueueView(), SETTINGS, NOW_S)
    decide(request(51, 1), pool, QueueView(), SETTINGS, NOW_S)


class FakeWorker:
    """As much of RemoteWorker as a Member looks at."""

    is_lost = False

    def __init__(self, name: str, state: EngineState) -> None:
        self.name = name
        self.address = KvAddress(name, "e", "h", ())
        self._state = state

    def state(self) -> EngineState:
        return self._state


def member(name: str, role: Role) -> Member:
    worker: Any = FakeWorker(name, STATE)
    return Member(role, worker)


@pytest.mark.parametrize("mode", [Mode.DISAGG, Mode.COLOCATED])
@pytest.mark.parametrize("seed", range(5))
def test_reservations_never_drift(mode: Mode, seed: int) -> None:
    """Requests begin, get on and end in any order, some steps twice: no count is ever negative, none is over its bound, all end at zero."""
    rng = random.Random(seed)
    roles = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE] if mode is Mode.DISAGG else [Role.COLOCATED] * 3
    members = {f"w{i}": member(f"w{i}", role) for i, role in enumerate(roles)}
    settings = AdmissionSettings(max_prefills_per_worker=3)
    held: list[Reservation] = []
    granted = 0
    for _ in range(3000):
        if rng.random() < 0.4:
            wanted = request(rng.randrange(1, 3000), rng.randrange(1, 600))
            pool = PoolView(NOW_S, mode, MODEL, tuple(m.view() for m in members.values()))
            route = pick(wanted, pool, settings)
            if isinstance(route, Route):
                moves = route.is_colocated or wanted.remaining_tokens > 1
                held.append(Reservation(route, need_of(wanted, MODEL), members[route.prefill], members[route.decode], moves, Signal()))
                granted += 1
        elif held:
            reservation = rng.choice(held)
            step = rng.choice(["first_token", "arrived", "decoding", "close"])
            getattr(reservation, step)()
            if step == "close":
                held.remove(reservation)
                reservation.first_token()
                reservation.arrived()
                reservation.close()
        for m in members.values():
            tally = m.tally
            assert all(getattr(tally, name) >= 0 for name in tally.__slots__), tally
            assert tally.prefills <= settings.max_prefills_per_worker
            assert tally.unseen_kv_tokens <= tally.reserved_kv_tokens <= STATE.total_kv_tokens
            assert max(tally.outbox_bytes, tally.inbox_bytes) <= STATE.outbox_total_bytes
            assert m.view().reserved_kv_tokens == tally.reserved_kv_tokens
    assert granted > 100
    for reservation in held:
        reservation.close()
    assert all(m.tally.is_empty for m in members.values()), SimpleNamespace(**members)
