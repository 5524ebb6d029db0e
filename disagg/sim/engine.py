"""One engine of the simulator: the simulated engine's scheduler and step times, with runs of like steps taken in one go. Pure.

    submit -> [Scheduler] -> step (a prompt is under way, somebody comes, goes, or is preempted)   one appointment per step
                          -> run  (every sequence gets one token per step, nothing else changes)   one appointment per run

The steps of a run are those that the scheduler would have planned one by one: their times are summed in closed form (a decode step is
affine in the context it reads), and whoever comes while a run is under way cuts it at the end of the step that is being computed.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from disagg.config import SimulatedSettings
from disagg.engine.simulated_loads import Loads, loads_of
from disagg.engine.simulated_prefix import PrefixCache
from disagg.engine.simulated_scheduler import Scheduled, Scheduler
from disagg.engine.simulated_scheduler import Sequence as ScheduledSequence
from disagg.engine.simulated_settings import kv_cache_tokens
from disagg.engine.simulated_timing import plan_record, plan_seconds, step_cost, step_model
from disagg.errors import ConfigError
from disagg.sim.agenda import Agenda, Appointment
from disagg.types import CacheChange, EngineState, StepRecord

_KEPT_RECORDS = 64
_RECORDS_OF_RUN = 4
_STEP_WEIGHT = 0.2  # of the newest step in the smoothed step time, as in the live engine


class LegOwner(Protocol):
    """Whoever submitted a leg; told at the instant at which a step ends (`loaded`: begins)."""

    def loaded(self, leg: Leg) -> None:
        """The engine has taken the KV that came from outside."""
        ...

    def computed(self, leg: Leg) -> None:
        """More of the context is computed (`leg.num_computed`), by a step that brought no token."""
        ...

    def first_token(self, leg: Leg) -> None:
        """The leg's first token is sampled."""
        ...

    def ended(self, leg: Leg) -> None:
        """All its tokens are sampled, and it has left the engine."""
        ...


@dataclass(slots=True, eq=False)
class Leg(ScheduledSequence):
    """One request inside one engine. `remaining`: tokens that it still has to produce here.

    `steps`: which steps of the engine gave it a token, as [first, behind the last) pairs, flat.
    """

    owner: LegOwner = field(kw_only=True)
    remaining: int = field(kw_only=True)
    is_over: bool = field(default=False, kw_only=True)
    steps: array[int] = field(default_factory=lambda: array("q"), kw_only=True)

    def count_steps(self, first: int, count: int) -> None:
        """It got a token in each of `count` steps from `first` on."""
        self.remaining -= count
        if self.steps and self.steps[-1] == first:
            self.steps[-1] += count
        else:
            self.steps.extend((first, first + count))


@dataclass(slots=True)
class _Run:
    """`steps` decode steps of `batch` legs from `start_s` on; step i (from 0) takes `first_s + i * growth_s`.

    `context`: tokens that the first of them reads. `factor`: seconds for each of the device's.
    """

    start_s: float
    first_s: float
    growth_s: float
    steps: int
    batch: int
    context: int
    factor: float
    end: Appointment

    def end_s(self, steps: int) -> float:
        """When the first `steps` steps are over."""
        return self.start_s + steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def record(self, i: int, number: int) -> StepRecord:
        """Of step i, which has `number` in its engine."""
        return StepRecord(number, self.first_s + i * self.growth_s, 0, 0.0, self.batch, self.context + i * self.batch)

    def steps_done(self, at_s: float) -> int:
        """Whole steps that are over at `at_s`."""
        start_s, first_s, growth_s, steps = self.start_s, self.first_s, self.growth_s, self.steps
        if growth_s > 0:
            passed_s = at_s - start_s
            a, b = growth_s / 2, first_s - growth_s / 2
            guess = int((math.sqrt(b * b + 4 * a * passed_s) - b) / (2 * a)) if passed_s > 0.0 else 0
        else:
            guess = int((at_s - start_s) / first_s) if first_s > 0 else steps
        # Rounding may have it one step off. Written out what end_s() is: this is where a report spends its time.
        while guess > 0 and start_s + guess * first_s + growth_s * (guess * (guess - 1) / 2) > at_s:
            guess -= 1
        while guess < steps and start_s + (guess + 1) * first_s + growth_s * ((guess + 1) * guess / 2) <= at_s:
            guess += 1
        return guess if guess < steps else steps


class SimEngine:
    """See the module. Seconds are those of the live engine's clock: the device's, divided by the settings' `speed`.

    `step_end_s[i]`: when step i ended; None where it is not kept. `busy_s`: seconds spent in steps. Counters are since the start.

    `recent`: records of the latest steps, oldest first; of a run only its last ones.
    """

    def __init__(
        self, agenda: Agenda, name: str, settings: SimulatedSettings, prefix_unit_blocks: int = 0, *, keep_tokens: bool = True
    ) -> None:
        self.name = name
        self.settings = settings
        self.num_steps = 0
        self.step_end_s: array[float] | None = array("d") if keep_tokens else None
        self.busy_s = 0.0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.cached_tokens = 0
        self.recent: deque[StepRecord] = deque(maxlen=_KEPT_RECORDS)
        self.prefixes = PrefixCache(prefix_unit_blocks) if prefix_unit_blocks else None
        self._loads: Loads[ScheduledSequence] | None = loads_of(settings)
        self.scheduler = Scheduler(
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            long_prefill_tokens=settings.long_prefill_tokens,
            mixed_step_tokens=settings.mixed_step_tokens,
            mixed_step_s=(settings.mixed_step_ms or 0.0) / 1e3,
            cost=step_cost(settings) if settings.mixed_step_ms else None,
            num_blocks=kv_cache_tokens(settings) // settings.block_tokens,
            block_tokens=settings.block_tokens,
            prefixes=self.prefixes,
            loads=self._loads,
        )
        self._capacity_tokens = self.scheduler.capacity_tokens
        self._agenda = agenda
        self._time_factor = 1.0 / settings.speed if settings.speed else 0.0
        if settings.speed == 0:
            raise ConfigError(key="simulated.speed", value=0, expected="a number above 0: steps that take no time have nothing to simulate")
        self._model = step_model(settings)
        self._run: _Run | None = None
        self._is_stepping = False
        self._step_s = 0.0

    def submit(self, leg: Leg) -> None:
        """Take a leg in. It must fit the empty cache."""
        self.scheduler.add(leg)
        self._cut()
        if not self._is_stepping:
            self._is_stepping = True
            self._agenda.call_after(0.0, self._begin)

    def cancel(self, leg: Leg) -> None:
        """Forget a leg; its blocks are free at once, a step under way goes on without it. Idempotent."""
        if leg.is_over:
            return
        self._cut()
        if self._run is not None and leg.is_running:
            # Tokens of the run's finished steps were its own; they are in `steps` already when the run is settled.
            self._settle_run(leg)
        leg.is_over = True
        self.scheduler.remove(leg)

    def slow_down(self, factor: float) -> None:
        """Steps from the next one on take `factor` times as long as the device's."""
        self._cut()
        self._time_factor = factor / self.settings.speed

    @property
    def is_idle(self) -> bool:
        """Nothing is computed, nobody waits."""
        return not self._is_stepping

    def state(
        self, epoch: str = "", told_steps: int = 0, told_changes: int = 0, outbox: tuple[int, int] = (0, 0), inbox: tuple[int, int] = (0, 0)
    ) -> EngineState:
        """What the live engine would report now; of steps and cache changes those after the numbers told.

        `outbox`, `inbox`: its worker's boxes, (free bytes, total bytes).
        """
        scheduler, run = self.scheduler, self._run
        queued = sum([max(0, s.num_tokens - s.num_ready) for s in scheduler.waiting]) if scheduler.waiting else 0
        running = taken = 0
        steps = self._steps_after(told_steps) if self.num_steps > told_steps else ()
        if run is not None:  # nobody's prompt is under way
            done = run.steps_done(self._agenda.now_s)
            taken = self._blocks_of_run(done + 1 if done < run.steps else done)
            if done and self.num_steps + done > told_steps:  # the run's latest step says what the others would
                last = run.record(done - 1, self.num_steps + done)
                steps = (*steps, last) if steps else (last,)
        elif scheduler.running:
            running = sum([left for s in scheduler.running if (left := s.num_tokens - s.num_computed) > 1])
        return EngineState(
            epoch=epoch,
            waiting_requests=scheduler.num_waiting,
            waiting_tokens=queued + running,
            running_requests=len(scheduler.running),
            free_kv_tokens=(scheduler.free_blocks - taken) * scheduler.block_tokens,
            total_kv_tokens=self._capacity_tokens,
            step_s=self._step_s,
            outbox_free_bytes=outbox[0],
            outbox_total_bytes=outbox[1],
            inbox_free_bytes=inbox[0],
            inbox_total_bytes=inbox[1],
            preemptions=scheduler.preemptions,
            max_step_tokens=scheduler.max_num_batched_tokens,
            max_running_requests=scheduler.max_num_seqs,
            mixed_step_tokens=scheduler.mixed_step_tokens,
            mixed_step_s=scheduler.mixed_step_s,
            steps=steps,
            cache_block_tokens=self.prefixes.unit_blocks * scheduler.block_tokens if self.prefixes is not None else 0,
            cache_changes=self._changes(told_changes) if self.prefixes is not None else (),
        )

    def _steps_after(self, told: int) -> tuple[StepRecord, ...]:
        found = list(itertools.takewhile(lambda step: step.number > told, reversed(self.recent)))
        return tuple(found[::-1])

    def _changes(self, told: int) -> tuple[CacheChange, ...]:
        if self.prefixes is None or self.prefixes.num_changes <= told:
            return ()
        return tuple([c for c in self.prefixes.changes if c.number > told])

    def produced(self, leg: Leg) -> int:
        """Tokens that `leg` has brought so far."""
        booked = sum(leg.steps[1::2]) - sum(leg.steps[::2])
        if self._run is not None and leg.is_running:
            booked += self._run.steps_done(self._agenda.now_s)
        return booked

    def token_times_s(self, leg: Leg) -> np.ndarray:
        """When each token of `leg` was sampled, seconds: [tokens] float64."""
        assert self.step_end_s is not None, "token times were not kept"
        ends = np.frombuffer(self.step_end_s, dtype=np.float64)
        spans = [ends[first:behind] for first, behind in zip(leg.steps[::2], leg.steps[1::2], strict=True)]
        return np.concatenate(spans) if spans else np.empty(0)

    def assert_empty(self) -> None:
        """No leg is left and every block is free."""
        self.scheduler.assert_empty()
        assert not self._is_stepping

    # ---- steps

    def _begin(self) -> None:
        """Start the next step or run, or rest."""
        scheduler = self.scheduler
        if not scheduler.has_work:
            self._is_stepping = False
            return
        if (most := self._least_remaining()) and (steps := scheduler.steady_steps(most)):
            self._begin_run(steps)
            return
        plan = scheduler.schedule()
        assert plan or self._loads, f"{self.name}: requests wait, and none of them can run"
        device_s = plan_seconds(self._model, plan) if plan else 0.0
        device_s += scheduler.load(device_s)
        seconds = device_s * self._time_factor
        for item in plan:
            leg = item.sequence
            assert isinstance(leg, Leg)
            if leg.num_cached and not leg.num_ready and leg.num_computed == leg.num_cached:
                self.cached_tokens += leg.num_cached
            if leg.num_ready:
                leg.num_ready = 0
                leg.owner.loaded(leg)
        if not plan:  # it only loads: no step that anybody counts
            self._agenda.call_after(seconds, self._begin)
            return
        self._agenda.call_after(seconds, lambda: self._end_step(plan, seconds, device_s))

    def _least_remaining(self) -> int:
        """Steps until the first running leg ends; 0 when one of them has no token yet."""
        least = 0
        for leg in self.scheduler.running:
            assert isinstance(leg, Leg)
            if not leg.steps:
                return 0
            if least == 0 or leg.remaining < least:
                least = leg.remaining
        return least

    def _end_step(self, plan: Sequence[Scheduled], seconds: float, device_s: float) -> None:
        index = self.num_steps
        self.num_steps += 1
        if self.step_end_s is not None:
            self.step_end_s.append(self._agenda.now_s)
        self._count(1, seconds)
        record = plan_record(plan, self.num_steps, seconds)
        if self._loads is not None and not record.prefill_tokens:
            self._loads.decode_s = device_s
        self.prefill_tokens += record.prefill_tokens
        self.decode_tokens += record.decode_requests
        self.recent.append(record)
        if self.prefixes is not None:
            self.prefixes.note_changes()
        sampled = []
        for item in plan:
            leg = item.sequence
            assert isinstance(leg, Leg)
            if leg.is_over:
                continue
            leg.num_computed += item.num_tokens
            if leg.num_computed == leg.num_tokens:
                leg.num_tokens += 1
                sampled.append(leg)
            else:
                leg.owner.computed(leg)
        for leg in sampled:
            self._sampled(leg, index)
        self._begin()

    def _sampled(self, leg: Leg, index: int) -> None:
        if leg.is_over:
            return
        is_first = not leg.steps
        leg.count_steps(index, 1)
        if leg.remaining == 0:
            leg.is_over = True
            self.scheduler.remove(leg)
        if is_first:
            leg.owner.first_token(leg)
        if leg.remaining == 0:
            leg.owner.ended(leg)

    def _count(self, steps: int, seconds: float) -> None:
        """A step's part of the smoothed step time; of many alike, what they would have brought it to."""
        self.busy_s += seconds
        mean_s = seconds / steps
        keep = (1 - _STEP_WEIGHT) ** steps if self._step_s else 0.0
        self._step_s = mean_s + (self._step_s - mean_s) * keep

    # ---- runs

    def _begin_run(self, steps: int) -> None:
        running = self.scheduler.running
        batch, context = len(running), sum([s.num_computed for s in running]) + len(running)
        first_s = self._model.decode_step_s(batch, context) * self._time_factor
        growth_s = self._model.decode_step_s(batch, context + batch) * self._time_factor - first_s
        now_s = self._agenda.now_s
        run = _Run(now_s, first_s, growth_s, steps, batch, context, self._time_factor, Appointment(0.0, None))
        run.end = self._agenda.at(run.end_s(steps), self._end_run)
        self._run = run

    def _cut(self) -> None:
        """Let a run end with the step that is being computed."""
        run = self._run
        if run is None:
            return
        steps = min(run.steps, run.steps_done(self._agenda.now_s) + 1)
        if steps < run.steps:
            run.steps = steps
            run.end.cancel()
            run.end = self._agenda.at(run.end_s(steps), self._end_run)

    def _end_run(self) -> None:
        legs = self._settle_run()
        self._begin_after(legs)

    def _settle_run(self, leaving: Leg | None = None) -> list[Leg]:
        """Book the run's steps. With `leaving`, those that are over; the step under way becomes a run of its own, without it."""
        run = self._run
        assert run is not None
        now_s = self._agenda.now_s
        steps = run.steps if leaving is None else run.steps_done(now_s)
        index = self.num_steps
        if steps:
            self.num_steps += steps
            if self.step_end_s is not None:
                number = np.arange(1, steps + 1, dtype=np.float64)
                ends = run.start_s + number * run.first_s + run.growth_s * (number * (number - 1) / 2)
                self.step_end_s.frombytes(ends.tobytes())
            self._count(steps, run.end_s(steps) - run.start_s)
            self._record_run(run, steps)
            if self._loads is not None:
                self._loads.decode_s = (run.first_s + (steps - 1) * run.growth_s) / run.factor
            self.scheduler.advance(steps)
            if self.prefixes is not None:
                self.prefixes.note_changes()
            for leg in self.scheduler.running:
                assert isinstance(leg, Leg)
                leg.count_steps(index, steps)
        if leaving is None:
            self._run = None
            return [leg for leg in self.scheduler.running if isinstance(leg, Leg) and leg.remaining == 0]
        run.context += steps * run.batch - (leaving.num_computed + 1)
        run.batch -= 1
        run.start_s, run.first_s, run.steps = run.end_s(steps), run.first_s + steps * run.growth_s, run.steps - steps
        return []

    def _begin_after(self, ended: Sequence[Leg]) -> None:
        for leg in ended:
            leg.is_over = True
            self.scheduler.remove(leg)
        for leg in ended:
            leg.owner.ended(leg)
        self._begin()

    def _record_run(self, run: _Run, steps: int) -> None:
        """Records of the last of the run's first `steps` steps."""
        self.decode_tokens += steps * run.batch
        behind = self.num_steps - steps
        self.recent.extend([run.record(i, behind + i + 1) for i in range(max(0, steps - _RECORDS_OF_RUN), steps)])

    def _blocks_of_run(self, steps: int) -> int:
        """Blocks that the run's first `steps` steps take."""
        size = self.scheduler.block_tokens
        return sum([-(-(s.num_computed + steps) // size) - s.num_blocks for s in self.scheduler.running])
