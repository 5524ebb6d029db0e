"""Continuous batching: no block leaks, nobody overtakes, nobody starves, whatever comes and goes. Seeded random histories."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.config import SimulatedSettings
from disagg.engine.load_room import SPREAD_STEPS, STEP_SHARE
from disagg.engine.simulated_loads import Loads, loads_of
from disagg.engine.simulated_scheduler import Scheduler, Sequence
from disagg.perf.profile import Profile, StepCoefficients


def scheduler_of(loads: Loads[Sequence] | None = None, **settings: int) -> Scheduler:
    given = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "num_blocks": 16, "block_tokens": 8, **settings}
    return Scheduler(**given, loads=loads)  # type: ignore[arg-type]  # by name


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


@pytest.mark.parametrize(
    ("mixed", "alone", "long", "left"), [(16, 14, 7, 7), (16, 14, 9, 5), (32, 26, 15, 15), (32, 26, 18, 12), (None, 26, 26, 4)]
)
def test_a_long_prompt_leaves_short_ones_up_to_half_of_a_mixed_step(mixed: int | None, alone: int, long: int, left: int) -> None:
    settings = {"max_num_batched_tokens": 32, "long_prefill_tokens": 26, "num_blocks": 100, "max_num_seqs": 8}
    scheduler = scheduler_of(**settings, **({"mixed_step_tokens": mixed} if mixed else {}))
    chats, document, late = [Sequence(3), Sequence(3)], Sequence(400), Sequence(left)
    for chat in chats:
        scheduler.add(chat)
    step(scheduler)
    scheduler.add(document)
    assert step(scheduler)[document] == alone
    scheduler.add(late)
    planned = step(scheduler)
    assert (planned[document], planned[late]) == (long, left), "beside two decodes"


def test_two_long_prompts_share_what_one_would_have() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=32, long_prefill_tokens=26, mixed_step_tokens=32, num_blocks=200, max_num_seqs=8)
    chat, first, second, short = Sequence(3), Sequence(400), Sequence(400), Sequence(12)
    scheduler.add(chat)
    step(scheduler)
    for sequence in (first, second, short):
        scheduler.add(sequence)
    assert step(scheduler) == {chat: 1, first: 9, second: 9, short: 9}
    assert step(scheduler) == {chat: 1, first: 14, second: 14, short: 3}


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


MB = 10**6
STEP_S = 0.1  # has time for 8 MB, a token's KV here


def with_chat() -> tuple[Scheduler, Sequence]:
    """One request decodes; a rank copies 1 GB/s."""
    scheduler, chat = scheduler_of(Loads(8 * MB, 1e9)), Sequence(5)
    scheduler.add(chat)
    loaded_step(scheduler)
    assert scheduler.loads is not None
    scheduler.loads.decode_s = STEP_S
    return scheduler, chat


def loaded_step(scheduler: Scheduler) -> tuple[dict[Sequence, int], float]:
    """What is computed in one step, and by how much its loads lengthen it."""
    plan = scheduler.schedule()
    more_s = scheduler.load(STEP_S if plan else 0.0)
    for item in plan:
        item.sequence.num_computed += item.num_tokens
        item.sequence.num_ready = 0
        item.sequence.num_tokens += item.sequence.num_computed == item.sequence.num_tokens
    return {item.sequence: item.num_tokens for item in plan}, more_s


def test_kv_from_elsewhere_is_loaded_a_little_per_step_beside_a_batch() -> None:
    scheduler, chat = with_chat()
    document, other = Sequence(41, num_ready=40), Sequence(7)
    scheduler.add(document)
    scheduler.add(other)
    first, more_s = loaded_step(scheduler)
    assert first == {chat: 1, other: 7}, "who computes its prompt goes on"
    assert more_s == pytest.approx(320 * MB / SPREAD_STEPS / 1e9), "a sixteenth of it is more than the step's share"
    assert scheduler.num_waiting == 1
    assert scheduler.steady_steps(100) == 0
    steps, left = 1, 320 * MB * (1 - 1 / SPREAD_STEPS)
    while document not in (plan := loaded_step(scheduler))[0]:
        assert plan[1] <= max(STEP_SHARE * STEP_S, left / SPREAD_STEPS / 1e9) + 1e-9
        left -= plan[1] * 1e9
        steps += 1
        assert steps < 100
    assert left == pytest.approx(0.0, abs=1.0)
    assert plan[0] == {chat: 1, other: 1, document: 1}
    assert steps > SPREAD_STEPS
    for sequence in (chat, document, other):
        scheduler.remove(sequence)
    scheduler.assert_empty()


def test_kv_that_a_step_has_time_for_is_computed_with_at_once() -> None:
    scheduler, chat = with_chat()
    short, next_one = Sequence(2, num_ready=1), Sequence(2, num_ready=1)
    scheduler.add(short)
    scheduler.add(next_one)
    assert loaded_step(scheduler) == ({chat: 1, short: 1}, pytest.approx(0.016)), "the second begins, and waits a step more"
    assert loaded_step(scheduler)[0] == {chat: 1, short: 1, next_one: 1}


def test_an_engine_that_runs_nothing_loads_at_once() -> None:
    scheduler, chat = with_chat()
    scheduler.remove(chat)
    document = Sequence(41, num_ready=40)
    scheduler.add(document)
    assert loaded_step(scheduler) == ({}, pytest.approx(0.32)), "the step before had a request: an empty step loads all of it"
    assert loaded_step(scheduler) == ({document: 1}, 0.0)
    scheduler.remove(document)
    scheduler.assert_empty()
    fresh, other = scheduler_of(Loads(8 * MB, 1e9)), Sequence(41, num_ready=40)
    fresh.add(other)
    assert loaded_step(fresh) == ({other: 1}, pytest.approx(0.32))


@pytest.mark.parametrize("steps", [0, 1, 40])
def test_who_leaves_while_it_loads_or_has_loaded_leaves_nothing(steps: int) -> None:
    scheduler, chat = with_chat()
    document = Sequence(41, num_ready=40)
    scheduler.add(document)
    scheduler.max_num_seqs = 1  # once loaded it waits for a seat
    for _ in range(steps):
        loaded_step(scheduler)
    scheduler.remove(document)
    scheduler.remove(document)
    scheduler.remove(chat)
    scheduler.assert_empty()


def test_loads_take_time_on_cpus_only(tmp_path: Path) -> None:
    steps = StepCoefficients(0.1, 0.0, 0.004, 0.0, 0.007, 0.0)
    cpu = Profile("smollm2-135m", "1 cores of a CPU, 2 workers at once", {}, steps, 20_000, 32, 46_080, 100, 0.1, "2026-11-30", 4e9, 2e-3)
    known: dict[str, Loads[str] | None] = {}
    for name, hardware in (("cpu", cpu.hardware), ("gpu", "1 x h200")):
        file = tmp_path / f"{name}.json"
        file.write_text(replace(cpu, hardware=hardware).to_json())
        settings = SimulatedSettings(profile=str(file), shape="smollm2-135m", tp=1)
        known[name] = loads_of(settings)
        assert loads_of(settings.model_copy(update={"speed": 0.0})) is None
    assert known["gpu"] is None
    assert known["cpu"] is not None
    known["cpu"].begin("request", 3000)
    assert known["cpu"].step(0.0) == (pytest.approx(3000 * 46_080 / 4e9), ["request"])
    assert loads_of(SimulatedSettings()) is None
    assert loads_of(SimulatedSettings(gpu="cpu", shape="smollm2-135m", tp=1)) is not None
