"""Loads from the inbox that take several engine steps, so that requests that are decoding do not wait for them.

A prompt's KV takes as long to copy as a whole decode step or longer. Copied at once, it shows as a gap in every running answer; copied a
little per step, its own request alone waits, in vLLM's state WAITING_FOR_REMOTE_KVS, until a rank has told the last block's step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from disagg.engine.vllm_memory import RankBoxes
from disagg.engine.vllm_plan import Copy, Load

logger = logging.getLogger(__name__)

STEP_SHARE = 0.08  # of a step's time is added to it
SPREAD_STEPS = 16  # a step copies at least so much that what waits now is over after about as many: what waits cannot grow without end
PIECE_BYTES = 2 << 20  # copied between two looks at the clock; less than this is not worth slicing either
_DEVICE_BYTES_PER_S = 16e9  # a GPU's copies end after the clock was read: at most what PCIe 4.0 x16 brings counts as done in the time
_HOST_BYTES_PER_S = 1e9  # what one core copies at least, while others use the memory, too


@dataclass(slots=True)
class LoadRoom:
    """Which loads are made at once beside running requests: those that all together lengthen the next step by `STEP_SHARE` at most.

    A load of several steps costs its request a step more than its copies take: the step that is scheduled next copies, and only the
    one after it computes. Where one step has time for all of it, that step computes with it, too.
    """

    on_host: bool  # the cache's memory; else a device's
    _taken_bytes: int = 0

    def fits(self, num_bytes: int, step_s: float) -> bool:
        """Whether a load has room in the step that is being scheduled. `step_s`: about how long it takes. No side effects."""
        bytes_per_s = _HOST_BYTES_PER_S if self.on_host else _DEVICE_BYTES_PER_S
        return num_bytes <= max(PIECE_BYTES, STEP_SHARE * step_s * bytes_per_s - self._taken_bytes)

    def take(self, num_bytes: int) -> None:
        """The step has one more load."""
        self._taken_bytes += num_bytes

    def clear(self) -> None:
        """The step is scheduled."""
        self._taken_bytes = 0


class RankLoads:
    """One rank's loads: those of this step, and those under way, first come first served.

    `block_bytes`: bytes of one cache block over all of the rank's layers.
    """

    def __init__(self, boxes: RankBoxes, block_bytes: int) -> None:
        self._boxes = boxes
        self._block_bytes = block_bytes
        self._piece_blocks = max(1, PIECE_BYTES // block_bytes)
        self._loads: dict[str, Copy] = {}  # what is left of each, by engine request id, oldest first
        self._ended: list[tuple[str, Copy]] = []
        self._failed_blocks: set[int] = set()

    def load(self, copies: Iterable[Copy]) -> None:
        """Copy at once: this step computes with it."""
        for copy in copies:
            if self._is_possible(copy):
                self._boxes.load([copy])

    def begin(self, loads: Iterable[Load]) -> None:
        """Take on what a step's plan begins."""
        for load in loads:
            if self._is_possible(load.copy):
                self._loads[load.request_id] = load.copy
            else:
                self._ended.append((load.request_id, load.copy))

    def _is_possible(self, copy: Copy) -> bool:
        """Whether the copy lies in the inbox. If not, its blocks fail, and with them its request alone."""
        if self._boxes.can_load(copy):
            return True
        logger.error("transfer %s does not lie in the inbox; its request fails", copy.transfer_id)
        self._failed_blocks.update(copy.block_ids)
        return False

    def give_up(self, request_ids: Iterable[str]) -> None:
        """These requests have ended. Their blocks may be used again once `take_ended` has told so; those of unknown ones may already."""
        for request_id in request_ids:
            copy = self._loads.pop(request_id, None)
            if copy is not None:
                self._ended.append((request_id, copy))

    def advance(self, budget_s: float) -> None:
        """Copy for about `budget_s` seconds, at least one piece, and at least a share of what is left."""
        began_s, num_blocks = time.perf_counter(), 0
        least_blocks = sum(len(copy.block_ids) for copy in self._loads.values()) // SPREAD_STEPS
        while self._loads:
            num_blocks += self._load_piece(*next(iter(self._loads.items())))
            spent_s = max(time.perf_counter() - began_s, num_blocks * self._block_bytes / _DEVICE_BYTES_PER_S)
            if spent_s >= budget_s and num_blocks >= least_blocks:
                return

    def _load_piece(self, request_id: str, copy: Copy) -> int:
        """Copy the first blocks of what is left of a load; returns how many."""
        now, later = copy.block_ids[: self._piece_blocks], copy.block_ids[self._piece_blocks :]
        self._boxes.load([replace(copy, block_ids=now)])
        if later:
            self._loads[request_id] = replace(copy, first_block=copy.first_block + len(now), block_ids=later)
        else:
            del self._loads[request_id]
            self._ended.append((request_id, copy))
        return len(now)

    def take_ended(self) -> list[tuple[str, Copy]]:
        """(request id, some part of its copy) of each load that ended since the last call, by whatever way: nothing is copied any more."""
        ended, self._ended = self._ended, []
        return ended

    def take_failed_blocks(self) -> set[int]:
        """Cache blocks that were not loaded though their request waits for them, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed
