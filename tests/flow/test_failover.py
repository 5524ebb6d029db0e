"""Workers and transfers that break, in every phase: each client gets the whole right answer, or a typed error."""

from __future__ import annotations

import asyncio
import time

import pytest

from disagg.errors import DeadlineError, NoWorkerError, TransferError, UnavailableError
from disagg.kv.carrier import Carrier
from disagg.kv.frames import Sink
from disagg.kv.outbox import Outbox
from disagg.types import Phase, Role, Transfer
from tests.builders import Answer, Cluster, cluster
from tests.faulty_carrier import FAULTS, Fault, FaultyCarrier

SLOW = {"speed": 20, "max_num_batched_tokens": 512, "kv": {"delay_s": 0.1}}
PHASES = (Phase.PREFILLING, Phase.TRANSFERRING, Phase.DECODING)


async def in_phase(c: Cluster, phase: Phase) -> None:
    """Returns when some request is in `phase`."""
    deadline_s = time.monotonic() + 60
    while not any(run.phase is phase for run in c.coordinator.open_runs):
        assert time.monotonic() < deadline_s, [run.phase for run in c.coordinator.open_runs]
        await asyncio.sleep(0.002)


async def eight(c: Cluster) -> list[asyncio.Task[Answer]]:
    return [asyncio.create_task(c.ask_right(c.request(400 + 100 * i, 30))) for i in range(8)]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_another_worker_takes_over(role: Role, phase: Phase) -> None:
    """With a second worker in each pool every one of 8 clients gets the right answer."""
    async with cluster(prefill=2, decode=2, **SLOW) as c:
        tasks = await eight(c)
        await in_phase(c, phase)
        await c.kill(f"{role}-0")
        answers = await asyncio.gather(*tasks)
        assert {a.run.phase for a in answers} == {Phase.FINISHED}
        assert f"{role}-0" not in {w.name for w in c.pool.view(0.0).workers}


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_the_only_worker_comes_back_with_a_new_epoch(role: Role) -> None:
    async with cluster(**SLOW) as c:
        name = f"{role}-0"
        epoch = c.worker(name).epoch
        tasks = await eight(c)
        await in_phase(c, Phase.DECODING)
        await c.kill(name)
        await c.pool.wait_lost(name)
        await c.add(role, name)
        assert c.worker(name).epoch != epoch
        await asyncio.gather(*tasks)
        await c.ask_right(c.request())


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_process_killed_by_sigkill(role: Role) -> None:
    """One worker of each pool is a process of its own; it dies by SIGKILL in the middle of 8 requests."""
    async with cluster(prefill=1, decode=1, **SLOW) as c:
        await c.spawn(role, "victim")
        tasks = await eight(c)
        await in_phase(c, Phase.DECODING)
        await c.kill("victim")
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*tasks)
        assert any("victim" in a.run.route.reason or a.run.attempts > 1 for a in answers if a.run.route) or role is Role.PREFILL


async def test_process_killed_while_prefilling() -> None:
    async with cluster(prefill=1, decode=1, **SLOW) as c:
        await c.spawn(Role.PREFILL, "victim")
        tasks = await eight(c)
        await in_phase(c, Phase.PREFILLING)
        await c.kill("victim")
        answers = await asyncio.gather(*tasks)
        assert any(a.run.attempts > 1 for a in answers)


async def test_colocated_worker_lost_while_decoding() -> None:
    async with cluster(mode="colocated", speed=20) as c:
        tasks = await eight(c)
        await in_phase(c, Phase.DECODING)
        await c.kill("colocated-0")
        answers = await asyncio.gather(*tasks)
        assert any(a.run.attempts > 1 for a in answers)


async def test_no_worker_left_is_a_typed_error_and_never_a_short_answer() -> None:
    async with cluster(admission={"worker_timeout_s": 0.5}, **SLOW) as c:
        tasks = await eight(c)
        await in_phase(c, Phase.DECODING)
        await c.kill("decode-0")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(r, NoWorkerError) for r in results)
        assert all(isinstance(r, Answer | UnavailableError) for r in results)


async def test_engine_that_dies_takes_only_its_worker_with_it() -> None:
    """The worker's process lives on, its engine does not: the gateway must not send it anything more."""
    async with cluster(prefill=2, decode=2, check_empty=False, **SLOW) as c:
        tasks = await eight(c)
        await in_phase(c, Phase.DECODING)
        c.engine("decode-0").die()
        c.engine("prefill-1").die()
        await c.workers["decode-0"].wait_dead()
        await asyncio.gather(*tasks)
        assert {w.name for w in c.pool.view(0.0).workers} == {"prefill-0", "decode-1"}
        await c.settle()
        c.coordinator.assert_empty()


async def test_engine_that_is_stuck_loses_its_worker() -> None:
    """It lives and answers, but its steps do not end."""
    async with cluster(prefill=2, check_empty=False, speed=20) as c:
        stuck = c.workers["prefill-0"]
        stuck.worker._stall_s = 0.5
        stuck._watch.cancel()
        stuck._watch = asyncio.create_task(stuck._end_streams_when_dead())
        await c.ask_right(c.request())
        await asyncio.sleep(1.2)
        assert stuck.worker.is_alive  # idle is not stuck
        c.engine("prefill-0").slow_factor = 1e9
        answers = await asyncio.gather(*(c.ask_right(c.request()) for _ in range(4)))
        assert any(a.run.attempts > 1 for a in answers)
        assert not stuck.worker.is_alive
        assert [w.name for w in c.pool.view(time.monotonic()).of(Role.PREFILL)] == ["prefill-1"]


async def test_silent_worker_is_lost_after_the_timeout() -> None:
    """The connection stands, but nothing comes any more."""
    async with cluster(decode=2, admission={"worker_timeout_s": 1.0}, check_empty=False, **SLOW) as c:
        tasks = await eight(c)
        await in_phase(c, Phase.DECODING)
        for attachment in c.workers["decode-0"]._servicer._attachments.values():
            attachment._heartbeat_s = 1e9
            attachment._wake = asyncio.Event()
            attachment._wake.set = lambda: None  # type: ignore[method-assign]
        await c.pool.wait_lost("decode-0")
        await asyncio.gather(*tasks)


# ---- transfers that break


class FirstPulls:
    """A fault on the first `count` pulls, then none."""

    def __init__(self, inner: Carrier, fault: Fault, count: int, at_frame: int = 0) -> None:
        self.name = inner.name
        self._plain = inner
        self._faulty = FaultyCarrier(inner, fault, at_frame, bit=1234567)
        self._left = count

    async def serve(self, outbox: Outbox) -> str:
        return await self._plain.serve(outbox)

    async def pull(self, endpoint: str, transfer: Transfer, sink: Sink) -> None:
        self._left -= 1
        await (self._faulty if self._left >= 0 else self._plain).pull(endpoint, transfer, sink)

    async def close(self) -> None:
        await self._plain.close()


@pytest.mark.parametrize("carrier", ["shm", "grpc"])
@pytest.mark.parametrize("fault", [f for f in FAULTS if f != "stall"])
async def test_broken_transfer_is_done_again_and_the_answer_is_right(fault: Fault, carrier: str) -> None:
    async with cluster(carrier=carrier, wrap_carrier=lambda k: FirstPulls(k, fault, 1), max_num_batched_tokens=512) as c:
        answer = await c.ask_right(c.request(3000, 10))
        assert answer.run.attempts == (1 if fault == "delay" else 2)
        assert answer.run.timeline.first_token_s is not None


async def test_attempts_used_up_is_the_last_error() -> None:
    async with cluster(wrap_carrier=lambda k: FirstPulls(k, "flip", 99)) as c:
        answers: list[Answer] = []
        with pytest.raises(TransferError, match="checksum"):
            await c.ask(c.request(100, 10), on_chunk=answers.append)
        assert c.coordinator.ended == {Phase.FAILED: 1}
        assert c.coordinator.retries.total() == 2
        # Each attempt prefilled one token further; none was given twice.
        assert answers[-1].token_ids == c.expected(answers[-1].request)[:3]


async def test_stalled_transfer_ends_with_the_deadline() -> None:
    async with cluster(wrap_carrier=lambda k: FirstPulls(k, "stall", 99)) as c:
        request = c.request(100, 10, deadline_s=asyncio.get_running_loop().time() + 0.5)
        with pytest.raises(DeadlineError):
            await c.ask(request)
