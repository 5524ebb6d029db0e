"""A worker at the other end of gRPC: `RemoteWorker` implements the protocol `Worker`.

One Attach stream per worker brings the tokens of all requests, the worker's state and its heartbeats. The worker counts as lost as soon
as the connection breaks, the stream ends, or nothing came for `timeout_s`; then everything pending raises WorkerLostError at once,
and the object stays lost: a worker that comes back is a new RemoteWorker with a new epoch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, Protocol, Self, TypeVar

import grpc
import grpc.aio

from disagg.errors import DeadlineError, DisaggError, EngineError, WorkerLostError, from_wire
from disagg.pb import worker_pb2 as pb
from disagg.pb import worker_pb2_grpc
from disagg.serving import worker_rpc_messages as wire
from disagg.serving.signal import Signal
from disagg.serving.worker_rpc_channel import CHANNEL_OPTIONS, ERROR_KEY
from disagg.serving.worker_rpc_chunks import RemoteChunks
from disagg.types import EngineState, KvAddress, Prefilled, Request, Transfer

log = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT", covariant=True)

KEPT_REPORTS = 64  # that nobody has asked for
CONTROL_TIMEOUT_S = 10.0  # a start, cancel or release is answered at once by a healthy worker


class _Call(Protocol[ReplyT]):
    """A gRPC call under way: awaitable, cancellable."""

    def __await__(self) -> Any: ...

    def cancel(self) -> bool: ...


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
        self._attach: _Call[Any] | None = None
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        self._lost = asyncio.Event()
        self._lost_reason = ""
        self._state = EngineState(epoch="")
        self._reports: deque[EngineState] = deque(maxlen=KEPT_REPORTS)
        self._address = KvAddress(name, "", "", ())
        self._streams: dict[str, RemoteChunks] = {}
        self._calls: set[_Call[Any]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._keys = itertools.count()
        self._heard_s = time.monotonic()

    @classmethod
    async def connect(cls, name: str, target: str, gateway_id: str, timeout_s: float, changes: Signal) -> Self:
        """Attach to the worker at `target`; returns when its hello came. Raises WorkerLostError after `timeout_s`.

        `changes` fires whenever the worker's state changes or it is lost.
        """
        self = cls(name, target, gateway_id, timeout_s, changes)
        attach = self._stub.Attach(pb.AttachRequest(gateway_id=gateway_id))
        try:
            async with asyncio.timeout(timeout_s):
                frame = await attach.read()
            if frame is grpc.aio.EOF or not frame.HasField("hello"):
                raise WorkerLostError(f"worker {name} at {target} did not say hello", worker=name)
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            attach.cancel()
            await self._channel.close()
            cause = f"no hello within {timeout_s:g} s" if isinstance(error, TimeoutError) else error.details()
            raise WorkerLostError(f"worker {name} at {target} cannot be reached: {cause}", worker=name) from error
        except BaseException:
            attach.cancel()
            await self._channel.close()
            raise
        self._welcome(frame)
        self._attach = attach
        self._spawn(self._read(attach))
        self._check_silence()
        return self

    def _welcome(self, frame: pb.StepFrame) -> None:
        hello = frame.hello
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

    def take_reports(self) -> list[EngineState]:
        """The states that came since the last call, oldest first; of too many only the latest."""
        reports = list(self._reports)
        self._reports.clear()
        return reports

    async def prefill(self, request: Request, transfer: Transfer) -> Prefilled:
        call = pb.PrefillCall(
            gateway_id=self._gateway_id, request=wire.request_to_wire(request), transfer=wire.transfer_to_wire(transfer), epoch=self.epoch
        )
        reply = await self._unary(self._stub.Prefill, call, _remaining_s(request))
        return wire.prefilled_from_wire(reply)

    async def fetch(self, transfer: Transfer) -> None:
        call = pb.FetchCall(gateway_id=self._gateway_id, transfer=wire.transfer_to_wire(transfer), epoch=self.epoch)
        await self._unary(self._stub.Fetch, call, None)

    async def release(self, transfer: Transfer) -> None:
        call = pb.ReleaseCall(gateway_id=self._gateway_id, transfer=wire.transfer_to_wire(transfer))
        try:
            await self._unary(self._stub.Release, call, CONTROL_TIMEOUT_S)
        except DeadlineError as error:  # this gateway's heartbeats would keep the entry for ever
            self.lose(f"it does not answer a release: {error.message}")
            raise self._lost_error() from error

    def decode(self, request: Request, prefilled: Prefilled, transfer: Transfer) -> RemoteChunks:
        """Starts at the call, not at the first iteration: the worker decodes while the caller hands the first token on."""
        call = pb.StartCall(
            gateway_id=self._gateway_id,
            request=wire.request_to_wire(request),
            transfer=wire.transfer_to_wire(transfer),
            prefilled=wire.prefilled_to_wire(prefilled),
            epoch=self.epoch,
        )
        return self._start(call, request)

    def generate(self, request: Request) -> RemoteChunks:
        """Starts at the call."""
        call = pb.StartCall(gateway_id=self._gateway_id, request=wire.request_to_wire(request), epoch=self.epoch)
        return self._start(call, request)

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
        for call in [*self._calls, self._attach]:
            if call is not None:
                call.cancel()
        self._changes.fire()

    def assert_empty(self) -> None:
        """Nothing of ours is left running on the worker, as far as this side knows."""
        assert not self._streams, f"{self.name}: streams {list(self._streams)} are open"
        assert not self._calls, f"{self.name}: {len(self._calls)} calls are pending"

    # ---- machinery

    def _start(self, call: pb.StartCall, request: Request) -> RemoteChunks:
        call.request_key = key = str(next(self._keys))
        chunks = RemoteChunks(lambda: self._abandon(key), _remaining_s(request))
        if self.is_lost:
            chunks.fail(self._lost_error())
            return chunks
        self._streams[key] = chunks
        chunks.started = self._spawn(self._send_start(call, chunks))
        return chunks

    async def _send_start(self, call: pb.StartCall, chunks: RemoteChunks) -> None:
        try:
            await self._unary(self._stub.Start, call, CONTROL_TIMEOUT_S)
        except DisaggError as error:
            self._streams.pop(call.request_key, None)
            chunks.fail(error)

    def _abandon(self, key: str) -> None:
        """The reader of a stream left before its end: the worker must stop it."""
        chunks = self._streams.pop(key, None)
        if chunks is not None and not self.is_lost:
            self._spawn(self._cancel(key, chunks))

    async def _cancel(self, key: str, chunks: RemoteChunks) -> None:
        """After the start was answered: a cancel that overtakes its start would be lost."""
        if chunks.started is not None:
            await asyncio.wait({chunks.started}, timeout=CONTROL_TIMEOUT_S)
        try:
            await self._unary(self._stub.Cancel, pb.CancelCall(gateway_id=self._gateway_id, request_key=key), CONTROL_TIMEOUT_S)
        except WorkerLostError:
            return  # with the worker its requests are gone
        except DisaggError as error:
            self.lose(f"it does not answer a cancel: {error.message}")

    async def _read(self, attach: grpc.aio.UnaryStreamCall[pb.AttachRequest, pb.StepFrame]) -> None:
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
        streams = self._streams
        for step in frame.requests:
            chunks = streams.get(step.request_key)
            if chunks is None:
                continue  # abandoned meanwhile
            if step.error:
                del streams[step.request_key]
                error = wire.error_from_wire(step)
                chunks.fail(error)
                self._lose_by(error)
                continue
            if step.finish:
                del streams[step.request_key]
            chunks.feed(wire.chunk_from_wire(step))
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

    async def _unary(self, method: Any, message: Any, timeout_s: float | None) -> Any:
        """One unary call. Raises the worker's typed error, WorkerLostError, or DeadlineError."""
        if self.is_lost:
            raise self._lost_error()
        if timeout_s is not None and timeout_s <= 0:
            raise DeadlineError("the request's deadline passed")
        call = method(message, timeout=timeout_s)
        self._calls.add(call)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            typed = _error_of(error, self.name)
            self._lose_by(typed)
            raise typed from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._lost.is_set() and not (task and task.cancelling()):
                raise self._lost_error() from None
            raise
        finally:
            self._calls.discard(call)

    def _lose_by(self, error: DisaggError) -> None:
        """A worker that says of itself that it is lost gets no second chance, or a retry would run into it again."""
        if isinstance(error, WorkerLostError) and error.worker == self.name:
            self.lose(error.message)

    def _lost_error(self) -> WorkerLostError:
        return WorkerLostError(f"worker {self.name} was lost: {self._lost_reason}", worker=self.name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


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
