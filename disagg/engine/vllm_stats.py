"""The engine's load as vLLM reports it after each step, kept as a few numbers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import StatLoggerBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

SMOOTHING = 0.2  # weight of the newest step in `step_s`


@dataclass(slots=True)
class EngineStats:
    """Latest numbers. `kv_usage`: share of KV blocks in use, 0 to 1. `step_s`: smoothed seconds of steps that followed each other."""

    running_requests: int = 0
    waiting_requests: int = 0
    kv_usage: float = 0.0
    step_s: float = 0.0
    preemptions: int = 0
    _last_step_s: float | None = None

    def note_step(self, now_s: float, is_busy: bool) -> None:
        """A step ended at `now_s` (monotonic); `is_busy`: another one follows at once."""
        if self._last_step_s is not None:
            took_s = now_s - self._last_step_s
            self.step_s = took_s if self.step_s == 0 else (1 - SMOOTHING) * self.step_s + SMOOTHING * took_s
        self._last_step_s = now_s if is_busy else None


class StatsRecorder(StatLoggerBase):  # type: ignore[misc]
    """vLLM's hook: called in the worker process after every step of the engine."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.stats = EngineStats()

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        stats = self.stats
        if scheduler_stats is not None:
            stats.running_requests = scheduler_stats.num_running_reqs
            stats.waiting_requests = scheduler_stats.num_waiting_reqs
            stats.kv_usage = scheduler_stats.kv_cache_usage
            stats.note_step(time.monotonic(), is_busy=stats.running_requests > 0)
        if iteration_stats is not None:
            stats.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to announce."""
