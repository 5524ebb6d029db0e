"""A worker's door for gateways: the gRPC service of worker.proto around a LocalWorker."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, NoReturn, Self

import grpc
import grpc.aio

from disagg.errors import CancelledRequestError, DisaggError, PlacementError, RejectedError, UnavailableError, WorkerLostError, to_wire
from disagg.pb import worker_pb2 as pb
from disagg.pb import worker_pb2_grpc
from disagg.serving.spans import WorkerSpans
from disagg.serving.worker import LocalWorker
from disagg.serving.worker_rpc_attachment import Attachment
from disagg.serving.worker_rpc_channel import ERROR_KEY, SERVER_OPTIONS, keepalive_options

log = logging.getLogger(__name__)

_STATUS: tuple[tuple[type[DisaggError], grpc.StatusCode], ...] = (
    (RejectedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
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
    async def start(cls, worker: LocalWorker, host: str, timeout_s: float, spans: WorkerSpans | None = None) -> Self:
        """Listen on a free port of `host`. Heartbeats come four times in `timeout_s`. Raises PlacementError when it cannot listen.

        `spans` is this server's from now on.
        """
        server = grpc.aio.server(options=[*SERVER_OPTIONS, *keepalive_options(timeout_s)])
        servicer = _Servicer(worker, min(1.0, timeout_s / 4), spans or WorkerSpans(None, worker.name))
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
        await self._servicer.spans.close()

    async def _end_streams_when_dead(self) -> None:
        """Gateways learn of an engine's death from the end of their streams."""
        await self.worker.wait_dead()
        log.error("worker %s lost its engine", self.worker.name)
        await self._servicer.close(WorkerLostError(f"worker {self.worker.name} lost its engine", worker=self.worker.name))


class _Servicer(worker_pb2_grpc.WorkerServicer):
    """The stream. Its end has a typed error beside the status."""

    def __init__(self, worker: LocalWorker, heartbeat_s: float, spans: WorkerSpans) -> None:
        self.spans = spans
        self._worker = worker
        self._heartbeat_s = heartbeat_s
        self._attachments: dict[str, Attachment] = {}

    async def close(self, error: DisaggError) -> None:
        """End all streams with `error`, and their requests."""
        for attachment in list(self._attachments.values()):
            await attachment.close()
            attachment.end(error)

    async def Attach(self, requests: Any, context: Any) -> None:  # noqa: N802
        first = await context.read()
        if not isinstance(first, pb.GatewayFrame) or not first.gateway_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first frame of a gateway must name it (gateway_id)")
        gateway_id = first.gateway_id
        attachment = Attachment(gateway_id, self._worker, self._heartbeat_s, self.spans)
        previous = self._attachments.get(gateway_id)
        self._attachments[gateway_id] = attachment
        log.info("gateway %.8s attached", gateway_id)
        if previous is not None:
            previous.end(RejectedError("the gateway attached again", retry_after_s=0.0))
        reader = asyncio.create_task(_read(context, attachment))
        try:
            await context.write(attachment.hello())
            while True:
                frame = await attachment.next_frame()
                began_s = time.monotonic()
                await context.write(frame)
                attachment.wrote(time.monotonic() - began_s)
        except DisaggError as error:
            await _abort(context, error)
        except grpc.aio.InternalError as error:
            log.info("gateway %.8s is gone: %s", gateway_id, error)  # it went while a frame was being written
        finally:
            reader.cancel()
            if self._attachments.get(gateway_id) is attachment:
                del self._attachments[gateway_id]
            log.info("gateway %.8s detached", gateway_id)
            await attachment.close()


async def _read(context: Any, attachment: Attachment) -> None:
    """Perform what the gateway sends, until it sends no more."""
    try:
        while isinstance(frame := await context.read(), pb.GatewayFrame):
            for command in frame.commands:
                attachment.perform(command)
    except grpc.aio.InternalError as error:
        log.info("gateway %.8s sends no more: %s", attachment.gateway_id, error)
    attachment.end(CancelledRequestError("the gateway ended its side of the stream"))


async def _abort(context: Any, error: DisaggError) -> NoReturn:
    status = next(code for cls, code in _STATUS if isinstance(error, cls))
    await context.abort(status, error.message, ((ERROR_KEY, to_wire(error)),))
    raise AssertionError("abort does not return")
