"""The dispatcher: when a worker gets its next prompt, and whose; room for what it brings is there first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.errors import InvalidRequestError
from disagg.types import Mode, Role
from tests.policy_rig import STATE, Rig

# ---- room


def test_kv_room_is_kept_for_the_whole_answer() -> None:
    rig = Rig(state=replace(STATE, total_kv_tokens=1000, free_kv_tokens=1000))
    first = rig.grant(400, 300)
    rig.dispatcher.first_token(first.key, rig.now_s)
    second = rig.submit(200, 101)
    grants, _ = rig.decide()
    assert second not in grants
    rig.end(first.key)
    grants, _ = rig.decide()
    assert second in grants


def test_a_full_batch_takes_neither_answers_nor_prompts() -> None:
    rig = Rig(Mode.ADAPTIVE, prefill=0, decode=2, state=replace(STATE, max_running_requests=2))
    held = [rig.decoding(rig.grant(100, 200)) for _ in range(4)]
    waiting = rig.submit(10, 5)
    assert waiting not in rig.decide()[0]
    gone = held.pop()
    rig.end(gone.key)
    grants, _ = rig.decide()
    assert {grants[waiting].route.prefill, grants[waiting].route.decode} == {gone.route.decode}
    for grant in (*held, grants[waiting]):
        rig.end(grant.key)
    rig.dispatcher.assert_empty()


def test_a_prompt_that_needs_a_whole_prefill_worker_is_not_passed_by_shorter_ones_for_ever() -> None:
    rig = Rig(prefill=0, decode=1)
    rig.join("p", Role.PREFILL, replace(STATE, total_kv_tokens=10_000, free_kv_tokens=10_000))
    worker, before = rig.dispatcher.workers["p"], rig.grant(2000, 2)
    long = rig.submit(9000, 2)
    rig.submit(2000, 2)
    rig.now_s = worker.busy_until_s - 0.02
    assert list(rig.decide()[0]) == [long]
    rig.dispatcher.first_token(before.key, rig.now_s)


def test_a_prefill_worker_with_one_seat_gets_its_next_prompt_before_it_runs_dry() -> None:
    rig = Rig(state=replace(STATE, max_running_requests=1))
    rig.join("d0", Role.DECODE)
    rig.grant(100, 2)
    later = rig.submit(100, 2)
    rig.now_s = rig.dispatcher.workers["p0"].busy_until_s - 0.02
    assert later in rig.decide()[0]


def test_the_last_seats_of_a_worker_are_spared() -> None:
    """Answers so short and few that their steps alone would keep them together: they spread once a batch is half full."""
    rig = Rig(Mode.ADAPTIVE, prefill=2, decode=1, state=replace(STATE, max_running_requests=4))
    decodes = [rig.decoding(rig.grant(10, 200)).route.decode for _ in range(6)]
    assert decodes.count("d0") < 4


def test_boxes_bound_what_moves() -> None:
    rig = Rig(state=replace(STATE, inbox_total_bytes=50_000))
    first = rig.grant(300)
    rig.dispatcher.first_token(first.key, rig.now_s)
    second = rig.submit(300)
    assert second not in rig.decide()[0]
    rig.dispatcher.arrived(first.key, rig.now_s)
    assert second in rig.decide()[0]


def test_a_worker_that_holds_nothing_is_never_too_small() -> None:
    assert Rig(state=replace(STATE, free_kv_tokens=10)).pair() == ("p0", "d0")


def test_an_answer_longer_than_expected_keeps_more_room() -> None:
    rig = Rig()
    book = rig.dispatcher.workers["d0"]
    grant = rig.decoding(rig.grant(100, 5000, ignore_eos=False))
    before = book.accounts.kv_tokens
    assert before < 5100
    rig.dispatcher.progress(grant.key, before, rig.now_s)
    assert book.accounts.kv_tokens > before
    rig.dispatcher.progress(grant.key, 5000, rig.now_s)
    assert book.accounts.kv_tokens == 5100
    rig.end(grant.key)
    rig.dispatcher.assert_empty()


def test_expected_output_is_learned_per_class() -> None:
    rig = Rig()
    for _ in range(60):
        grant = rig.decoding(rig.grant(10, 2000, "chat", ignore_eos=False))
        rig.dispatcher.progress(grant.key, 20, rig.now_s)
        rig.end(grant.key)
    seen = []
    for slo_class, limit in (("chat", 2000), ("batch", 2000), ("chat", 8)):
        grant = rig.grant(10, limit, slo_class, ignore_eos=False)
        seen.append(grant.prediction.output_tokens)
        rig.end(grant.key, is_whole=False)
    chat, other, short = seen
    assert short <= 8 < chat < 100 < other


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"),
    [(100_001, 1, "prompt"), (90_000, 10_001, "max_tokens"), (99_999, 1, None), (90_000, 10_000, None)],
)
def test_what_fits_no_worker_is_invalid(prompt: int, max_tokens: int, field: str | None) -> None:
    rig = Rig()
    if field is None:
        rig.submit(prompt, max_tokens)
        return
    with pytest.raises(InvalidRequestError) as refusal:
        rig.submit(prompt, max_tokens)
    assert refusal.value.field == field
    assert "at most" in refusal.value.expected


@pytest.mark.parametrize("mode", [Mode.DISAGG, Mode.COLOCATED, Mode.ADAPTIVE])
def test_of_unlike_workers_only_those_that_can_hold_it_are_asked(mode: Mode) -> None:
    """The smaller one is idle, and the first in turn."""
    small = replace(STATE, total_kv_tokens=10_000, free_kv_tokens=10_000)
    answers = Role.COLOCATED if mode is Mode.COLOCATED else Role.DECODE
    rig = Rig(mode, prefill=0, decode=0)
    rig.join("p", Role.COLOCATED if mode is Mode.COLOCATED else Role.PREFILL, small if mode is Mode.ADAPTIVE else STATE)
    rig.join("small", answers, small)
    rig.join("large", answers)
    for prompt, max_tokens in ((12_000, 10), (8_000, 2_500), (8_000, 1_000)):
        grant = rig.decoding(rig.grant(prompt, max_tokens))
        rig.end(grant.key)
        rig.now_s += 1.0
        if prompt + max_tokens > 10_000:
            assert grant.route.decode == ("p" if mode is Mode.COLOCATED and grant.route.decode == "p" else "large")
        if prompt > 10_000 and mode is Mode.ADAPTIVE:
            assert grant.route.prefill == "large"


def test_a_prompt_that_fits_no_prefill_worker_is_invalid() -> None:
    rig = Rig(prefill=0)
    rig.join("p", Role.PREFILL, replace(STATE, total_kv_tokens=10_000, free_kv_tokens=10_000))
    rig.submit(10_000, 500)
    with pytest.raises(InvalidRequestError, match="at most 10000 tokens"):
        rig.submit(10_001, 500)


def test_what_only_a_worker_that_left_could_hold_waits_for_it_and_then_is_refused() -> None:
    small = replace(STATE, total_kv_tokens=10_000, free_kv_tokens=10_000)
    rig = Rig(decode=1, worker_timeout_s=5.0)
    rig.join("small", Role.DECODE, small)
    running = rig.grant(5000)
    first = rig.submit(12_000, 10)
    rig.dispatcher.leave("d0", rig.now_s)
    rig.end(running.key)
    assert rig.decide() == ({}, {})
    rig.join("d0", Role.DECODE)
    assert first in rig.decide()[0], "it came back in time"
    rig.end(first)
    running = rig.grant(5000)
    second = rig.submit(12_000, 10)
    rig.dispatcher.leave("d0", rig.now_s)
    rig.end(running.key)
    rig.now_s += 5.0
    refusal = rig.decide()[1][second]
    assert refusal.no_worker
    assert "no live worker could hold it" in refusal.reason
    rig.dispatcher.assert_empty()


def test_how_full_a_worker_is_follows_from_what_it_tells() -> None:
    for seats, kv_tokens, expected in ((64, 100_000, 0.5), (0, 100_000, 0.5), (4, 100_000, 0.5), (4, 0, 0.25), (0, 0, 0.0)):
        rig = Rig(state=replace(STATE, max_running_requests=seats, total_kv_tokens=kv_tokens, free_kv_tokens=kv_tokens))
        rig.decoding(rig.grant(40_000, 10_000))
        assert rig.dispatcher.workers["d0"].outline(rig.now_s).fullness == pytest.approx(expected), (seats, kv_tokens)


def test_boxes_bound_what_moves_only() -> None:
    rig = Rig(state=replace(STATE, inbox_total_bytes=5000))
    with pytest.raises(InvalidRequestError, match="at most 50 tokens: the largest inbox"):
        rig.submit(51, 2)
    rig.submit(50, 2)
    rig.submit(51, 1)


# ---- late binding, order


def test_a_worker_gets_its_next_prompt_when_it_is_about_to_run_dry() -> None:
    rig = Rig()
    first = rig.grant(1000)
    second = rig.submit(1000)
    assert second not in rig.decide()[0]
    wake_at_s = rig.dispatcher.decide(rig.now_s).wake_at_s
    assert wake_at_s is not None
    assert rig.now_s < wake_at_s < rig.now_s + first.prediction.prefill_s
    rig.now_s += first.prediction.prefill_s - 0.02
    assert second in rig.decide()[0]


def test_a_first_token_that_comes_early_lets_the_next_prompt_go() -> None:
    rig = Rig()
    first = rig.grant(1000)
    second = rig.submit(1000)
    rig.now_s += 0.1
    rig.dispatcher.first_token(first.key, rig.now_s)
    assert second in rig.decide()[0]


def test_priority_then_deadline_then_arrival() -> None:
    rig = Rig(by_slo=False)
    running = rig.grant(1000)
    chat, batch, urgent, free = (rig.submit(500, 1, c, priority=p) for c, p in (("chat", 0), ("batch", -1), ("batch", 5), ("free", 0)))
    order = []
    for _ in range(4):
        rig.now_s += 10
        rig.end(running.key)
        grants, _ = rig.decide()
        (key,) = grants
        order.append(key)
        running = grants[key]
    assert order == [urgent, chat, free, batch]


def test_ageing_gives_the_oldest_a_turn() -> None:
    rig = Rig(by_slo=False)
    running = rig.grant(1000)
    old = rig.submit(500, 1, "batch", priority=-1)
    for turn in range(200):
        rig.submit(500, 1, "chat", priority=1)
        rig.now_s += 1
        rig.end(running.key)
        grants, _ = rig.decide()
        running = next(iter(grants.values()))
        if old in grants:
            assert turn >= 29
            return
    pytest.fail("the batch request starved")


def test_a_long_prompt_does_not_block_short_ones_behind_it() -> None:
    """In adaptive mode: the long one waits for the free worker that it needs, short ones pass to the other."""
    rig = Rig(Mode.ADAPTIVE)
    rig.grant(6000)
    for _ in range(2):
        rig.decoding(rig.grant(64, 300, "chat"))
    long = rig.submit(6000)
    short = rig.submit(64, 50, "chat")
    grants, _ = rig.decide()
    assert short in grants
    assert long not in grants


def test_a_short_prompt_passes_a_long_one_between_its_steps() -> None:
    """Where engines keep a part of each step from long prompts, a short one doesn't wait for the long one's end."""
    rig = Rig(pass_tokens=128)
    long = rig.grant(6000)
    short = rig.grant(64)
    assert short.prediction.ttft_s < 0.3 * long.prediction.ttft_s
    waits = rig.submit(3000)
    assert waits not in rig.decide()[0]
    book = rig.dispatcher.workers["p0"]
    before_s = book.busy_until_s
    rig.dispatcher.first_token(short.key, rig.now_s)
    assert book.busy_until_s == before_s
    assert book.passing_tokens == 0
    assert len(book.prefilling) == 1
