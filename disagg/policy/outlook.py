"""When a request that must wait would start, and so whether it may enter the queue at all. Pure.

The prompts that go before it are poured over the workers like water over steps: each worker is free from some instant on, and from then
on takes prompts at the share of its time that its decoding requests can spare. The decode side has places, as many as fit inside the
targets and the KV cache; when they are all taken, a place comes free as often as an answer ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.policy.router import Ask
from disagg.policy.worker_book import WorkerBook
from disagg.types import Mode, Role

SPARE_BELOW = 0.9  # of a target: what decoding is held to when prompts run beside it
NEVER_S = 1e6


@dataclass(frozen=True, slots=True)
class Outlook:
    """`start_s`: until the prefill starts. `place_s`: the part of it that waits for room on the decode side."""

    start_s: float
    place_s: float


def outlook(ask: Ask, mode: Mode, workers: Sequence[WorkerBook], ahead: int, ahead_work_s: float, now_s: float) -> Outlook:
    """For a request with `ahead` others before it, whose prompts take `ahead_work_s` in all."""
    sources = [w for w in workers if mode is not Mode.DISAGG or w.role is Role.PREFILL]
    sinks = [w for w in workers if mode is not Mode.DISAGG or w.role is Role.DECODE]
    place_s = _place_s(ask, sinks, ahead, now_s) if ask.moves_kv else 0.0
    return Outlook(max(place_s, _prefill_start_s(sources, ahead_work_s, now_s)), place_s)


def spare_share(w: WorkerBook, now_s: float) -> float:
    """Share of its time, 0 to 1, that a worker can give to prompts while what decodes there stays inside its targets."""
    if not w.decodes or not w.accounts.groups:
        return 1.0
    limit_s = SPARE_BELOW * min(w.accounts.groups)
    step_s = w.step_s(now_s)
    mixed_s = step_s + w.prefill_s(w.chunk_tokens, 0, now_s)
    if mixed_s <= limit_s:
        return 1.0 - step_s / mixed_s
    return min(1.0, max(0.0, 1.0 - step_s / limit_s))


def _prefill_start_s(sources: Sequence[WorkerBook], work_s: float, now_s: float) -> float:
    """The level to which `work_s` seconds of prompts fill the workers."""
    steps = sorted((w.wait_s(now_s), spare_share(w, now_s)) for w in sources)
    level_s, rate = NEVER_S, 0.0
    for index, (free_s, share) in enumerate(steps):
        if index == 0:
            level_s = free_s
        rate += share
        next_s = steps[index + 1][0] if index + 1 < len(steps) else NEVER_S
        if rate <= 0.0:
            level_s = next_s
            continue
        room_s = (next_s - level_s) * rate
        if room_s >= work_s:
            return level_s + work_s / rate
        work_s -= room_s
        level_s = next_s
    return level_s


def _place_s(ask: Ask, sinks: Sequence[WorkerBook], ahead: int, now_s: float) -> float:
    """Until a place on the decode side is free for it."""
    places, ends_per_s = 0.0, 0.0
    for w in sinks:
        places += _places(ask, w, now_s)
        if places > ahead:
            return 0.0
        if w.decodes:
            ends_per_s += w.decodes / (w.mean_output_tokens * w.gap_s(now_s))
    return (ahead + 1 - places) / ends_per_s if ends_per_s > 0 else 0.0


def _places(ask: Ask, w: WorkerBook, now_s: float) -> float:
    """How many further requests like this one can decode on `w`, by KV room and by its target."""
    by_room = max(0, w.free_kv_tokens) // max(1, ask.kv_tokens)
    if w.accounts.kv_tokens == 0:
        by_room = max(1, by_room)
    limit = w.state.max_running_requests
    if limit:
        by_room = min(by_room, max(0, limit - w.decodes))
    if ask.targets.tpot_s is None or not by_room:
        return by_room
    room_s = ask.targets.tpot_s * (1.0 - w.duty(now_s)) - w.step_s(now_s)
    cost = w.cost(now_s)
    each_s = cost.token_s + cost.context_s * (ask.context_tokens + 0.5 * ask.output_tokens)
    if w.decodes >= cost.ridge_tokens:
        each_s += cost.over_s
    return min(by_room, max(0.0, room_s / each_s)) if each_s > 0 else by_room
