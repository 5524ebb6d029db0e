"""The two protocols of the serving path.

`Engine` computes: it runs prompts and decodes tokens, and touches only memory (outbox and inbox entries that its worker hands
it). `Worker` is what a coordinator talks to: an engine together with its boxes and carrier. serving/worker.py implements `Worker`
around any `Engine`; serving/worker_rpc.py implements it again as a gRPC client. One contract suite runs on all of them.

Cancelling: closing an iterator, or cancelling the task that awaits a call, ends the request inside the engine and
frees what it held; both are safe at any instant.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from disagg.kv.api import InboxEntry, OutboxEntry
from disagg.kv.layout import KvLayout
from disagg.types import Chunk, EngineState, KvAddress, Prefilled, Request, Transfer


class Chunks(Protocol):
    """The tokens of one request as they come; an async generator of chunks is one. Use it in `contextlib.aclosing`."""

    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    async def __anext__(self) -> Chunk: ...

    async def aclose(self) -> None:
        """Cancel what is still running and free it. Idempotent."""
        ...


class Engine(Protocol):
    """One model on one set of devices. Created by an async `start` function of its module, ended by `close`.

    All methods raise InvalidRequestError for what the engine cannot run, and EngineError when it fails; an EngineError after
    which `is_alive` is False means that the process must be replaced.
    """

    @property
    def layout(self) -> KvLayout:
        """Shape, dtype, block size and fingerprint of the KV cache; equal layouts can exchange raw blocks."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Tokens of the longest request, prompt and answer together."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once the engine cannot serve again."""
        ...

    async def wait_dead(self) -> None:
        """Returns once `is_alive` is False; for ever pending on a healthy engine."""
        ...

    async def prefill(self, request: Request, entry: OutboxEntry) -> Prefilled:
        """Run the context (prompt + prior output), stage its KV into `entry` chunk by chunk, return the next token.

        The engine calls `entry.stage(...)` (see kv/api.py) as chunks finish, and `entry.end_write()` when it will
        never write again, also after an error or a cancel.
        """
        ...

    def decode(self, request: Request, prefilled: Prefilled, entry: InboxEntry) -> Chunks:
        """Continue after context + `prefilled.first`. The KV of the context lies whole in `entry`.

        Yields the tokens after the first one. Calls `entry.end_read()` once the engine will never read it again
        (loaded, or the request ended before it was scheduled).
        """
        ...

    def generate(self, request: Request) -> Chunks:
        """Colocated: run the context and decode, all on this engine."""
        ...

    async def cached_tokens(self, request: Request) -> int:
        """Tokens at the context's begin, in whole blocks, whose KV the engine's prefix cache holds now.

        Nothing keeps them there: a `decode` whose entry begins behind what is left of them computes the missing ones.
        """
        ...

    def state(self) -> EngineState:
        """Snapshot without boxes (the worker fills those in). Cheap: no I/O."""
        ...

    async def close(self) -> None:
        """End the engine and its processes. Idempotent."""
        ...


class Worker(Protocol):
    """An engine with its boxes, leases and carrier: what a route names."""

    async def prefill(self, request: Request, transfer: Transfer) -> Prefilled:
        """Reserve outbox room for `transfer`, run the prompt, return its first token; KV goes to the outbox.

        When the first token ends the request, the outbox entry is released at once. Waits for outbox room when full.
        """
        ...

    async def fetch(self, transfer: Transfer, request: Request | None = None) -> None:
        """Pull `transfer` from its source into the inbox; returns when it is complete and verified. Idempotent.

        With `request`, whose context it is, what the engine's prefix cache holds of it already stays where it is.
        Raises TransferError (fenced, corrupt, mismatch, or source lost). May be called before the source has begun.
        """
        ...

    def decode(self, request: Request, prefilled: Prefilled, transfer: Transfer) -> Chunks:
        """Await the fetch of `transfer`, then continue after the first token. Closing the iterator cancels and frees."""
        ...

    def generate(self, request: Request) -> Chunks:
        """Colocated serving. Closing the iterator cancels and frees."""
        ...

    async def release(self, transfer: Transfer) -> None:
        """Free outbox and inbox entries of `transfer`. Idempotent; unknown is fine."""
        ...

    def state(self) -> EngineState:
        """Latest snapshot: engine and boxes."""
        ...

    @property
    def address(self) -> KvAddress:
        """Where this worker's outbox is read; changes with its epoch."""
        ...
