"""Whatever workers tell and clients ask, in whatever order, and however time passes: the dispatcher decides, and books nothing twice."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from typing import Any

import pytest

from disagg.config import SloClass
from disagg.errors import InvalidRequestError
from disagg.policy.decision import Decisions
from disagg.policy.router import Known
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
        mixed_step_s=rng.choice([0.0, 0.0, 1e-6, 0.03]),
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


class Anything:
    """A dispatcher to which anything happens."""

    def __init__(self, mode: Mode, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        prefill, decode, cost = rng.randrange(3), rng.randrange(1, 3), (COST, NOTHING, GENERIC, COST)[seed]
        self.rig = Rig(mode, prefill, decode, CLASSES, cost, worker_timeout_s=3.0, max_queued_requests=6, by_slo=seed != 3)
        self.roles = [Role.COLOCATED] if mode is Mode.COLOCATED else [Role.PREFILL, Role.DECODE]
        self.waiting: set[int] = set()
        self.live: set[int] = set()
        self._steps = 0

    def request(self) -> None:
        rng, now_s = self.rng, self.rig.now_s
        fields: dict[str, Any] = {
            "ignore_eos": rng.random() < 0.5,
            "priority": rng.choice([-(10**6), 0, 10**6]),
            "attempt": rng.randrange(2),
            "deadline_s": rng.choice([None, now_s - 1.0, now_s + 60.0]),
            "arrival_s": now_s + rng.choice([0.0, -50.0, 50.0]),
        }
        name = rng.choice(["free", "chat", "batch", "ttft", "tpot", "unheard of"])
        with contextlib.suppress(InvalidRequestError):
            self.waiting.add(self.rig.submit(rng.choice([1, 30, 800, 4_000]), rng.choice([1, 2, 300, 3_000]), name, **fields))

    def worker(self) -> None:
        rng, d = self.rng, self.rig.dispatcher
        match rng.randrange(3):
            case 0:
                self.rig.join(rng.choice("abc"), rng.choice(self.roles), any_state(rng))
            case 1:
                d.leave(rng.choice(["a", "b", "c", "p0", "d0"]), self.rig.now_s)
            case _:
                for name in list(d.workers):
                    d.report(name, replace(any_state(rng), steps=any_steps(rng, self._steps)), self.rig.now_s)
                self._steps += 4

    def answer(self) -> None:
        rng, d, now_s = self.rng, self.rig.dispatcher, self.rig.now_s
        if not self.live:
            return
        key = rng.choice(sorted(self.live))
        for event in rng.choice([("first_token",), ("first_token", "decoding"), ("arrived",), ("decoding", "progress")]):
            if event == "progress":
                d.progress(key, rng.choice([1, 40, 3_000]), now_s)
            else:
                getattr(d, event)(key, now_s)
        if rng.random() < 0.6:
            self.rig.end(key, is_whole=rng.random() < 0.5)
            self.live.discard(key)

    def decide(self) -> None:
        d, now_s = self.rig.dispatcher, self.rig.now_s
        decisions = d.decide(now_s)
        assert decisions.wake_at_s is None or decisions.wake_at_s <= now_s + 60.0
        for grant in decisions.grants:
            self.waiting.remove(grant.key)
            self.live.add(grant.key)
            assert {grant.route.prefill, grant.route.decode} <= set(d.workers)
            assert all(number >= 0.0 for number in grant.prediction)
        for refusal in decisions.refusals:
            self.waiting.remove(refusal.key)
            assert 0.5 <= refusal.retry_after_s <= 60.0
            assert refusal.reason

    def end(self) -> None:
        for key in self.live:
            self.rig.end(key)
        for key in self.waiting:
            self.rig.dispatcher.withdraw(key)
        self.rig.dispatcher.assert_empty()


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("seed", range(4))
def test_it_decides_whatever_comes(mode: Mode, seed: int) -> None:
    it = Anything(mode, seed)
    for _ in range(400):
        it.rig.now_s += it.rng.choice([0.0, 1e-4, 0.02, 0.02, 0.5, 40.0])
        it.rng.choice([it.request, it.worker, it.answer])()
        it.decide()
        for book in it.rig.dispatcher.workers.values():
            cost = book.fit.cost
            assert min(cost.base_s, cost.over_s, cost.token_s, cost.pair_s, cost.decode_s, cost.context_s) >= 0.0
    it.end()


def decisions_of(mode: Mode, seed: int, *, forgets: bool) -> list[Decisions]:
    """What is decided in a history; with `forgets` nothing is kept of one look at the workers for the next."""
    it = Anything(mode, seed)
    d = it.rig.dispatcher
    ask, decide, said = d._ask, d.decide, []
    if forgets:
        d._ask = lambda waiter, now_s: replace(ask(waiter, now_s), known=Known())  # type: ignore[method-assign]

    def noted(now_s: float) -> Decisions:
        said.append(decide(now_s))
        return said[-1]

    d.decide = noted  # type: ignore[method-assign]
    for _ in range(400):
        it.rig.now_s += it.rng.choice([0.0, 1e-4, 1e-4, 0.02, 0.5])
        it.rng.choice([it.request, it.request, it.worker, it.answer])()
        it.decide()
    return said


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("seed", range(2))
def test_what_is_kept_of_a_look_changes_no_decision(mode: Mode, seed: int) -> None:
    kept, fresh = (decisions_of(mode, seed, forgets=forgets) for forgets in (False, True))
    assert any(decisions.grants for decisions in kept)
    for one, other in zip(kept, fresh, strict=True):
        assert [(g.key, g.route, g.prediction, g.admitted) for g in one.grants] == [
            (g.key, g.route, g.prediction, g.admitted) for g in other.grants
        ]
        assert [(r.key, r.reason, r.retry_after_s) for r in one.refusals] == [(r.key, r.reason, r.retry_after_s) for r in other.refusals]
