"""A worker's door for gateways: the gRPC service of worker.proto around a LocalWorker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Self, TypeVar

import grpc
import grpc.aio

from disagg.errors import (
    CancelledRequestError,
    DeadlineError,
    DisaggError,
    EngineError,
    InvalidRequestError,
    PlacementError,
    RejectedError,
    UnavailableError,
    WorkerLostError,
    to_wire,
)
from disagg.pb import worker_pb2 as pb
from disagg.pb import worker_pb2_grpc
from disagg.serving import worker_rpc_messages as wire
from disagg.serving.worker import LocalWorker
from disagg.serving.worker_rpc_attachment import Attachment
from disagg.serving.worker_rpc_channel import ERROR_KEY, SERVER_OPTIONS, keepalive_options

log = logging.getLogger(__name__)

CallT = TypeVar("CallT")
ReplyT = TypeVar("ReplyT")

_STATUS: tuple[tuple[type[DisaggError], grpc.StatusCode], ...] = (
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (RejectedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (CancelledRequestError, grpc.StatusCode.CANCELLED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (DisaggError, grpc.StatusCode.INTERNAL),
)


class WorkerServer:
    """Serves `worker` at `target` ("host:port") until `close`, which also ends the worker."""

    def __init__(self, worker: LocalWorker, server: grpc.aio.Server, servicer: _Servicer, target: str) -> None:
        self.worker = worker
        self.target = target
        self._server = server
        self._servicer = servicer
        self._watch = asyncio.create_task(self._end_streams_when_dead())

    @classmethod
    async def start(cls, worker: LocalWorker, host: str, timeout_s: float) -> Self:
        """Listen on a free port of `host`. Heartbeats come four times in `timeout_s`. Raises PlacementError when it cannot listen."""
        server = grpc.aio.server(options=[*SERVER_OPTIONS, *keepalive_options(timeout_s)])
        servicer = _Servicer(worker, heartbeat_s=min(1.0, timeout_s / 4))
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        try:
            port = server.add_insecure_port(f"{host}:0")
        except RuntimeError as error:
            message = f"worker {worker.name} cannot listen on {host}: {error}"
            raise PlacementError(message, key="host", value=host, expected="an address of this host") from error
        await server.start()
        return cls(worker, server, servicer, f"{host}:{port}")

    @property
    def epoch(self) -> str:
        """Names this life of the worker's process."""
        return self.worker.epoch

    async def wait_dead(self) -> None:
        """Returns when the engine has died or is stuck: the process should be replaced."""
        await self.worker.wait_dead()

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop serving (calls under way get `grace_s`), then end the worker. Idempotent."""
        self._watch.cancel()
        await self._servicer.close(WorkerLostError(f"worker {self.worker.name} is closing", worker=self.worker.name))
        await self._server.stop(grace_s or None)  # 0 would race with itself: a wait of no time is a cancel
        await self.worker.close()

    async def _end_streams_when_dead(self) -> None:
        """Gateways learn of an engine's death from the end of their streams."""
        await self.worker.wait_dead()
        log.error("worker %s lost its engine", self.worker.name)
        await self._servicer.close(WorkerLostError(f"worker {self.worker.name} lost its engine", worker=self.worker.name))


class _Servicer(worker_pb2_grpc.WorkerServicer):
    """The calls. Each checks the epoch, runs on the LocalWorker, and turns typed errors into a status with the error beside it."""

    def __init__(self, worker: LocalWorker, heartbeat_s: float) -> None:
        self._worker = worker
        self._heartbeat_s = heartbeat_s
        self._attachments: dict[str, Attachment] = {}

    async def close(self, error: DisaggError) -> None:
        """End all streams with `error`, and their requests."""
        for attachment in list(self._attachments.values()):
            await attachment.close()
            attachment.end(error)

    async def Attach(self, request: pb.AttachRequest, context: Any) -> None:  # noqa: N802
        attachment = Attachment(request.gateway_id, self._worker, self._heartbeat_s)
        previous = self._attachments.get(request.gateway_id)
        self._attachments[request.gateway_id] = attachment
        log.info("gateway %.8s attached", request.gateway_id)
        try:
            if previous is not None:
                previous.end(RejectedError("the gateway attached again", retry_after_s=0.0))
            await context.write(attachment.hello())
            while True:
                await context.write(await attachment.next_frame())
        except DisaggError as error:
            await _abort(context, error)
        except grpc.aio.InternalError as error:
            log.info("gateway %.8s is gone: %s", request.gateway_id, error)  # it went while a frame was being written
        finally:
            if self._attachments.get(request.gateway_id) is attachment:
                del self._attachments[request.gateway_id]
            log.info("gateway %.8s detached", request.gateway_id)
            await attachment.close()

    async def Prefill(self, call: pb.PrefillCall, context: Any) -> pb.PrefillReply:  # noqa: N802
        async def run() -> pb.PrefillReply:
            attachment = self._check(call.gateway_id, call.epoch)
            request, transfer = wire.request_from_wire(call.request), wire.transfer_from_wire(call.transfer)
            try:
                return wire.prefilled_to_wire(await self._worker.prefill(request, transfer, call.gateway_id))
            finally:
                attachment.poke()

        return await _answered(run, context)

    async def Fetch(self, call: pb.FetchCall, context: Any) -> pb.FetchReply:  # noqa: N802
        async def run() -> pb.FetchReply:
            self._check(call.gateway_id, call.epoch)
            await self._worker.fetch(wire.transfer_from_wire(call.transfer), call.gateway_id)
            return pb.FetchReply()

        return await _answered(run, context)

    async def Start(self, call: pb.StartCall, context: Any) -> pb.StartReply:  # noqa: N802
        async def run() -> pb.StartReply:
            attachment = self._check(call.gateway_id, call.epoch)
            request = wire.request_from_wire(call.request)
            if call.HasField("transfer"):
                transfer, prefilled = wire.transfer_from_wire(call.transfer), wire.prefilled_from_wire(call.prefilled)
                chunks = self._worker.decode(request, prefilled, transfer, call.gateway_id)
            else:
                chunks = self._worker.generate(request)
            attachment.start(call.request_key, chunks)
            return pb.StartReply()

        return await _answered(run, context)

    async def Cancel(self, call: pb.CancelCall, context: Any) -> pb.CancelReply:  # noqa: N802
        attachment = self._attachments.get(call.gateway_id)
        if attachment is not None:
            attachment.cancel(call.request_key)
        return pb.CancelReply()

    async def Release(self, call: pb.ReleaseCall, context: Any) -> pb.ReleaseReply:  # noqa: N802
        await self._worker.release(wire.transfer_from_wire(call.transfer))
        return pb.ReleaseReply()

    def _check(self, gateway_id: str, epoch: str) -> Attachment:
        """The caller's stream. A call for another life of this worker, or without a stream, is refused."""
        name = self._worker.name
        if epoch != self._worker.epoch:
            raise WorkerLostError(f"worker {name} lives in epoch {self._worker.epoch}, not {epoch}", worker=name)
        if not self._worker.is_alive:
            raise WorkerLostError(f"worker {name} lost its engine", worker=name)
        attachment = self._attachments.get(gateway_id)
        if attachment is None or attachment.has_ended:
            raise WorkerLostError(f"gateway {gateway_id} is not attached to worker {name}", worker=name)
        return attachment


async def _answered(run: Callable[[], Awaitable[ReplyT]], context: Any) -> ReplyT:
    """The reply of `run`, or its typed error as the call's status."""
    try:
        return await run()
    except DisaggError as error:
        await _abort(context, error)
    except Exception as error:
        log.exception("a call failed")
        await _abort(context, EngineError(f"unexpected: {error!r}"))


async def _abort(context: Any, error: DisaggError) -> NoReturn:
    status = next(code for cls, code in _STATUS if isinstance(error, cls))
    await context.abort(status, error.message, ((ERROR_KEY, to_wire(error)),))
    raise AssertionError("abort does not return")
