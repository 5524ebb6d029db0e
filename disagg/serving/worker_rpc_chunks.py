"""The tokens of one request on a remote worker, as they come out of the step frames."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from disagg.errors import DeadlineError, DisaggError
from disagg.types import Chunk, join_chunks


class RemoteChunks:
    """An iterator of chunks, fed by the worker's stream. No task and no timer per token; tokens that wait for their reader come together.

    `abandon` is called once when the reader closes it before its end. `timeout_s` bounds the whole of it. What is buffered is
    bounded by the request's `max_tokens`.
    """

    __slots__ = ("_abandon", "_ended", "_error", "_ready", "_timer", "_waiter")

    def __init__(self, abandon: Callable[[], None], timeout_s: float | None) -> None:
        self._abandon: Callable[[], None] | None = abandon
        self._ready: deque[Chunk] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: DisaggError | None = None
        self._ended = False
        self._timer = None
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, timeout_s), self._expire)

    def feed(self, chunk: Chunk) -> None:
        """Hand one chunk to the reader."""
        self._ready.append(chunk)
        if chunk.finish is not None:
            self._settle()
        self._wake()

    def fail(self, error: DisaggError) -> None:
        """End with an error, after the chunks that came before it."""
        if self._ended:
            return
        self._error = error
        self._settle()
        self._wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        chunk = join_chunks(self._ready)  # a reader that is behind catches up in one go, one that waits gets each token at once
        self._ready.clear()
        return chunk

    async def aclose(self) -> None:
        """Cancel on the worker when it has not ended. Returns at once: the cancel travels on its own."""
        abandon = self._abandon
        self._settle()
        self._ready.clear()
        if abandon is not None:
            abandon()

    def _expire(self) -> None:
        abandon = self._abandon
        self.fail(DeadlineError("the request's deadline passed before its answer was whole"))
        if abandon is not None:
            abandon()

    def _settle(self) -> None:
        """Nothing more will come."""
        self._ended = True
        self._abandon = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
