"""When a request that must wait would start, and so whether it may enter the queue at all. Pure.

The prompts that go before it are poured over the workers like water over steps: each worker is free from some instant on, and from then
on takes prompts at the share of its time that its decoding requests can spare. The decode side has places, as many as fit inside the
targets and the KV cache; when they are all taken, a place comes free as often as an answer ends.
"""

from __future__ import annotations

from typing import NamedTuple

from disagg.policy.outline import Outline
from disagg.policy.router import Ask
from disagg.policy.standing import Standing
from disagg.policy.step_cost import StepCost
from disagg.policy.worker_book import UNKNOWN_STEP_TOKENS, WorkerBook

SPARE_BELOW = 0.9  # of a target: what decoding is held to when prompts run beside it
NEVER_S = 1e6


class Outlook(NamedTuple):
    """`start_s`: until the prefill starts. `place_s`: the part of it that waits for room on the decode side."""

    start_s: float
    place_s: float


def outlook(
    ask: Ask,
    standing: Standing,
    ahead: int,
    ahead_work_s: float,
    typical: StepCost,
) -> Outlook:
    """For a request with `ahead` others before it, whose prompts take `ahead_work_s` in all at the cost `typical`."""
    place_s = _place_s(ask, standing, ahead) if ask.moves_kv else 0.0
    return Outlook(max(place_s, _prefill_start_s(standing, ahead, ahead_work_s, typical)), place_s)


def prompt_rate(w: WorkerBook, typical: StepCost, o: Outline) -> float:
    """Seconds of prompt work, as `typical` counts it, that a worker does per second while what decodes there stays inside its targets."""
    known = w.prompt_rate
    if known is None or known[0] is not o or known[1] is not typical:
        known = w.prompt_rate = (o, typical, _prompt_rate(w, o, typical))
    return known[2]


def _prompt_rate(w: WorkerBook, o: Outline, typical: StepCost) -> float:
    chunk = o.chunk_tokens
    held_s = w.held_to_s(o) if o.decodes else None
    if held_s is None:
        tokens = min(chunk, UNKNOWN_STEP_TOKENS)
        own_s = o.cost.prefill_s(tokens, 0, tokens)
        return typical.prefill_s(tokens, 0, tokens) / own_s if own_s > 0 else 1.0
    limit_s = SPARE_BELOW * held_s
    step_s, mixed_s = o.step_s, o.mixed_s
    share = 1.0
    if mixed_s > limit_s:  # the mean step may be as long as the limit: so many of them may carry a chunk
        share = max(0.0, (limit_s - step_s) / (mixed_s - step_s)) if step_s < limit_s else 0.0
    mean_s = share * mixed_s + (1.0 - share) * step_s
    return share * typical.prefill_s(chunk, 0, chunk) / mean_s if mean_s > 0 else 1.0


def _prefill_start_s(standing: Standing, ahead: int, work_s: float, typical: StepCost) -> float:
    """When a worker is free after `ahead` prompts of `work_s` seconds in all: the level to which that much work fills the workers.

    Prompts come in lumps, and each goes to the worker that is free first: half a lump earlier per further worker than the level says.
    """
    if not ahead:
        return _soonest_s(standing, typical)
    work_s = max(0.0, work_s - 0.5 * work_s / ahead * (len(standing.sources) - 1))
    level_s, rate = NEVER_S, 0.0
    for free_s, share in _levels(standing, typical):
        if rate > 0.0:  # from the last worker's level up to this one's
            room_s = (free_s - level_s) * rate
            if room_s >= work_s:
                return level_s + work_s / rate
            work_s -= room_s
        level_s = free_s
        rate += share
    room_s = (NEVER_S - level_s) * rate
    return level_s + work_s / rate if room_s >= work_s and rate > 0.0 else NEVER_S


def _soonest_s(standing: Standing, typical: StepCost) -> float:
    """When the first worker is free for prompts."""
    soonest_s = NEVER_S
    for w in standing.sources:
        wait_s = standing.wait_s(w)
        if wait_s < soonest_s and prompt_rate(w, typical, standing.look(w)) > 0.0:
            soonest_s = wait_s
            if wait_s == 0.0:
                break
    return soonest_s


def _levels(standing: Standing, typical: StepCost) -> list[tuple[float, float]]:
    """When workers are free, the first one first, and how quick each is with prompts from then on."""
    if standing.levels is None:
        rates = [  # as prompt_rate() does, without a call for each
            k[2] if (k := w.prompt_rate) is not None and k[0] is o and k[1] is typical else prompt_rate(w, typical, o)
            for w, o in zip(standing.sources, standing.all_looks(standing.sources), strict=True)
        ]
        standing.levels = sorted(zip(standing.waits_s(), rates, strict=True))
    return standing.levels


def _place_s(ask: Ask, standing: Standing, ahead: int) -> float:
    """Until a place on the decode side is free for it."""
    places, ends_per_s = 0.0, 0.0
    for w in standing.sinks:
        o = standing.look(w)
        places += _places(ask, w, o)
        if places > ahead:
            return 0.0
        if w.accounts.decodes:
            if o.gap_s <= 0.0:
                return 0.0  # steps that take no time: its answers end at once
            ends_per_s += w.accounts.decodes / (w.mean_output_tokens * o.gap_s)
    return (ahead + 1 - places) / ends_per_s if ends_per_s > 0 else 0.0


def _places(ask: Ask, w: WorkerBook, o: Outline) -> float:
    """How many further requests like this one can decode on `w`, by KV room and by its target."""
    if ask.whole_tokens > w.state.total_kv_tokens > 0:
        return 0.0
    by_room = max(0, o.free_kv_tokens) // max(1, ask.kv_tokens)
    if w.accounts.kv_tokens == 0:
        by_room = max(1, by_room)
    by_room = min(by_room, max(0, o.free_seats))
    decodes = o.decodes + w.accounts.coming
    if ask.targets.tpot_s is None or not by_room or o.cost.alone_s(ask.context_tokens) >= ask.targets.tpot_s:
        return by_room
    room_s = ask.targets.tpot_s * (1.0 - o.duty) - o.gap_s * (1.0 - o.duty)
    each_s = o.cost.decode_s + o.cost.context_s * (ask.context_tokens + 0.5 * ask.output_tokens)
    if decodes >= o.cost.ridge_tokens:
        each_s += o.cost.over_s
    return min(by_room, max(0.0, room_s / each_s)) if each_s > 0 else by_room
