"""The simulated prefix cache: what is shared, what it saves, and that no block is lost or counted twice. Seeded random histories."""

from __future__ import annotations

import random

import pytest

from disagg.engine.simulated_prefix import PrefixCache
from disagg.engine.simulated_scheduler import Scheduler, Sequence

BLOCK = 8
UNIT_BLOCKS = 2
UNIT = BLOCK * UNIT_BLOCKS


def scheduler_of(num_blocks: int = 40, **settings: int) -> Scheduler:
    defaults = {"max_num_batched_tokens": 64, "max_num_seqs": 6, "block_tokens": BLOCK}
    return Scheduler(num_blocks=num_blocks, prefixes=PrefixCache(UNIT_BLOCKS), **{**defaults, **settings})


def sequence_of(num_tokens: int, family: int, num_ready: int = 0) -> Sequence:
    return Sequence(num_tokens, num_ready, prefix=tuple(family * 100 + i for i in range(num_tokens // UNIT)))


def step(scheduler: Scheduler) -> dict[Sequence, int]:
    plan = scheduler.schedule()
    for item in plan:
        item.sequence.num_computed += item.num_tokens
        item.sequence.num_ready = 0
        if item.sequence.num_computed == item.sequence.num_tokens:
            item.sequence.num_tokens += 1
    return {item.sequence: item.num_tokens for item in plan}


def check(scheduler: Scheduler) -> None:
    """Each block is free, privately held, or in a cached unit that somebody holds."""
    assert scheduler.prefixes is not None
    private = sum(s.num_blocks - s.num_units * UNIT_BLOCKS for s in scheduler.running)
    assert scheduler.free_blocks + private + scheduler.prefixes.held_blocks == scheduler.num_blocks
    assert 0 <= scheduler.prefixes.evictable_blocks <= scheduler.free_blocks
    assert all(s.num_blocks * BLOCK >= s.num_computed for s in scheduler.running)
    assert all(s.num_blocks == s.num_units == 0 for s in scheduler.waiting)


def test_a_known_prefix_is_not_computed_again() -> None:
    scheduler = scheduler_of()
    first = sequence_of(40, family=1)
    scheduler.add(first)
    assert step(scheduler) == {first: 40}
    scheduler.remove(first)
    again = sequence_of(50, family=1)
    assert scheduler.cached_tokens(again.prefix, 50) == 32
    scheduler.add(again)
    assert step(scheduler) == {again: 18}
    assert again.num_cached == 32
    check(scheduler)


def test_a_prompt_that_is_cached_whole_still_computes_its_last_unit() -> None:
    scheduler = scheduler_of()
    for _ in range(2):
        sequence = sequence_of(32, family=1)
        scheduler.add(sequence)
        planned = step(scheduler)[sequence]
        scheduler.remove(sequence)
    assert planned == 16, "one token at least must be computed, and units are whole"


def test_twins_share_their_blocks() -> None:
    scheduler = scheduler_of()
    twins = [sequence_of(32, family=1) for _ in range(2)]
    for twin in twins:
        scheduler.add(twin)
    step(scheduler)
    assert scheduler.prefixes is not None
    assert scheduler.prefixes.held_blocks == 4
    assert scheduler.free_blocks == 36, "the second one's copy was given back"
    check(scheduler)


def test_cached_blocks_give_way_to_new_ones_oldest_first() -> None:
    scheduler = scheduler_of(num_blocks=8)
    for family in (1, 2):
        sequence = sequence_of(32, family)
        scheduler.add(sequence)
        step(scheduler)
        scheduler.remove(sequence)
    assert scheduler.free_blocks == 8
    other = sequence_of(24, family=3)
    scheduler.add(other)
    step(scheduler)
    check(scheduler)
    assert scheduler.cached_tokens((200, 201), 100) == 32, "the later one is still there"
    assert scheduler.cached_tokens((100, 101), 100) < 32, "the earlier one gave way, from its end on"


@pytest.mark.parametrize("seed", range(30))
def test_random_histories_lose_no_block(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = scheduler_of(num_blocks=rng.randint(8, 60), max_num_seqs=rng.randint(1, 8), max_num_batched_tokens=rng.randint(8, 80))
    alive: dict[Sequence, int] = {}
    for _ in range(500):
        if rng.random() < 0.4:
            end = rng.randint(2, scheduler.capacity_tokens)
            size = rng.randint(1, end - 1)
            sequence = sequence_of(size, rng.randrange(3), num_ready=rng.choice([0, size - 1]))
            alive[sequence] = end
            scheduler.add(sequence)
        if alive and rng.random() < 0.1:
            victim = rng.choice(list(alive))
            del alive[victim]
            scheduler.remove(victim)
        planned = step(scheduler)
        check(scheduler)
        assert bool(planned) == scheduler.has_work
        assert sum(planned.values()) <= scheduler.max_num_batched_tokens
        for sequence in planned:
            if sequence.num_tokens >= alive[sequence]:
                del alive[sequence]
                scheduler.remove(sequence)
        check(scheduler)
    for sequence in list(alive):
        scheduler.remove(sequence)
    scheduler.assert_empty()
    assert scheduler.prefixes is not None
    assert scheduler.prefixes.stored > 0, "nothing was ever cached: the test shows nothing"


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("with_prefixes", [False, True])
def test_steady_steps_are_those_that_the_scheduler_would_plan(seed: int, with_prefixes: bool) -> None:
    """Two equal schedulers, one of them taking runs of steps at once, agree after every run."""
    rng = random.Random(seed)
    settings = {"num_blocks": rng.randint(8, 60), "max_num_seqs": rng.randint(1, 8), "max_num_batched_tokens": rng.randint(8, 80)}
    both = [Scheduler(block_tokens=BLOCK, prefixes=PrefixCache(UNIT_BLOCKS) if with_prefixes else None, **settings) for _ in range(2)]
    fast, slow = both
    alive: list[tuple[Sequence, Sequence, int]] = []
    longest_run = 0
    for _ in range(300):
        if rng.random() < 0.15:
            end = rng.randint(2, min(200, fast.capacity_tokens))
            size, family = rng.randint(1, end - 1), rng.randrange(3)
            twins = [sequence_of(size, family) for _ in range(2)]
            alive.append((twins[0], twins[1], end))
            for scheduler, twin in zip(both, twins, strict=True):
                scheduler.add(twin)
        most = min((end - f.num_tokens for f, _, end in alive if f.is_running), default=0)
        run = fast.steady_steps(most) if most else 0
        if run:
            fast.advance(run)
            for _ in range(run):
                planned = step(slow)
                assert set(planned.values()) == {1}
                assert set(planned) == set(slow.running)
        else:
            step(fast)
            step(slow)
        longest_run = max(longest_run, run)
        assert fast.free_blocks == slow.free_blocks
        assert [(s.num_tokens, s.num_computed, s.num_blocks) for s in fast.running] == [
            (s.num_tokens, s.num_computed, s.num_blocks) for s in slow.running
        ]
        for entry in list(alive):
            f, s, end = entry
            if f.num_tokens >= end:
                alive.remove(entry)
                fast.remove(f)
                slow.remove(s)
    assert longest_run > 5, "hardly a run: the test shows nothing"
