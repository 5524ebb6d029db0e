"""Continuous batching as vLLM v1 does it, with chunked prefill and preemption by recomputation. Pure.

One number per sequence, `num_computed`, replaces two phases: a sequence wants `num_tokens - num_computed` more tokens computed, many
while its prompt is new, one while it decodes. Each step hands out at most `max_num_batched_tokens`: first to running sequences in their
order, then to waiting ones, first come first served; where others want some too, one sequence gets `long_prefill_tokens` of them at most
(less beside decodes where mixed steps are bounded, see mixed_step.py). When the cache is full, the newest running sequence is preempted:
its blocks are freed, it goes to the front of the waiting ones and computes all its tokens again.

    waiting --admit--> running --remove--> gone          blocks: running sequences hold them, and those that load or have loaded
     | ^----preempt-----' ^
     '-> loading -> loaded'                              loads of several steps (simulated_loads.py); who has loaded goes first

With a prefix cache (simulated_prefix.py) the blocks of known prefixes are shared: a sequence starts behind what is cached, and what it
fills becomes cached. `free_blocks` counts the cached blocks that nobody holds: their room is given away when it is needed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.engine.mixed_step import UNBOUNDED_TOKENS, long_prompt_tokens, tokens_in_time
from disagg.engine.simulated_loads import Loads
from disagg.engine.simulated_prefix import PrefixCache
from disagg.policy.step_cost import StepCost


@dataclass(slots=True, eq=False)
class Sequence:
    """What the scheduler needs to know of one request. `num_tokens`: all tokens known, context and output.

    `num_ready`: tokens whose KV arrives from outside at admission (a decode leg), instead of being computed; forgotten on preemption, and
    when the prefix cache no longer has the first `num_awaited` of them, which do not arrive.
    `prefix`: identities of the prompt's full units, for the prefix cache; the first `num_units` are held there. `num_cached`: tokens
    that the prefix cache gave at the latest admission. `num_blocks` counts held units too.
    """

    num_tokens: int
    num_ready: int = 0
    num_computed: int = 0
    num_blocks: int = 0
    is_running: bool = False
    prefix: tuple[int, ...] = field(default=(), kw_only=True)
    num_units: int = field(default=0, kw_only=True)
    num_cached: int = field(default=0, kw_only=True)
    num_awaited: int = field(default=0, kw_only=True)


class Scheduled(NamedTuple):  # one per request and step, and a frozen dataclass takes four times as long to make
    """`num_tokens` tokens of `sequence`, from its `num_computed` on, are computed in this step."""

    sequence: Sequence
    num_tokens: int


class Scheduler:
    """Owner of the queue and of the block count. Never awaits; not thread-safe."""

    def __init__(
        self,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        num_blocks: int,
        block_tokens: int,
        prefixes: PrefixCache | None = None,
        long_prefill_tokens: int = 0,
        mixed_step_tokens: int | None = None,
        mixed_step_s: float = 0.0,
        cost: StepCost | None = None,
        loads: Loads[Sequence] | None = None,
    ) -> None:
        """`mixed_step_tokens`, `mixed_step_s`: tokens and seconds of a step in which somebody decodes, at most; every decode gets its
        token in any case. `cost`: what steps take, for `mixed_step_s` (0: no such limit).

        `loads`: what loading KV takes; None: nothing.
        """
        self.max_num_batched_tokens = max_num_batched_tokens
        self.mixed_step_tokens = min(mixed_step_tokens or 0, max_num_batched_tokens)  # 0: as others
        self.mixed_step_s = mixed_step_s
        self._cost = cost
        self.max_num_seqs = max_num_seqs
        self._left_by_one = max(0, max_num_batched_tokens - long_prefill_tokens) if long_prefill_tokens else 0
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.prefixes = prefixes
        self.free_blocks = num_blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.loads = loads
        self._loaded: deque[Sequence] = deque()
        self._is_busy = False  # the latest step had requests

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.loads or self._loaded)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, also for their loads and after them."""
        return len(self.waiting) + len(self._loaded) + (len(self.loads) if self.loads is not None else 0)

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
        elif sequence.num_blocks and self.loads is not None:  # it loads, or has loaded
            self.loads.give_up(sequence)
            if sequence in self._loaded:
                self._loaded.remove(sequence)
            self._free(sequence)

    def schedule(self) -> list[Scheduled]:
        """The next step, in order; the caller adds each `num_tokens` to its `num_computed`, and calls `load`.

        Not empty while there is work, unless all of it waits for its loads.
        """
        budget, most_of_one = self._limits()
        plan: list[Scheduled] = []
        preempted = False
        index, size = 0, self.block_tokens
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            num_tokens = sequence.num_tokens - sequence.num_computed
            if num_tokens > 1:
                num_tokens = min(num_tokens, budget, most_of_one)
            end = sequence.num_computed + num_tokens
            if end > sequence.num_blocks * size or sequence.prefix:  # a decode mostly has its block already
                while sequence.is_running and not self._allocate(sequence, end):
                    self._preempt(self.running[-1])
                    preempted = True
                if not sequence.is_running:
                    break
            plan.append(Scheduled(sequence, num_tokens))
            budget -= num_tokens
            index += 1
        if not preempted or not plan:  # who has loaded holds blocks, and may have kept the only one that ran from going on
            plan += self._admit(budget, most_of_one)
        self._is_busy = bool(plan)
        return plan

    def load(self, step_s: float) -> float:
        """The step that was scheduled loads, too: by how many seconds that lengthens it. `step_s`: without; 0 where it is empty."""
        if self.loads is None:
            return 0.0
        more_s, ended = self.loads.step(step_s)
        self._loaded += ended
        return more_s

    def cached_tokens(self, prefix: tuple[int, ...], num_tokens: int) -> int:
        """Tokens of a context of `num_tokens` that the prefix cache would give now; at least one is always computed."""
        return self._usable_units(prefix, num_tokens) * self._unit_tokens

    def steady_steps(self, most: int) -> int:
        """How many of the next steps, up to `most`, each compute one token of every running sequence and change nothing else.

        0 when already the next one does not: a prompt is under way, somebody can be admitted or must be preempted. The caller sees to it
        that no sequence ends before the last of them.
        """
        running = self.running
        if not running or len(running) > self.max_num_batched_tokens or self.loads or self._loaded:
            return 0
        for sequence in running:
            if sequence.num_tokens - sequence.num_computed != 1:
                return 0
        if self.waiting and len(running) < self.max_num_seqs:
            limit, most_of_one = self._limits()
            if limit > len(running) and self._could_admit(self.waiting[0], limit - len(running), most_of_one):
                return 0
        if len(running) * (most // self.block_tokens + 1) <= self.free_blocks or self._blocks_for(most) <= self.free_blocks:
            return most
        low, high = 0, most  # the last count that has room, the first one known to have none
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._blocks_for(middle) <= self.free_blocks else (low, middle)
        return low

    def advance(self, steps: int) -> None:
        """Take `steps` steady steps at once: each running sequence computes a token and gets a new one in each of them."""
        size = self.block_tokens
        for sequence in self.running:
            sequence.num_computed += steps
            sequence.num_tokens += steps
            more = -(-sequence.num_computed // size) - sequence.num_blocks
            if more > 0:
                sequence.num_blocks += more
                self.free_blocks -= more
        self._make_room()

    def assert_empty(self) -> None:
        """No sequence is left and every block is free."""
        assert not self.running, f"{len(self.running)} sequences still run"
        assert not self.waiting, f"{len(self.waiting)} sequences still wait"
        assert not self.loads, f"{len(self.loads or ())} sequences still load"
        assert not self._loaded, f"{len(self._loaded)} sequences have loaded and wait"
        assert self.free_blocks == self.num_blocks, f"{self.num_blocks - self.free_blocks} blocks leaked"
        if self.prefixes is not None:
            self.prefixes.assert_unheld()

    def _limits(self) -> tuple[int, int]:
        """Tokens of the next step, and of one sequence in it. Beside decodes prompts get fewer, so that it stays as short as those want."""
        whole, kept = self.max_num_batched_tokens, self._left_by_one
        if self.mixed_step_tokens or self.mixed_step_s:
            decoding = [s for s in self.running if s.num_tokens - s.num_computed == 1 and s.num_computed > 0]
            if decodes := len(decoding):
                limit = min(whole, max(self._mixed_limit(decoding), decodes))
                return limit, min(whole - kept, long_prompt_tokens(limit, decodes, self._prompts())) if kept else limit
        return whole, whole - kept if len(self.running) + len(self.waiting) > 1 else whole

    def _mixed_limit(self, decoding: list[Sequence]) -> int:
        limit = self.mixed_step_tokens or UNBOUNDED_TOKENS
        if not self.mixed_step_s or self._cost is None or len(decoding) == len(self.running) + len(self.waiting):
            return limit
        context = sum([s.num_computed for s in decoding])
        cached = max([s.num_computed for s in self.running if s.num_tokens - s.num_computed > 1], default=0)
        return min(limit, tokens_in_time(self._cost, self.mixed_step_s, len(decoding), context, cached))

    def _prompts(self) -> list[int]:
        """Tokens that each prompt still wants computed, under way or waiting."""
        running = [left for s in self.running if (left := s.num_tokens - s.num_computed) > 1 or not s.num_computed]
        return running + [s.num_tokens - s.num_ready for s in self.waiting]

    @property
    def _unit_tokens(self) -> int:
        return self.prefixes.unit_blocks * self.block_tokens if self.prefixes is not None else 0

    def _usable_units(self, prefix: tuple[int, ...], num_tokens: int) -> int:
        """Cached units that a context of `num_tokens` may start behind."""
        if self.prefixes is None or not prefix:
            return 0
        return min(self.prefixes.match(prefix), (num_tokens - 1) // self._unit_tokens)

    def _could_admit(self, sequence: Sequence, budget: int, most_of_one: int) -> bool:
        """Whether the first chunk of a waiting sequence, of so many tokens at most, has room. Leaves no trace in the prefix cache."""
        units = self._usable_units(sequence.prefix, sequence.num_tokens)
        start = _start(sequence, units * self._unit_tokens)
        num_tokens = start + min(sequence.num_tokens - start, budget, most_of_one)
        blocks = -(-num_tokens // self.block_tokens)
        if units and self.prefixes is not None:
            blocks -= units * self.prefixes.unit_blocks - self.prefixes.evictable_among(sequence.prefix[:units])
        return blocks <= self.free_blocks

    def _blocks_for(self, steps: int) -> int:
        size = self.block_tokens
        return sum(-(-(s.num_computed + steps) // size) - s.num_blocks for s in self.running)

    def _make_room(self) -> None:
        """Cached units that nobody holds give way to blocks that somebody does."""
        if self.prefixes is not None:
            self.prefixes.evict_to(self.free_blocks)

    def _admit(self, budget: int, most_of_one: int) -> list[Scheduled]:
        plan: list[Scheduled] = []
        while self._loaded and budget > 0 and len(self.running) < self.max_num_seqs:
            plan.append(self._begin(self._loaded.popleft(), 1))
            budget -= 1
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if not self._could_admit(sequence, budget, most_of_one):
                break
            self.waiting.popleft()
            self._hold_prefix(sequence)
            start = _start(sequence, sequence.num_cached)
            if start < sequence.num_ready:
                sequence.num_ready = 0
            if self.loads is not None and sequence.num_ready > sequence.num_cached and self._waits_for_load(sequence, self.loads):
                continue
            num_tokens = min(sequence.num_tokens - start, budget, most_of_one)
            plan.append(self._begin(sequence, num_tokens))
            budget -= num_tokens
        return plan

    def _begin(self, sequence: Sequence, num_tokens: int) -> Scheduled:
        """It runs from now on; its first `num_tokens` have room."""
        start = _start(sequence, sequence.num_cached)
        has_room = self._allocate(sequence, start + num_tokens)
        assert has_room
        sequence.is_running = True
        sequence.num_computed = start
        self.running.append(sequence)
        return Scheduled(sequence, num_tokens)

    def _waits_for_load(self, sequence: Sequence, loads: Loads[Sequence]) -> bool:
        """Whether it must wait until its KV is loaded over several steps, which then begins; else it is loaded with this step."""
        num_tokens = sequence.num_ready - sequence.num_cached
        if not self._is_busy or loads.fits(num_tokens):
            loads.make(num_tokens)
            return False
        has_room = self._allocate(sequence, sequence.num_ready + 1)
        assert has_room
        loads.begin(sequence, num_tokens)
        return True

    def _allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give `sequence` blocks for `num_tokens` tokens in all; False, and nothing changed, when there are too few."""
        more = -(-num_tokens // self.block_tokens) - sequence.num_blocks
        if more > self.free_blocks:
            return False
        if more > 0:
            self.free_blocks -= more
            sequence.num_blocks += more
            self._make_room()
        if sequence.prefix:
            self._cache_filled(sequence, num_tokens)
        return True

    def _hold_prefix(self, sequence: Sequence) -> None:
        """Hold the cached units that a waiting sequence can start behind."""
        count = self._usable_units(sequence.prefix, sequence.num_tokens)
        if count and self.prefixes is not None:
            self.free_blocks -= self.prefixes.acquire(sequence.prefix[:count])
            sequence.num_units = count
            sequence.num_blocks = count * self.prefixes.unit_blocks
        sequence.num_cached = count * self._unit_tokens

    def _cache_filled(self, sequence: Sequence, num_tokens: int) -> None:
        """Units that are full once `num_tokens` tokens are computed become cached, as vLLM does when it allocates them."""
        if self.prefixes is None:
            return
        full = min(len(sequence.prefix), num_tokens // self._unit_tokens)
        while sequence.num_units < full:
            identity = sequence.prefix[sequence.num_units]
            if not self.prefixes.store(identity):  # a twin was first: share its unit, and give the own blocks back
                self.free_blocks += self.prefixes.unit_blocks - self.prefixes.acquire((identity,))
            sequence.num_units += 1

    def _let_go(self, sequence: Sequence) -> None:
        """Give all its blocks back; units stay cached."""
        own = sequence.num_blocks
        if sequence.num_units and self.prefixes is not None:
            own -= sequence.num_units * self.prefixes.unit_blocks
            self.free_blocks += self.prefixes.release(sequence.prefix[: sequence.num_units])
        self.free_blocks += own
        sequence.num_blocks = sequence.num_units = 0

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self._let_go(sequence)
        sequence.num_computed = sequence.num_ready = 0
        sequence.is_running = False


def _start(sequence: Sequence, num_cached: int) -> int:
    """The first token that an admitted sequence computes."""
    return max(sequence.num_ready, num_cached) if num_cached >= sequence.num_awaited else num_cached
