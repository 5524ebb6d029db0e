"""The way of one request through two workers, and what is done when a part of it breaks.

    queued -> prefilling -> transferring -> waiting -> decoding -> finished
      |           |              |             |          |
      |           +--- retryable error: a new route, with the tokens sent so far as `prior_output` ---> queued
      +-> rejected | failed | cancelled

The client never sees a token twice, nothing is sampled twice, and an answer that ends without an error is whole.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from disagg.config import Topology
from disagg.engine.engine import Worker
from disagg.errors import CancelledRequestError, DisaggError, EngineError, InvalidRequestError, RejectedError, WorkerLostError
from disagg.kv.layout import hash_tokens
from disagg.policy.decision import Verdict
from disagg.serving.coordinator_queue import CoordinatorQueue
from disagg.serving.decision_log import DecisionLog
from disagg.serving.pool import Pool, Reservation
from disagg.serving.run import Run
from disagg.tracing import TraceContext
from disagg.types import Chunk, FinishReason, ModelInfo, Phase, Prefilled, Request, Transfer, new_id

log = logging.getLogger(__name__)

DEFAULT_DEADLINE_S = 3600.0  # for a request without one: nothing waits for ever


class Coordinator:
    """Serves requests over the workers of `pool`. One per gateway.

    `ended` counts requests by the phase in which they ended; `retries` the routes taken after a failure, by the error's class.
    """

    def __init__(self, pool: Pool, topology: Topology, model_info: ModelInfo) -> None:
        self.pool = pool
        self.model_info = model_info
        self.ended: Counter[Phase] = Counter()
        self.retries: Counter[str] = Counter()
        self._settings = topology.admission
        self.decisions = DecisionLog()
        self._queue = CoordinatorQueue(pool, self.decisions)
        self._open: set[Run] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, request: Request) -> Run:
        """Take a request in. It starts when its chunks are iterated. `arrival_s` is set to now when it is 0."""
        now_s = time.monotonic()
        arrival_s = request.arrival_s or now_s
        deadline_s = request.deadline_s if request.deadline_s is not None else now_s + DEFAULT_DEADLINE_S
        return Run(replace(request, arrival_s=arrival_s, deadline_s=deadline_s), self._serve)

    def refusal(self, num_requests: int, priority: int) -> RejectedError | None:
        """Why so many further requests of this priority would be refused now, whatever they are; None when they may come."""
        return self._queue.refusal(num_requests, priority)

    @property
    def decided(self) -> Mapping[tuple[Verdict, str], int]:
        """Decisions so far by verdict and kind of reason (see CoordinatorQueue)."""
        return self._queue.decided

    @property
    def open_runs(self) -> frozenset[Run]:
        """Requests under way."""
        return frozenset(self._open)

    async def close(self, grace_s: float = 0.0) -> None:
        """Let requests under way end for `grace_s`, then refuse those that still queue, and end the clean-up calls."""
        deadline_s = time.monotonic() + grace_s
        try:
            async with asyncio.timeout_at(deadline_s):
                while self._open:
                    await self.pool.changes.next().wait()
        except TimeoutError:
            log.info("%d requests are cut off", len(self._open))
        await self._queue.close()
        for task in list(self._tasks):
            task.cancel()
        await self.settle()

    async def settle(self) -> None:
        """Returns when the clean-up calls of ended requests are answered (each has its deadline)."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def assert_empty(self) -> None:
        """No request is under way, and nothing is left of those that ended. For tests, and for an idle gateway."""
        assert not self._open, f"{len(self._open)} requests are under way"
        assert not self._tasks, f"{len(self._tasks)} clean-up calls are pending"
        self._queue.assert_empty()
        self.pool.assert_empty()

    # ---- one request

    async def _serve(self, run: Run) -> AsyncGenerator[Chunk, None]:
        self._open.add(run)
        try:
            async with aclosing(self._attempts(run)) as chunks:
                async for chunk in chunks:
                    run.output_tokens += len(chunk.tokens)
                    run.timeline.last_token_s = time.monotonic()
                    if chunk.finish is not None:
                        run.end(Phase.FINISHED)
                    yield chunk
        except (RejectedError, InvalidRequestError):
            run.end(Phase.REJECTED)
            raise
        except (GeneratorExit, asyncio.CancelledError, CancelledRequestError):
            run.end(Phase.CANCELLED)
            raise
        finally:
            run.end(Phase.FAILED)
            self.ended[run.phase] += 1
            self._open.discard(run)
            self.pool.changes.fire()

    async def _attempts(self, run: Run) -> AsyncGenerator[Chunk, None]:
        """Routes until one of them brings the answer's end; each continues after the tokens of those before."""
        request, avoid = run.request, frozenset[str]()
        sent = list(request.prior_output)
        while True:
            reservation = await self._queue.take(request, avoid, run.attempts)
            self._routed(run, reservation)
            leg = self._colocated if reservation.route.is_colocated else self._disaggregated
            try:
                async with aclosing(leg(run, request, reservation)) as chunks:
                    async for chunk in chunks:
                        sent.extend([t.token_id for t in chunk.tokens])
                        reservation.progress(len(sent) - len(request.prior_output))
                        reservation.is_whole = chunk.finish is not None
                        yield chunk
                        if chunk.finish is not None:
                            return
                raise EngineError("the engine ended the stream before the answer was whole")
            except DisaggError as error:
                if not error.retryable or run.attempts >= self._settings.max_attempts:
                    raise
                avoid |= _suspects(error, reservation)
                self.retries[type(error).__name__] += 1
                log.info("request %s, attempt %d on %s: %s", request.request_id, run.attempts, reservation.route, error.message)
            finally:
                reservation.is_whole |= run.phase is Phase.FINISHED  # its owner found a stop string: that was its end
                reservation.close()
            request = replace(request, prior_output=tuple(sent))
            run.phase = Phase.QUEUED
            if request.remaining_tokens <= 0:  # all tokens came, only the word that these were all did not
                yield Chunk((), FinishReason.LENGTH)
                return

    def _routed(self, run: Run, reservation: Reservation) -> None:
        run.attempts += 1
        run.route = reservation.route
        if run.prediction is None:
            run.prediction = reservation.prediction
        run.phase = Phase.PREFILLING
        if run.timeline.routed_s is None:
            run.timeline.routed_s = time.monotonic()

    async def _colocated(self, run: Run, request: Request, reservation: Reservation) -> AsyncGenerator[Chunk, None]:
        async with aclosing(reservation.source.worker.generate(request)) as chunks:
            async for chunk in chunks:
                if run.phase is Phase.PREFILLING:
                    reservation.first_token(chunk.cached_tokens)
                    reservation.decoding()
                    _first_token(run, Phase.DECODING)
                    _count_cached(run, chunk)
                yield chunk

    async def _disaggregated(self, run: Run, request: Request, reservation: Reservation) -> AsyncGenerator[Chunk, None]:
        p, d = reservation.source.worker, reservation.sink.worker
        transfer = _transfer(run, request, p, reservation.form)
        # The pull starts with the prefill: the decode side takes each prefill chunk's KV while the next one is computed.
        fetch = self._spawn(_fetch(run, request, d, transfer, reservation)) if request.remaining_tokens > 1 else None
        whole = False
        try:
            prefilled = await p.prefill(request, transfer)
            reservation.first_token(prefilled.cached_tokens)
            _first_token(run, Phase.TRANSFERRING if fetch is None or not fetch.done() else Phase.WAITING)
            _count_cached(run, prefilled)
            if prefilled.finish is not None:
                whole = fetch is None
                yield Chunk((prefilled.first,), prefilled.finish, prefilled.prompt_logprobs)
                return
            # Started before the first token is handed out, so that the two do not wait for each other.
            async with aclosing(d.decode(request, prefilled, transfer)) as chunks:
                yield Chunk((prefilled.first,), None, prefilled.prompt_logprobs)
                async for chunk in chunks:
                    if run.phase is not Phase.DECODING:
                        run.phase = Phase.DECODING
                        reservation.arrived()
                        reservation.decoding()
                    whole = chunk.finish is not None
                    yield chunk
        finally:
            if fetch is not None:
                fetch.cancel()
            if not whole:
                self._release(transfer, p, d)

    def _release(self, transfer: Transfer, *workers: Worker) -> None:
        """Tell both sides that nobody wants this KV any more; the caller does not wait for it."""
        for worker in workers:
            self._spawn(_release(worker, transfer))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _count_cached(run: Run, first: Chunk | Prefilled) -> None:
    """Of the first prefill that says something: a later one finds what that one left."""
    if not (run.cached_tokens or run.newly_cached_tokens):
        run.cached_tokens, run.newly_cached_tokens = first.cached_tokens, first.newly_cached_tokens


def _transfer(run: Run, request: Request, source: Worker, form: str) -> Transfer:
    tokens = request.prompt_token_ids + request.prior_output
    digest = hash_tokens(tokens)
    trace = TraceContext(traceparent=request.traceparent, tracestate=request.tracestate)
    return Transfer(new_id(), run.attempts - 1, source.address, len(tokens), digest, form, **trace)


def _first_token(run: Run, phase: Phase) -> None:
    run.phase = phase
    if run.timeline.first_token_s is None:
        run.timeline.first_token_s = time.monotonic()


async def _fetch(run: Run, request: Request, worker: Worker, transfer: Transfer, reservation: Reservation) -> None:
    """Have `worker` pull the KV. A failure also ends the decode that waits for it, and is told there."""
    try:
        await worker.fetch(transfer, request)
    except DisaggError as error:
        log.debug("request %s: fetch of %s failed: %s", run.request.request_id, transfer.transfer_id, error.message)
        return
    run.timeline.transferred_s = time.monotonic()
    reservation.arrived()
    if run.phase is Phase.TRANSFERRING:
        run.phase = Phase.WAITING


async def _release(worker: Worker, transfer: Transfer) -> None:
    try:
        await worker.release(transfer)
    except DisaggError as error:
        log.debug("release of %s: %s", transfer.transfer_id, error.message)  # a lost worker has nothing left to free


def _suspects(error: DisaggError, reservation: Reservation) -> frozenset[str]:
    """Workers that the next attempt had better not use."""
    if isinstance(error, WorkerLostError):
        return frozenset({error.worker})
    return frozenset({reservation.route.prefill, reservation.route.decode})
