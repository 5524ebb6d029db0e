"""The frames of one outbox entry: staged by its engine in some order, and sent to each reader in that order, without what it has."""

from __future__ import annotations

from disagg.errors import EngineError
from disagg.kv.copy import digest
from disagg.kv.frames import Coverage, End, Frame, Opened
from disagg.kv.layout import KvLayout
from disagg.types import Transfer


class Staged:
    """The frames of `transfer` so far; its entry has geometry `layout`."""

    def __init__(self, transfer: Transfer, layout: KvLayout, epoch: str) -> None:
        self.layout = layout
        self.frames: list[Frame] = []
        self._transfer = transfer
        self._epoch = epoch
        self._coverage = Coverage(layout, transfer.num_tokens)

    @property
    def is_complete(self) -> bool:
        return self._coverage.is_complete

    @property
    def progress(self) -> str:
        """For messages: `3 of 7 blocks`."""
        return f"{self._coverage.num_blocks} of {self._coverage.total_blocks} blocks"

    def add(self, rank: int, first_block: int, num_blocks: int, digest: int) -> int:
        """A frame is written; returns its bytes, 0 when it was staged before.

        Raises EngineError for a range that cannot be a frame, or that overlaps what is staged in part.
        """
        t = self._transfer
        fault = self._coverage.fault(rank, first_block, num_blocks)
        present = 0 if fault else self._coverage.count(rank, first_block, num_blocks)
        if fault is None and 0 < present < num_blocks:
            fault = f"{present} of blocks {first_block}..{first_block + num_blocks - 1} of rank {rank} are staged already"
        if fault is not None:
            raise EngineError(f"transfer {t.transfer_id}: cannot stage: {fault}")
        if present:
            return 0
        self._coverage.add(rank, first_block, num_blocks)
        num_bytes = num_blocks * self.layout.slab_bytes
        seq = len(self.frames)
        self.frames.append(Frame(t.transfer_id, self._epoch, t.attempt, seq, rank, first_block, num_blocks, digest, num_bytes))
        return num_bytes

    def opened(self, box_offset: int) -> Opened:
        """What a reader is told first."""
        t = self._transfer
        return Opened(t.transfer_id, self._epoch, t.attempt, t.token_hash, t.num_tokens, t.form, self.layout, box_offset)

    def end(self, num_frames: int) -> End:
        """What a reader is told when it was sent all."""
        return End(self._transfer.transfer_id, num_frames)

    def start(self, frame: Frame) -> int:
        """Byte offset of a frame in the entry."""
        return self.layout.offset(self._transfer.num_tokens, frame.rank, frame.first_block)


class Sending:
    """How far one reader is, who lacks the tokens from `first_token` on. `memory`: the entry's bytes."""

    def __init__(self, staged: Staged, memory: memoryview, first_token: int) -> None:
        self._staged = staged
        self._memory = memory
        self._first_block = first_token // staged.layout.block_tokens
        self._num_seen = 0  # of the entry's frames
        self._num_sent = 0

    def next(self) -> Frame | End | None:
        """The next frame or, after all of them, End; None while there is none."""
        while self._num_seen < len(self._staged.frames):
            self._num_seen += 1
            frame = self._wanted(self._staged.frames[self._num_seen - 1])
            if frame is not None:
                self._num_sent += 1
                return frame
        return self._staged.end(self._num_sent) if self._staged.is_complete else None

    def payload(self, frame: Frame) -> memoryview:
        """The bytes of a frame that `next` gave."""
        start = self._staged.start(frame)
        return self._memory[start : start + frame.num_bytes]

    def _wanted(self, frame: Frame) -> Frame | None:
        """What of a staged frame the reader lacks, as the next frame to send."""
        first = max(frame.first_block, self._first_block)
        num_blocks = frame.first_block + frame.num_blocks - first
        if num_blocks <= 0:
            return None
        if num_blocks == frame.num_blocks:
            return frame if frame.seq == self._num_sent else frame._replace(seq=self._num_sent)
        num_bytes = num_blocks * self._staged.layout.slab_bytes
        rest = frame._replace(seq=self._num_sent, first_block=first, num_blocks=num_blocks, num_bytes=num_bytes)
        return rest._replace(digest=digest(self.payload(rest)))
