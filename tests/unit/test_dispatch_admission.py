"""The dispatcher: who may enter the queue, who is refused and when to come again, in numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.policy.step_cost import StepCost
from disagg.types import Mode, Role
from tests.policy_rig import CHAT, COST, STATE, Rig


def test_what_cannot_meet_its_class_is_refused_with_numbers() -> None:
    rig = Rig(classes=(CHAT,))
    keys = [rig.submit(800, 50, "chat") for _ in range(4)]
    grants, refusals = rig.decide()
    assert keys[0] in grants
    assert set(refusals) == set(keys[1:])
    refusal = refusals[keys[1]]
    assert "first token after" in refusal.reason
    assert "target 1000 ms" in refusal.reason
    assert refusal.record.candidates[0].prediction.ttft_s > 1.0
    assert refusal.record.candidates[0].prediction.tpot_s > 0
    assert 0.5 <= refusal.retry_after_s < 5
    rig.now_s += refusal.retry_after_s + 0.3
    rig.dispatcher.first_token(keys[0], rig.now_s)
    assert rig.grant(100, 50, "chat")


def test_best_effort_waits_behind_what_can_still_be_in_time() -> None:
    relaxed = CHAT.model_copy(update={"if_missed": "best_effort"})
    rig = Rig(classes=(relaxed,))
    running = rig.grant(700, 50, "chat")
    late = rig.submit(900, 50, "chat")
    assert rig.decide() == ({}, {})
    short = rig.submit(50, 50, "chat")
    assert rig.decide() == ({}, {})
    rig.now_s += 0.7
    rig.dispatcher.first_token(running.key, rig.now_s)
    grants, _ = rig.decide()
    assert next(iter(grants)) == short
    rig.now_s += 5
    for key in (*grants, running.key):
        rig.end(key)
    assert late in {**grants, **rig.decide()[0]}


@pytest.mark.parametrize("mode", [Mode.DISAGG, Mode.COLOCATED])
def test_a_target_that_one_request_alone_misses_keeps_nobody_waiting(mode: Mode) -> None:
    """A worker whose every step takes 200 ms: to serve one after the other would not bring 100 ms back, only leave the batch empty."""
    slow = COST.scaled(10.0)
    rig = Rig(mode, classes=(CHAT.model_copy(update={"if_missed": "best_effort", "ttft_ms": 60_000}),), cost=slow)
    for _ in range(6):
        rig.decoding(rig.grant(20, 50, "chat"))
        rig.now_s += 1.0


def test_admission_off_refuses_nothing_for_its_class() -> None:
    rig = Rig(classes=(CHAT,), by_slo=False)
    for _ in range(20):
        rig.submit(800, 50, "chat")
    assert not rig.decide()[1]


def test_high_priority_is_not_refused_because_of_lower_ones() -> None:
    high = CHAT.model_copy(update={"name": "high", "priority": 5})
    rig = Rig(classes=(CHAT, high), prefill=2)
    for _ in range(3):
        rig.submit(500, 50, "chat")
    rig.decide()
    key = rig.submit(300, 50, "high", priority=5)
    assert key not in rig.decide()[1]


def test_high_priority_that_is_late_is_not_refused_before_lower_ones_that_are_not() -> None:
    rig = Rig(classes=(CHAT.model_copy(update={"if_missed": "best_effort"}),), max_queued_requests=2)
    rig.grant(700, 50, "chat")
    late = rig.submit(900, 50, "chat", priority=5)
    assert rig.decide() == ({}, {})
    low, lowest = rig.submit(50, 50, "chat"), rig.submit(50, 50, "chat", priority=-1)
    assert set(rig.decide()[1]) == {lowest}
    assert rig.submit(50, 50, "chat", priority=5)
    assert set(rig.decide()[1]) == {low}
    rig.submit(50, 50, "chat", priority=6)
    assert set(rig.decide()[1]) == {late}, "now it is the last of the lowest"


def test_a_queue_that_is_full_of_lower_ones_is_not_full() -> None:
    rig = Rig(max_queued_requests=2)
    rig.grant(5000)
    for _ in range(2):
        rig.submit(10, priority=-1)
    rig.decide()
    full = rig.dispatcher.full
    assert full(1, rig.now_s, priority=0) is None
    assert full(1, rig.now_s, priority=-1) is not None
    assert full(3, rig.now_s, priority=0) is not None, "more than it holds"


def test_steps_that_take_no_time_are_reckoned_with() -> None:
    """As of simulated engines of speed 0: where all KV is taken, a place comes free at once."""
    nothing = StepCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    rig = Rig(cost=nothing, state=replace(STATE, total_kv_tokens=1000, free_kv_tokens=1000))
    running = rig.decoding(rig.grant(400, 300, "chat"))
    waiting = {rig.submit(400, 300, "chat") for _ in range(2)}
    assert rig.decide() == ({}, {})
    rig.end(running.key)
    assert waiting & set(rig.decide()[0])


def test_retries_are_not_refused_for_load() -> None:
    rig = Rig(classes=(CHAT,), max_queued_requests=1)
    for _ in range(3):
        rig.submit(800, 50, "chat", attempt=1)
    assert not rig.decide()[1]


def test_a_full_queue_refuses_the_last_in_order() -> None:
    rig = Rig(max_queued_requests=2)
    rig.grant(5000)
    low, first, second = rig.submit(10, priority=-5), rig.submit(10), rig.submit(10)
    _, refusals = rig.decide()
    assert set(refusals) == {low}
    assert "2 requests" in refusals[low].reason
    third = rig.submit(10, priority=3)
    _, refusals = rig.decide()
    assert set(refusals) == {second}
    assert {first, third}.isdisjoint(refusals)


def test_one_large_request_may_wait_whatever_its_size() -> None:
    rig = Rig(max_queued_tokens=1000)
    rig.grant(5000)
    large = rig.submit(5000)
    assert not rig.decide()[1]
    small = rig.submit(10)
    assert set(rig.decide()[1]) == {small}
    assert large not in rig.decide()[1]


def test_deadline_over_in_the_queue_is_a_refusal() -> None:
    rig = Rig()
    rig.grant(5000)
    key = rig.submit(10, deadline_s=rig.now_s + 1)
    assert rig.dispatcher.decide(rig.now_s).wake_at_s <= rig.now_s + 1  # type: ignore[operator]
    rig.now_s += 1.01
    assert "deadline passed" in rig.decide()[1][key].reason


def test_a_missing_pool_is_waited_for_and_then_said() -> None:
    rig = Rig(decode=0, worker_timeout_s=2.0)
    key = rig.submit()
    assert rig.decide() == ({}, {})
    rig.now_s += 1.9
    assert rig.decide() == ({}, {})
    rig.now_s += 0.2
    refusal = rig.decide()[1][key]
    assert refusal.no_worker
    assert "no live decode worker" in refusal.reason
    key = rig.submit()
    rig.join("d0", Role.DECODE)
    assert key in rig.decide()[0]


def test_a_withdrawn_request_is_forgotten() -> None:
    rig = Rig()
    running = rig.grant(5000)
    key = rig.submit()
    rig.dispatcher.withdraw(key)
    rig.dispatcher.withdraw(key)
    rig.end(running.key)
    assert rig.decide() == ({}, {})
    rig.dispatcher.assert_empty()
