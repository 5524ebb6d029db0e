"""A worker at the other end of gRPC: `RemoteWorker` implements the protocol `Worker`.

One stream per worker carries all: commands there, and back their replies, the tokens of all requests, the worker's state and heartbeats.
A call of its own for each command would cost more than all else that is done for a request. The worker counts as lost as soon as the
connection breaks, the stream ends, or nothing came for `timeout_s`; then everything pending raises WorkerLostError at once, and the
object stays lost: a worker that comes back is a new RemoteWorker with a new epoch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, Self

import grpc
import grpc.aio

from disagg.errors import DeadlineError, DisaggError, EngineError, WorkerLostError, from_wire
from disagg.kv.frames import unpack_layout
from disagg.kv.layout import KvLayout
from disagg.pb import worker_pb2 as pb
from disagg.pb import worker_pb2_grpc
from disagg.serving import worker_rpc_messages as wire
from disagg.serving.pace import URGENT_SHARE, Pace
from disagg.serving.signal import Signal
from disagg.serving.worker_rpc_channel import CHANNEL_OPTIONS, ERROR_KEY
from disagg.serving.worker_rpc_chunks import RemoteChunks
from disagg.types import EngineState, KvAddress, Prefilled, Request, Transfer

log = logging.getLogger(__name__)

KEPT_REPORTS = 64  # that nobody has asked for
CONTROL_TIMEOUT_S = 10.0  # a release is answered at once by a healthy worker


class RemoteWorker:
    """Made by `connect`, ended by `close`. Not live any more once `is_lost`.

    The request's `deadline_s` is kept here: calls raise DeadlineError when it passes.
    """

    def __init__(self, name: str, target: str, gateway_id: str, timeout_s: float, changes: Signal) -> None:
        self.name = name
        self.target = target
        self._gateway_id = gateway_id
        self._timeout_s = timeout_s
        self._changes = changes
        self._attach: Any = None  # the stream's call
        self._writer: asyncio.Task[None] | None = None
        self._outgoing = pb.GatewayFrame()  # commands that wait for the writer
        self._has_outgoing = asyncio.Event()
        self._is_urgent = asyncio.Event()  # a client waits for what one of them brings
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        self._lost = asyncio.Event()
        self._lost_reason = ""
        self._state = EngineState(epoch="")
        self._reports: deque[EngineState] = deque(maxlen=KEPT_REPORTS)
        self._address = KvAddress(name, "", "", ())
        self.layout: KvLayout | None = None  # of the engine's cache; None when the hello did not say
        self._streams: dict[int, RemoteChunks] = {}
        self._replies: dict[int, asyncio.Future[pb.Reply]] = {}
        self._fetched: dict[str, Request] = {}  # by transfer: what the worker was told of it, and keeps for its start
        self._tasks: set[asyncio.Task[None]] = set()
        self._keys = itertools.count()
        self._heard_s = self._worked_s = time.monotonic()

    @classmethod
    async def connect(cls, name: str, target: str, gateway_id: str, timeout_s: float, changes: Signal) -> Self:
        """Attach to the worker at `target`; returns when its hello came. Raises WorkerLostError after `timeout_s`.

        `changes` fires whenever the worker's state changes or it is lost.
        """
        self = cls(name, target, gateway_id, timeout_s, changes)
        attach = self._stub.Attach()
        try:
            async with asyncio.timeout(timeout_s):
                await attach.write(pb.GatewayFrame(gateway_id=gateway_id))
                frame = await attach.read()
            if frame is grpc.aio.EOF or not frame.HasField("hello"):
                raise WorkerLostError(f"worker {name} at {target} did not say hello", worker=name)
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            attach.cancel()
            await self._channel.close()
            cause = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error) or f"no hello within {timeout_s:g} s"
            raise WorkerLostError(f"worker {name} at {target} cannot be reached: {cause}", worker=name) from error
        except BaseException:
            attach.cancel()
            await self._channel.close()
            raise
        self._welcome(frame)
        self._attach = attach
        self._spawn(self._read(attach))
        self._writer = self._spawn(self._write(attach))
        self._check_silence()
        return self

    def _welcome(self, frame: pb.StepFrame) -> None:
        hello = frame.hello
        self.layout = unpack_layout(hello.kv_layout) if hello.kv_layout else None
        self._address = KvAddress(self.name, hello.epoch, hello.host_id, tuple(sorted(hello.endpoints.items())))
        self._state = wire.state_from_wire(frame.state, hello.epoch)
        self._heard_s = time.monotonic()

    # ---- the protocol Worker

    @property
    def address(self) -> KvAddress:
        return self._address

    @property
    def epoch(self) -> str:
        """Names this life of the worker's process."""
        return self._address.epoch

    def state(self) -> EngineState:
        return self._state

    @property
    def worked_s(self) -> float:
        """Instant of the latest sign that its engine works: tokens, or a step that it reports, such as a chunk of a long prompt."""
        return self._worked_s

    def take_reports(self) -> list[EngineState]:
        """The states that came since the last call, oldest first; of too many only the latest."""
        if not self._reports:  # so it is nearly always: a gateway asks all its workers for each request
            return []
        reports = list(self._reports)
        self._reports.clear()
        return reports

    async def prefill(self, request: Request, transfer: Transfer) -> Prefilled:
        command = pb.Command()
        wire.request_to_wire(request, command.prefill.request)
        wire.transfer_to_wire(transfer, command.prefill.transfer)
        reply = await self._call(command, _remaining_s(request))
        return wire.prefilled_from_wire(reply.prefilled)

    async def fetch(self, transfer: Transfer, request: Request | None = None) -> None:
        command = pb.Command()
        wire.transfer_to_wire(transfer, command.fetch.transfer)
        if request is not None:
            wire.request_to_wire(request, command.fetch.request)
            self._fetched[transfer.transfer_id] = request
        try:
            await self._call(command, None)
        except BaseException:
            self._fetched.pop(transfer.transfer_id, None)
            raise

    async def release(self, transfer: Transfer) -> None:
        self._fetched.pop(transfer.transfer_id, None)
        command = pb.Command()
        wire.transfer_to_wire(transfer, command.release)
        try:
            await self._call(command, CONTROL_TIMEOUT_S)
        except DeadlineError as error:  # this gateway's heartbeats would keep the entry for ever
            self.lose(f"it does not answer a release: {error.message}")
            raise self._lost_error() from error

    def decode(self, request: Request, prefilled: Prefilled, transfer: Transfer) -> RemoteChunks:
        """Starts at the call, not at the first iteration: the worker decodes while the caller hands the first token on."""
        command = pb.Command()
        wire.prefilled_to_wire(prefilled, command.start.prefilled)
        if self._fetched.pop(transfer.transfer_id, None) is request:  # a long prompt travels once
            command.start.fetched = transfer.transfer_id
        else:
            wire.request_to_wire(request, command.start.request)
            wire.transfer_to_wire(transfer, command.start.transfer)
        return self._start(command, request)

    def generate(self, request: Request) -> RemoteChunks:
        """Starts at the call."""
        command = pb.Command()
        wire.request_to_wire(request, command.start.request)
        return self._start(command, request)

    # ---- life

    @property
    def is_lost(self) -> bool:
        return self._lost.is_set()

    async def wait_lost(self) -> None:
        """Returns when the worker is lost or was closed."""
        await self._lost.wait()

    async def close(self) -> None:
        """Let go of the worker; what is pending raises WorkerLostError. Idempotent."""
        self.lose("the gateway let it go", logging.INFO)
        tasks = {t for t in self._tasks if t is not asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CONTROL_TIMEOUT_S)
        await self._channel.close()

    def lose(self, reason: str, level: int = logging.WARNING) -> None:
        """Count the worker as lost from now on. Idempotent."""
        if self.is_lost:
            return
        self._lost_reason = reason
        self._lost.set()
        log.log(level, "worker %s (epoch %.8s) lost: %s", self.name, self.epoch, reason)
        for stream in list(self._streams.values()):
            stream.fail(self._lost_error())
        self._streams.clear()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(self._lost_error())
        if self._attach is not None and self._writer is not None:
            self._writer.cancel()
            self._attach.cancel()
        self._changes.fire()

    def assert_empty(self) -> None:
        """Nothing of ours is left running on the worker, as far as this side knows."""
        assert not self._streams, f"{self.name}: streams {list(self._streams)} are open"
        assert not self._replies, f"{self.name}: {len(self._replies)} calls are pending"
        assert not self._fetched, f"{self.name}: fetched and neither started nor released: {list(self._fetched)}"

    # ---- machinery

    def _start(self, command: pb.Command, request: Request) -> RemoteChunks:
        key = command.key = next(self._keys)
        chunks = RemoteChunks(lambda: self._abandon(key), _remaining_s(request))
        if self.is_lost:
            chunks.fail(self._lost_error())
            return chunks
        self._streams[key] = chunks
        self._send(command)
        return chunks

    def _abandon(self, key: int) -> None:
        """The reader of a stream left before its end: the worker must stop it."""
        if self._streams.pop(key, None) is not None and not self.is_lost:
            self._send(pb.Command(cancel=key))

    async def _call(self, command: pb.Command, timeout_s: float | None) -> pb.Reply:
        """A command and its reply. Raises the worker's typed error, WorkerLostError, or DeadlineError."""
        if self.is_lost:
            raise self._lost_error()
        if timeout_s is not None and timeout_s <= 0:
            raise DeadlineError("the request's deadline passed")
        key = command.key = next(self._keys)
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[pb.Reply] = loop.create_future()
        timer = loop.call_later(timeout_s, _expire, reply, self.name) if timeout_s is not None else None
        self._replies[key] = reply
        self._send(command)
        try:
            found = await reply
        except (asyncio.CancelledError, DeadlineError):
            self._send(pb.Command(cancel=key))
            raise
        finally:
            del self._replies[key]
            if timer is not None:
                timer.cancel()
        if found.error:
            raise self._lose_by(from_wire(found.error))
        return found

    def _send(self, command: pb.Command) -> None:
        """Hand it to the writer: what comes in one burst of the event loop travels in one message, in order."""
        self._outgoing.commands.append(command)
        self._has_outgoing.set()
        if command.HasField("prefill") or (command.HasField("start") and not command.start.HasField("prefilled")):
            self._is_urgent.set()

    async def _write(self, attach: Any) -> None:
        pace = Pace()
        try:
            while True:
                await self._has_outgoing.wait()
                self._has_outgoing.clear()
                self._is_urgent.clear()
                frame, self._outgoing = self._outgoing, pb.GatewayFrame()
                began_s = time.monotonic()
                await attach.write(frame)
                if rest_s := pace.wrote(time.monotonic() - began_s):
                    await self._rest(rest_s)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.debug("worker %s takes no more commands: %r", self.name, error)  # the reader says why it is lost

    async def _rest(self, rest_s: float) -> None:
        """Under pressure (pace.py) commands travel together; those for whose token a client waits go after a part of the rest."""
        await asyncio.sleep(URGENT_SHARE * rest_s)
        timer = asyncio.get_running_loop().call_later((1.0 - URGENT_SHARE) * rest_s, self._is_urgent.set)
        try:
            await self._is_urgent.wait()
        finally:
            timer.cancel()

    async def _read(self, attach: Any) -> None:
        try:
            while isinstance(frame := await attach.read(), pb.StepFrame):
                self._heard_s = time.monotonic()
                self._take_frame(frame)
            self.lose("its stream ended")
        except grpc.aio.AioRpcError as error:
            self.lose(f"its stream broke: {_error_of(error, self.name).message}")
        except asyncio.CancelledError:
            if not self.is_lost:
                raise  # else it was `lose` that cancelled the stream
        finally:
            await self._channel.close()

    def _take_frame(self, frame: pb.StepFrame) -> None:
        """The hot path: once per engine step."""
        for reply in frame.replies:
            waiting = self._replies.get(reply.key)
            if waiting is not None and not waiting.done():  # else its caller has left
                waiting.set_result(reply)
        streams = self._streams
        for step in frame.requests:
            chunks = streams.get(step.key)
            if chunks is None:
                continue  # abandoned meanwhile
            if step.finish or step.error:
                del streams[step.key]
            if step.token_ids or step.tokens or step.finish:
                chunks.feed(wire.chunk_from_wire(step))
            if step.error:
                chunks.fail(self._lose_by(from_wire(step.error)))
        if frame.requests or frame.state.steps:
            self._worked_s = self._heard_s
        if frame.HasField("state"):
            self._state = wire.state_from_wire(frame.state, self.epoch)
            self._reports.append(self._state)
            self._changes.fire()

    def _check_silence(self, due_s: float | None = None) -> None:
        """Lost when nothing came for `timeout_s`. One lazy timer, not one per frame.

        A check that itself comes late says that this process stood still: what came meanwhile is unread, so the worker gets more time.
        """
        if self.is_lost:
            return
        now_s = time.monotonic()
        left_s = self._heard_s + self._timeout_s - now_s
        if due_s is not None and now_s - due_s > self._timeout_s / 4:
            left_s = max(left_s, self._timeout_s / 2)
        if left_s <= 0:
            self.lose(f"silent for {now_s - self._heard_s:.1f} s")
            return
        asyncio.get_running_loop().call_later(left_s, self._check_silence, now_s + left_s)

    def _lose_by(self, error: DisaggError) -> DisaggError:
        """A worker that says of itself that it is lost gets no second chance, or a retry would run into it again. Returns `error`."""
        if isinstance(error, WorkerLostError) and error.worker == self.name:
            self.lose(error.message)
        return error

    def _lost_error(self) -> WorkerLostError:
        return WorkerLostError(f"worker {self.name} was lost: {self._lost_reason}", worker=self.name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _expire(reply: asyncio.Future[pb.Reply], worker: str) -> None:
    if not reply.done():
        reply.set_exception(DeadlineError(f"worker {worker} did not answer before the deadline"))


def _remaining_s(request: Request) -> float | None:
    return None if request.deadline_s is None else request.deadline_s - time.monotonic()


def _error_of(error: grpc.aio.AioRpcError, worker: str) -> DisaggError:
    """The typed error of a failed call: the worker's own when it sent one, else by the status code."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_KEY:
            return from_wire(value if isinstance(value, bytes) else value.encode())
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"worker {worker} did not answer before the deadline")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):  # a server that stops cancels its calls
        return WorkerLostError(f"worker {worker} was lost: {details}", worker=worker)
    return EngineError(f"worker {worker} failed: {code.name.lower()}: {details}")
