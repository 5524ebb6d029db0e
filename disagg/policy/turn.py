"""Whose turn it is: which workers are about to run dry, and whether the first of the queue may start there now. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection

from disagg.config import AdmissionSettings
from disagg.policy.outline import Outline
from disagg.policy.outlook import SPARE_BELOW
from disagg.policy.router import Ask, Pair
from disagg.policy.standing import Standing
from disagg.policy.targets import slope
from disagg.policy.waiting import Waiter, WaitingQueue
from disagg.policy.worker_book import WorkerBook

FEED_S = 0.025  # a worker gets its next prompt when it has so much left, at the least: a round trip and the way through the gateway


def is_any_ready(standing: Standing, settings: AdmissionSettings, spent: Collection[str]) -> bool:
    """Whether a worker is about to run dry, those that are `spent` left out."""
    now_s = standing.now_s
    books = [w for w in standing.sources if w.name not in spent] if spent else standing.sources
    for w, o in zip(books, standing.looks(books), strict=True):
        if not w.prefilling:
            return True
        wait_s = abs(w.busy_until_s - now_s)
        may_be_ready = wait_s <= FEED_S or wait_s <= o.feed_s or w.tail_s < o.feed_s
        if may_be_ready and is_ready(w, settings, wait_s, o):
            return True
    return False


def is_ready(source: WorkerBook, settings: AdmissionSettings, wait_s: float, o: Outline) -> bool:
    """Whether a worker is about to run dry, or its next step to begin half empty: a wait for the step under way is none."""
    if not source.prefilling:
        return True
    near_s = max(FEED_S, o.feed_s)
    if wait_s > near_s and not (source.tail_s < o.feed_s and wait_s - source.tail_s <= near_s and source.shares_a_step):
        return False
    return source.accounts.prefills < settings.max_prefills_per_worker


def queue_price(waiting: WaitingQueue, servers: int, now_s: float) -> float:
    """Regret per second of a prefill worker's time: what one of those who wait for `servers` loses by starting so much later."""
    if len(waiting) < 2:
        return 0.0
    first = waiting.first()
    waited = (now_s - first.request.arrival_s) / first.targets.ttft_scale_s if first is not None else 0.0
    share = max(waited, waiting.work_s / servers / waiting.mean_target_s)
    return slope(share) / waiting.mean_target_s / servers


def is_hopeless(waiter: Waiter, settings: AdmissionSettings, ask: Ask, pair: Pair) -> bool:
    """It came in time, but its target cannot be met any more: others can still be."""
    target_s = ask.targets.ttft_s
    if target_s is None or not ask.targets.may_reject or waiter.attempt or waiter.is_best_effort or not settings.by_slo:
        return False
    return ask.waited_s + pair.first.wait_s + pair.first.prefill_s > target_s


def may_join(waiter: Waiter, settings: AdmissionSettings, ask: Ask, pair: Pair, now_s: float) -> bool:
    """Whether the decode side can take one more within the targets: its own, and for lower work those of the others."""
    sink = pair.second.worker
    if not ask.moves_kv or not settings.by_slo or waiter.attempt or not (sink.accounts.decodes or sink.accounts.coming):
        return True
    o = sink.outline(now_s)
    limit_s = math.inf
    if ask.targets.tpot_s is not None and not waiter.is_best_effort:
        if o.cost.alone_s(ask.context_tokens) < ask.targets.tpot_s:
            limit_s = ask.targets.tpot_s
    elif (held_s := sink.held_to_s(o)) is not None:
        limit_s = SPARE_BELOW * held_s
    return pair.second.tpot_s <= limit_s
