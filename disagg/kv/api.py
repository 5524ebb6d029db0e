"""What an engine sees of the KV path: an entry to write and an entry to read. Nothing here knows of sockets.

Life of a transfer's bytes (one owner at each arrow; the worker process owns both boxes and all bookkeeping):

    outbox:  reserve -> [engine stages frames] -> end_write -> (reader acks | released | fenced) and no reader left -> free
    inbox:   reserve -> [carrier writes frames] -> complete -> [engine loads] -> end_read -> free

An outbox region is free only when the engine has ended writing AND no reader is left; an inbox region only when the carrier has ended
writing AND the engine has ended reading. So a region that is handed to the next transfer has no other user.
"""

from __future__ import annotations

from typing import Protocol

from disagg.kv.layout import KvLayout


class OutboxEntry(Protocol):
    """Room for one transfer's KV in the prefill worker's outbox, written by its engine."""

    @property
    def transfer_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Context tokens whose KV is to be staged."""
        ...

    @property
    def form(self) -> str:
        """How the KV lies in the entry: see kv/form.py."""
        ...

    @property
    def layout(self) -> KvLayout:
        """The entry's own geometry; in form `blocks` it is the engine's, in form `tokens` its blocks are single tokens."""
        ...

    @property
    def offset(self) -> int:
        """Byte offset of the entry in the box, for a process that maps the box by its file descriptor."""
        ...

    @property
    def view(self) -> memoryview:
        """The entry's bytes, writable: [ranks, blocks, layers, block_bytes]."""
        ...

    def stage(self, rank: int, first_block: int, num_blocks: int, digest: int) -> None:
        """Blocks [first_block, first_block + num_blocks) of `rank` are written and will not change.

        `digest`: xxh3_64 of those bytes. Each block is staged once; at most `layout.frame_blocks` blocks per call.
        Frames are sent in the order staged. After a release or fence the call is counted and ignored.
        """
        ...

    def end_write(self) -> None:
        """The engine will never write this entry again. Idempotent. Ending before all blocks are staged fails the transfer."""
        ...


class InboxEntry(Protocol):
    """One transfer's KV in the decode worker's inbox, complete and verified before an engine sees it."""

    @property
    def transfer_id(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def first_token(self) -> int:
        """Tokens before this one are not in the entry, because the engine's prefix cache had them; a multiple of its block size."""
        ...

    @property
    def form(self) -> str:
        """How the KV lies in the entry: see kv/form.py."""
        ...

    @property
    def layout(self) -> KvLayout:
        """The entry's own geometry; its ranks are the source's."""
        ...

    @property
    def offset(self) -> int:
        """Byte offset of the entry in the box."""
        ...

    @property
    def view(self) -> memoryview:
        """The entry's bytes from `first_token` on, read-only to engines: [ranks, blocks, layers, block_bytes]."""
        ...

    def end_read(self) -> None:
        """The engine will never read this entry again: the room is freed. Idempotent."""
        ...
