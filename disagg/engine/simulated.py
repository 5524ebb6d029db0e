"""Engine `simulated`: no model, real timing, real bytes.

A loop of steps as vLLM's (simulated_scheduler.py), each as long as the roofline says (perf/roofline.py) divided by the clock speed. The KV
is bytes derived from the tokens, and each next token depends on all of them (simulated_model.py): any fault on the KV's way shows.

    submit -> [Scheduler] -plan-> compute: load inbox, make KV, write outbox, draw -> sleep -> publish: stage, deliver tokens

The loop is one asyncio task that lives only while there is work. Computing comes before the sleep, so its cost hides in the step; nothing
is visible outside before the sleep ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import xxhash

from disagg.config import SimulatedSettings
from disagg.engine.simulated_kv import Codes, from_entry, to_entry
from disagg.engine.simulated_loads import Loads, loads_of
from disagg.engine.simulated_model import KvState, SimulatedModel
from disagg.engine.simulated_prefix import PrefixCache
from disagg.engine.simulated_scheduler import Scheduled, Scheduler
from disagg.engine.simulated_scheduler import Sequence as ScheduledSequence
from disagg.engine.simulated_settings import check_request, kv_cache_tokens, simulated_layout
from disagg.engine.simulated_timing import plan_counts, plan_seconds, step_cost, step_model
from disagg.errors import DisaggError, EngineError, LayoutMismatchError, TransferCorruptError
from disagg.kv.api import InboxEntry, OutboxEntry
from disagg.kv.form import check_entry
from disagg.kv.layout import KvLayout
from disagg.prefix import block_identities, root_identity
from disagg.types import Chunk, EngineState, FinishReason, Prefilled, Request, StepRecord, Token

log = logging.getLogger(__name__)

_MAX_LAG_S = 0.05  # a loop that is later than this against its clock gives the rest up, instead of rushing to catch up
_STEP_WEIGHT = 0.2  # of the newest step in the smoothed step time
RECORDED_STEPS = 32  # the latest, for the router; reports come more often than so many steps


@dataclass(slots=True, eq=False)
class _Job(ScheduledSequence):
    """One request inside the engine. `tokens`: context and output so far; `kv`: the KV of its first `num_computed` tokens."""

    request: Request = field(kw_only=True)
    tokens: list[int] = field(kw_only=True)
    kv: KvState = field(kw_only=True)
    outbox: OutboxEntry | None = None
    inbox: InboxEntry | None = None
    num_output: int = 0
    num_staged_blocks: int = 0
    is_over: bool = False
    error: DisaggError | None = None
    ready: list[Token] = field(default_factory=list)  # not handed out yet
    finish: FinishReason | None = None  # comes with the last of them
    is_unsaid: bool = True  # how much the prefix cache had: the first chunk says it
    waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def next_chunk(self) -> Chunk | None:
        """All that is ready, None after the last. Raises the error that ended the request. Pending until the engine steps, ends or dies."""
        while not self.ready:
            if self.error is not None:
                raise self.error
            if self.is_over:
                return None
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
        tokens, self.ready = tuple(self.ready), []
        is_first = self.is_unsaid and self.num_output - len(tokens) == len(self.request.prior_output)  # never of a decode leg
        self.is_unsaid = False
        return Chunk(tokens, self.finish, None, self.num_cached if is_first else 0)


@dataclass(frozen=True, slots=True)
class _Frame:
    """A run of finished blocks of one rank, written to the outbox and not announced yet."""

    rank: int
    first_block: int
    num_blocks: int
    digest: int


# What one step did for one job: frames to announce, and the sampled token when its context is all computed.
_Result: TypeAlias = tuple[_Job, Sequence[_Frame], Token | None]


class SimulatedChunks:
    """The tokens of one decode or colocated request. Submits at the first `__anext__`; `aclose` cancels and frees, also before that."""

    def __init__(self, engine: SimulatedEngine, job: _Job, *, is_finished: bool = False) -> None:
        self._engine = engine
        self._job = job
        self._is_submitted = False
        if is_finished:
            engine._end(job)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        try:
            if not self._is_submitted and not self._job.is_over:
                self._engine._submit(self._job)
                self._is_submitted = True
            chunk = await self._job.next_chunk()
        except BaseException:
            self._engine._end(self._job)
            raise
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        self._job.ready.clear()
        self._engine._end(self._job)


class SimulatedEngine:
    """See the module. Implements `engine.Engine`; made by `start_simulated_engine`, ended by `close`.

    For tests: `slow_factor` multiplies step times from the next step on, `die()` is a crash, `assert_empty()` checks for leaks.
    """

    def __init__(self, settings: SimulatedSettings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.slow_factor = 1.0
        self._layout = simulated_layout(settings)
        self._model = SimulatedModel(settings)
        self._steps = step_model(settings)
        self._loads: Loads[ScheduledSequence] | None = loads_of(settings)
        self._scheduler = Scheduler(
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            long_prefill_tokens=settings.long_prefill_tokens,
            mixed_step_tokens=settings.mixed_step_tokens,
            mixed_step_s=(settings.mixed_step_ms or 0.0) / 1e3,
            cost=step_cost(settings) if settings.mixed_step_ms else None,
            num_blocks=kv_cache_tokens(settings) // settings.block_tokens,
            block_tokens=settings.block_tokens,
            prefixes=PrefixCache(unit_blocks=1) if settings.enable_prefix_caching else None,
            loads=self._loads,
        )
        self._max_context = min(settings.max_model_len, self._scheduler.capacity_tokens)
        self._jobs: set[_Job] = set()
        self._task: asyncio.Task[None] | None = None
        self._dead = asyncio.Event()
        self._step_s = 0.0
        self._records: deque[StepRecord] = deque(maxlen=RECORDED_STEPS)
        self.num_steps = 0

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def max_context_tokens(self) -> int:
        return self._max_context

    @property
    def is_alive(self) -> bool:
        return not self._dead.is_set()

    async def wait_dead(self) -> None:
        await self._dead.wait()

    async def prefill(self, request: Request, entry: OutboxEntry) -> Prefilled:
        try:
            job = self._job(request, request.prior_output)
            job.outbox = entry
            self._check_entry(request, entry)
            self._submit(job)
            try:
                chunk = await job.next_chunk()
            finally:
                self._end(job)
        finally:
            entry.end_write()
        assert chunk is not None
        return Prefilled(chunk.tokens[0], chunk.finish, chunk.cached_tokens)

    def decode(self, request: Request, prefilled: Prefilled, entry: InboxEntry) -> SimulatedChunks:
        job = self._job(request, (*request.prior_output, prefilled.first.token_id))
        job.inbox = entry
        job.num_ready = request.num_context_tokens
        job.num_awaited = entry.first_token
        return SimulatedChunks(self, job, is_finished=prefilled.finish is not None)

    def generate(self, request: Request) -> SimulatedChunks:
        return SimulatedChunks(self, self._job(request, request.prior_output))

    async def cached_tokens(self, request: Request) -> int:
        if self._scheduler.prefixes is None:
            return 0
        context = (*request.prompt_token_ids, *request.prior_output)
        block = self.settings.block_tokens
        return self._scheduler.prefixes.match(block_identities(context, block, root_identity(request.cache_salt))) * block

    def state(self) -> EngineState:
        scheduler = self._scheduler
        queued = sum(max(0, s.num_tokens - s.num_ready) for s in scheduler.waiting)
        running = sum(s.num_tokens - s.num_computed for s in scheduler.running if s.num_tokens - s.num_computed > 1)
        return EngineState(
            epoch="",
            waiting_requests=scheduler.num_waiting,
            waiting_tokens=queued + running,
            running_requests=len(scheduler.running),
            free_kv_tokens=scheduler.free_blocks * self.settings.block_tokens,
            total_kv_tokens=scheduler.capacity_tokens,
            step_s=self._step_s,
            preemptions=scheduler.preemptions,
            max_step_tokens=self.settings.max_num_batched_tokens,
            max_running_requests=self.settings.max_num_seqs,
            mixed_step_tokens=scheduler.mixed_step_tokens,
            mixed_step_s=scheduler.mixed_step_s,
            steps=tuple(self._records),
            cache_block_tokens=self.settings.block_tokens if scheduler.prefixes is not None else 0,
            cache_changes=tuple(scheduler.prefixes.changes) if scheduler.prefixes is not None else (),
        )

    async def close(self) -> None:
        task = self._task
        self._stop(EngineError(f"engine {self.name} is closed"))
        if task is not None:
            await asyncio.wait([task])

    def die(self) -> None:
        """Crash: `is_alive` turns False, requests under way and all later calls fail with EngineError."""
        self._stop(EngineError(f"engine {self.name} died"))

    def assert_empty(self) -> None:
        """No request is left inside and all KV blocks are free."""
        assert not self._jobs, f"{len(self._jobs)} requests are left in engine {self.name}"
        self._scheduler.assert_empty()

    def _job(self, request: Request, output: Sequence[int]) -> _Job:
        tokens = [*request.prompt_token_ids, *output]
        return _Job(len(tokens), request=request, tokens=tokens, kv=self._model.new_state(), num_output=len(output))

    def _submit(self, job: _Job) -> None:
        """Check and queue `job`, and see that the loop runs. Raises InvalidRequestError, TransferError or EngineError."""
        if not self.is_alive:
            raise EngineError(f"engine {self.name} is dead")
        check_request(self.settings, job.request, self._max_context, is_prefill=job.outbox is not None)
        if job.inbox is not None:
            self._check_entry(job.request, job.inbox)
        if self._scheduler.prefixes is not None:
            job.prefix = block_identities(job.tokens, self.settings.block_tokens, root_identity(job.request.cache_salt))
        self._jobs.add(job)
        self._scheduler.add(job)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"simulated-engine-{self.name}")

    def _check_entry(self, request: Request, entry: OutboxEntry | InboxEntry) -> None:
        try:
            check_entry(self._layout, entry.layout, entry.form)
        except LayoutMismatchError as error:
            raise LayoutMismatchError(f"engine {self.name} cannot use this KV: {error.message}") from None
        if entry.num_tokens != request.num_context_tokens:
            message = f"transfer {entry.transfer_id} holds {entry.num_tokens} tokens, the request has {request.num_context_tokens}"
            raise TransferCorruptError(message)

    def _end(self, job: _Job, error: DisaggError | None = None) -> None:
        """The request leaves the engine, from whatever state: blocks are free, its entries never touched again. Idempotent."""
        if job.is_over:
            return
        job.is_over = True
        job.error = error
        self._jobs.discard(job)
        self._scheduler.remove(job)
        self._end_entries(job)
        job.wake()

    def _end_entries(self, job: _Job) -> None:
        if job.outbox is not None:
            job.outbox.end_write()
        if job.inbox is not None:
            job.inbox.end_read()
            job.inbox = None

    def _stop(self, error: EngineError) -> None:
        self._dead.set()
        if self._task is not None:
            self._task.cancel()
        for job in list(self._jobs):
            self._end(job, EngineError(error.message))  # one each: a raised error carries its own traceback

    async def _run(self) -> None:
        """Steps while there is work. Sleeps until an absolute instant, so that errors of short sleeps do not add up."""
        clock, speed = time.monotonic, self.settings.speed
        due = clock()
        try:
            while self._scheduler.has_work:
                began = clock()
                plan = self._scheduler.schedule()
                if not plan and not self._loads:
                    raise EngineError("requests wait, and none of them can run")
                device_s = self._device_s(plan) if speed else 0.0
                duration_s = device_s / speed * self.slow_factor if speed else 0.0
                counts = plan_counts(plan)
                results = self._compute(plan)
                due = max(due, began - _MAX_LAG_S) + duration_s
                await asyncio.sleep(max(0.0, due - clock()))
                self._publish(results)
                if self._scheduler.prefixes is not None:
                    self._scheduler.prefixes.note_changes()
                if not plan:  # it only loaded: no step that anybody counts
                    continue
                if self._loads is not None and not counts[0]:
                    self._loads.decode_s = device_s
                took_s = clock() - began
                self._records.append(StepRecord(self.num_steps, took_s, *counts))
                self.num_steps += 1
                self._step_s += (took_s - self._step_s) * (_STEP_WEIGHT if self._step_s else 1.0)
        except Exception as error:
            log.exception("engine %s failed in a step", self.name)
            self._task = None
            self._stop(EngineError(f"engine {self.name} failed: {error!r}"))
        finally:
            self._task = None

    def _device_s(self, plan: Sequence[Scheduled]) -> float:
        """Of a step, its loads included."""
        step_s = plan_seconds(self._steps, plan) if plan else 0.0
        return step_s + self._scheduler.load(step_s)

    def _compute(self, plan: Sequence[Scheduled]) -> list[_Result]:
        """The step's work: KV of all scheduled tokens, and a token for each job whose KV is complete."""
        results: list[_Result] = []
        model = self._model
        for job, num_tokens in plan:
            assert isinstance(job, _Job)
            frames: Sequence[_Frame] = ()
            if job.num_ready:
                self._load(job)
            elif job.num_computed in (0, job.num_cached):
                frames = self._begin_context(job)
            start, kv = job.num_computed, job.kv
            if num_tokens == 1 and job.outbox is None:
                model.extend_by_one(kv, job.tokens[start])
            else:
                codes = model.extend(kv, job.tokens[start : start + num_tokens])
                if job.outbox is not None:
                    frames = [*frames, *self._write(job, job.outbox, start, codes)]
            job.num_computed = start + num_tokens
            is_due = job.num_computed == job.num_tokens
            results.append((job, frames, model.draw(kv.digest, job.request.sampling, job.num_output) if is_due else None))
        return results

    def _begin_context(self, job: _Job) -> list[_Frame]:
        """A context is computed from its begin on, or from behind what the prefix cache gave: KV of the same tokens, so the same bytes."""
        job.kv = self._model.new_state()
        if job.inbox is not None:  # it begins behind what the cache still has
            job.inbox.end_read()
            job.inbox = None
        if not job.num_computed:
            return []
        codes = self._model.extend(job.kv, job.tokens[: job.num_computed])
        return self._write(job, job.outbox, 0, codes) if job.outbox is not None else []

    def _load(self, job: _Job) -> None:
        """Take the context's KV out of the inbox, as it is there, and leave the inbox."""
        assert job.inbox is not None
        entry, layout, first = job.inbox, job.inbox.layout, job.inbox.first_token
        if first:
            self._model.extend(job.kv, job.tokens[:first])  # the prefix cache gave these
        num_tokens = job.num_ready - first
        if num_tokens:
            box = np.frombuffer(entry.view, np.uint8)[: layout.entry_bytes(num_tokens)]
            by_rank = box.reshape(layout.num_ranks, layout.num_blocks(num_tokens) * layout.block_tokens, -1)
            codes = from_entry(by_rank[:, :num_tokens], self._layout, layout, entry.form)
            running = self._model.running_states(job.tokens[first : job.num_ready], first, job.kv.running)[-1]
            job.kv.append(codes.data.cast("B"), num_tokens, int(running))
            del box, by_rank, codes  # no export of the box may outlive the entry
        job.num_ready = 0
        job.inbox.end_read()
        job.inbox = None

    def _write(self, job: _Job, entry: OutboxEntry, start: int, codes: Codes) -> list[_Frame]:
        """Write the KV of tokens from `start` on; returns frames of the blocks that are complete now, and were not announced before."""
        layout, num_context = entry.layout, job.num_tokens
        num_blocks = layout.num_blocks(num_context)
        end = start + len(codes)
        box = np.frombuffer(entry.view, np.uint8)[: layout.entry_bytes(num_context)]
        by_rank = box.reshape(layout.num_ranks, num_blocks * layout.block_tokens, -1)
        # After a preemption this writes the same bytes again: announced blocks do not change.
        by_rank[:, start:end] = to_entry(codes, self._layout, layout, entry.form)
        if end == num_context:
            by_rank[:, end:] = 0  # the box held another prompt before
        done = num_blocks if end == num_context else end // layout.block_tokens
        frames = []
        for first in range(job.num_staged_blocks, done, layout.frame_blocks):
            count = min(layout.frame_blocks, done - first)
            for rank in range(layout.num_ranks):
                span = by_rank[rank, first * layout.block_tokens : (first + count) * layout.block_tokens]
                frames.append(_Frame(rank, first, count, xxhash.xxh3_64_intdigest(span.data)))
        job.num_staged_blocks = max(job.num_staged_blocks, done)
        return frames

    def _publish(self, results: Sequence[_Result]) -> None:
        """The step is over: announce frames and deliver tokens, except to requests that ended meanwhile."""
        for job, frames, token in results:
            if job.is_over:
                continue
            try:
                for frame in frames:
                    assert job.outbox is not None
                    job.outbox.stage(frame.rank, frame.first_block, frame.num_blocks, frame.digest)
            except DisaggError as error:
                self._end(job, error)
                continue
            if token is not None:
                self._deliver(job, token)

    def _deliver(self, job: _Job, token: Token) -> None:
        job.tokens.append(token.token_id)
        job.num_tokens += 1
        job.num_output += 1
        job.finish = self._model.finish_reason(token.token_id, job.request.sampling, job.num_output)
        job.ready.append(token)
        if job.finish is not None or job.outbox is not None:
            self._end(job)
        else:
            job.wake()


async def start_simulated_engine(settings: SimulatedSettings, name: str) -> SimulatedEngine:
    """A running simulated engine. Raises ConfigError when the shape does not fit the device, naming the degree that would."""
    return SimulatedEngine(settings, name)
