"""The dispatcher: who goes where, with a reason; and nothing is ever left booked."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from disagg.policy.decision import Verdict
from disagg.types import Mode, Role
from tests.policy_rig import COST, STATE, Rig

# ---- which pair


def test_disaggregated_picks_a_pair_and_says_why() -> None:
    grant = Rig().grant()
    assert (grant.route.prefill, grant.route.decode) == ("p0", "d0")
    assert "p0: idle" in grant.route.reason
    record = grant.record
    assert record.verdict is Verdict.GRANTED
    assert record.chosen is not None
    assert record.chosen.prediction == grant.prediction
    assert grant.prediction.ttft_s == pytest.approx(0.02 + 100 * 0.5e-3 + 68 * 0.5e-3, rel=0.01)
    assert grant.prediction.kv_tokens == 150


def test_colocated_picks_one_worker_with_fewer_decodes() -> None:
    rig = Rig(Mode.COLOCATED, prefill=2, decode=0)
    first = rig.decoding(rig.grant())
    assert rig.pair()[0] != first.route.prefill


def test_equal_workers_take_turns() -> None:
    rig = Rig(prefill=3, decode=2)
    seen: Counter[str] = Counter()
    for _ in range(12):
        grant = rig.grant()
        seen.update((grant.route.prefill, grant.route.decode))
        rig.decoding(grant)
        rig.end(grant.key)
        rig.now_s += 1
    assert seen == {"p0": 4, "p1": 4, "p2": 4, "d0": 6, "d1": 6}


@pytest.mark.parametrize("mode", [Mode.DISAGG, Mode.COLOCATED])
@pytest.mark.parametrize("slow_start", [1.0, 4.0])
def test_what_is_learned_of_equal_workers_moves_no_share(mode: Mode, slow_start: float) -> None:
    """Their steps differ by noise, and the first two of each are `slow_start` times as long as those that follow."""
    rng = random.Random(5)
    rig = Rig(mode, prefill=4, decode=4)
    own = {name: rng.lognormvariate(0, 0.03) for name in rig.dispatcher.workers}
    steps: Counter[str] = Counter()
    shares: Counter[str] = Counter()
    for _ in range(64):
        grant = rig.grant(64, 50)
        rig.dispatcher.first_token(grant.key, rig.now_s)
        shares.update({grant.route.prefill, grant.route.decode})
        for name, prompt in ((grant.route.prefill, 64), (grant.route.decode, 0)):
            late = slow_start * rng.uniform(0.5, 2.0) if not steps[name] and slow_start > 1 else 1.0
            rig.now_s += 0.05 if prompt else 0.02
            rig.steps(name, 2, own[name] * rng.lognormvariate(0, 0.1) * late, batch=1, prompt=prompt)
            steps[name] += 1
        rig.decoding(grant)
        rig.end(grant.key)
    assert len(shares) == len(own)
    spread = max(shares.values()) - min(shares.values())
    assert spread <= (2 if slow_start == 1.0 else 6), shares  # of 16 (disaggregated) or 8 each; too long steps are remembered a while


def test_the_decode_worker_with_fewer_requests_wins() -> None:
    rig = Rig(prefill=2, decode=2)
    busy = Counter(rig.decoding(rig.grant(max_tokens=500)).route.decode for _ in range(10))
    assert busy == {"d0": 5, "d1": 5}


def test_adaptive_prefills_on_the_decode_worker_while_the_prefill_worker_is_busy() -> None:
    rig = Rig(Mode.ADAPTIVE)
    assert rig.pair(5000)[0] == "p0"
    assert rig.pair(64) == ("d0", "d0")


def test_adaptive_keeps_a_long_prompt_away_from_those_who_decode() -> None:
    rig = Rig(Mode.ADAPTIVE)
    for _ in range(4):
        rig.decoding(rig.grant(64, 200, "chat"))
    busiest = max(rig.dispatcher.workers.values(), key=lambda w: w.accounts.decodes).name
    assert rig.pair(5000)[0] != busiest


def test_what_a_prompt_costs_is_known_of_a_worker_that_has_only_decoded() -> None:
    """One has run prompts, four times as slowly as was believed; the other has not, and must not be taken for four times as quick."""
    rig = Rig(Mode.ADAPTIVE)
    rig.steps("p0", 20, factor=4.0, batch=0, prompt=512)
    rig.steps("d0", 40)
    rig.now_s += 2.0
    short = rig.decoding(rig.grant(50, 400, "chat"))
    assert short.route.decode == "d0"
    rig.steps("d0", 3, prompt=8)  # what a few short ones tell is of no account beside that
    rig.now_s += 2.0
    assert rig.pair(1500)[0] == "p0", "nobody decodes there"


@pytest.mark.parametrize(("slowness", "late_s"), [(1.0, 0.02), (5.0, 0.08)])
def test_what_first_tokens_take_beyond_their_steps_is_learned_on_quick_and_slow_engines(slowness: float, late_s: float) -> None:
    rig = Rig(Mode.COLOCATED, prefill=1, decode=0, cost=COST.scaled(slowness))
    for _ in range(60):
        grant = rig.grant(16, 4)
        right_s = COST.scaled(slowness).step_s(16, 16 * 17 / 2, 0, 0) + late_s
        rig.now_s += right_s
        rig.decoding(grant)
        rig.end(grant.key)
        rig.now_s += 1
    assert rig.grant(16, 4).prediction.ttft_s == pytest.approx(right_s, rel=0.1)


def test_what_workers_tell_each_other_does_not_come_back_to_them() -> None:
    """All are twice as slow for a while, and no step shows what tokens above the ridge cost: about twice as much, and no more."""
    rig = Rig(Mode.ADAPTIVE)
    for second in range(40):
        rig.now_s += 1.1
        for name in ("p0", "d0"):
            rig.steps(name, 4, factor=2.0 if 10 <= second < 25 else 1.0)
            rig.now_s += 0.01
            rig.steps(name, 1, factor=2.0 if 10 <= second < 25 else 1.0, prompt=16)
        rig.decide()
        for name in ("p0", "d0"):
            predicted_s = rig.dispatcher.workers[name].fit.cost.prefill_s(2000, 0, 512)
            assert predicted_s < 3 * COST.prefill_s(2000, 0, 512), second
    assert predicted_s == pytest.approx(COST.prefill_s(2000, 0, 512), rel=0.3)


def test_adaptive_uses_any_worker_when_only_one_role_is_left() -> None:
    rig = Rig(Mode.ADAPTIVE)
    rig.dispatcher.leave("p0", rig.now_s)
    assert rig.pair(5000) == ("d0", "d0")


def test_the_near_worker_wins_when_the_move_costs_more_than_the_wait() -> None:
    rig = Rig(prefill=1, decode=1)
    rig.join("far", Role.DECODE, host="elsewhere")
    rig.decoding(rig.grant(100, 500))  # d0 has one
    assert rig.pair(50_000, 2)[1] == "d0"


def test_a_worker_that_failed_before_is_the_last_choice_but_a_choice() -> None:
    rig = Rig(prefill=2, decode=2)
    assert rig.pair(avoid=frozenset({"p0", "d1"})) == ("p1", "d0")
    assert Rig().pair(avoid=frozenset({"p0", "d0"})) == ("p0", "d0")


@pytest.mark.parametrize("mode", [Mode.DISAGG, Mode.COLOCATED, Mode.ADAPTIVE])
def test_a_slow_worker_loses_its_share_within_20_steps_and_gets_it_back(mode: Mode) -> None:
    rig = Rig(mode, prefill=2, decode=2)
    names = sorted(rig.dispatcher.workers)
    victim = "d1"

    def share(count: int) -> float:
        hits = 0
        for _ in range(count):
            grant = rig.grant(64, 200)
            hits += grant.route.decode == victim
            rig.decoding(grant)
            rig.end(grant.key)
            rig.now_s += 0.05
        return hits / count

    for name in names:
        rig.steps(name, 30)
    assert share(40) > 0.15
    rig.now_s += 0.1
    rig.steps(victim, 20, factor=5.0)
    assert share(40) == 0.0
    rig.now_s += 30  # no step in between, so nothing says that it is quick again
    assert share(40) > 0.15
    rig.now_s += 0.1
    rig.steps(victim, 40)
    assert share(40) > 0.15


def test_those_who_idle_since_the_machine_was_slow_are_tried_again() -> None:
    """All were slow. One shows that this is over; the others get no work to show it with, unless they are believed to be like it."""
    rig = Rig(prefill=1, decode=4)
    for name in ("d0", "d1", "d2", "d3"):
        rig.steps(name, 40, factor=3.0)
    rig.now_s += 0.1
    rig.steps("d0", 40)
    seen = set()
    for _ in range(80):
        grant = rig.decoding(rig.grant(64, 200))
        seen.add(grant.route.decode)
        rig.now_s += 0.25
        rig.steps(grant.route.decode, 10)
        rig.end(grant.key)
    assert seen == {"d0", "d1", "d2", "d3"}


def test_first_tokens_that_were_late_once_are_not_held_against_an_idle_worker_for_ever() -> None:
    rig = Rig(prefill=3, decode=1)
    workers = rig.dispatcher.workers
    for name, overhead_s in (("p0", 0.01), ("p1", 0.01), ("p2", 0.05)):
        workers[name].overhead_s = overhead_s
        rig.steps(name, 40, batch=0, prompt=64)
    rig.grant()
    assert workers["p2"].outline(rig.now_s).overhead_s == 0.05
    rig.now_s += 10.0
    rig.steps("p0", 1, batch=0, prompt=64)
    rig.grant()
    assert workers["p0"].outline(rig.now_s).overhead_s == 0.01
    assert workers["p1"].outline(rig.now_s).overhead_s == 0.01
    assert 0.01 < workers["p2"].outline(rig.now_s).overhead_s < 0.02


def test_kv_that_comes_to_a_worker_with_a_long_prompt_waits_for_its_end() -> None:
    """Engines serve in order of arrival: until the prompt's last step nothing is left for others, unless it leaves them a part of each."""
    waits_s = []
    for pass_tokens in (0, 128):
        rig = Rig(Mode.ADAPTIVE, prefill=1, decode=2, pass_tokens=pass_tokens)
        long = rig.grant(20_000, 100)
        record = rig.grant(100, 100).record
        there = [c for c in record.candidates if c.decode == long.route.prefill != c.prefill]
        assert record.chosen is not None
        assert long.route.prefill not in (record.chosen.prefill, record.chosen.decode)
        book = rig.dispatcher.workers[long.route.prefill]
        waits_s.append(book.until_let_in_s(long.prediction.prefill_s, book.outline(rig.now_s)))
        assert all(c.prediction.transfer_s > 0.8 * waits_s[-1] for c in there)
    assert waits_s[0] > 15 * waits_s[1] > 0


def test_a_worker_that_stops_answering_gets_no_more() -> None:
    rig = Rig(prefill=2, decode=2)
    stuck = rig.grant(100)
    grants = [rig.decoding(rig.grant(100, 400)) for _ in range(4)]
    rig.now_s += 4
    for name in ("d0",):
        rig.steps(name, 5)
    assert {rig.pair(100, 400) for _ in range(1)} == {("p1" if stuck.route.prefill == "p0" else "p0", "d0")}
    assert {g.route.decode for g in grants} == {"d0", "d1"}


# ---- accounts


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("seed", range(4))
def test_accounts_never_drift(mode: Mode, seed: int) -> None:
    """Requests begin, get on and end in any order, some steps twice, workers go and come: every count stays in its bounds, all end at 0."""
    rng = random.Random(seed)
    rig = Rig(mode, prefill=2, decode=2, max_prefills_per_worker=3, by_slo=False, pass_tokens=128 * (seed % 2))
    d = rig.dispatcher
    live: dict[int, int] = {}
    granted = 0
    books = dict(d.workers)
    for _ in range(2000):
        rig.now_s += rng.random() * 0.05
        if rng.random() < 0.35:
            rig.submit(rng.randrange(1, 3000), rng.randrange(1, 600), rng.choice(["chat", "batch", "free"]), ignore_eos=rng.random() < 0.5)
        if rng.random() < 0.01:
            name = rng.choice(sorted(books))
            books[f"{name}-{rig.now_s}"] = books[name]
            rig.join(name, books[name].role)
            books[name] = d.workers[name]
        for key, grant in rig.decide()[0].items():
            live[key] = grant.request.sampling.max_tokens
            granted += 1
        if live:
            key = rng.choice(list(live))
            step = rng.choice(["first_token", "arrived", "decoding", "progress", "end"])
            if step == "end":
                rig.end(key, is_whole=rng.random() < 0.8)
                limit = live.pop(key)
                d.first_token(key, rig.now_s)
                d.progress(key, limit, rig.now_s)
                rig.end(key)
            elif step == "progress":
                d.progress(key, rng.randrange(1, live[key] + 1), rig.now_s)
            else:
                getattr(d, step)(key, rig.now_s)
        for book in books.values():
            a = book.accounts
            numbers = [getattr(a, name) for name in a.__slots__ if name != "groups"]
            assert all(n >= -1e-6 for n in numbers), a
            assert a.prefills <= 3 or seed % 2
            assert a.unseen_kv_tokens <= a.kv_tokens
            assert sum(a.groups.values()) == a.decodes
            assert max(a.outbox_bytes, a.inbox_bytes) <= STATE.outbox_total_bytes
    assert granted > 100
    for key in list(live):
        rig.end(key)
    rig.now_s += 1000
    while d.num_waiting:
        for key in rig.decide()[0]:
            rig.end(key)
    d.assert_empty()
    assert all(book.accounts.is_empty and not book.prefilling and not book.passing_tokens for book in books.values())
