"""How KV gets from one worker's outbox to another's inbox. One protocol; which carrier is used is a pure choice."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, Protocol, get_args

from disagg.errors import ConfigError, nearest
from disagg.kv.frames import Frame, Header, Opened, Sink, Waiting
from disagg.kv.outbox import Outbox
from disagg.types import KvAddress, Transfer

CarrierChoice = Literal["auto", "shm", "cuda_ipc", "tcp", "grpc", "torch_dist", "loopback"]
# What `auto` prefers, best first: no copy through a socket; then NCCL between GPUs; then the network by the kernel alone.
_PREFERENCE = ("loopback", "cuda_ipc", "shm", "torch_dist", "tcp", "grpc")
_SAME_HOST = frozenset({"loopback", "shm", "cuda_ipc"})
_OFFERED_BY_AUTO = ("shm", "tcp")


class Carrier(Protocol):
    """Moves frames. One object serves this worker's outbox and pulls from other workers' ones."""

    @property
    def name(self) -> str:
        """The key under which the endpoint stands in a KvAddress."""
        ...

    async def serve(self, outbox: Outbox) -> str:
        """Let peers read `outbox`; returns the endpoint to publish. Raises PlacementError when its port is taken."""
        ...

    async def pull(self, endpoint: str, transfer: Transfer, sink: Sink) -> None:
        """Hand the messages of `transfer` to `sink` in order; when it says that it is complete, acknowledge to the source.

        Raises TransferError when the source refuses, fails, closes or falls silent, and what `sink` raises. Cancelling is safe at any
        instant and lets the source know.
        """
        ...

    async def close(self) -> None:
        """End serving and pulling. Idempotent."""
        ...


def offered_carriers(choice: CarrierChoice) -> tuple[str, ...]:
    """What a worker whose boxes lie in host memory serves and pulls by, given the setting kv.carrier."""
    return _OFFERED_BY_AUTO if choice == "auto" else (choice,)


def expected_carrier(choice: CarrierChoice, *, same_host: bool) -> str:
    """What two workers with that setting will use, said before they exist. Raises ConfigError when it will not reach."""
    here = KvAddress("the prefill worker", "", "a", tuple((name, "") for name in offered_carriers(choice)))
    return choose_carrier(here, offered_carriers(choice), "a" if same_host else "another host", choice)


def choose_carrier(source: KvAddress, offered: Collection[str], host_id: str, choice: CarrierChoice = "auto") -> str:
    """The name of the carrier for a pull from `source` by a worker on `host_id` that has the carriers `offered`.

    `auto` takes the first of loopback, cuda_ipc, shm, torch_dist, tcp, grpc that both have and that reaches. Raises ConfigError when
    none does.
    """
    if choice not in get_args(CarrierChoice):
        raise ConfigError(key="kv.carrier", value=choice, expected=nearest(choice, get_args(CarrierChoice)))
    possible = [name for name in _PREFERENCE if _obstacle(name, source, offered, host_id) is None]
    if choice == "auto" and possible:
        return possible[0]
    if choice in possible:
        return choice
    named = {*offered, *(name for name, _ in source.endpoints)}
    names = [name for name in _PREFERENCE if name in named] if choice == "auto" else [choice]
    why = "; ".join(f"{name}: {_obstacle(name, source, offered, host_id)}" for name in names) or "neither has any"
    expected = f"auto or one of {possible}" if possible else "a carrier that both workers serve and that reaches"
    raise ConfigError(
        f"kv.carrier {choice} cannot read from worker {source.worker} ({why}); expected {expected}",
        key="kv.carrier",
        value=choice,
        expected=expected,
    )


def _obstacle(name: str, source: KvAddress, offered: Collection[str], host_id: str) -> str | None:
    if name not in offered:
        return "not available in this worker"
    if source.endpoint(name) is None:
        return "not served by the source"
    if name in _SAME_HOST and source.host_id != host_id:
        return f"the workers are on different hosts ({source.host_id} and {host_id})"
    return None


def this_host_id() -> str:
    """Equal exactly for processes that can meet on an abstract socket and share memory: kernel boot, network namespace, user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/net").stat().st_ino
    return f"{boot}-{namespace}-{os.getuid()}"


class SlowCarrier:
    """`inner`, slowed on purpose: `delay_s` more seconds before the first frame, and at most `gbps` x 10^9 payload bytes/s."""

    def __init__(self, inner: Carrier, delay_s: float = 0.0, gbps: float | None = None) -> None:
        self._inner = inner
        self._delay_s = delay_s
        self._gbps = gbps

    @property
    def name(self) -> str:
        return self._inner.name

    async def serve(self, outbox: Outbox) -> str:
        return await self._inner.serve(outbox)

    async def pull(self, endpoint: str, transfer: Transfer, sink: Sink) -> None:
        await self._inner.pull(endpoint, transfer, _SlowSink(sink, self._delay_s, self._gbps))

    async def close(self) -> None:
        await self._inner.close()


class _SlowSink:
    def __init__(self, inner: Sink, delay_s: float, gbps: float | None) -> None:
        self._inner = inner
        self._delay_s = delay_s
        self._gbps = gbps
        self._free_at_s = 0.0  # when the paced link has sent what it was given so far

    def room(self, frame: Frame) -> memoryview:
        return self._inner.room(frame)

    async def receive(self, header: Header, payload: Sequence[memoryview]) -> bool:
        if not isinstance(header, Opened | Waiting) and self._delay_s > 0:
            delay_s, self._delay_s = self._delay_s, 0.0
            await asyncio.sleep(delay_s)
        if isinstance(header, Frame) and self._gbps is not None:
            now_s = asyncio.get_running_loop().time()
            self._free_at_s = max(now_s, self._free_at_s) + header.num_bytes / (self._gbps * 1e9)
            await asyncio.sleep(self._free_at_s - now_s)
        return await self._inner.receive(header, payload)
