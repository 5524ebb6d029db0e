"""What peers say to each other: headers, in msgpack, each checked field by field when read. No pickle, no trust.

    puller                                   source
      Pull ------------------------------->
             <------------------------------- Opened      (layout, tokens, hash; now the puller takes inbox room)
             <------------------------------- Frame + payload, in the order staged; Waiting while the engine computes
             <------------------------------- End         (or Failed with a typed error, at any point)
      Ack  ------------------------------->               (every block verified: the source may free)

A frame's payload is whole blocks of one rank of the entry, all layers (kv/layout.py; in form `tokens` a block is a token). Payloads have
a digest in their header, and each header ends in a digest of itself: a flipped bit is noticed wherever it is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias, get_type_hints

import msgpack
import xxhash

from disagg.errors import DisaggError, TransferCorruptError, TransferError, from_wire, to_wire
from disagg.kv.layout import KvLayout, Packing
from disagg.types import Transfer

MAX_HEADER_BYTES = 1 << 16
HEARTBEAT_S = 3.0  # a source that has nothing to send yet says so this often
SILENCE_S = 15.0  # a peer that says nothing for this long is lost


@dataclass(frozen=True, slots=True)
class Pull:
    """Asks for a transfer of the process life `epoch`, without its first `first_token` tokens: whole blocks that the puller has already."""

    transfer_id: str
    epoch: str
    attempt: int
    token_hash: str
    first_token: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """The entry exists: what it will hold, in which form and geometry, and where it lies in the source's box (`box_offset`, bytes)."""

    transfer_id: str
    epoch: str
    attempt: int
    token_hash: str
    num_tokens: int
    form: str
    layout: KvLayout
    box_offset: int


class Frame(NamedTuple):  # several per transfer, and a frozen dataclass takes four times as long to make
    """Blocks [first_block, first_block + num_blocks) of `rank`. `seq` counts frames from 0; `digest` is xxh3_64 of the payload."""

    transfer_id: str
    epoch: str
    attempt: int
    seq: int
    rank: int
    first_block: int
    num_blocks: int
    digest: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """The source lives; its engine has not finished the next blocks."""


@dataclass(frozen=True, slots=True)
class End:
    """All `num_frames` frames were sent."""

    transfer_id: str
    num_frames: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The transfer cannot be read (any more). `error` is a typed error, see errors.to_wire."""

    error: bytes


@dataclass(frozen=True, slots=True)
class Ack:
    """The puller has every block, verified."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Hello:
    """(shm) Asks for the source's box."""

    epoch: str


@dataclass(frozen=True, slots=True)
class Mapped:
    """(shm) The answer to Hello, with a descriptor of the box beside it."""

    epoch: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Shown:
    """(cuda_ipc) The answer to Hello: what the source's box, in GPU memory, is opened by."""

    epoch: str
    num_bytes: int
    handle: bytes


@dataclass(frozen=True, slots=True)
class Join:
    """(torch_dist) Asks the source of life `epoch` to be rank 0 of a new process group, whose store keys begin with `pair_id`."""

    epoch: str
    pair_id: str


@dataclass(frozen=True, slots=True)
class Via:
    """(torch_dist) The next pull on this connection is called `pull_id` in Wants."""

    pull_id: str


@dataclass(frozen=True, slots=True)
class Want:
    """(torch_dist) The puller waits in a recv with `tag` for `num_frames` payloads of pull `pull_id`, as one, from frame `seq` on."""

    pull_id: str
    seq: int
    num_frames: int
    tag: int


Header: TypeAlias = Pull | Opened | Frame | Waiting | End | Failed | Ack | Hello | Mapped | Shown | Join | Via | Want
_KINDS: dict[str, type[Any]] = {
    c.__name__: c for c in (Pull, Opened, Frame, Waiting, End, Failed, Ack, Hello, Mapped, Shown, Join, Via, Want)
}
_FIELDS = {c: get_type_hints(c) for c in (*_KINDS.values(), KvLayout)}
_NAMES = {c: tuple(types) for c, types in _FIELDS.items()}
_TYPES = {c: tuple(types.values()) for c, types in _FIELDS.items()}


class Sink(Protocol):
    """Where a carrier puts what it reads."""

    def room(self, frame: Frame) -> memoryview:
        """Where the payload of `frame` belongs, for carriers that receive in place; asked for in the order of the frames, once each.

        Then `receive(frame, [room])` has only to verify. Raises TransferError on a frame that is not due; valid until the pull returns.
        """
        ...

    async def receive(self, header: Header, payload: Sequence[memoryview]) -> bool:
        """Take one message; `payload` (consecutive pieces, for frames) may be read until the transfer is complete: it is not to change.

        Copies and checks may still be under way at the return; the next messages meet what they find. After an error or a cancel the
        pieces may still be read for a moment, to no effect. Returns True when the transfer is complete and verified: acknowledge it.
        Raises TransferError on anything wrong.
        """
        ...


def pull_request(transfer: Transfer) -> Pull:
    """The question that fetches `transfer`."""
    return Pull(transfer.transfer_id, transfer.source.epoch, transfer.attempt, transfer.token_hash, transfer.first_token)


_DIGEST = struct.Struct("<I")
_PACKER = msgpack.Packer()


def pack(header: Header) -> bytes:
    """The bytes of a header: msgpack, then xxh32 of that."""
    kind = type(header)
    values = [getattr(header, name) for name in _NAMES[kind]]
    if kind is Opened:
        values = [_values(value) if isinstance(value, KvLayout) else value for value in values]
    packed: bytes = _PACKER.pack([kind.__name__, *values])
    return packed + _DIGEST.pack(xxhash.xxh32_intdigest(packed))


def unpack(data: bytes | bytearray | memoryview) -> Header:
    """The header in `data`. Raises TransferCorruptError on anything that `pack` does not write."""
    body = memoryview(data)[: -_DIGEST.size]
    if len(data) <= _DIGEST.size or _DIGEST.unpack_from(data, len(body))[0] != xxhash.xxh32_intdigest(body):
        raise TransferCorruptError(f"not a KV header: {len(data)} bytes without the digest that belongs to them")
    try:
        kind, *values = msgpack.unpackb(body)
        header: Header = _build(_KINDS[kind], values)
        return header
    except (ValueError, TypeError, KeyError, msgpack.UnpackException, RecursionError) as error:
        raise TransferCorruptError(f"not a KV header: {type(error).__name__}") from None


def _build(cls: type[Any], values: Sequence[Any]) -> Any:
    types = _TYPES[cls]
    if tuple(map(type, values)) != types:  # a layout is in it, or it is none of ours
        values = [_converted(value, wanted) for value, wanted in zip(values, types, strict=True)]
    for value in values:
        if type(value) is int and not 0 <= value < 1 << 64:
            raise TypeError("int")
    return cls(*values)


def _converted(value: Any, wanted: type) -> Any:
    if wanted is KvLayout:
        return _known_layout(*value)
    if wanted is Packing:
        return Packing(value)
    if type(value) is not wanted:
        raise TypeError(wanted.__name__)
    return value


@lru_cache(maxsize=64)
def _values(layout: KvLayout) -> tuple[Any, ...]:
    """A layout's fields; each pull tells the same one."""
    return astuple(layout)


@lru_cache(maxsize=64, typed=True)
def _known_layout(*values: Any) -> KvLayout:
    """`_build`, for one that each pull brings."""
    layout: KvLayout = _build(KvLayout, values)
    return layout


def pack_layout(layout: KvLayout) -> bytes:
    """The bytes of a layout, for a worker's hello."""
    packed: bytes = msgpack.packb(astuple(layout))
    return packed


def unpack_layout(data: bytes) -> KvLayout:
    """The layout in `data`. Raises TransferCorruptError on anything that `pack_layout` does not write."""
    try:
        layout: KvLayout = _build(KvLayout, msgpack.unpackb(data))
        return layout
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise TransferCorruptError(f"not a KV layout: {type(error).__name__}") from None


def failed(error: DisaggError) -> Failed:
    """A header that carries `error`."""
    return Failed(to_wire(error))


def raise_failed(header: Failed) -> None:
    """Raise the error that the source sent; one that is not a TransferError arrives as one."""
    error = from_wire(header.error)
    raise error if isinstance(error, TransferError) else TransferError(f"the source failed: {error.message}")


class Coverage:
    """Which blocks of an entry for `num_tokens` tokens are there, from block `first` on: each of them once."""

    def __init__(self, layout: KvLayout, num_tokens: int, first: int = 0) -> None:
        self._num_ranks, self._frame_blocks = layout.num_ranks, layout.frame_blocks
        self._first = first
        num_blocks = layout.num_blocks(num_tokens)
        self._have = [bytearray(num_blocks) for _ in range(layout.num_ranks)]
        self.total_blocks = layout.num_ranks * (num_blocks - first)
        self.num_blocks = 0

    @property
    def is_complete(self) -> bool:
        return self.num_blocks == self.total_blocks

    def fault(self, rank: int, first_block: int, num_blocks: int) -> str | None:
        """Why this range cannot be one frame's of the entry, or None. Does not look at what is there already."""
        if not 0 <= rank < self._num_ranks:
            return f"rank {rank} is outside 0..{self._num_ranks - 1}"
        if not 0 < num_blocks <= self._frame_blocks:
            return f"{num_blocks} blocks in a frame, expected 1..{self._frame_blocks}"
        if first_block < self._first or first_block + num_blocks > len(self._have[rank]):
            return f"blocks {first_block}..{first_block + num_blocks - 1} are outside {self._first}..{len(self._have[rank]) - 1}"
        return None

    def count(self, rank: int, first_block: int, num_blocks: int) -> int:
        """How many blocks of a (faultless) range are there already."""
        return sum(self._have[rank][first_block : first_block + num_blocks])

    def add(self, rank: int, first_block: int, num_blocks: int) -> None:
        """Note a (faultless, new) range as there."""
        self._have[rank][first_block : first_block + num_blocks] = b"\x01" * num_blocks
        self.num_blocks += num_blocks
