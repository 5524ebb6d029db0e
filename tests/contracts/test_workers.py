"""One suite for everything that implements `Worker`: the local one, and its client at the other end of gRPC. Then what only gRPC has."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from disagg.engine.engine import Worker
from disagg.errors import DeadlineError, EngineError, InvalidRequestError, TransferError, TransferFencedError, WorkerLostError, from_wire
from disagg.kv.layout import hash_tokens
from disagg.pb import worker_pb2 as pb
from disagg.pb import worker_pb2_grpc
from disagg.serving import worker_rpc_attachment, worker_rpc_messages
from disagg.serving.signal import Signal
from disagg.serving.worker_rpc_client import RemoteWorker
from disagg.types import Chunk, EngineState, FinishReason, Prefilled, Request, Sampling, Token, TopLogprob, Transfer, new_id
from tests.builders import Cluster, cluster

KINDS = ("local", "remote")


class Bench:
    """A prefill and a decode worker of one kind; what lies behind them is in `cluster`."""

    def __init__(self, kind: str, c: Cluster) -> None:
        self.cluster = c
        self.p: Worker = c.worker("prefill-0") if kind == "local" else c.pool.members["prefill-0"].worker
        self.d: Worker = c.worker("decode-0") if kind == "local" else c.pool.members["decode-0"].worker

    def transfer(self, request: Request, **changes: Any) -> Transfer:
        tokens = request.prompt_token_ids + request.prior_output
        return replace(Transfer(new_id(), 0, self.p.address, len(tokens), hash_tokens(tokens)), **changes)

    async def answer(self, request: Request) -> tuple[int, ...]:
        """Both legs, one after the other."""
        transfer = self.transfer(request)
        prefilled = await self.p.prefill(request, transfer)
        ids = [prefilled.first.token_id]
        if prefilled.finish is None:
            async with aclosing(self.d.decode(request, prefilled, transfer)) as chunks:
                ids += [t.token_id async for c in chunks for t in c.tokens]
        return tuple(ids)


@pytest.fixture(params=KINDS)
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with cluster(speed=200) as c:
        yield Bench(request.param, c)


async def settled(bench: Bench) -> None:
    await bench.cluster.settle()
    bench.cluster.assert_empty()


async def test_both_legs_give_the_answer(bench: Bench) -> None:
    for length in (1, 16, 17, 500):
        request = bench.cluster.request(length, 9)
        assert await bench.answer(request) == bench.cluster.expected(request)


async def test_prior_output_is_continued(bench: Bench) -> None:
    request = bench.cluster.request(50, 9)
    whole = bench.cluster.expected(request)
    assert await bench.answer(replace(request, prior_output=whole[:4])) == whole[4:]


async def test_generate_gives_the_answer(bench: Bench) -> None:
    request = bench.cluster.request(50, 9)
    async with aclosing(bench.d.generate(request)) as chunks:
        got = [c async for c in chunks]
    assert tuple(t.token_id for c in got for t in c.tokens) == bench.cluster.expected(request)
    assert [c.finish for c in got if c.finish] == [FinishReason.LENGTH]
    assert got[-1].finish is FinishReason.LENGTH


async def test_last_token_at_the_prefill_needs_no_release(bench: Bench) -> None:
    request = bench.cluster.request(50, 1)
    prefilled = await bench.p.prefill(request, bench.transfer(request))
    assert prefilled.finish is FinishReason.LENGTH
    await settled(bench)


async def test_fetch_may_come_first_and_often(bench: Bench) -> None:
    request = bench.cluster.request(500, 5)
    transfer = bench.transfer(request)
    fetches = [asyncio.create_task(bench.d.fetch(transfer)) for _ in range(3)]
    await asyncio.sleep(0.02)
    prefilled = await bench.p.prefill(request, transfer)
    await asyncio.gather(*fetches)
    await bench.d.fetch(transfer)
    async with aclosing(bench.d.decode(request, prefilled, transfer)) as chunks:
        ids = [t.token_id async for c in chunks for t in c.tokens]
    assert (prefilled.first.token_id, *ids) == bench.cluster.expected(request)


async def test_release_is_idempotent_and_final(bench: Bench) -> None:
    request = bench.cluster.request(50, 5)
    transfer = bench.transfer(request)
    await bench.d.release(transfer)
    prefilled = await bench.p.prefill(request, transfer)
    for _ in range(2):
        await bench.p.release(transfer)
    with pytest.raises(TransferFencedError):
        await bench.d.fetch(transfer)
    with pytest.raises(TransferFencedError):
        await _drain(bench.d.decode(request, prefilled, transfer))
    await settled(bench)


async def test_decode_of_kv_that_never_comes_fails_when_the_source_says_so(bench: Bench) -> None:
    request = bench.cluster.request(50, 5)
    transfer = bench.transfer(request)
    decode = asyncio.create_task(_drain(bench.d.decode(request, Prefilled(Token(7)), transfer)))
    await asyncio.sleep(0.02)
    await bench.p.release(transfer)
    with pytest.raises(TransferError):
        await decode


async def test_other_tokens_or_another_epoch_are_refused(bench: Bench) -> None:
    request = bench.cluster.request(50, 5)
    transfer = bench.transfer(request)
    await bench.p.prefill(request, transfer)
    with pytest.raises(TransferFencedError):
        await bench.d.fetch(replace(transfer, token_hash=hash_tokens((1, 2, 3))))
    stale = replace(bench.p.address, epoch=new_id())
    with pytest.raises(TransferFencedError):
        await bench.d.fetch(bench.transfer(request, source=stale))
    await bench.p.release(transfer)


async def test_cancelling_a_prefill_frees_it_also_while_it_waits_for_room(bench: Bench) -> None:
    c = bench.cluster
    held = []
    free = bench.p.state().outbox_total_bytes if isinstance(bench.p, RemoteWorker) else 0
    while True:  # fill the outbox
        request = c.request(8000, 5)
        task = asyncio.create_task(bench.p.prefill(request, transfer := bench.transfer(request)))
        held.append((task, transfer))
        await asyncio.wait({task}, timeout=0.5 if len(held) > 100 else 5.0)
        if not task.done() or len(held) > 3:
            break
    assert free >= 0
    for task, _ in held:
        task.cancel()
    await asyncio.gather(*(t for t, _ in held), return_exceptions=True)
    for _, transfer in held:
        await bench.p.release(transfer)
    await settled(bench)


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_closing_the_chunks_cancels_and_frees(bench: Bench, after: int) -> None:
    request = bench.cluster.request(300, 400)
    transfer = bench.transfer(request)
    prefilled = await bench.p.prefill(request, transfer)
    for chunks in (bench.d.decode(request, prefilled, transfer), bench.p.generate(request)):
        got = 0
        async with aclosing(chunks) as stream:
            while got < after and (await anext(stream)).finish is None:  # on a starved machine an answer may come in one chunk
                got += 1
    await bench.d.release(transfer)
    await bench.p.release(transfer)
    await settled(bench)


async def test_errors_keep_their_type_and_fields(bench: Bench) -> None:
    bad = bench.cluster.request([1, 2, 10**6], 5)
    for call in (bench.p.prefill(bad, bench.transfer(bad)), _drain(bench.d.generate(bad))):
        with pytest.raises(InvalidRequestError) as refusal:
            await call
        assert refusal.value.field
        assert refusal.value.expected
    await settled(bench)


async def test_dead_engine_is_a_lost_worker(bench: Bench) -> None:
    request = bench.cluster.request(300, 7000)
    running = asyncio.create_task(_drain(bench.d.generate(request)))
    await asyncio.sleep(0.05)
    bench.cluster.engine("decode-0").die()
    with pytest.raises(WorkerLostError):
        await running
    with pytest.raises(WorkerLostError):
        await _drain(bench.d.generate(request))


async def test_state_shows_engine_and_boxes(bench: Bench) -> None:
    request = bench.cluster.request(1000, 5)
    idle = bench.p.state()
    assert idle.epoch == bench.p.address.epoch
    assert idle.free_kv_tokens == idle.total_kv_tokens > 0
    assert idle.outbox_free_bytes == idle.outbox_total_bytes > 0
    transfer = bench.transfer(request)
    await bench.p.prefill(request, transfer)
    deadline_s = time.monotonic() + 60
    while bench.p.state().outbox_free_bytes == idle.outbox_free_bytes and time.monotonic() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert bench.p.state().outbox_free_bytes < idle.outbox_free_bytes
    await bench.p.release(transfer)


async def _drain(chunks: Any) -> list[Chunk]:
    async with aclosing(chunks) as stream:
        return [c async for c in stream]


# ---- only over gRPC


@pytest.fixture
async def remote() -> AsyncIterator[tuple[Cluster, RemoteWorker]]:
    async with cluster(mode="colocated", prefill=1, decode=1, speed=50) as c:
        yield c, c.pool.members["colocated-0"].worker


async def test_a_prompt_travels_to_its_decode_worker_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with the fetch, and the worker keeps it for the start; a release makes it forget."""
    async with cluster(speed=200) as c:
        p, d = (c.pool.members[name].worker for name in ("prefill-0", "decode-0"))
        kept = c.workers["decode-0"]._servicer._attachments[c.pool.gateway_id]._fetched
        sent: list[pb.Command] = []
        send = d._send
        monkeypatch.setattr(d, "_send", lambda command: (sent.append(command), send(command)))
        await c.ask_right(c.request(500, 5))
        asked = [command.fetch.HasField("request") for command in sent if command.HasField("fetch")]
        starts = [command.start for command in sent if command.HasField("start")]
        assert asked == [True]
        assert [bool(start.fetched) for start in starts] == [True]
        assert not starts[0].HasField("request")
        request = c.request(50, 5)
        transfer = Transfer(new_id(), 0, p.address, 50, hash_tokens(request.prompt_token_ids))
        prefilled = await p.prefill(request, transfer)
        await d.fetch(transfer, request)
        assert list(kept) == [transfer.transfer_id]
        await asyncio.gather(d.release(transfer), p.release(transfer))
        assert not kept
        forgotten = pb.Command(start=pb.StartCommand(fetched=transfer.transfer_id))
        worker_rpc_messages.prefilled_to_wire(prefilled, forgotten.start.prefilled)
        for chunks in (d.decode(request, prefilled, transfer), d._start(forgotten, request)):
            with pytest.raises(TransferFencedError, match="released"):
                await _drain(chunks)
        await c.settle()
        c.assert_empty()


async def test_one_message_per_step_for_all_requests(remote: tuple[Cluster, RemoteWorker]) -> None:
    """24 requests decode together: the gateway gets about one frame per step of the engine, not one per token."""
    c, worker = remote
    frames = 0
    take = worker._take_frame

    def counted(frame: pb.StepFrame) -> None:
        nonlocal frames
        frames += bool(frame.requests)
        take(frame)

    worker._take_frame = counted  # type: ignore[method-assign]
    answers = await asyncio.gather(*(_drain(worker.generate(c.request(20, 60))) for _ in range(24)))
    assert all(sum(len(chunk.tokens) for chunk in a) == 60 for a in answers)
    assert frames <= 1.3 * c.engine("colocated-0").num_steps


async def test_a_stream_without_a_gateway_and_an_unknown_command_are_refused(remote: tuple[Cluster, RemoteWorker]) -> None:
    _, worker = remote
    async with grpc.aio.insecure_channel(worker.target) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        nameless = stub.Attach()
        await nameless.write(pb.GatewayFrame())
        with pytest.raises(grpc.aio.AioRpcError, match="gateway_id"):
            await nameless.read()
        stream = stub.Attach()
        await stream.write(pb.GatewayFrame(gateway_id="stranger", commands=[pb.Command(key=7)]))
        await stream.write(pb.GatewayFrame(commands=[pb.Command(key=8), pb.Command(cancel=99)]))
        async with asyncio.timeout(60):
            while not (frame := await stream.read()).replies:
                pass
        assert [r.key for r in frame.replies] == [8]
        assert isinstance(from_wire(frame.replies[0].error), EngineError)
        stream.cancel()
    assert not worker.is_lost


async def test_a_cancel_right_behind_its_start_frees_everything(remote: tuple[Cluster, RemoteWorker]) -> None:
    c, worker = remote
    for _ in range(3):
        chunks = worker.generate(c.request(20, 4000))
        await chunks.aclose()
    await c.settle()
    c.assert_empty()


async def test_a_lost_connection_fails_all_that_is_pending_at_once(remote: tuple[Cluster, RemoteWorker]) -> None:
    c, worker = remote
    slow = [asyncio.create_task(_drain(worker.generate(c.request(20, 4000)))) for _ in range(5)]
    await asyncio.sleep(0.1)
    changed = c.pool.changes.next()
    await c.kill("colocated-0")
    results = await asyncio.gather(*slow, return_exceptions=True)
    assert all(isinstance(r, WorkerLostError) and r.worker == "colocated-0" for r in results)
    assert changed.is_set()
    with pytest.raises(WorkerLostError):
        await worker.release(Transfer("t", 0, worker.address, 1, ""))
    worker.assert_empty()


async def test_a_gateway_that_goes_away_leaves_nothing_running(remote: tuple[Cluster, RemoteWorker]) -> None:
    c, worker = remote
    other = await RemoteWorker.connect("colocated-0", worker.target, "other-gateway", 3.0, Signal())
    chunks = other.generate(c.request(20, 4000))
    await anext(chunks)
    await other.close()
    with pytest.raises(WorkerLostError):
        await _drain(chunks)
    await c.settle()
    c.assert_empty()
    assert len((await c.ask_right(c.request(20, 5))).tokens) == 5


async def test_a_gateway_that_does_not_read_is_cut_off(remote: tuple[Cluster, RemoteWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream ends and its requests with it; another gateway's go on."""
    c, worker = remote
    monkeypatch.setattr(worker_rpc_attachment, "MAX_PENDING_TOKENS", 6000)
    c.engine("colocated-0").settings.__dict__["speed"] = 0  # as many tokens as the machine can
    server = c.workers["colocated-0"]
    async with grpc.aio.insecure_channel(worker.target, options=[("grpc.http2.bdp_probe", 0)]) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        stream = stub.Attach()
        await stream.write(pb.GatewayFrame(gateway_id="sleeper"))
        await stream.read()
        attachment = server._servicer._attachments["sleeper"]
        commands = [pb.Command(key=key) for key in range(1, 33)]
        for command in commands:
            worker_rpc_messages.request_to_wire(c.request(5, 8000), command.start.request)
        await stream.write(pb.GatewayFrame(commands=commands))
        async with asyncio.timeout(60):
            while not attachment.has_ended:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await c.ask_right(c.request(20, 5))
            with pytest.raises(grpc.aio.AioRpcError, match="unread"):
                await _read_all(stream)


async def _read_all(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_deadline_ends_a_stream(remote: tuple[Cluster, RemoteWorker]) -> None:
    c, worker = remote
    with pytest.raises(DeadlineError):
        await _drain(worker.generate(c.request(20, 4000, deadline_s=time.monotonic() + 0.2)))
    await c.settle()
    c.assert_empty()


async def test_nobody_there_is_a_typed_error() -> None:
    with pytest.raises(WorkerLostError, match="cannot be reached"):
        await RemoteWorker.connect("w", "127.0.0.1:1", "gateway", 2.0, Signal())

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(WorkerLostError, match="cannot be reached"):
            await RemoteWorker.connect("w", f"127.0.0.1:{port}", "gateway", 0.5, Signal())


def test_messages_keep_everything() -> None:
    sampling = Sampling(7, 2, 0.5, 0.9, 40, 0.1, -5, 0.1, -0.2, 1.1, (), (4, 5), True, 0)
    request = Request("id", (1, 2, 3), sampling, "chat", -3, 5.0, 9.0, (4,))
    message, reply = pb.RequestMessage(), pb.PrefillReply()
    worker_rpc_messages.request_to_wire(request, message)
    back = worker_rpc_messages.request_from_wire(message)
    assert replace(back, arrival_s=5.0, deadline_s=9.0) == request
    chunk = Chunk((Token(5, -0.5, (TopLogprob(5, -0.5), TopLogprob(6, -1.5))), Token(6, 0.0)), FinishReason.STOP)
    step = pb.RequestStep()
    worker_rpc_messages.add_chunk(step, chunk)
    assert worker_rpc_messages.chunk_from_wire(step) == chunk
    prefilled = Prefilled(Token(5, -0.5), FinishReason.LENGTH, 17)
    worker_rpc_messages.prefilled_to_wire(prefilled, reply)
    assert worker_rpc_messages.prefilled_from_wire(reply) == prefilled
    state = EngineState("e", *range(1, 6), 0.5, *range(7, 12))
    assert worker_rpc_messages.state_from_wire(worker_rpc_messages.state_to_wire(state), "e") == state
