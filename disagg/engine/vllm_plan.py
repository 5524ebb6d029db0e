"""What each engine step must copy: decided on the scheduler's side of the connector, pure block arithmetic.

Writes (prefill): after a step, every block that the request has filled is final, except the last one of the context, which is final
when the whole context is computed. Each block is staged once, in order; blocks that a prefix cache already held go with the first
chunk. A preempted request is recomputed into other blocks; what was staged before stays staged.

Reads (decode): the inbox is complete before the request enters the engine. Its request is context + first token, so the engine computes
exactly one token, and matched are the context's tokens that the local prefix cache lacks. Loaded once: a preempted request finds its
entry consumed and recomputes. An entry is ended exactly once, also when nothing had to be loaded or the request was aborted before it ran.
A load that others would have to wait for is a `Load`: its request waits while the ranks copy a little of it in each step (vllm_loads.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg.kv.api import InboxEntry, OutboxEntry
from disagg.kv.form import BLOCKS
from disagg.kv.frames import pack_layout, unpack_layout
from disagg.kv.layout import KvLayout

WRITE, READ = "write", "read"


def transfer_params(entry: InboxEntry | OutboxEntry, first_token: int) -> list[Any]:
    """What a request's transfer parameters must say of its entry, for `Planner.add`. The geometry only where it is not the cache's."""
    geometry = None if entry.form == BLOCKS else list(pack_layout(entry.layout))
    return [entry.transfer_id, entry.offset, entry.num_tokens, first_token, entry.form, geometry]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy engine blocks `block_ids` to or from blocks [first_block, ...) of the entry at `offset` of its box.

    `num_tokens`: context tokens of the entry, which give its shape, from `first_token` on. `form` and `entry` are the entry's own form and
    geometry; `entry` None: the cache's.
    """

    transfer_id: str
    offset: int
    num_tokens: int
    first_block: int
    block_ids: tuple[int, ...]
    first_token: int = 0
    form: str = BLOCKS
    entry: KvLayout | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """A copy that is made over several steps; engine request `request_id` waits for it."""

    request_id: str
    copy: Copy


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work on the boxes: loads before the forward pass, stages after it, then the ends.

    `begun_loads` begin with this step; `given_up`: requests that ended meanwhile, whose loads may have ended, too.
    """

    loads: tuple[Copy, ...] = ()
    begun_loads: tuple[Load, ...] = ()
    given_up: tuple[str, ...] = ()
    stages: tuple[Copy, ...] = ()
    ended_writes: tuple[str, ...] = ()
    ended_reads: tuple[str, ...] = ()


@dataclass(slots=True)
class _Transfer:
    """One request's transfer. `next_block`: blocks staged so far (writes).

    `consumed`: loaded, being loaded, or found unneeded (reads). `sliced`: its load was begun as one of several steps.
    """

    transfer_id: str
    offset: int
    num_tokens: int
    first_token: int = 0
    form: str = BLOCKS
    entry: KvLayout | None = None
    next_block: int = 0
    consumed: bool = False
    sliced: bool = False

    def copy(self, first_block: int, block_ids: Sequence[int]) -> Copy:
        ids = tuple(block_ids)
        return Copy(self.transfer_id, self.offset, self.num_tokens, first_block, ids, self.first_token, self.form, self.entry)


@dataclass(slots=True)
class Planner:
    """State of all transfers of one engine, by engine request id. `block_tokens`: tokens per cache block."""

    block_tokens: int
    _writes: dict[str, _Transfer] = field(default_factory=dict)
    _reads: dict[str, _Transfer] = field(default_factory=dict)
    _loads: list[Copy] = field(default_factory=list)
    _begun_loads: list[Load] = field(default_factory=list)
    _given_up: list[str] = field(default_factory=list)
    _ended_writes: list[str] = field(default_factory=list)
    _ended_reads: list[str] = field(default_factory=list)

    def add(self, request_id: str, params: Mapping[str, Any] | None) -> None:
        """A request entered the engine. `params`: {"write" | "read": what `transfer_params` made}, or none of ours."""
        for kind, known in ((WRITE, self._writes), (READ, self._reads)):
            if params and kind in params:
                transfer_id, offset, num_tokens, first_token, form, entry = params[kind]
                layout = None if entry is None else unpack_layout(bytes(entry))
                known[request_id] = _Transfer(transfer_id, offset, num_tokens, first_token, form, layout)

    def matched_tokens(self, request_id: str, num_computed_tokens: int) -> int:
        """Tokens that the inbox holds beyond the `num_computed_tokens` cached ones. No side effects.

        0 where there is a gap between the two: blocks were evicted after the pull had begun, and the context is computed from there.
        """
        read = self._reads.get(request_id)
        if read is None or read.consumed or num_computed_tokens < read.first_token:
            return 0
        return max(0, read.num_tokens - num_computed_tokens)

    def allocated(self, request_id: str, block_ids: Sequence[int], num_loaded_tokens: int, is_sliced: bool = False) -> None:
        """The request has `block_ids`, into which the last `num_loaded_tokens` tokens of its context are to be loaded.

        It runs in this step, or, `is_sliced`, when its load of several steps is over.
        """
        read = self._reads.get(request_id)
        if read is None or read.consumed:
            return
        read.consumed = True
        if num_loaded_tokens <= 0:
            self._ended_reads.append(read.transfer_id)
            return
        first = (read.num_tokens - num_loaded_tokens) // self.block_tokens
        copy = read.copy(first, block_ids[first : self._num_blocks(read.num_tokens)])
        if is_sliced:
            read.sliced = True
            self._begun_loads.append(Load(request_id, copy))
        else:
            self._loads.append(copy)

    def finished(self, request_id: str) -> None:
        """The request left the engine, by whatever way; it may never have run."""
        write = self._writes.pop(request_id, None)
        if write is not None:
            self._ended_writes.append(write.transfer_id)
        read = self._reads.pop(request_id, None)
        if read is not None and not read.consumed:
            self._ended_reads.append(read.transfer_id)
        elif read is not None and read.sliced:
            self._given_up.append(request_id)

    def step(self, computed: Iterable[tuple[str, int]], block_ids_of: Callable[[str], Sequence[int]]) -> StepPlan:
        """The plan of the step that is being scheduled. `computed`: (request id, tokens computed once the step has run)."""
        stages = []
        if self._writes:
            for request_id, num_computed in computed:
                write = self._writes.get(request_id)
                if write is None:
                    continue
                copy = self._stage(write, num_computed, block_ids_of, request_id)
                if copy is not None:
                    stages.append(copy)
                if write.next_block == self._num_blocks(write.num_tokens):
                    self._ended_writes.append(write.transfer_id)
                    del self._writes[request_id]
        plan = StepPlan(
            tuple(self._loads),
            tuple(self._begun_loads),
            tuple(self._given_up),
            tuple(stages),
            tuple(self._ended_writes),
            tuple(self._ended_reads),
        )
        for told in (self._loads, self._begun_loads, self._given_up, self._ended_writes, self._ended_reads):
            told.clear()
        return plan

    def _stage(self, write: _Transfer, num_computed: int, block_ids_of: Callable[[str], Sequence[int]], request_id: str) -> Copy | None:
        whole = num_computed >= write.num_tokens
        end = self._num_blocks(write.num_tokens) if whole else num_computed // self.block_tokens
        first = write.next_block
        if end <= first:
            return None
        write.next_block = end
        return write.copy(first, block_ids_of(request_id)[first:end])

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)
