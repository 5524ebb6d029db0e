"""Continuous batching: no block leaks, nobody overtakes, nobody starves, whatever comes and goes. Seeded random histories."""

from __future__ import annotations

import random

import pytest

from disagg.engine.simulated_scheduler import Scheduler, Sequence


def scheduler_of(**settings: int) -> Scheduler:
    return Scheduler(**{"max_num_batched_tokens": 32, "max_num_seqs": 4, "num_blocks": 16, "block_tokens": 8, **settings})


def step(scheduler: Scheduler) -> dict[Sequence, int]:
    """One step as an engine takes it: what is scheduled is computed, and whoever has all computed gets a token."""
    plan = scheduler.schedule()
    for item in plan:
        item.sequence.num_computed += item.num_tokens
        item.sequence.num_ready = 0
        if item.sequence.num_computed == item.sequence.num_tokens:
            item.sequence.num_tokens += 1
    return {item.sequence: item.num_tokens for item in plan}


def check(scheduler: Scheduler) -> None:
    held = sum(s.num_blocks for s in scheduler.running)
    assert held + scheduler.free_blocks == scheduler.num_blocks
    assert scheduler.free_blocks >= 0
    assert all(s.num_blocks == 0 and not s.is_running for s in scheduler.waiting)
    assert len(scheduler.running) <= scheduler.max_num_seqs
    for sequence in scheduler.running:
        assert sequence.num_blocks * scheduler.block_tokens >= sequence.num_computed


def test_a_long_prompt_is_cut_into_chunks_and_decodes_go_first() -> None:
    scheduler = scheduler_of()
    chat, document = Sequence(5), Sequence(70)
    scheduler.add(chat)
    assert step(scheduler) == {chat: 5}
    scheduler.add(document)
    assert [step(scheduler) for _ in range(3)] == [{chat: 1, document: 31}, {chat: 1, document: 31}, {chat: 1, document: 8}]
    assert step(scheduler) == {chat: 1, document: 1}


def test_a_mixed_step_is_shorter_and_a_step_without_decodes_is_not() -> None:
    scheduler = scheduler_of(mixed_step_tokens=9)
    chat, document = Sequence(5), Sequence(70)
    scheduler.add(document)
    assert step(scheduler) == {document: 32}
    scheduler.add(chat)
    assert [step(scheduler) for _ in range(2)] == [{document: 32}, {document: 6, chat: 5}]
    other = Sequence(20)
    scheduler.add(other)
    assert step(scheduler) == {document: 1, chat: 1, other: 7}
    scheduler.remove(document)
    scheduler.remove(chat)
    assert step(scheduler) == {other: 13}  # nobody decodes any more


@pytest.mark.parametrize(("mixed", "long", "left"), [(16, 7, 7), (32, 15, 15), (None, 26, 4)])
def test_a_long_prompt_leaves_short_ones_half_of_a_mixed_step(mixed: int | None, long: int, left: int) -> None:
    settings = {"max_num_batched_tokens": 32, "long_prefill_tokens": 26, "num_blocks": 100, "max_num_seqs": 8}
    scheduler = scheduler_of(**settings, **({"mixed_step_tokens": mixed} if mixed else {}))
    chats, document, late = [Sequence(3), Sequence(3)], Sequence(400), Sequence(20)
    for chat in chats:
        scheduler.add(chat)
    step(scheduler)
    scheduler.add(document)
    assert step(scheduler)[document] == long
    scheduler.add(late)
    planned = step(scheduler)
    assert (planned[document], planned[late]) == (long, left), "beside two decodes"


def test_a_long_prompt_that_is_alone_takes_the_whole_step() -> None:
    scheduler = scheduler_of(long_prefill_tokens=24)
    document, late = Sequence(100), Sequence(20)
    scheduler.add(document)
    assert step(scheduler) == {document: 32}
    scheduler.add(late)
    assert step(scheduler) == {document: 24, late: 8}


def test_every_decode_gets_its_token_in_a_mixed_step() -> None:
    scheduler = scheduler_of(mixed_step_tokens=2)
    sequences = [Sequence(3) for _ in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    step(scheduler)
    assert step(scheduler) == dict.fromkeys(sequences, 1)


def test_a_ready_sequence_starts_at_its_last_token() -> None:
    scheduler = scheduler_of()
    sequence = Sequence(41, num_ready=40)
    scheduler.add(sequence)
    assert step(scheduler) == {sequence: 1}
    assert (sequence.num_computed, sequence.num_blocks) == (41, 6)


def test_the_newest_is_preempted_and_comes_back_first() -> None:
    scheduler = scheduler_of(num_blocks=8, max_num_batched_tokens=64)
    old, new, later = Sequence(32), Sequence(32), Sequence(8)
    for sequence in (old, new, later):
        scheduler.add(sequence)
    assert step(scheduler) == {old: 32, new: 32}
    assert step(scheduler) == {old: 1}, "old needs a fifth block: new gives its four up"
    assert scheduler.preemptions == 1
    assert list(scheduler.waiting) == [new, later]
    assert new.num_computed == 0
    scheduler.remove(old)
    assert step(scheduler) == {new: 33, later: 8}
    check(scheduler)


@pytest.mark.parametrize("seed", range(30))
def test_random_histories_leak_nothing_and_are_fair(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = scheduler_of(
        num_blocks=rng.randint(4, 40),
        block_tokens=rng.choice([1, 8, 16]),
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.randint(4, 64),
    )
    alive: dict[Sequence, int] = {}  # and at how many tokens each ends
    admitted: list[Sequence] = []
    arrivals: list[Sequence] = []
    for _ in range(400):
        if rng.random() < 0.4:
            end = rng.randint(2, scheduler.capacity_tokens)
            size = rng.randint(1, end - 1)
            sequence = Sequence(size, num_ready=rng.choice([0, size - 1]))
            alive[sequence] = end
            arrivals.append(sequence)
            scheduler.add(sequence)
        if alive and rng.random() < 0.1:
            victim = rng.choice(list(alive))
            del alive[victim]
            scheduler.remove(victim)
            scheduler.remove(victim)
            if victim not in admitted:
                arrivals.remove(victim)
        oldest = next((s for s in scheduler.running), None)
        planned = step(scheduler)
        check(scheduler)
        assert bool(planned) == scheduler.has_work, "work waits and nothing runs"
        assert sum(planned.values()) <= scheduler.max_num_batched_tokens
        assert oldest is None or oldest in planned, "the oldest running sequence always goes on"
        for sequence in planned:
            if sequence not in admitted:
                admitted.append(sequence)
            if sequence.num_tokens >= alive[sequence]:
                del alive[sequence]
                scheduler.remove(sequence)
        check(scheduler)
    assert admitted == arrivals[: len(admitted)], "first come, first served"
    for _ in range(20_000):
        if not alive:
            break
        for sequence in step(scheduler):
            if sequence.num_tokens >= alive[sequence]:
                del alive[sequence]
                scheduler.remove(sequence)
    assert not alive, "somebody starves"
    scheduler.assert_empty()
