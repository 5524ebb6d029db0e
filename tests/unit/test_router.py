"""The router is a pure function of a view: who is picked, who is not, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from disagg.config import AdmissionSettings
from disagg.policy.router import NoRoute, pick
from disagg.policy.view import EXPECTED_OUTPUT_TOKENS, PoolView, WorkerView, need_of
from disagg.types import EngineState, Mode, ModelInfo, Request, Role, Route, Sampling

MODEL = ModelInfo("m", max_model_len=8192, vocab_size=1000, kv_bytes_per_token=100)
STATE = EngineState(
    "e", free_kv_tokens=10_000, total_kv_tokens=10_000, outbox_free_bytes=10**6, outbox_total_bytes=10**6, inbox_free_bytes=10**6,
    inbox_total_bytes=10**6,
)  # fmt: skip
SETTINGS = AdmissionSettings()


def worker(name: str, role: Role, state: EngineState = STATE, **fields: object) -> WorkerView:
    return WorkerView(**{"name": name, "role": role, "host_id": "h", "state": state, **fields})  # type: ignore[arg-type]


def p(name: str, **fields: object) -> WorkerView:
    return worker(name, Role.PREFILL, **fields)  # type: ignore[arg-type]


def d(name: str, **fields: object) -> WorkerView:
    return worker(name, Role.DECODE, **fields)  # type: ignore[arg-type]


def view(*workers: WorkerView, mode: Mode = Mode.DISAGG) -> PoolView:
    return PoolView(100.0, mode, MODEL, workers)


def request(prompt: int = 100, max_tokens: int = 50) -> Request:
    return Request("r", tuple(range(prompt)), Sampling(max_tokens=max_tokens))


def route(
    *workers: WorkerView, mode: Mode = Mode.DISAGG, of: Request | None = None, avoid: frozenset[str] = frozenset()
) -> Route | NoRoute:
    return pick(of or request(), view(*workers, mode=mode), SETTINGS, avoid)


def names(choice: Route | NoRoute) -> tuple[str, str]:
    assert isinstance(choice, Route), choice
    return choice.prefill, choice.decode


def test_picks_a_pair_and_says_why() -> None:
    choice = route(p("p0"), d("d0"))
    assert names(choice) == ("p0", "d0")
    assert "p0" in choice.reason
    assert "10000 KV tokens free" in choice.reason


def test_colocated_is_the_pair_of_one_worker() -> None:
    w = worker("w0", Role.COLOCATED)
    busy = worker("w1", Role.COLOCATED, running_requests=5)
    assert names(route(busy, w, mode=Mode.COLOCATED)) == ("w0", "w0")


def test_the_shorter_prefill_queue_wins() -> None:
    assert names(route(p("p0", prefill_tokens=1000), p("p1", prefill_tokens=500), d("d0")))[0] == "p1"
    told = replace(STATE, waiting_tokens=1000)  # another gateway's
    assert names(route(p("p0", state=told), p("p1", prefill_tokens=500), d("d0")))[0] == "p1"


def test_a_faster_prefill_worker_wins_once_it_has_shown_so() -> None:
    slow = p("p0", prefill_s_per_token=2e-3, prefill_tokens_seen=20_000, prefill_seen_s=100.0)
    fast = p("p1", prefill_s_per_token=1e-3, prefill_tokens_seen=20_000, prefill_seen_s=100.0, last_used_s=9.0)
    assert names(route(slow, fast, d("d0")))[0] == "p1"
    assert names(route(slow, replace(fast, prefill_tokens=5000), d("d0")))[0] == "p0"


def test_little_or_old_evidence_shuts_nobody_out() -> None:
    fast = p("p1", prefill_s_per_token=1e-3, prefill_tokens_seen=20_000, prefill_seen_s=100.0, last_used_s=9.0)
    little = p("p0", prefill_s_per_token=9e-3, prefill_tokens_seen=30, prefill_seen_s=100.0)
    old = p("p2", prefill_s_per_token=9e-3, prefill_tokens_seen=20_000, prefill_seen_s=100.0 - 600)
    assert names(route(fast, replace(fast, name="p3"), little, d("d0")))[0] == "p0"
    assert names(route(fast, replace(fast, name="p3"), old, d("d0")))[0] == "p2"


def test_fewer_running_requests_and_more_free_kv_win() -> None:
    assert names(route(p("p0"), d("d0", running_requests=3), d("d1", running_requests=2)))[1] == "d1"
    told = replace(STATE, running_requests=3)
    assert names(route(p("p0"), d("d0", state=told), d("d1", running_requests=2)))[1] == "d1"
    fuller = replace(STATE, free_kv_tokens=2000)
    assert names(route(p("p0"), d("d0", state=fuller), d("d1", last_used_s=5.0)))[1] == "d1"


def test_equal_workers_take_turns() -> None:
    prefill, decode = [p(f"p{i}") for i in range(3)], [d(f"d{i}") for i in range(2)]
    seen: Counter[str] = Counter()
    for turn in range(12):
        chosen = names(route(*prefill, *decode))
        seen.update(chosen)
        prefill = [replace(w, last_used_s=turn + 1.0) if w.name in chosen else w for w in prefill]
        decode = [replace(w, last_used_s=turn + 1.0) if w.name in chosen else w for w in decode]
    assert seen == {"p0": 4, "p1": 4, "p2": 4, "d0": 6, "d1": 6}


def test_same_host_wins_only_when_the_move_costs_more_than_the_wait() -> None:
    near, far = d("d0", host_id="a", running_requests=1), d("d1", host_id="b")
    source = p("p0", host_id="a")
    many, few = request(8000, 2), request(100, 500)
    big = replace(MODEL, kv_bytes_per_token=300_000)
    room = replace(STATE, outbox_total_bytes=10**10, inbox_total_bytes=10**10)
    workers = (replace(source, state=room), replace(near, state=room), replace(far, state=room))
    assert names(pick(many, PoolView(100.0, Mode.DISAGG, big, workers), SETTINGS))[1] == "d0"
    assert names(pick(few, PoolView(100.0, Mode.DISAGG, big, workers), SETTINGS))[1] == "d1"


def test_a_worker_that_failed_before_is_the_last_choice_but_a_choice() -> None:
    assert names(route(p("p0"), p("p1", prefill_tokens=5000), d("d0"), d("d1", running_requests=90), avoid=frozenset({"p0", "d0"}))) == (
        "p1",
        "d1",
    )
    assert names(route(p("p0"), d("d0"), avoid=frozenset({"p0", "d0"}))) == ("p0", "d0")


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ((p("p0", prefills=SETTINGS.max_prefills_per_worker), d("d0")), "prefill workers are full"),
        ((p("p0", outbox_bytes=995_000), d("d0")), "prefill workers are full"),
        ((p("p0"), d("d0", inbox_bytes=995_000)), "no decode worker has room"),
        ((p("p0"), d("d0", reserved_kv_tokens=9_900)), "no decode worker has room for 150 KV tokens"),
        ((p("p0"), d("d0", state=replace(STATE, free_kv_tokens=149), reserved_kv_tokens=1)), "no decode worker has room"),
        ((p("p0"), d("d0", reserved_kv_tokens=200, unseen_kv_tokens=100, state=replace(STATE, free_kv_tokens=249))), "no decode worker"),
    ],
)
def test_full_workers_are_not_picked(workers: tuple[WorkerView, ...], reason: str) -> None:
    choice = route(*workers)
    assert isinstance(choice, NoRoute)
    assert reason in choice.reason
    assert not choice.no_worker


def test_one_token_needs_no_decode_room() -> None:
    full = d("d0", reserved_kv_tokens=10_000, inbox_bytes=10**6)
    assert isinstance(route(p("p0"), full, of=request(100, 2)), NoRoute)
    assert names(route(p("p0"), full, of=request(100, 1))) == ("p0", "d0")


def test_an_empty_worker_takes_what_is_larger_than_its_free_room() -> None:
    """Nothing of ours is there: waiting would be for nothing."""
    assert names(route(p("p0"), d("d0", state=replace(STATE, free_kv_tokens=10)))) == ("p0", "d0")


def test_a_missing_pool_is_said() -> None:
    choice = route(p("p0"))
    assert isinstance(choice, NoRoute)
    assert choice.no_worker
    assert "decode" in choice.reason
    assert isinstance(route(p("p0"), d("d0"), mode=Mode.COLOCATED), NoRoute)


def test_need_counts_what_an_earlier_attempt_gave() -> None:
    again = replace(request(100, 50), prior_output=(1, 2, 3))
    assert need_of(again, MODEL) == need_of(replace(request(103, 47)), MODEL)
    assert need_of(request(10, 10**6), MODEL).kv_tokens == 10 + EXPECTED_OUTPUT_TOKENS


def test_a_pick_among_64_workers_is_quick() -> None:
    """Well under a millisecond: compared with 64 x 64 pairs looked at one by one, in the same run."""
    import time

    workers = [p(f"p{i}", last_used_s=float(i)) for i in range(32)] + [d(f"d{i}", last_used_s=float(i)) for i in range(32)]
    pool = view(*workers)
    began = time.perf_counter()
    for _ in range(50):
        pick(request(), pool, SETTINGS)
    picked_s = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(50):
        [(a.waiting_tokens + b.free_kv_tokens + b.used_kv_share) for a in workers[:32] for b in workers[32:]]
    assert picked_s < time.perf_counter() - began
