"""Outbox and inbox entries in plain memory, strict about their contract (kv/api.py), for tests of engines without boxes and carriers."""

from __future__ import annotations

import xxhash

from disagg.kv.layout import KvLayout


class FakeOutboxEntry:
    """Room for one transfer. Fails at once when a block is staged twice, changed after staging, out of range, or after `end_write`."""

    def __init__(self, layout: KvLayout, num_tokens: int, transfer_id: str = "transfer", fill: int = 0xA5, form: str = "blocks") -> None:
        self.layout = layout
        self.form = form
        self.num_tokens = num_tokens
        self.transfer_id = transfer_id
        self.offset = 0
        self.frames: list[tuple[int, int, int, int]] = []
        self.is_ended = False
        # As a box is: full of what an earlier transfer left.
        self._bytes = bytearray([fill]) * layout.entry_bytes(num_tokens)

    @property
    def view(self) -> memoryview:
        assert not self.is_ended, "the engine touches an outbox entry after end_write"
        return memoryview(self._bytes)

    def stage(self, rank: int, first_block: int, num_blocks: int, digest: int) -> None:
        assert not self.is_ended, "staged after end_write"
        assert 0 <= rank < self.layout.num_ranks
        assert 0 < num_blocks <= self.layout.frame_blocks
        assert first_block >= 0
        assert first_block + num_blocks <= self.layout.num_blocks(self.num_tokens)
        again = {b for r, first, count, _ in self.frames if r == rank for b in range(first, first + count)}
        assert not again & set(range(first_block, first_block + num_blocks)), "a block is staged twice"
        self.frames.append((rank, first_block, num_blocks, digest))
        self._check(self.frames[-1])

    def end_write(self) -> None:
        self.is_ended = True

    @property
    def is_whole(self) -> bool:
        """True when every block of every rank is staged."""
        return sum(count for _, _, count, _ in self.frames) == self.layout.num_ranks * self.layout.num_blocks(self.num_tokens)

    def _check(self, frame: tuple[int, int, int, int]) -> None:
        rank, first, count, digest = frame
        start = self.layout.offset(self.num_tokens, rank, first)
        data = bytes(self._bytes[start : start + count * self.layout.slab_bytes])
        assert xxhash.xxh3_64_intdigest(data) == digest, f"blocks {first} to {first + count} of rank {rank} are not what was staged"

    def to_inbox(self) -> FakeInboxEntry:
        """What a carrier would deliver: a copy, after checking that all is staged and nothing changed since."""
        assert self.is_whole, f"only {self.frames} of {self.num_tokens} tokens were staged"
        for frame in self.frames:
            self._check(frame)
        return FakeInboxEntry(self.layout, self.num_tokens, self._bytes, self.transfer_id, self.form)


class FakeInboxEntry:
    """A complete transfer. `contents` is the test's to corrupt before an engine reads it."""

    def __init__(
        self, layout: KvLayout, num_tokens: int, contents: bytes | bytearray, transfer_id: str = "transfer", form: str = "blocks"
    ) -> None:
        self.layout = layout
        self.form = form
        self.num_tokens = num_tokens
        self.transfer_id = transfer_id
        self.offset = 0
        self.first_token = 0
        self.contents = bytearray(contents)
        self.is_ended = False

    @property
    def view(self) -> memoryview:
        assert not self.is_ended, "the engine touches an inbox entry after end_read"
        return memoryview(self.contents).toreadonly()

    def end_read(self) -> None:
        # As a real box does: the room belongs to another transfer from here on.
        if not self.is_ended:
            self.contents[:] = bytes(len(self.contents))
        self.is_ended = True
