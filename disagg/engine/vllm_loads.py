"""Loads from the inbox that take several engine steps, so that requests that are decoding do not wait for them.

A prompt's KV takes as long to copy as a whole decode step or longer. Copied at once, it shows as a gap in every running answer; copied a
little per step, its own request alone waits, in vLLM's state WAITING_FOR_REMOTE_KVS, until a rank has told the last block's step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace

from disagg.engine.load_room import DEVICE_BYTES_PER_S, PIECE_BYTES, SPREAD_STEPS
from disagg.engine.vllm_memory import RankBoxes
from disagg.engine.vllm_plan import Copy, Load

logger = logging.getLogger(__name__)


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
            spent_s = max(time.perf_counter() - began_s, num_blocks * self._block_bytes / DEVICE_BYTES_PER_S)
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
