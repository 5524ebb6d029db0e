"""One gateway's stream at a worker: the steps of all its requests, gathered into one frame per engine step."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from disagg.errors import DisaggError, EngineError, RejectedError
from disagg.pb import worker_pb2 as pb
from disagg.serving import worker_rpc_messages as wire
from disagg.serving.worker import LocalWorker
from disagg.types import Chunk

log = logging.getLogger(__name__)

MAX_PENDING_STEPS = 65_536  # of a gateway that does not read; then its requests and its stream end, instead of this worker's memory
STATE_INTERVAL_S = 0.1  # how old the worker's state may get at a gateway while tokens flow


class Attachment:
    """Requests of one gateway, each pumped by one task, and the steps that wait to be sent.

    All requests that get a token in one step of the engine wake in one burst of the event loop; the sender, woken by the first of
    them, runs after the burst and so takes all of it.
    """

    def __init__(self, gateway_id: str, worker: LocalWorker, heartbeat_s: float) -> None:
        self.gateway_id = gateway_id
        self._worker = worker
        self._heartbeat_s = heartbeat_s
        self._pending: list[pb.RequestStep] = []
        self._wake = asyncio.Event()
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._ended: DisaggError | None = None
        self._state_due_s = 0.0
        self._is_poked = False
        self._last_step = -1  # number of the latest engine step that this gateway was told of

    def start(self, key: str, chunks: AsyncGenerator[Chunk, None]) -> None:
        """Run a request; its steps go to this gateway under `key`."""
        task = asyncio.create_task(self._pump(key, chunks))
        self._requests[key] = task
        task.add_done_callback(lambda _: self._forget(key))  # a task cancelled before its first step has no `finally`

    def cancel(self, key: str) -> None:
        """Stop a request and free what it holds. Unknown is fine: it has ended."""
        task = self._requests.get(key)
        if task is not None:
            task.cancel()

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
        tasks = list(self._requests.values())
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
        )
        return pb.StepFrame(hello=hello, state=self._state())

    def poke(self) -> None:
        """Something that the gateway should hear of has happened: the next frame goes out as soon as a state is due."""
        self._is_poked = True
        self._wake.set()

    async def next_frame(self) -> pb.StepFrame:
        """The steps since the last frame, or after `heartbeat_s` without any just the state. Raises what `end` was given."""
        while not self._pending and self._ended is None:
            until_due_s = self._state_due_s - time.monotonic()
            if until_due_s <= 0 and (self._is_poked or self._state_due_s == 0.0):
                break
            self._wake.clear()
            try:
                async with asyncio.timeout(until_due_s if self._is_poked else self._heartbeat_s):
                    await self._wake.wait()
            except TimeoutError:
                break
        if self._ended is not None and not self._pending:
            raise self._ended
        steps, self._pending = self._pending, []
        frame = pb.StepFrame(requests=steps)
        now_s = time.monotonic()
        if not steps or now_s >= self._state_due_s:
            self._state_due_s = now_s + STATE_INTERVAL_S
            self._is_poked = False
            frame.state.CopyFrom(self._state())
            self._worker.renew(self.gateway_id)
        return frame

    def _state(self) -> pb.State:
        """The worker's state with the steps since the last one."""
        state = self._worker.state()
        message = wire.state_to_wire(state, self._last_step)
        if state.steps:
            self._last_step = state.steps[-1].number
        return message

    async def _pump(self, key: str, chunks: AsyncGenerator[Chunk, None]) -> None:
        """One request from start to end. Never raises: its end is a step."""
        try:
            async with aclosing(chunks) as stream:
                async for chunk in stream:
                    self._add(wire.chunk_to_wire(key, chunk))
        except DisaggError as error:
            self._add(wire.error_to_wire(key, error))
        except Exception as error:
            log.exception("request %s of gateway %.8s failed", key, self.gateway_id)
            self._add(wire.error_to_wire(key, EngineError(f"worker {self._worker.name} failed: {error!r}")))

    def _forget(self, key: str) -> None:
        del self._requests[key]
        self._state_due_s = 0.0  # room came free: the gateway learns of it at once
        self._wake.set()

    def _add(self, step: pb.RequestStep) -> None:
        if self._ended is not None:
            return
        self._pending.append(step)
        self._wake.set()
        if len(self._pending) > MAX_PENDING_STEPS:
            log.warning("gateway %.8s left %d steps unread: its stream ends", self.gateway_id, len(self._pending))
            self._pending.clear()
            self.end(RejectedError(f"the gateway left {MAX_PENDING_STEPS} steps unread", retry_after_s=1.0))
            for task in self._requests.values():
                task.cancel()
