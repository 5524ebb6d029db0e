"""The connector's block arithmetic, without vLLM: what each step stages and loads, and that every entry is ended exactly once."""

from __future__ import annotations

import pytest

from disagg.engine.vllm_plan import Copy, Load, Planner, StepPlan

BLOCK = 32


def blocks_of(num_tokens: int, first: int = 100) -> list[int]:
    return list(range(first, first + -(-num_tokens // BLOCK)))


def prefill(planner: Planner, num_tokens: int, chunk: int, cached: int = 0) -> list[StepPlan]:
    """The plans of all steps of one prompt that is run alone."""
    planner.add("r", {"write": ["t", 4096, num_tokens, 0, "blocks", None]})
    plans, computed = [], cached
    while computed < num_tokens:
        computed = min(num_tokens, computed + chunk)
        plans.append(planner.step([("r", computed)], lambda _: blocks_of(num_tokens)))
    planner.finished("r")
    plans.append(planner.step([], lambda _: []))
    return plans


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 64, 511, 512, 513, 3000])
@pytest.mark.parametrize("chunk", [1, 32, 48, 512])
@pytest.mark.parametrize("cached", [0, 32])
def test_every_block_is_staged_once_in_order_and_only_when_final(num_tokens: int, chunk: int, cached: int) -> None:
    cached = cached if cached < num_tokens else 0  # vLLM computes at least one token
    plans = prefill(Planner(BLOCK), num_tokens, chunk, cached)
    computed, staged = cached, []
    for plan in plans[:-1]:
        computed = min(num_tokens, computed + chunk)
        for copy in plan.stages:
            assert (copy.transfer_id, copy.offset, copy.num_tokens, copy.first_block) == ("t", 4096, num_tokens, len(staged))
            staged += copy.block_ids
        assert len(staged) * BLOCK <= computed or computed == num_tokens
    assert staged == blocks_of(num_tokens)
    assert [plan.ended_writes for plan in plans] == [()] * (len(plans) - 2) + [("t",), ()]


def test_an_aborted_prefill_is_ended_once_with_the_next_step() -> None:
    planner = Planner(BLOCK)
    planner.add("r", {"write": ["t", 0, 100, 0, "blocks", None]})
    planner.step([("r", 40)], lambda _: blocks_of(100))
    planner.finished("r")
    planner.finished("r")
    assert planner.step([], lambda _: []) == StepPlan(ended_writes=("t",))
    assert planner.step([("r", 100)], lambda _: blocks_of(100)) == StepPlan()


def test_a_preempted_prefill_stages_the_rest_from_its_new_blocks() -> None:
    planner = Planner(BLOCK)
    planner.add("r", {"write": ["t", 0, 100, 0, "blocks", None]})
    assert planner.step([("r", 70)], lambda _: [5, 6, 7, 8]).stages[0].block_ids == (5, 6)
    assert planner.step([("r", 64)], lambda _: [11, 12, 13, 14]).stages == ()
    last = planner.step([("r", 100)], lambda _: [11, 12, 13, 14])
    assert last.stages == (Copy("t", 0, 100, 2, (13, 14)),)
    assert last.ended_writes == ("t",)


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 64, 65, 513])
def test_decode_loads_what_its_prefix_cache_lacks(num_tokens: int) -> None:
    for cached_blocks in range(num_tokens // BLOCK + 1):
        planner = Planner(BLOCK)
        planner.add("r", {"read": ["t", 8192, num_tokens, 0, "blocks", None]})
        cached = cached_blocks * BLOCK
        matched = planner.matched_tokens("r", cached)
        assert matched == planner.matched_tokens("r", cached) == num_tokens - cached
        ids = blocks_of(num_tokens + 1)
        planner.allocated("r", ids, matched)
        plan = planner.step([("r", num_tokens + 1)], lambda _: blocks_of(num_tokens + 1))
        if matched:
            expected = tuple(ids[cached_blocks : -(-num_tokens // BLOCK)])
            assert plan == StepPlan(loads=(Copy("t", 8192, num_tokens, cached_blocks, expected),))
        else:
            assert plan == StepPlan(ended_reads=("t",)), "all was cached: the entry is ended all the same"
        planner.finished("r")
        assert planner.step([], lambda _: []) == StepPlan(), "a loaded entry is ended by the load, once"


def test_a_preempted_decode_recomputes_and_touches_the_inbox_no_more() -> None:
    planner = Planner(BLOCK)
    planner.add("r", {"read": ["t", 0, 64, 0, "blocks", None]})
    planner.allocated("r", [1, 2, 3], planner.matched_tokens("r", 0))
    assert planner.step([], lambda _: []).loads
    assert planner.matched_tokens("r", 0) == 0
    planner.allocated("r", [4, 5, 6], 0)
    planner.finished("r")
    assert planner.step([], lambda _: []) == StepPlan()


def test_a_decode_aborted_before_it_ran_ends_its_entry() -> None:
    planner = Planner(BLOCK)
    planner.add("r", {"read": ["t", 0, 64, 0, "blocks", None]})
    planner.matched_tokens("r", 0)
    planner.finished("r")
    assert planner.step([], lambda _: []) == StepPlan(ended_reads=("t",))


def sliced_read() -> Planner:
    """A planner that has told that the load of request "r" begins."""
    planner = Planner(BLOCK)
    planner.add("r", {"read": ["t", 0, 64, 0, "blocks", None]})
    planner.allocated("r", [1, 2, 3], planner.matched_tokens("r", 0), is_sliced=True)
    assert planner.step([], lambda _: []) == StepPlan(begun_loads=(Load("r", Copy("t", 0, 64, 0, (1, 2))),))
    return planner


def test_a_sliced_load_begins_once_and_its_end_is_the_ranks_to_tell() -> None:
    planner = sliced_read()
    assert planner.matched_tokens("r", 64) == 0
    planner.allocated("r", [1, 2, 3], 0)  # it runs now
    assert planner.step([("r", 65)], lambda _: [1, 2, 3]) == StepPlan()
    planner.finished("r")
    assert planner.step([], lambda _: []).ended_reads == ()


def test_a_sliced_load_of_an_aborted_request_is_given_up() -> None:
    planner = sliced_read()
    planner.finished("r")
    planner.finished("r")
    assert planner.step([], lambda _: []) == StepPlan(given_up=("r",))
    assert planner.step([], lambda _: []) == StepPlan()


def test_requests_without_a_transfer_and_unknown_ones_are_left_alone() -> None:
    planner = Planner(BLOCK)
    planner.add("plain", None)
    assert planner.matched_tokens("plain", 0) == planner.matched_tokens("never seen", 0) == 0
    planner.allocated("plain", [1], 0)
    planner.finished("plain")
    planner.finished("never seen")
    assert planner.step([("plain", 5), ("never seen", 5)], lambda _: [1]) == StepPlan()
