"""What the policy sees: frozen snapshots of the pools and of the gateway's queue, and how much of them a request needs.

A snapshot joins what a worker says of itself (`EngineState`, a little old) with what this gateway has given it since
(exact). `tokens` are context or KV tokens, `bytes` are bytes of KV in a box.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.types import EngineState, Mode, ModelInfo, Request, Role

EXPECTED_OUTPUT_TOKENS = 512  # an answer is expected to be no longer than this; a longer one may cost a preemption, never a wrong token


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at one instant.

    The fields after `state` count this gateway's own requests: `prefills` and `prefill_tokens` until the first token,
    `outbox_bytes`/`inbox_bytes` until their KV has arrived, `reserved_kv_tokens` and `running_requests` until they end.
    `unseen_kv_tokens` is the share of `reserved_kv_tokens` that `state` cannot show yet, because their decode has not begun.
    `prefill_s_per_token` is learned from `prefill_tokens_seen` tokens, the latest at `prefill_seen_s` (all 0 while nothing is known).
    `last_used_s` is the instant of the last route to it.
    """

    name: str
    role: Role
    host_id: str
    state: EngineState
    prefills: int = 0
    prefill_tokens: int = 0
    outbox_bytes: int = 0
    inbox_bytes: int = 0
    running_requests: int = 0
    reserved_kv_tokens: int = 0
    unseen_kv_tokens: int = 0
    prefill_s_per_token: float = 0.0
    prefill_tokens_seen: float = 0.0
    prefill_seen_s: float = 0.0
    last_used_s: float = 0.0

    @property
    def free_kv_tokens(self) -> int:
        """KV tokens that a new request may count on: by our own accounts and by what the worker says, whichever is less."""
        by_account = self.state.total_kv_tokens - self.reserved_kv_tokens
        by_report = self.state.free_kv_tokens - self.unseen_kv_tokens
        return min(by_account, by_report)

    @property
    def used_kv_share(self) -> float:
        """0 when empty, 1 when full."""
        total = self.state.total_kv_tokens
        return 1.0 - max(0, self.free_kv_tokens) / total if total else 0.0

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that a new prefill would wait for."""
        return max(self.prefill_tokens, self.state.waiting_tokens)


@dataclass(frozen=True, slots=True)
class PoolView:
    """All live workers at the monotonic instant `at_s`, and the model that they serve."""

    at_s: float
    mode: Mode
    model: ModelInfo
    workers: tuple[WorkerView, ...]

    def of(self, role: Role) -> tuple[WorkerView, ...]:
        """The live workers of one role."""
        return tuple(w for w in self.workers if w.role is role)

    @property
    def prefill_workers(self) -> tuple[WorkerView, ...]:
        """Workers that may take the first leg."""
        return self.of(Role.COLOCATED if self.mode is Mode.COLOCATED else Role.PREFILL)

    @property
    def decode_workers(self) -> tuple[WorkerView, ...]:
        """Workers that may take the second leg."""
        return self.of(Role.COLOCATED if self.mode is Mode.COLOCATED else Role.DECODE)

    @property
    def missing_role(self) -> Role | None:
        """A role that the mode needs and that no live worker has."""
        needed = (Role.COLOCATED,) if self.mode is Mode.COLOCATED else (Role.PREFILL, Role.DECODE)
        present = {w.role for w in self.workers}
        return next((role for role in needed if role not in present), None)


@dataclass(frozen=True, slots=True)
class QueueView:
    """The gateway's queue at one instant: how many wait, their context tokens, and how many of them go before the request in question."""

    requests: int = 0
    tokens: int = 0
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """What one request takes from its workers: `kv_tokens` on the decode side for context and expected answer, `box_bytes` in each box."""

    context_tokens: int
    kv_tokens: int
    box_bytes: int


def need_of(request: Request, model: ModelInfo) -> Need:
    """The room that a request takes. The answer is expected to run to `max_tokens`, at most EXPECTED_OUTPUT_TOKENS."""
    context = request.num_context_tokens
    output = min(request.remaining_tokens, EXPECTED_OUTPUT_TOKENS)
    return Need(context, context + output, context * model.kv_bytes_per_token)
