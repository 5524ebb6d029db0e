"""What the dispatcher decides, as values: grants, refusals, and for each the record of what was weighed and why. Pure.

Named tuples: several are made per decision, and a frozen dataclass takes four times as long to make.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from disagg.types import Request, Route


class Verdict(StrEnum):
    """How a request's time in the gateway's queue ended, or that it goes on."""

    GRANTED = "granted"
    QUEUED = "queued"
    REJECTED = "rejected"


class Prediction(NamedTuple):
    """What a route is expected to give.

    `ttft_s`: first token minus arrival; its parts are `queue_s` (arrival to the start of the prefill, on the gateway and on the worker) and
    `prefill_s`. `transfer_s`: what the KV's way adds before the second token. `tpot_s`: mean seconds per further token.
    `output_tokens`: the answer's expected length; `kv_tokens`: reserved on the decode side for context and answer.
    `cached_tokens`: context tokens that the prefill worker is expected to hold already.
    """

    ttft_s: float
    tpot_s: float
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    output_tokens: int = 0
    kv_tokens: int = 0
    cached_tokens: int = 0


class Candidate(NamedTuple):
    """A pair that was weighed. `cost`: lower is better (policy/router.py says in what); `note`: what speaks against it, if anything."""

    prefill: str
    decode: str
    prediction: Prediction
    cost: float
    note: str = ""


class DecisionRecord(NamedTuple):
    """One decision, complete enough to be explained later. `at_s`: monotonic instant; `waited_s`: since arrival.

    `candidates`: the best pairs, the chosen one first when there is one. `retry_after_s`: with a refusal.
    """

    request_id: str
    at_s: float
    waited_s: float
    verdict: Verdict
    reason: str
    slo_class: str
    priority: int
    context_tokens: int
    max_tokens: int
    ttft_target_s: float | None
    tpot_target_s: float | None
    queued_requests: int
    attempt: int = 0
    candidates: tuple[Candidate, ...] = ()
    retry_after_s: float | None = None

    @property
    def chosen(self) -> Candidate | None:
        """The pair that was granted."""
        return self.candidates[0] if self.verdict is Verdict.GRANTED and self.candidates else None


class Grant(NamedTuple):
    """Start `request` on `route` now; its room is reserved until `Dispatcher.end(key)`.

    `admitted`: what was predicted when the request came; equal to `prediction` when it did not wait.
    """

    key: int
    request: Request
    route: Route
    prediction: Prediction
    record: DecisionRecord
    admitted: Prediction


class Refusal(NamedTuple):
    """Refuse the request. `no_worker`: for want of a live worker in a pool, not of room or speed."""

    key: int
    request: Request
    reason: str
    retry_after_s: float
    record: DecisionRecord
    no_worker: bool = False


class Decisions(NamedTuple):
    """What to do now, in order. `wake_at_s`: look again at this instant at the latest (None: only when something happens)."""

    grants: tuple[Grant, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    wake_at_s: float | None = None
