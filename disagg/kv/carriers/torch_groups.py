"""torch's side of carrier `torch_dist`: stores, process groups of two, and threads that wait for what these do.

torch is imported when a store or a group is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np

from disagg.kv.carriers.tcp import listening

_THREADS = 64
_POSTING_THREADS = 4
DEVICES = 2  # of gloo: connections of a pair, each with a thread; by a tag's remainder. One alone keeps neither end busy


class Groups:
    """One carrier's groups. `silence_s`: how long a peer may take for a step of a handshake, or for a payload.

    A group's connections close when nobody refers to it or to what it does any more; nothing else ends a send or recv under way.
    """

    def __init__(self, host: str, silence_s: float) -> None:
        self._host = host
        self._timeout = timedelta(seconds=silence_s)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="disagg-kv-torch")
        self._posting = ThreadPoolExecutor(_POSTING_THREADS, thread_name_prefix="disagg-kv-torch-post")
        self._store: Any = None
        self._devices: list[Any] = []

    def serve_store(self) -> int:
        """Start the store at which pullers meet this source; its port."""
        import torch.distributed as dist

        with listening(self._host, 0) as sock:
            port = int(sock.getsockname()[1])
            # The store takes over the descriptor: it is bound to our address, where a store of its own would listen on all of them.
            self._store = dist.TCPStore(self._host, port, None, True, self._timeout, wait_for_workers=False, master_listen_fd=sock.detach())
        return port

    async def accept(self, pair_id: str) -> Any:
        """The source's end of a new group. Raises RuntimeError when the puller does not come within the timeout."""
        return await self._run(self._make, self._store, pair_id, 0)

    async def join(self, host: str, port: int, pair_id: str) -> Any:
        """The puller's end of a new group. Raises RuntimeError when there is no store or no source."""

        def join() -> Any:
            import torch.distributed as dist

            store = dist.TCPStore(host.strip("[]"), port, None, False, self._timeout, wait_for_workers=False)
            return self._make(store, pair_id, 1)

        return await self._run(join)

    def _make(self, store: Any, pair_id: str, rank: int) -> Any:
        import torch.distributed as dist

        if not self._devices:
            self._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host) for _ in range(DEVICES)]
        options = dist.ProcessGroupGloo._Options()
        options._devices = self._devices
        options._timeout = self._timeout
        options._threads = 1
        return dist.ProcessGroupGloo(dist.PrefixStore(pair_id, store), rank, 2, options)

    async def wait(self, work: Any) -> None:
        """Returns when a send or recv has ended. Raises RuntimeError when it failed or took longer than the timeout.

        Not to be cancelled: the memory is in use until then.
        """
        await self._run(work.wait, self._timeout)

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        self._posting.shutdown(wait=False)
        self._store = None
        self._devices = []  # each has a listening socket and a thread

    def post(self, begin: Any, *args: Any) -> Awaitable[Any]:
        """`begin` a send or recv in a thread; gives what `wait` waits for.

        gloo's thread holds a lock that this needs for as long as bytes come without a pause, and a send writes what the socket takes.
        These threads wait for no peer, so that those in `wait` cannot keep a worker from sending what its peers wait for.
        """
        return asyncio.get_running_loop().run_in_executor(self._posting, begin, *args)

    def _run(self, function: Any, *args: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


def tensor(parts: Sequence[memoryview]) -> Any:
    """The bytes of `parts` as one tensor: not copied where they lie together in memory, else copied, and so to be read only."""
    import torch

    if len(parts) == 1:
        return torch.frombuffer(parts[0], dtype=torch.uint8)
    if not all(map(are_together, parts, parts[1:])):
        return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
    whole: Any = (ctypes.c_uint8 * sum(map(len, parts))).from_address(_address(parts[0]))
    whole.parts = parts  # which keep the memory; the tensor keeps `whole`
    return torch.frombuffer(whole, dtype=torch.uint8)


def are_together(part: memoryview, after: memoryview) -> bool:
    """Whether `after` begins in memory where `part` ends."""
    return _address(part) + len(part) == _address(after)


def _address(part: memoryview) -> int:
    return int(np.frombuffer(part, dtype=np.uint8).__array_interface__["data"][0])


async def all_done(tasks: list[asyncio.Task[None]]) -> None:
    """Returns when each of `tasks` has ended, by whatever way. A cancel does not cut it short."""
    while under_way := [task for task in tasks if not task.done()]:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(under_way)
    for task in tasks:
        if not task.cancelled():
            task.exception()
