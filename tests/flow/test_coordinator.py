"""One request's way over simulated workers, real gRPC and real carriers: right answers, in every mode and at every length."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest

from disagg.config import parse_topology
from disagg.errors import ConfigError, DeadlineError, InvalidRequestError, NoWorkerError, RejectedError
from disagg.types import FinishReason, Phase, Role
from tests.builders import cluster, sim_topology, with_sampling

CARRIERS = ("shm", "tcp", "grpc", "torch_dist")


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_answers_are_right_at_every_length(carrier: str) -> None:
    async with cluster(carrier=carrier) as c:
        for length in (1, 5, 15, 16, 17, 31, 32, 33, 200, 2047, 2048, 2049, 3000):
            for max_tokens in (1, 2, 7):
                answer = await c.ask_right(c.request(length, max_tokens))
                assert answer.run.phase is Phase.FINISHED
                assert answer.run.attempts == 1


async def test_colocated_takes_the_same_path() -> None:
    async with cluster(mode="colocated", prefill=1, decode=1) as c:
        answers = await asyncio.gather(*(c.ask_right(c.request(40 + i, 6)) for i in range(20)))
        assert {a.run.route.prefill for a in answers if a.run.route} == {"colocated-0", "colocated-1"}
        assert all(a.run.route and a.run.route.is_colocated for a in answers)


async def test_a_prefill_worker_needs_room_for_the_prompt_only() -> None:
    tree = sim_topology().model_dump(exclude_none=True)
    tree["pools"]["prefill"]["simulated"] = {"kv_cache_tokens": 640}
    async with cluster(parse_topology(tree)) as c:
        assert (await c.ask_right(c.request(600, 300))).run.attempts == 1
        with pytest.raises(InvalidRequestError, match="at most 640 tokens"):
            await c.ask(c.request(641, 2))


async def test_answers_that_a_stop_string_ends_teach_how_long_answers_are() -> None:
    """The front door finds it, says that the run is finished, and leaves."""
    async with cluster() as c:
        expected = []
        for _ in range(20):
            run = c.coordinator.submit(c.request(32, 400))
            async with aclosing(run.chunks()) as chunks:
                async for _ in chunks:
                    run.end(Phase.FINISHED)
                    break
            assert run.prediction is not None
            expected.append(run.prediction.output_tokens)
        await c.settle()
    assert expected[0] == 400
    assert expected[-1] < 200


async def test_first_token_does_not_wait_for_the_kv() -> None:
    """A carrier slowed by 1.5 s: the first token comes as without, the second one 1.5 s later, and decoding goes on at full speed."""
    async with cluster(speed=20) as c:
        plain = await c.ask_right(c.request(500, 8))
    async with cluster(speed=20, kv={"delay_s": 1.5}) as c:
        slow = await c.ask_right(c.request(500, 8))
    assert plain.run.timeline.ttft_s < 0.75
    assert slow.run.timeline.ttft_s < 0.75
    assert 1.5 <= slow.instants_s[1] - slow.instants_s[0] < 1.5 + 0.75
    assert slow.instants_s[-1] - slow.instants_s[1] < 0.75
    assert slow.run.timeline.transfer_s > 1.4
    assert plain.run.timeline.transfer_s < 0.75


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_boxes_smaller_than_two_requests_deadlock_nothing(carrier: str) -> None:
    async with cluster(
        prefill=2, decode=2, carrier=carrier, box_bytes=48 << 10, max_model_len=520
    ) as c:  # a request of 512 tokens has 32 KiB
        answers = await asyncio.gather(*(c.ask_right(c.request(480 + i % 32, 5)) for i in range(50)))
        assert {a.run.attempts for a in answers} == {1}


async def test_equal_workers_share_the_load() -> None:
    async with cluster(prefill=4, decode=4) as c:
        answers = [await c.ask_right(c.request(32, 3)) for _ in range(16)]
        for leg in ("prefill", "decode"):
            names = [getattr(a.run.route, leg) for a in answers]
            assert len(set(names)) == 4, names
            assert max(names.count(n) for n in set(names)) <= 8, names  # 4 each, unless a stall of the machine makes others look slow


async def test_many_at_once_are_all_right() -> None:
    async with cluster(prefill=3, decode=3) as c:
        await asyncio.gather(*(c.ask_right(c.request(1 + 37 * i % 900, 1 + i % 40)) for i in range(200)))
        assert c.coordinator.ended == {Phase.FINISHED: 200}


async def test_end_token_first_needs_no_decode() -> None:
    """The prefill engine's first token ends some of these: no KV is waited for, and none stays in a box."""
    async with cluster(eos_mean_tokens=3) as c:
        answers = [await c.ask_right(c.request(20, 50)) for _ in range(30)]
        assert any(len(a.tokens) == 1 and a.finish is FinishReason.STOP for a in answers)
        assert any(len(a.tokens) > 1 for a in answers)


async def test_logprobs_and_seeds_cross_the_handover() -> None:
    async with cluster() as c, cluster(mode="colocated") as single:
        request = with_sampling(c.request(100, 6), logprobs=3, temperature=0.7, seed=11)
        split, whole = await c.ask_right(request), await single.ask_right(request)
        assert split.tokens == whole.tokens
        assert all(len(t.top) == 3 for t in split.tokens)


# ---- the queue


async def test_queue_goes_by_priority_then_arrival() -> None:
    async with cluster(speed=50, admission={"max_prefills_per_worker": 1}) as c:
        ended: list[int] = []

        async def ask(number: int, priority: int) -> None:
            await c.ask_right(c.request(2000, 1, priority=priority))
            ended.append(number)

        tasks = []
        for number, priority in enumerate([0, 0, 5, 0, 5]):
            tasks.append(asyncio.create_task(ask(number, priority)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert ended == [0, 2, 4, 1, 3]


async def test_full_queue_rejects_with_a_hint() -> None:
    async with cluster(speed=10, admission={"max_prefills_per_worker": 1, "max_queued_requests": 2}) as c:
        results = await asyncio.gather(*(c.ask_right(c.request(2000, 1)) for _ in range(6)), return_exceptions=True)
        rejected = [r for r in results if isinstance(r, RejectedError)]
        assert len(rejected) == 3
        assert all(0.5 <= r.retry_after_s <= 60 for r in rejected)
        assert c.coordinator.ended == {Phase.FINISHED: 3, Phase.REJECTED: 3}


async def test_deadline_over_while_queued_is_a_rejection() -> None:
    async with cluster(speed=2, admission={"max_prefills_per_worker": 1}) as c:
        first = asyncio.create_task(c.ask_right(c.request(4000, 1)))
        await asyncio.sleep(0.01)
        with pytest.raises(RejectedError, match="deadline passed while it waited"):
            await c.ask(c.request(10, 1, deadline_s=time.monotonic() + 0.05))
        await first


@pytest.mark.parametrize("mode", ["disagg", "colocated"])
async def test_deadline_over_while_served_is_a_deadline_error(mode: str) -> None:
    async with cluster(mode=mode, speed=0.05) as c:
        with pytest.raises(DeadlineError):
            await c.ask(c.request(10, 50, deadline_s=time.monotonic() + 0.3))
        assert c.coordinator.ended == {Phase.FAILED: 1}


async def test_request_that_fits_no_worker_is_refused_by_name() -> None:
    async with cluster(kv_cache_tokens=1024) as c:
        with pytest.raises(InvalidRequestError, match="at most 1024 tokens") as refusal:
            await c.ask(c.request(1025, 1))
        assert refusal.value.field == "prompt"
        with pytest.raises(InvalidRequestError, match="at most 24 with this prompt") as refusal:
            await c.ask(c.request(1000, 25))
        assert refusal.value.field == "max_tokens"
        await c.ask_right(c.request(1000, 24))


async def test_a_box_that_cannot_hold_the_longest_prompt_is_refused_at_the_start() -> None:
    needed = 1008 * 64  # the KV of 999 tokens, in whole blocks of 16
    message = rf"kv.outbox_gib: .* longest prompt, 999 tokens and {needed} bytes; give at least 0\.0001"
    with pytest.raises(ConfigError, match=message) as refusal:
        async with cluster(box_bytes=needed - 1, max_model_len=1000):
            pass
    assert refusal.value.key == "kv.outbox_gib"
    async with cluster(box_bytes=64 << 10, max_model_len=1000) as c:
        await c.ask_right(c.request(999, 1))


async def test_a_refusal_by_the_decode_side_frees_the_prefill_side(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster() as c:

        def refuse(*_: object) -> None:
            raise InvalidRequestError(field="prompt", value=1, expected="something else")

        with monkeypatch.context() as patch:
            patch.setattr(c.engine("decode-0"), "decode", refuse)
            with pytest.raises(InvalidRequestError, match="something else"):
                await c.ask(c.request(500, 5))
        await c.settle()
        c.assert_empty()
        await c.ask_right(c.request(500, 5))


async def test_what_the_engine_refuses_is_not_tried_again() -> None:
    async with cluster(prefill=2, decode=2, vocab_size=1000) as c:
        with pytest.raises(InvalidRequestError):
            await c.ask(c.request([5, 1000, 7], 4))
        assert not c.coordinator.retries
        await c.ask_right(c.request([5, 999, 7], 4))


async def test_no_worker_in_a_pool_is_an_error_after_a_while_and_a_join_is_in_time() -> None:
    async with cluster(start_workers=False, admission={"worker_timeout_s": 0.5}) as c:
        await c.add(Role.PREFILL)
        with pytest.raises(NoWorkerError, match="no live decode worker"):
            await c.ask(c.request())
        waiting = asyncio.create_task(c.ask_right(c.request()))
        await asyncio.sleep(0.1)
        await c.add(Role.DECODE)
        await waiting
