"""May a request enter now, wait, or not at all? Pure; every answer says why.

decide -> Admit(route)          room now, and nobody waits who goes before it
       -> Queue                 room later
       -> Reject(retry_after)   the queue is full
       raises InvalidRequestError when no worker could ever hold it
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from disagg.config import AdmissionSettings
from disagg.errors import InvalidRequestError
from disagg.policy.router import DEFAULT_PREFILL_S_PER_TOKEN, NoRoute, pick
from disagg.policy.view import PoolView, QueueView
from disagg.types import Mode, Request, Route

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Admit:
    """Start on `route`."""

    route: Route

    @property
    def reason(self) -> str:
        return self.route.reason


@dataclass(frozen=True, slots=True)
class Queue:
    """Wait at the gateway. `no_worker`: for a worker to come, not for one to finish."""

    reason: str
    no_worker: bool = False


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse; the same request may be admitted after `retry_after_s`."""

    reason: str
    retry_after_s: float


def decide(
    request: Request, view: PoolView, queue: QueueView, settings: AdmissionSettings, now_s: float, avoid: Container[str] = ()
) -> Admit | Queue | Reject:
    """Admit, queue or reject a request that just came. Raises InvalidRequestError when it is larger than any worker."""
    check_fits(request, view)
    if request.deadline_s is not None and request.deadline_s <= now_s:
        return Reject("its deadline is over", retry_after_s(view, queue))
    if queue.ahead == 0:
        choice = pick(request, view, settings, avoid)
        if isinstance(choice, Route):
            return Admit(choice)
    else:
        choice = NoRoute(f"{queue.ahead} requests go before it", no_worker=view.missing_role is not None)
    if queue.requests >= settings.max_queued_requests:
        return Reject(f"{choice.reason}, and {queue.requests} requests wait already", retry_after_s(view, queue))
    if queue.requests and queue.tokens + request.num_context_tokens > settings.max_queued_tokens:
        return Reject(f"{choice.reason}, and {queue.tokens} prompt tokens wait already", retry_after_s(view, queue))
    return Queue(choice.reason, choice.no_worker)


def retry_after_s(view: PoolView, queue: QueueView) -> float:
    """When the queue of now will have been prefilled, by the speed learned so far; between 1 and 60 s."""
    speeds = [w.prefill_s_per_token or DEFAULT_PREFILL_S_PER_TOKEN for w in view.prefill_workers]
    if not speeds:
        return MIN_RETRY_AFTER_S
    tokens = queue.tokens + sum(w.waiting_tokens for w in view.prefill_workers)
    tokens_per_s = sum(1.0 / s for s in speeds)
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, tokens / tokens_per_s))


def check_fits(request: Request, view: PoolView) -> None:
    """Raise InvalidRequestError when no live worker could hold the request even if it were alone there.

    Nothing is said of a pool without live workers.
    """
    context = request.num_context_tokens
    whole = context + max(0, request.remaining_tokens)
    largest = max((w.state.total_kv_tokens for w in view.decode_workers), default=0)
    if largest and context > largest:
        expected = f"at most {largest} tokens, the largest KV cache of a worker"
        raise InvalidRequestError(field="prompt", value=f"{context} tokens", expected=expected)
    if largest and whole > largest:
        raise InvalidRequestError(
            field="max_tokens",
            value=request.sampling.max_tokens,
            expected=f"at most {largest - request.num_prompt_tokens} with this prompt (the largest KV cache of a worker: {largest} tokens)",
        )
    if request.remaining_tokens > 1 and view.mode is Mode.DISAGG:
        _check_boxes(context, view)


def _check_boxes(context: int, view: PoolView) -> None:
    per_token = view.model.kv_bytes_per_token
    for box, sizes in (
        ("outbox", [w.state.outbox_total_bytes for w in view.prefill_workers]),
        ("inbox", [w.state.inbox_total_bytes for w in view.decode_workers]),
    ):
        largest = max(sizes, default=0)
        if largest and context * per_token > largest:
            raise InvalidRequestError(
                field="prompt",
                value=f"{context} tokens",
                expected=f"at most {largest // per_token} tokens: the largest {box} of a worker holds {largest} bytes (kv.{box}_gib)",
            )
