"""A request that needs most of a worker's KV cache is served beside a stream of small ones; without a drain it never was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.types import Mode
from tests.policy_rig import STATE, Rig

SMALL = replace(STATE, free_kv_tokens=10_000, total_kv_tokens=10_000)


@pytest.mark.parametrize(("mode", "workers"), [(Mode.DISAGG, 2), (Mode.COLOCATED, 1), (Mode.ADAPTIVE, 1)])
def test_a_large_request_is_not_starved_by_small_ones(mode: Mode, workers: int) -> None:
    rig = Rig(mode, prefill=workers, decode=workers, state=SMALL)
    running, done, large, large_s, waited = [], 0, None, None, 0
    for second in range(200):
        rig.now_s += 1.0
        for worker in list(rig.dispatcher.workers):
            rig.steps(worker, 40, batch=2, state=SMALL)  # it is not stuck
        for grant in running[: max(1, len(running) // 3)]:
            rig.end(grant.key)
            running.remove(grant)
            done += grant.key != large
        if second == 5:
            large = rig.submit(9_000, 500)
            waited = rig.now_s
        for _ in range(6 * workers):
            rig.submit(1_900, 100)
        for key, grant in rig.decide()[0].items():
            rig.decoding(grant)
            running.append(grant)
            if key == large:
                large_s = rig.now_s - waited
        if large_s is not None:
            break
    assert large_s is not None, "it starved"
    assert large_s > 20.0, "it would have been served without a drain: this test shows nothing"
    assert done > 20, "others were served meanwhile"


def test_a_worker_empties_for_one_and_takes_others_again_when_that_gave_up() -> None:
    rig = Rig(state=SMALL)
    first = rig.decoding(rig.grant(5_000, 500))
    large = rig.submit(9_000, 500)
    rig.now_s += 31.0
    rig.steps("d0", 40, batch=1, state=replace(SMALL, free_kv_tokens=5_000))
    rig.decide()
    small = rig.submit(100, 10)
    assert small not in rig.decide()[0], "there is room, and it is kept"
    rig.dispatcher.withdraw(large)
    assert small in rig.decide()[0]
    rig.end(first.key)
