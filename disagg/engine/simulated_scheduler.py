"""Continuous batching as vLLM v1 does it, with chunked prefill and preemption by recomputation. Pure.

One number per sequence, `num_computed`, replaces two phases: a sequence wants `num_tokens - num_computed` more tokens computed, many
while its prompt is new, one while it decodes. Each step hands out at most `max_num_batched_tokens`: first to running sequences in their
order, then to waiting ones, first come first served. When the cache is full, the newest running sequence is preempted: its blocks are
freed, it goes to the front of the waiting ones and computes all its tokens again.

    waiting --admit--> running --remove--> gone          blocks: only running sequences hold any
       ^-----preempt-----'
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Sequence:
    """What the scheduler needs to know of one request. `num_tokens`: all tokens known, context and output.

    `num_ready`: tokens whose KV arrives from outside at admission (a decode leg), instead of being computed; forgotten on preemption.
    """

    num_tokens: int
    num_ready: int = 0
    num_computed: int = 0
    num_blocks: int = 0
    is_running: bool = False


@dataclass(frozen=True, slots=True)
class Scheduled:
    """`num_tokens` tokens of `sequence`, from its `num_computed` on, are computed in this step."""

    sequence: Sequence
    num_tokens: int


class Scheduler:
    """Owner of the queue and of the block count. Never awaits; not thread-safe."""

    def __init__(self, *, max_num_batched_tokens: int, max_num_seqs: int, num_blocks: int, block_tokens: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.free_blocks = num_blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the whole cache holds; no sequence may ever need more."""
        return self.num_blocks * self.block_tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It must fit the empty cache, or it would wait for ever."""
        assert sequence.num_tokens <= self.capacity_tokens
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is, and free its blocks. Idempotent."""
        if sequence.is_running:
            self.running.remove(sequence)
            self._free(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Scheduled]:
        """The next step, in order; the caller adds each `num_tokens` to its `num_computed`. Not empty while there is work."""
        budget = self.max_num_batched_tokens
        plan: list[Scheduled] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            num_tokens = min(sequence.num_tokens - sequence.num_computed, budget)
            while sequence.is_running and not self._allocate(sequence, sequence.num_computed + num_tokens):
                self._preempt(self.running[-1])
                preempted = True
            if not sequence.is_running:
                break
            plan.append(Scheduled(sequence, num_tokens))
            budget -= num_tokens
            index += 1
        if not preempted:
            plan += self._admit(budget)
        return plan

    def assert_empty(self) -> None:
        """No sequence is left and every block is free."""
        assert not self.running, f"{len(self.running)} sequences still run"
        assert not self.waiting, f"{len(self.waiting)} sequences still wait"
        assert self.free_blocks == self.num_blocks, f"{self.num_blocks - self.free_blocks} blocks leaked"

    def _admit(self, budget: int) -> list[Scheduled]:
        plan: list[Scheduled] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            num_tokens = min(sequence.num_tokens - sequence.num_ready, budget)
            if not self._allocate(sequence, sequence.num_ready + num_tokens):
                break
            self.waiting.popleft()
            sequence.is_running = True
            sequence.num_computed = sequence.num_ready
            self.running.append(sequence)
            plan.append(Scheduled(sequence, num_tokens))
            budget -= num_tokens
        return plan

    def _allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give `sequence` blocks for `num_tokens` tokens in all; False, and nothing changed, when there are too few."""
        more = -(-num_tokens // self.block_tokens) - sequence.num_blocks
        if more > self.free_blocks:
            return False
        if more > 0:
            self.free_blocks -= more
            sequence.num_blocks += more
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self.free_blocks += sequence.num_blocks
        sequence.num_blocks = sequence.num_computed = sequence.num_ready = 0
        sequence.is_running = False
