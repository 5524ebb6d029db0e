"""Whatever workers tell and clients ask, in whatever order, and however time passes: the dispatcher decides, and books nothing twice."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from disagg.config import SloClass
from disagg.errors import InvalidRequestError
from disagg.policy.step_cost import GENERIC, StepCost
from disagg.types import EngineState, Mode, Role, StepRecord
from tests.policy_rig import BATCH, CHAT, COST, FREE, STATE, Rig

NOTHING = StepCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
ONLY_TTFT = SloClass(name="ttft", ttft_ms=300, if_missed="reject")
ONLY_TPOT = SloClass(name="tpot", tpot_ms=25)
CLASSES = (FREE, CHAT, BATCH, ONLY_TTFT, ONLY_TPOT)


def any_state(rng: random.Random) -> EngineState:
    """A worker that tells much, little, or nothing of itself."""
    total = rng.choice([0, 600, 5_000, 100_000])
    return replace(
        STATE,
        total_kv_tokens=total,
        free_kv_tokens=rng.randint(0, total),
        max_running_requests=rng.choice([0, 1, 3, 64]),
        max_step_tokens=rng.choice([0, 1, 512]),
        mixed_step_tokens=rng.choice([0, 1, 64]),
        running_requests=rng.choice([0, 0, 2, 200]),
        waiting_requests=rng.choice([0, 0, 5]),
        outbox_total_bytes=rng.choice([0, 10**4, 10**7]),
        inbox_total_bytes=rng.choice([0, 10**4, 10**7]),
    )


def any_steps(rng: random.Random, first: int) -> tuple[StepRecord, ...]:
    steps = []
    for number in range(first, first + rng.randrange(4)):
        prompt, batch = rng.choice([0, 1, 500]), rng.choice([0, 1, 200])
        seconds = rng.choice([0.0, 1e-6, 0.02, 3.0, 900.0])
        steps.append(StepRecord(number, seconds, prompt, prompt * (prompt + 1) / 2, batch, batch * 1000))
    return tuple(steps)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("seed", range(4))
def test_it_decides_whatever_comes(mode: Mode, seed: int) -> None:
    rng = random.Random(seed)
    cost = (COST, NOTHING, GENERIC, COST)[seed]
    rig = Rig(mode, rng.randrange(3), rng.randrange(1, 3), CLASSES, cost, worker_timeout_s=3.0, max_queued_requests=6, by_slo=seed != 3)
    d, live, ended, step = rig.dispatcher, set(), 0, 0
    roles = [Role.COLOCATED] if mode is Mode.COLOCATED else [Role.PREFILL, Role.DECODE]
    waiting: set[int] = set()
    for _ in range(500):
        rig.now_s += rng.choice([0.0, 1e-4, 0.02, 0.02, 0.5, 40.0])
        match rng.randrange(8):
            case 0 | 1 | 2:
                prompt, most = rng.choice([1, 30, 800, 4_000]), rng.choice([1, 2, 300, 3_000])
                fields = {
                    "ignore_eos": rng.random() < 0.5,
                    "priority": rng.choice([-(10**6), 0, 10**6]),
                    "attempt": rng.randrange(2),
                    "deadline_s": rng.choice([None, rig.now_s - 1.0, rig.now_s + 60.0]),
                    "arrival_s": rig.now_s + rng.choice([0.0, -50.0, 50.0]),
                }
                try:
                    waiting.add(rig.submit(prompt, most, rng.choice(["free", "chat", "batch", "ttft", "tpot", "unheard of"]), **fields))
                except InvalidRequestError as error:
                    assert error.expected
            case 3:
                rig.join(rng.choice("abc"), rng.choice(roles), any_state(rng))
            case 4:
                d.leave(rng.choice(["a", "b", "c", "p0", "d0"]), rig.now_s)
            case 5:
                for name in list(d.workers):
                    d.report(name, replace(any_state(rng), steps=any_steps(rng, step)), rig.now_s)
                step += 4
            case _ if live:
                key = rng.choice(sorted(live))
                for event in rng.choice([("first_token",), ("first_token", "decoding"), ("arrived",), ("decoding", "progress")]):
                    if event == "progress":
                        d.progress(key, rng.choice([1, 40, 3_000]), rig.now_s)
                    else:
                        getattr(d, event)(key, rig.now_s)
                if rng.random() < 0.6:
                    rig.end(key, is_whole=rng.random() < 0.5)
                    live.discard(key)
        decisions = d.decide(rig.now_s)
        assert decisions.wake_at_s is None or decisions.wake_at_s <= rig.now_s + 60.0
        for grant in decisions.grants:
            waiting.remove(grant.key)
            live.add(grant.key)
            assert {grant.route.prefill, grant.route.decode} <= set(d.workers)
            assert all(number >= 0.0 for number in grant.prediction)
        for refusal in decisions.refusals:
            waiting.remove(refusal.key)
            ended += 1
            assert 0.5 <= refusal.retry_after_s <= 60.0
            assert refusal.reason
        for book in d.workers.values():
            cost = book.fit.cost
            assert min(cost.base_s, cost.over_s, cost.token_s, cost.pair_s, cost.decode_s, cost.context_s) >= 0.0
    for key in live:
        rig.end(key)
    rig.now_s += 1e6
    for _ in range(20):
        for key in rig.decide()[0]:
            rig.end(key)
        rig.now_s += 10.0
    for key in waiting:
        d.withdraw(key)
    d.assert_empty()
