"""What the engine's steps did, how long they took, how full its KV cache is: told by the connector beside the scheduler, once per step.

vLLM's own statistics are off: they lack what a step consisted of, and cost time for every token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from disagg.types import CacheChange, StepRecord

SMOOTHING = 0.2  # weight of the newest step in smoothed step times
KEPT_CHANGES = 256  # of the prefix cache, the latest, for gateways
RECORDED_STEPS = 32  # the latest, for the router; reports come more often than so many steps

# What crosses the channel: (work or None for a step without any, share of KV blocks in use, requests resumed after a preemption);
# work: (seconds, prefill tokens, prefill pairs, decode requests, context tokens), as in StepRecord.
Work = tuple[float, int, float, int, int]
StepReport = tuple[Work | None, float, int]


@dataclass(slots=True)
class StepClock:
    """Times steps in the engine's process. With asynchronous scheduling several are under way: a step begins where the one before ends.

    `decode_s`: smoothed seconds of steps in which nobody's prompt ran; `prompt_token_s`: what a prompt's token adds. 0 before the first.
    """

    decode_s: float = 0.0
    prompt_token_s: float = 0.0
    _started: deque[tuple[float, tuple[int, float, int, int] | None]] = field(default_factory=deque)
    _last_end_s: float = 0.0

    def start(self, now_s: float, scheduled: Iterable[tuple[int, int]]) -> float:
        """A step is scheduled; returns about how many seconds it will take.

        `scheduled`: (tokens computed before, tokens of this step) of each request in it; none: no work. A single token on a non-empty
        cache is a decode, everything else prefill.
        """
        prefill_tokens, pairs, decodes, context_tokens = 0, 0.0, 0, 0
        for cached, num_tokens in scheduled:
            if num_tokens == 1 and cached:
                decodes += 1
                context_tokens += cached + 1
            else:
                prefill_tokens += num_tokens
                pairs += num_tokens * (cached + (num_tokens + 1) / 2)
        work = (prefill_tokens, pairs, decodes, context_tokens) if prefill_tokens or decodes else None
        self._started.append((now_s, work))
        return (self.decode_s if decodes else 0.0) + prefill_tokens * self.prompt_token_s

    def end(self, now_s: float) -> Work | None:
        """The oldest step under way is over; None when it had no work."""
        start_s, work = self._started.popleft()
        seconds = now_s - max(start_s, self._last_end_s)
        self._last_end_s = now_s
        if work is None:
            return None
        if work[0] == 0:
            self.decode_s = smoothed(self.decode_s, seconds)
        else:
            added_s = max(0.0, seconds - (self.decode_s if work[2] else 0.0))
            self.prompt_token_s = smoothed(self.prompt_token_s, added_s / work[0])
        return (seconds, *work)


def smoothed(old_s: float, new_s: float) -> float:
    """`old_s` with a new sample; the sample where there was none."""
    return new_s if old_s == 0 else (1 - SMOOTHING) * old_s + SMOOTHING * new_s


@dataclass(slots=True)
class EngineStats:
    """Latest numbers, in the worker's process. `kv_usage`: share of KV blocks in use, 0 to 1. `step_s`: smoothed seconds of a step."""

    kv_usage: float = 0.0
    step_s: float = 0.0
    preemptions: int = 0
    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=RECORDED_STEPS))
    cache_changes: deque[CacheChange] = field(default_factory=lambda: deque(maxlen=KEPT_CHANGES))
    _num_steps: int = 0
    _num_changes: int = 0

    def note(self, report: StepReport) -> None:
        """Takes in one report."""
        work, self.kv_usage, resumed = report
        self.preemptions += resumed
        if work is not None:
            self._num_steps += 1
            self.steps.append(StepRecord(self._num_steps, *work))
            self.step_s = smoothed(self.step_s, work[0])

    def note_cache(self, stored: Sequence[int], removed: Sequence[int], is_cleared: bool) -> None:
        """Takes in one change of the prefix cache."""
        self._num_changes += 1
        self.cache_changes.append(CacheChange(self._num_changes, tuple(stored), tuple(removed), is_cleared))
