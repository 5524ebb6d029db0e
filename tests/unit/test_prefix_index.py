"""What the router knows of prefix caches: identities of blocks, the index fed by the engines' events, and what follows for a route."""

from __future__ import annotations

import random
from dataclasses import replace

from disagg.engine.simulated_prefix import PrefixCache
from disagg.policy.prefix_index import PrefixIndex
from disagg.prefix import block_identities, root_identity
from disagg.types import CacheChange, Mode, Role
from tests.policy_rig import STATE, Rig

CACHING = replace(STATE, cache_block_tokens=16)


def test_identities_are_equal_exactly_for_equal_beginnings() -> None:
    a, b = tuple(range(100)), (*range(40), 7, *range(41, 100))
    whole = block_identities(a, 16)
    assert len(whole) == 6  # the last, partly filled block has none
    assert block_identities(a[:40], 16) == whole[:2]
    assert [x == y for x, y in zip(whole, block_identities(b, 16), strict=True)] == [True, True, False, False, False, False]
    assert set(block_identities(a, 16, root_identity("tenant"))).isdisjoint(whole)
    assert block_identities(a[32:], 16, whole[1]) == whole[2:]  # goes on from a parent, as engines tell it


def test_the_index_follows_an_engines_cache_through_its_events() -> None:
    """Random histories of a cache: after each report the index gives what the cache would give."""
    rng = random.Random(5)
    cache, index = PrefixCache(1), PrefixIndex()
    index.join("w", 60)
    for _ in range(400):
        family = rng.randrange(12)
        prompt = [family * 1000 + i for i in range(rng.randrange(1, 20))]
        held = cache.match(prompt)
        cache.acquire(prompt[:held])
        for identity in prompt[held:]:
            assert cache.store(identity)
        cache.release(prompt)
        cache.evict_to(60)
        cache.note_changes()
        index.update("w", list(cache.changes)[-3:])  # reports overlap; what was told before counts once
        want = cache.match([family * 1000 + i for i in range(20)])
        assert index.cached_blocks([family * 1000 + i for i in range(20)]).get("w", 0) == want
    assert cache.evicted > 1000
    assert len(index) <= 60


def test_memory_is_bounded_and_a_lost_event_is_put_right_by_a_first_token() -> None:
    index = PrefixIndex()
    index.join("w", 8)
    index.update("w", [CacheChange(1, stored=tuple(range(100)))])
    assert len(index) == 8
    index.update("w", [CacheChange(2, is_cleared=True, stored=(1, 2, 3))])
    index.learn("w", (1, 2, 3), cached_blocks=1)  # it had lost 2 and 3, and has them again now
    assert index.cached_blocks((1, 2, 3, 4)) == {"w": 3}
    index.learn("w", (1, 2, 9), cached_blocks=0)
    assert index.cached_blocks((1, 2, 3)) == {"w": 3}
    index.leave("w")
    index.update("w", [CacheChange(3, stored=(5,))])
    assert not index.cached_blocks((5,))


def test_a_prompt_goes_where_its_beginning_is_and_the_prediction_counts_it() -> None:
    rig = Rig(Mode.DISAGG, prefill=3, decode=1, state=CACHING)
    prompt = tuple(range(1000))
    change = CacheChange(1, stored=block_identities(prompt, 16))
    rig.dispatcher.report("p1", replace(CACHING, cache_changes=(change,)), rig.now_s)
    grant = rig.grant(1000)
    assert grant.route.prefill == "p1"
    assert grant.prediction.cached_tokens == 992
    assert grant.prediction.prefill_s < 0.1 < rig.grant(1000, cache_salt="other").prediction.prefill_s


def test_a_busy_worker_with_the_prefix_loses_when_waiting_costs_more_than_computing() -> None:
    rig = Rig(Mode.DISAGG, prefill=2, decode=1, state=CACHING)
    change = CacheChange(1, stored=block_identities(tuple(range(160)), 16))
    rig.dispatcher.report("p1", replace(CACHING, cache_changes=(change,)), rig.now_s)
    assert rig.grant(160).route.prefill == "p1"
    assert rig.grant(900, cache_salt="x").route.prefill == "p0"
    rig.grant(4000, cache_salt="y")  # p1 is busy for seconds
    rig.end(2)  # p0 is free
    assert rig.grant(160).route.prefill == "p0"


def test_what_ran_on_a_worker_is_known_before_its_event_comes() -> None:
    rig = Rig(Mode.DISAGG, prefill=3, decode=1, state=CACHING)
    first = rig.decoding(rig.grant(640))
    rig.end(first.key)
    again = rig.grant(640)
    assert again.route.prefill == first.route.prefill
    assert again.prediction.cached_tokens == 639


def test_a_worker_that_comes_back_has_an_empty_cache() -> None:
    rig = Rig(Mode.DISAGG, prefill=1, decode=1, state=CACHING)
    rig.end(rig.decoding(rig.grant(640)).key)
    rig.dispatcher.leave("p0", rig.now_s)
    rig.join("p0", Role.PREFILL, CACHING)
    assert rig.grant(640).prediction.cached_tokens == 0
