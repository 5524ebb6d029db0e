"""The record of a decision, from what was weighed. Pure."""

from __future__ import annotations

from disagg.policy.decision import Candidate, DecisionRecord, Verdict
from disagg.policy.router import Pair
from disagg.policy.waiting import Waiter


def record_of(
    waiter: Waiter,
    num_waiting: int,
    now_s: float,
    verdict: Verdict,
    reason: str,
    candidates: tuple[Candidate, ...],
    retry_s: float | None = None,
) -> DecisionRecord:
    """What became of `waiter`, with `num_waiting` requests in the queue after it."""
    request, targets = waiter.request, waiter.targets
    return DecisionRecord(  # by place, as in candidate()
        request.request_id,
        now_s,
        max(0.0, now_s - request.arrival_s),
        verdict,
        reason,
        request.slo_class,
        request.priority,
        request.num_context_tokens,
        request.sampling.max_tokens,
        targets.ttft_s,
        targets.tpot_s,
        num_waiting,
        waiter.attempt,
        candidates,
        retry_s,
    )


def describe(pair: Pair) -> str:
    """Why this pair, in a few words."""
    first, second = pair.first, pair.second
    p, d = first.worker, second.worker
    ahead = f"starts in {first.wait_s * 1e3:.0f} ms behind {len(p.prefilling)} prompts" if p.prefilling else "idle"
    if pair.is_colocated:
        return f"{p.name} alone: {ahead}, {p.accounts.decodes} decoding there"
    decoding = d.accounts.decodes + d.accounts.coming
    return f"{p.name}: {ahead}; {d.name}: {decoding} decoding, {max(0, d.state.total_kv_tokens - d.accounts.kv_tokens)} KV tokens free"
