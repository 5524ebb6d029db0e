"""What follows from one worker's accounts and speed, as of an instant. Pure."""

from __future__ import annotations

from disagg.policy.step_cost import StepCost


class Outline:
    """Made anew when the worker's accounts or speed change, or when it has become old (`WorkerBook.outline`).

    `overhead_s`: what a first token takes beyond the steps. `decodes`, with contexts of `context_tokens` in all: what decodes there now;
    `step_s`: a step of those (of an empty worker: of the first request to come). `gap_s`: seconds per token once those that are coming
    are there too, prompts there lately included. `chunk_tokens`: prompt tokens that a step takes beside the decodes. `duty`: share of its
    time that prompts lately took from decoding, 0 to 0.95; `late_per_s`: steps too long for decoding, per second, each counted by how much
    too long it was. `fullness`: the part of its seats, or of its KV, that is taken, whichever is more of what it tells. `feed_s`: the work
    that makes a step worth its weight reads: so much stands ready. What few ask for is worked out when they do.
    """

    __slots__ = (
        "_mixed_s", "_most_tokens", "_whole_step_s", "at_s", "chunk_tokens", "context_tokens", "cost", "decodes", "duty", "feed_s",
        "free_kv_tokens", "free_seats", "fullness", "gap_s", "late_per_s", "overhead_s", "step_s",
    )  # fmt: skip

    def __init__(
        self,
        at_s: float,
        cost: StepCost,
        overhead_s: float,
        decodes: int,
        context_tokens: float,
        step_s: float,
        chunk_tokens: int,
        most_tokens: int,
        free_kv_tokens: int,
        free_seats: int,
    ) -> None:
        """`most_tokens`: prompt tokens that a step takes while nobody decodes. `free_seats`: so many further requests run at once."""
        self.at_s = at_s
        self.cost = cost
        self.overhead_s = overhead_s
        self.decodes = decodes
        self.context_tokens = context_tokens
        self.step_s = self.gap_s = step_s
        self.chunk_tokens = chunk_tokens
        self.free_kv_tokens = free_kv_tokens
        self.free_seats = free_seats
        self.fullness = 0.0
        self.duty = self.late_per_s = 0.0
        self._most_tokens = most_tokens
        self._mixed_s: float | None = None
        self._whole_step_s: float | None = None
        worth = min(chunk_tokens, 2 * cost.ridge_tokens)
        self.feed_s = cost.step_s(worth, 0, decodes, context_tokens) if worth else 0.0

    @property
    def mixed_s(self) -> float:
        """A step as full of prompts as it gets beside the decodes."""
        if self._mixed_s is None:
            self._mixed_s = self.cost.prefill_s(self.chunk_tokens, 0, self.chunk_tokens, self.decodes, self.context_tokens)
        return self._mixed_s

    @property
    def whole_step_s(self) -> float:
        """A step as full of prompts as it gets while nobody decodes."""
        if self._whole_step_s is None:
            most = self._most_tokens
            self._whole_step_s = self.cost.step_s(most, most * most / 2, 0, 0)
        return self._whole_step_s
