"""The line between a worker process and the processes of its vLLM engine: one unix socket, shared memory, small messages.

    engine process, at its start     lifeline ----> worker     its end means death
                                     <------------- worker     bye: the engine is closed, exit
    engine rank, connector start     attach ------> worker
                                     <------------- worker     sizes and file descriptors of both boxes (SCM_RIGHTS)
                                     hello -------> worker     rank and cache layout, or refused: why it cannot serve
    engine rank, once per step       events ------> worker     staged, write_ended, read_ended
    scheduler, once per step         step --------> worker     on the lifeline: what the step did, how long it took
    scheduler, once per step         cache -------> worker     on the lifeline: what came into its prefix cache, what went
    scheduler, at its start          lookups -----> worker     on the lifeline: ask me what the prefix cache holds
                                     <------------- worker     cached: token ids, and the hash of the block before them
                                     cached ------> worker     how many of the full blocks are there, and the hash of the last of those

Each side learns of the other's death by the end of its socket, at once and without polling: the worker marks its engine dead; an engine
process exits, so that killing a worker never leaves an engine behind. The socket is an abstract unix one (no file to clean up), packets
keep their borders, and only processes of the same user are let in. Messages are msgpack lists; no pickle.

Standard library and msgpack only: the engine process uses this before torch is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import mmap
import multiprocessing.util
import os
import secrets
import socket
import struct
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgpack

logger = logging.getLogger(__name__)

ADDRESS_ENV = "DISAGG_ENGINE_CHANNEL"  # how an engine process finds its worker; absent in processes that are not ours
MAX_PACKET = 1 << 16
MAX_EVENTS = 500  # per packet: an event is under 100 bytes
CONNECT_TIMEOUT_S = 30.0
MAX_CHANGES = 3000  # per packet that came, and as many that went: an identity is 9 bytes at most
LOOKUP_TOKENS = 8192  # per packet
LOOKUP_TIMEOUT_S = 0.5  # the prompt runs meanwhile; an engine that is silent for longer computes with the lock of Python held

Event = tuple[Any, ...]


class BoxMemory(Protocol):
    """What is needed of a box: a file descriptor that can be mapped, and its size."""

    @property
    def fd(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


# The engine's side ------------------------------------------------------------------------------------------------------------


def _connect(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(CONNECT_TIMEOUT_S)
    sock.connect("\0" + address)
    sock.settimeout(None)
    return sock


def _exit_at_end_of(sock: socket.socket) -> None:
    """Ends this process when the worker says bye or its end of `sock` closes. The thread sleeps in recv until then.

    At once and without clean-up: nothing of an engine outlives its worker, and the kernel frees memory and sockets. Questions for the
    scheduler are answered by the same thread.
    """

    def watch() -> None:
        packet = b""
        with contextlib.suppress(OSError):
            packet = sock.recv(MAX_PACKET)
            while packet and (message := msgpack.unpackb(packet))[0] == "cached":
                _answer(sock, *message[1:])
                packet = sock.recv(MAX_PACKET)
        if packet:
            multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]  # else named semaphores are reported as leaks
        os._exit(0 if packet else 1)

    threading.Thread(target=watch, name="disagg-lifeline", daemon=True).start()


Lookup = Callable[[Sequence[int], bytes, str], tuple[int, bytes]]
_lookup: list[Lookup] = []


def answer_lookups(lookup: Lookup) -> None:
    """Let the worker ask what the prefix cache holds. `lookup`: (token ids, hash of the block before, salt) -> (blocks, hash of the last).

    It is called in a thread of its own, beside the scheduler's.
    """
    _lookup[:] = [lookup]
    sock = _lifelines.get((os.environ.get(ADDRESS_ENV, ""), os.getpid()))
    if sock is not None:
        _send(sock, ["lookups"])


def _answer(sock: socket.socket, key: int, token_bytes: bytes, parent: bytes, salt: str) -> None:
    """A question that cannot be answered finds nothing cached: then all is sent."""
    try:
        found = _lookup[0](array("I", token_bytes), parent, salt)
    except Exception:
        logger.exception("the prefix cache could not be asked")
        found = (0, b"")
    _send(sock, ["cached", key, *found])


def _address_prefix() -> str:
    """What addresses of this process's own channels begin with: a worker must not hold a lifeline to itself."""
    return f"disagg-engine-{os.getpid()}-"


_lifelines: dict[tuple[str, int], socket.socket] = {}  # by process too: a forked child has its parent's sockets, but not its threads


def hold_lifeline() -> None:
    """Ties this process's life to the worker named by the environment. Idempotent; nothing happens outside our engines."""
    address = os.environ.get(ADDRESS_ENV)
    if not address or (address, os.getpid()) in _lifelines or address.startswith(_address_prefix()):
        return
    try:
        sock = _connect(address)
    except OSError as error:
        logger.error("the worker that started this engine is gone: %s", error)
        os._exit(1)
    _send(sock, ["lifeline", os.getpid()])
    _lifelines[address, os.getpid()] = sock
    _exit_at_end_of(sock)


def _send(sock: socket.socket, message: Sequence[Any]) -> None:
    sock.send(msgpack.packb(message))


def report_step(report: Sequence[Any]) -> None:
    """Tells the worker of one step (vllm_stats.StepReport); nothing happens outside our engines."""
    sock = _lifelines.get((os.environ.get(ADDRESS_ENV, ""), os.getpid()))
    if sock is not None:
        _send(sock, ["step", report])


def report_cache(stored: Sequence[int], removed: Sequence[int], is_cleared: bool) -> None:
    """Tells the worker what one step changed in the prefix cache, as identities of blocks; nothing happens outside our engines."""
    sock = _lifelines.get((os.environ.get(ADDRESS_ENV, ""), os.getpid()))
    if sock is None:
        return
    for start in range(0, max(1, len(stored), len(removed)), MAX_CHANGES):
        end = start + MAX_CHANGES
        _send(sock, ["cache", stored[start:end], removed[start:end], is_cleared and start == 0])


class RankChannel:
    """One engine rank's line to its worker. `outbox` and `inbox` are the worker's boxes, mapped into this process."""

    def __init__(self, rank: int, address: str) -> None:
        """Connects and maps. Raises OSError when the worker is gone."""
        self.rank = rank
        self._sock = _connect(address)
        _send(self._sock, ["attach", rank, os.getpid()])
        packet, fds, _, _ = socket.recv_fds(self._sock, MAX_PACKET, 2)
        _, outbox_bytes, inbox_bytes = msgpack.unpackb(packet)
        self.outbox = mmap.mmap(fds[0], outbox_bytes)
        self.inbox = mmap.mmap(fds[1], inbox_bytes)
        for fd in fds:
            os.close(fd)
        _exit_at_end_of(self._sock)

    def hello(self, layout: dict[str, Any]) -> None:
        """This rank is ready; `layout` holds KvLayout's fields."""
        _send(self._sock, ["hello", self.rank, layout])

    def refuse(self, reason: str) -> None:
        """This rank cannot serve, and why; the engine's start then fails with this sentence."""
        _send(self._sock, ["refused", self.rank, reason[: MAX_PACKET // 2]])

    def send_events(self, events: Sequence[Event]) -> None:
        """Events of one step, in order: ("staged", id, first_block, num_blocks, digest), ("write_ended", id), ("read_ended", id).

        Last ("copied", "", seconds of loading, seconds of staging).
        """
        for start in range(0, len(events), MAX_EVENTS):
            _send(self._sock, ["events", self.rank, events[start : start + MAX_EVENTS]])


# The worker's side ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Peer:
    """One connected engine process. `rank` is None for a lifeline."""

    sock: socket.socket
    pid: int
    rank: int | None = None
    answers_lookups: bool = False


class Listener(Protocol):
    """What the owner of a channel is told, always on the event loop."""

    def on_hello(self, rank: int, layout: dict[str, Any]) -> None: ...

    def on_refused(self, reason: str) -> None: ...

    def on_events(self, rank: int, events: Sequence[Event]) -> None: ...

    def on_step(self, report: Any) -> None: ...

    def on_cache(self, stored: Sequence[int], removed: Sequence[int], is_cleared: bool) -> None: ...

    def on_process_lost(self) -> None:
        """An engine process ended: the engine cannot serve any more."""
        ...

    def on_ranks_lost(self) -> None:
        """The last process that had the boxes mapped ended: nobody writes or reads them any more."""
        ...


@dataclass(slots=True)
class WorkerChannel:
    """The worker's end: accepts its engine's processes and hands their messages to `listener`. Owned by one event loop."""

    outbox: BoxMemory
    inbox: BoxMemory
    listener: Listener
    address: str = field(default_factory=lambda: _address_prefix() + secrets.token_hex(8))
    _is_up: bool = False  # a rank has said hello
    _server: socket.socket | None = None
    _peers: set[_Peer] = field(default_factory=set)
    _loop: asyncio.AbstractEventLoop | None = None
    _lookups: dict[int, asyncio.Future[tuple[int, bytes]]] = field(default_factory=dict)
    _keys: Iterator[int] = field(default_factory=itertools.count)

    def open(self) -> None:
        """Listen; call it on the event loop, before the engine starts."""
        self._loop = asyncio.get_running_loop()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.setblocking(False)
        self._server.bind("\0" + self.address)
        self._server.listen(64)
        self._loop.add_reader(self._server, self._accept)

    @property
    def process_ids(self) -> frozenset[int]:
        """The engine's processes that are connected."""
        return frozenset(peer.pid for peer in self._peers)

    async def cached_blocks(self, token_ids: Sequence[int], block_tokens: int, salt: str) -> int:
        """Full blocks at the begin of `token_ids` that the engine's prefix cache holds now; 0 when it does not answer in time."""
        part = LOOKUP_TOKENS // block_tokens * block_tokens
        found, parent = 0, b""
        for start in range(0, len(token_ids) // block_tokens * block_tokens, part):
            tokens = token_ids[start : start + part]
            count, parent = await self._ask(tokens, parent, salt)
            found += count
            if count < len(tokens) // block_tokens:
                break
        return found

    async def _ask(self, token_ids: Sequence[int], parent: bytes, salt: str) -> tuple[int, bytes]:
        peer = next((p for p in self._peers if p.answers_lookups), None)
        if peer is None:
            return 0, b""
        assert self._loop is not None
        key, answer = next(self._keys), self._loop.create_future()
        self._lookups[key] = answer
        try:
            peer.sock.send(msgpack.packb(["cached", key, array("I", token_ids).tobytes(), parent, salt]))
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                count, last = await answer
                return count, last
        except (OSError, TimeoutError):
            return 0, b""
        finally:
            del self._lookups[key]

    def dismiss(self) -> None:
        """Tell every engine process to exit; their ends are reported as usual."""
        for peer in self._peers:
            if peer.rank is None:
                with contextlib.suppress(OSError):
                    peer.sock.send(msgpack.packb(["bye"]))

    def close(self) -> None:
        """Let go of every engine process; those still alive end themselves. Idempotent."""
        if self._server is not None and self._loop is not None:
            self._loop.remove_reader(self._server)
            self._server.close()
            self._server = None
        for peer in list(self._peers):
            self._drop(peer)

    def _accept(self) -> None:
        assert self._server is not None
        assert self._loop is not None
        try:
            sock, _ = self._server.accept()
        except BlockingIOError:
            return
        sock.setblocking(False)
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if uid != os.getuid():
            sock.close()
            return
        peer = _Peer(sock, pid)
        self._peers.add(peer)
        self._loop.add_reader(sock, self._read, peer)

    def _read(self, peer: _Peer) -> None:
        """All packets that have come from one process."""
        while peer in self._peers:
            try:
                packet = peer.sock.recv(MAX_PACKET)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._lost(peer)
                return
            self._handle(peer, msgpack.unpackb(packet, use_list=False))

    def _handle(self, peer: _Peer, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == "events":
            self.listener.on_events(*rest)
        elif kind == "step":
            self.listener.on_step(*rest)
        elif kind == "cache":
            self.listener.on_cache(*rest)
        elif kind == "lookups":
            peer.answers_lookups = True
        elif kind == "cached":
            answer = self._lookups.get(rest[0])
            if answer is not None and not answer.done():
                answer.set_result((rest[1], rest[2]))
        elif kind == "attach":
            peer.rank = rest[0]
            sizes = msgpack.packb(["boxes", self.outbox.num_bytes, self.inbox.num_bytes])
            socket.send_fds(peer.sock, [sizes], [self.outbox.fd, self.inbox.fd])
        elif kind == "hello":
            self._is_up = True
            self.listener.on_hello(*rest)
        elif kind == "refused":
            self.listener.on_refused(rest[1])

    def _lost(self, peer: _Peer) -> None:
        had_ranks = any(p.rank is not None for p in self._peers)
        self._drop(peer)
        # vLLM starts short-lived processes of its own while it starts (to look at the model's class, once per cache): they load plugins,
        # so they hold a lifeline, and their end is no loss. That of a process it needs makes its start fail by itself.
        if self._is_up or peer.rank is not None or peer.answers_lookups:
            self.listener.on_process_lost()
        if had_ranks and not any(p.rank is not None for p in self._peers):
            self.listener.on_ranks_lost()

    def _drop(self, peer: _Peer) -> None:
        assert self._loop is not None
        self._loop.remove_reader(peer.sock)
        peer.sock.close()
        self._peers.discard(peer)
