"""Boxes: anonymous shared memory for KV in flight, and the room inside one.

A `Box` is a memfd: it has no name in any file system, so nothing is left behind by any death, and the size of /dev/shm does
not bound it. Pages are taken from the system when first written. `Room` hands out regions of a box, first come first served.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from disagg.errors import ConfigError, InvalidRequestError

ALIGN_BYTES = 4096
_SEAL_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Box:
    """`num_bytes` of shared memory. `name` is for people (it shows in /proc/PID/maps).

    Raises ConfigError when the size is not positive or exceeds the memory that the host (or its container) has available.
    """

    def __init__(self, num_bytes: int, name: str) -> None:
        if num_bytes <= 0:
            raise ConfigError(key=f"size of {name}", value=num_bytes, expected="a positive number of bytes")
        available_bytes = available_memory_bytes()
        if num_bytes > available_bytes:
            raise ConfigError(
                f"{name} asks for {num_bytes / 2**30:.2f} GiB but {available_bytes / 2**30:.2f} GiB of memory are available; "
                "lower kv.outbox_gib and kv.inbox_gib",
                key=f"size of {name}",
                value=num_bytes,
                expected=f"at most {available_bytes} bytes",
            )
        self.name = name
        self.num_bytes = num_bytes
        self.fd = os.memfd_create(f"disagg-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, num_bytes)
        # A peer that maps the box must never meet SIGBUS because somebody shrank it.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEAL_SIZE)
        self._map = mmap.mmap(self.fd, num_bytes)
        self.buffer = memoryview(self._map)

    @property
    def path(self) -> str:
        """A path under which another process of this user and PID namespace can open the box while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def open_read_only(self) -> int:
        """A new descriptor of the box that cannot write it; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give the memory back (as soon as no view of it is left). Idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        with contextlib.suppress(BufferError):  # a view is still held: the map goes when it goes
            self.buffer.release()
            self._map.close()


def attach(fd: int, num_bytes: int, *, writable: bool = False) -> memoryview:
    """Map a box by a descriptor of it (which may be closed afterwards). Raises ConfigError when it is not a sealed box of that size."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEAL_SIZE == _SEAL_SIZE
        size = os.fstat(fd).st_size
        if not sealed or size != num_bytes:
            raise ConfigError(key="box", value=f"{size} bytes, sealed: {sealed}", expected=f"{num_bytes} bytes, sealed")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return memoryview(mmap.mmap(fd, num_bytes, prot=access))
    except OSError as error:
        raise ConfigError(f"cannot map a box of {num_bytes} bytes: {error}", key="box", value=num_bytes, expected="a memfd") from error


def available_memory_bytes() -> int:
    """Memory that this process may still take: the host's available memory, or what the container's limit leaves when that is less."""
    return min([_meminfo_bytes("MemAvailable"), *[limit - used for limit, used in _container_memory()]])


def host_memory_bytes() -> int:
    """All memory of the host, or the container's limit when that is less."""
    return min([_meminfo_bytes("MemTotal"), *[limit for limit, _ in _container_memory()]])


def _meminfo_bytes(key: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _container_memory() -> list[tuple[int, int]]:
    """(limit, used) of this process's control group, version 2 or 1; nothing without a limit. Page cache that can go is not counted."""
    found = []
    for folder, limit, usage, cache in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            limit_bytes, used_bytes = [int((Path(folder) / name).read_text()) for name in (limit, usage)]
            stat = dict(line.split() for line in (Path(folder) / "memory.stat").read_text().splitlines())
            found.append((limit_bytes, max(0, used_bytes - int(stat.get(cache, 0)))))
    return found


@dataclass(frozen=True, slots=True)
class Region:
    """`num_bytes` at `offset` of a box; the length is a multiple of ALIGN_BYTES, and 0 for an empty one."""

    offset: int
    num_bytes: int


@dataclass(slots=True)
class _Waiter:
    num_bytes: int
    future: asyncio.Future[Region]


class Room:
    """The regions of one box: first fit, and first come first served when full.

    `key` names the setting to raise when a request can never fit ("kv.outbox_gib").
    """

    def __init__(self, num_bytes: int, key: str) -> None:
        self.total_bytes = num_bytes // ALIGN_BYTES * ALIGN_BYTES
        self._key = key
        self._free: list[Region] = [Region(0, self.total_bytes)]  # by offset; no two adjacent
        self._used: dict[int, Region] = {}
        self._waiters: deque[_Waiter] = deque()

    @property
    def free_bytes(self) -> int:
        """Bytes in no region, whether or not contiguous."""
        return sum(r.num_bytes for r in self._free)

    @property
    def num_waiting(self) -> int:
        """Reservations that wait for room."""
        return sum(not w.future.done() for w in self._waiters)

    def try_reserve(self, num_bytes: int) -> Region | None:
        """A region now, or None when it must wait (for room, or for its turn). Raises InvalidRequestError when it can never fit."""
        size = -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        if size > self.total_bytes:
            raise InvalidRequestError(
                f"the prompt's KV needs {num_bytes} bytes but {self._key} gives {self.total_bytes}; "
                f"shorten the prompt or raise {self._key} to at least {size / 2**30:.3f}",
                field="prompt",
                value=f"{num_bytes} bytes of KV",
                expected=f"at most {self.total_bytes} bytes of KV",
            )
        if size == 0:
            return Region(0, 0)
        return None if self.num_waiting else self._fit(size)

    async def reserve(self, num_bytes: int) -> Region:
        """A region, as soon as its turn has come and there is room. Cancelling leaves no hole. Raises as `try_reserve`."""
        region = self.try_reserve(num_bytes)
        if region is not None:
            return region
        size = -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        waiter = _Waiter(size, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.cancelled():
                with contextlib.suppress(ValueError):  # already skipped by _serve
                    self._waiters.remove(waiter)
                self._serve()
            else:  # granted in the same instant as the cancel
                self.free(waiter.future.result())
            raise

    def free(self, region: Region) -> None:
        """Give a region back, exactly once."""
        if region.num_bytes == 0:
            return
        assert self._used.pop(region.offset, None) == region, f"{region} is not in use"
        at = bisect_left(self._free, region.offset, key=lambda r: r.offset)
        start, end = region.offset, region.offset + region.num_bytes
        if at < len(self._free) and self._free[at].offset == end:
            end += self._free.pop(at).num_bytes
        if at > 0 and self._free[at - 1].offset + self._free[at - 1].num_bytes == start:
            start = self._free.pop(at - 1).offset
            at -= 1
        self._free.insert(at, Region(start, end - start))
        self._serve()

    def check(self) -> None:
        """Assert that free and used regions tile the box, and that no two free ones touch."""
        tiles = sorted([*self._free, *self._used.values()], key=lambda r: r.offset)
        assert all(r.num_bytes > 0 for r in tiles) or self.total_bytes == 0
        position = 0
        for tile in tiles:
            assert tile.offset == position, f"hole or overlap at {position}: {tiles}"
            position += tile.num_bytes
        assert position == self.total_bytes
        assert all(a.offset + a.num_bytes < b.offset for a, b in zip(self._free, self._free[1:], strict=False)), "free regions touch"

    def assert_empty(self) -> None:
        """Assert that everything is free and nobody waits."""
        self.check()
        assert not self._used, f"regions in use: {self._used}"
        assert not self.num_waiting, f"{self.num_waiting} reservations wait"

    def _fit(self, size: int) -> Region | None:
        for i, hole in enumerate(self._free):
            if hole.num_bytes >= size:
                region = Region(hole.offset, size)
                rest = Region(hole.offset + size, hole.num_bytes - size)
                self._free[i : i + 1] = [rest] if rest.num_bytes else []
                self._used[region.offset] = region
                return region
        return None

    def _serve(self) -> None:
        """Grant waiters in order, up to the first that does not fit."""
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.future.done():
                region = self._fit(waiter.num_bytes)
                if region is None:
                    return
                waiter.future.set_result(region)
            self._waiters.popleft()
