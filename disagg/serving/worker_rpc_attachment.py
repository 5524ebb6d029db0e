"""One gateway's stream at a worker: its commands performed, and replies and steps of all its requests gathered into frames."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import AbstractContextManager, aclosing
from typing import Any

from disagg.errors import DisaggError, EngineError, RejectedError, TransferFencedError, WorkerLostError, to_wire
from disagg.kv.frames import pack_layout
from disagg.pb import worker_pb2 as pb
from disagg.serving import worker_rpc_messages as wire
from disagg.serving.pace import URGENT_SHARE, Pace
from disagg.serving.spans import WorkerSpans
from disagg.serving.worker import LocalWorker
from disagg.types import Chunk, Request, Transfer

log = logging.getLogger(__name__)

MAX_PENDING_TOKENS = 1 << 18  # of a gateway that does not read; then its requests and its stream end, instead of this worker's memory
STATE_INTERVAL_S = 0.1  # how old the worker's state may get at a gateway while tokens flow
STATE_LEAST_S = 0.01  # between two states, however much happens
STATE_PRESSED_S = 0.05  # the same under pressure: a state costs both ends as much as a token's way does


class Attachment:
    """Commands of one gateway, each performed by one task, and the frame that is being gathered.

    All requests that get a token in one step of the engine wake in one burst of the event loop; the sender, woken by the first of
    them, runs after the burst and so takes all of it. Under pressure (pace.py) a frame waits a little, less if a client's first token is in
    it, and so do the readers of the requests that have a token in it, also while the frame before it is being written: the engine keeps
    what comes meanwhile, and they wake once for all of it.
    """

    def __init__(self, gateway_id: str, worker: LocalWorker, heartbeat_s: float, spans: WorkerSpans) -> None:
        self.gateway_id = gateway_id
        self._worker = worker
        self._spans = spans
        self._heartbeat_s = heartbeat_s
        self._frame = pb.StepFrame()
        self._steps: dict[int, pb.RequestStep] = {}  # of the frame that is being gathered
        self._num_pending = 0  # tokens in it
        self._is_urgent = False  # somebody waits for what is in it
        self._urgent_from_s = 0.0  # when such a frame may go
        self._pace = Pace()
        self._rest_s = 0.0  # after the last frame; above 0 under pressure
        self._rested = asyncio.Event()  # not set while the sender rests, and under pressure while it writes
        self._rested.set()
        self._rest: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._fetched: dict[str, tuple[Request, Transfer]] = {}  # by transfer, until it is started or released, or its fetch is cancelled
        self._ended: DisaggError | None = None
        self._state_due_s = 0.0
        self._state_sent_s = 0.0
        self._is_poked = False
        self._last_step = -1  # number of the latest engine step that this gateway was told of
        self._last_change = -1  # and of the latest change of the prefix cache

    def perform(self, command: pb.Command) -> None:
        """Begin what the gateway wants. Never raises: what goes wrong is told under the command's key."""
        key = command.key
        if command.HasField("cancel"):
            task = self._tasks.get(command.cancel)
            if task is not None:  # else it has ended
                task.cancel()
        elif command.HasField("start"):
            self._run(key, self._start(key, command.start))
        else:
            self._run(key, self._call(key, command))

    @property
    def has_ended(self) -> bool:
        """It takes no new requests."""
        return self._ended is not None

    def end(self, error: DisaggError) -> None:
        """Let the stream end with `error` after what is pending."""
        self._ended = error
        self._wake.set()

    async def close(self) -> None:
        """Cancel all its requests; returns when what they held is free."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def hello(self) -> pb.StepFrame:
        """The stream's first frame."""
        address = self._worker.address
        hello = pb.Hello(
            worker=address.worker,
            epoch=address.epoch,
            host_id=address.host_id,
            endpoints=dict(address.endpoints),
            heartbeat_s=self._heartbeat_s,
            kv_layout=pack_layout(self._worker.layout),
        )
        return pb.StepFrame(hello=hello, state=self._state())

    def wrote(self, write_s: float) -> None:
        """The last frame took so long to write."""
        self._rest_s = self._pace.wrote(write_s)
        self._urgent_from_s = time.monotonic() + URGENT_SHARE * self._rest_s
        self._begin_rest()

    def _begin_rest(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        if self._rest_s:
            self._rested.clear()
            self._rest = asyncio.get_running_loop().call_later(self._rest_s, self._end_rest)
        else:
            self._rested.set()

    def _end_rest(self) -> None:
        """The readers first, so that the frame has what they find."""
        self._rest = None
        self._rested.set()
        asyncio.get_running_loop().call_soon(self._wake.set)

    async def next_frame(self) -> pb.StepFrame:
        """What came since the last frame, or after `heartbeat_s` without anything just the state. Raises what `end` was given."""
        beat_due_s = time.monotonic() + self._heartbeat_s
        while (wait_s := self._due_in_s(beat_due_s)) > 0:
            self._wake.clear()
            timer = asyncio.get_running_loop().call_later(wait_s, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
        if self._ended is not None and not self._has_pending:
            raise self._ended
        frame = self._frame
        now_s = time.monotonic()
        if not self._has_pending or now_s >= self._state_due_s:
            self._state_sent_s, self._state_due_s = now_s, now_s + STATE_INTERVAL_S
            self._is_poked = False
            frame.state.CopyFrom(self._state())
            self._worker.renew(self.gateway_id)
        self._frame, self._steps, self._num_pending, self._is_urgent = pb.StepFrame(), {}, 0, False
        if self._rest_s:  # while this one is written; but no longer, so that a gateway that does not read is found out (_cut_off)
            self._begin_rest()
        return frame

    @property
    def _has_pending(self) -> bool:
        return bool(self._steps or self._frame.replies)

    def _due_in_s(self, beat_due_s: float) -> float:
        """How long the next frame has to wait, if nothing else happens."""
        if self._ended is not None:
            return 0.0
        due_s = beat_due_s
        if self._is_urgent:
            due_s = min(due_s, self._urgent_from_s)
        if self._is_poked:
            due_s = min(due_s, self._state_due_s)
        if self._has_pending and self._rested.is_set():
            return 0.0
        return due_s - time.monotonic()

    def _state(self) -> pb.State:
        """The worker's state, with the steps and the changes of the prefix cache since the last one."""
        state = self._worker.state()
        message = wire.state_to_wire(state, self._last_step, self._last_change)
        if state.cache_changes:
            self._last_change = state.cache_changes[-1].number
        if state.steps:
            self._last_step = state.steps[-1].number
        return message

    # ---- commands

    def _run(self, key: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._ended_task(key))  # a task cancelled before its first step has no `finally`

    def _ended_task(self, key: int) -> None:
        """Room may have come free: the gateway should hear of it soon."""
        del self._tasks[key]
        least_s = STATE_LEAST_S if self._rested.is_set() else STATE_PRESSED_S
        self._state_due_s = min(self._state_due_s, self._state_sent_s + least_s)
        self._is_poked = True
        self._wake.set()

    async def _call(self, key: int, command: pb.Command) -> None:
        """A command that is replied to."""
        reply = pb.Reply(key=key)
        try:
            self._check()
            match command.WhichOneof("what"):
                case "prefill":
                    request, transfer = wire.request_from_wire(command.prefill.request), wire.transfer_from_wire(command.prefill.transfer)
                    with self._span("prefill", request, transfer):
                        prefilled = await self._worker.prefill(request, transfer, self.gateway_id)
                    wire.prefilled_to_wire(prefilled, reply.prefilled)
                case "fetch":
                    await self._fetch(command.fetch)
                case "release":
                    transfer = wire.transfer_from_wire(command.release)
                    self._fetched.pop(transfer.transfer_id, None)
                    await self._worker.release(transfer)
                case other:
                    raise EngineError(f"worker {self._worker.name} knows no command {other!r}")
        except DisaggError as error:
            reply.error = to_wire(error)
        except Exception as error:
            log.exception("command %d of gateway %.8s failed", key, self.gateway_id)
            reply.error = to_wire(self._fault(error))
        if self._ended is None:
            self._frame.replies.append(reply)
            self._is_urgent |= command.HasField("prefill")  # a client waits for it
            self._wake.set()

    async def _fetch(self, asked: pb.FetchCommand) -> None:
        """A request that comes with it is kept for its start, also when the pull fails: the start then says so, in the pull's words."""
        transfer = wire.transfer_from_wire(asked.transfer)
        known = None
        if asked.HasField("request"):
            known = wire.request_from_wire(asked.request)
            self._fetched[transfer.transfer_id] = (known, transfer)
        try:
            with self._spans.span("disagg.worker.fetch", transfer, transfer_id=transfer.transfer_id):
                await self._worker.fetch(transfer, known, self.gateway_id)
        except asyncio.CancelledError:
            self._fetched.pop(transfer.transfer_id, None)
            raise

    async def _start(self, key: int, command: pb.StartCommand) -> None:
        """One request's tokens from start to end. Never raises: its end is a step."""
        try:
            self._check()
            is_first = True
            if command.HasField("prefilled"):
                is_first = False  # that token was the prefill's
                request, transfer = self._request_of(command)
                span = self._span("decode", request, transfer)
                chunks = self._worker.decode(request, wire.prefilled_from_wire(command.prefilled), transfer, self.gateway_id)
            else:
                request = wire.request_from_wire(command.request)
                span, chunks = self._span("generate", request), self._worker.generate(request)
            with span:
                async with aclosing(chunks) as stream:
                    async for chunk in stream:
                        self._add(key, chunk, is_urgent=is_first)
                        is_first = False
                        if chunk.finish is None:
                            await self._rested.wait()
        except DisaggError as error:
            self._fail(key, error)
        except Exception as error:
            log.exception("request %d of gateway %.8s failed", key, self.gateway_id)
            self._fail(key, self._fault(error))

    def _request_of(self, command: pb.StartCommand) -> tuple[Request, Transfer]:
        """Which request is to be continued, with which KV. Raises TransferFencedError when no fetch has brought it, or it was released."""
        if not command.fetched:
            transfer = wire.transfer_from_wire(command.transfer)
            self._fetched.pop(transfer.transfer_id, None)  # its fetch failed, so that the gateway sent all again
            return wire.request_from_wire(command.request), transfer
        found = self._fetched.pop(command.fetched, None)
        if found is None:
            raise TransferFencedError(f"transfer {command.fetched} was released, or never fetched")
        return found

    def _span(self, what: str, request: Request, transfer: Transfer | None = None) -> AbstractContextManager[None]:
        named: dict[str, str | int] = {"request_id": request.request_id, "context_tokens": request.num_context_tokens}
        if transfer is not None:
            named["transfer_id"] = transfer.transfer_id
        return self._spans.span(f"disagg.worker.{what}", request, **named)

    def _check(self) -> None:
        if not self._worker.is_alive:
            raise WorkerLostError(f"worker {self._worker.name} lost its engine", worker=self._worker.name)

    def _fault(self, error: Exception) -> EngineError:
        return EngineError(f"worker {self._worker.name} failed: {error!r}")

    # ---- the frame

    def _add(self, key: int, chunk: Chunk, *, is_urgent: bool) -> None:
        if self._ended is not None:
            return
        wire.add_chunk(self._step(key), chunk)
        if is_urgent:
            self._is_urgent = True
            self._wake.set()
        self._num_pending += len(chunk.tokens) or 1
        if self._num_pending > MAX_PENDING_TOKENS:
            self._cut_off()

    def _fail(self, key: int, error: DisaggError) -> None:
        if self._ended is None:
            self._step(key).error = to_wire(error)
            self._is_urgent = True
            self._wake.set()

    def _step(self, key: int) -> pb.RequestStep:
        """The request's share of the frame that is being gathered."""
        step = self._steps.get(key)
        if step is None:
            if not self._has_pending:
                self._wake.set()
            step = self._steps[key] = self._frame.requests.add()
            step.key = key
        return step

    def _cut_off(self) -> None:
        log.warning("gateway %.8s left %d tokens unread: its stream ends", self.gateway_id, self._num_pending)
        self._frame, self._steps, self._num_pending = pb.StepFrame(), {}, 0
        self.end(RejectedError(f"the gateway left {MAX_PENDING_TOKENS} tokens unread", retry_after_s=1.0))
        for task in self._tasks.values():
            task.cancel()
