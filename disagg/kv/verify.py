"""Payloads that have come: brought to their places and verified in threads, while the carrier reads on.

A thread takes frame after frame of its pull, so a pull costs few hand-overs however many frames it has; after FRAMES_A_TURN it goes to
the end of the executor's queue, and other pulls have their turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from disagg.kv.copy import copy_and_digest, digest
from disagg.kv.frames import Frame

INLINE_BYTES = 128 << 10  # below this a copy takes less time than handing it to a thread
THREADS_OF_A_PULL = 2
FRAMES_A_TURN = 4
MOST_WAITING = 32  # then the event loop has a turn, too


class Payload(NamedTuple):  # one per frame, as Frame
    """A frame's payload in consecutive `parts`, and the `room` where it belongs; no parts when it is there already."""

    frame: Frame
    room: memoryview
    parts: Sequence[memoryview]

    def is_right(self) -> bool:
        """Bring it to its place; whether what is there then has the frame's digest."""
        arrived = copy_and_digest(self.room, self.parts) if self.parts else digest(self.room)
        return arrived == self.frame.digest


class Verifier:
    """The frames of one pull, which owns this. `copier`: threads for all but the smallest. Methods belong to the event loop."""

    def __init__(self, copier: Executor) -> None:
        self._copier = copier
        self._loop = asyncio.get_running_loop()
        self.num_verified = 0
        self.verified_bytes = 0
        self.corrupt: Frame | None = None  # the first of those that failed their digest
        self._error: Exception | None = None
        self._lock = threading.Lock()  # threads change what stands above and below
        self._waiting: deque[Payload] = deque()
        self._num_threads = 0
        self._settled: asyncio.Future[None] | None = None

    async def add(self, payload: Payload) -> None:
        """Verify it: now if it is small, else soon."""
        if payload.frame.num_bytes <= INLINE_BYTES:
            self._note(payload.frame, payload.is_right())
            return
        with self._lock:
            self._waiting.append(payload)
            num_waiting = len(self._waiting)
            is_new_thread = self._num_threads < THREADS_OF_A_PULL
            self._num_threads += is_new_thread
        if is_new_thread:
            self._copier.submit(self._work)
        if num_waiting >= MOST_WAITING:
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Returns when all that was added is verified, or one of it is corrupt. Raises what a thread met instead."""
        with self._lock:
            settled = self._settled = self._loop.create_future() if self._num_threads else None
        if settled is not None:
            await settled
        if self._error is not None:
            raise self._error

    async def leave(self) -> None:
        """Drop what waits; returns when no thread is in any room. A cancel does not cut it short."""
        with self._lock:
            self._waiting.clear()
        while self._num_threads:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self.settle()

    def _work(self) -> None:
        """(in a thread) Some of what waits."""
        try:
            for _ in range(FRAMES_A_TURN):
                with self._lock:
                    if not self._waiting:
                        self._end_thread()
                        return
                    payload = self._waiting.popleft()
                self._note(payload.frame, payload.is_right())
            self._copier.submit(self._work)
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits has to learn of it
            with self._lock:
                self._error = error
                self._waiting.clear()
                self._end_thread()

    def _note(self, frame: Frame, is_right: bool) -> None:
        with self._lock:
            if is_right:
                self.num_verified += 1
                self.verified_bytes += frame.num_bytes
                return
            if self.corrupt is None or frame.seq < self.corrupt.seq:
                self.corrupt = frame
            self._waiting.clear()

    def _end_thread(self) -> None:
        self._num_threads -= 1
        if not self._num_threads and self._settled is not None:
            self._loop.call_soon_threadsafe(_set, self._settled)
            self._settled = None


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
