"""In which form KV moves between two workers: decided once per pair from both layouts, before any request uses the pair.

    blocks          raw cache blocks: equal layouts only, bit-exact
    tokens          [shards, tokens, layers, 2, heads, head_dim]: unlike block sizes, tensor-parallel degrees and cache dtypes
    .../fp8, /int8  the same with numbers of one byte (`kv.wire_dtype`) and scales beside them: about half the bytes

Conversion happens while the KV is copied anyway: the producer's gather writes the entry in this form, the consumer's scatter reads it.
In form `tokens` each (token, layer) row is the codes of [2, heads, head_dim] numbers, then, when quantised, the [2, heads] scales; in form
`blocks/...` each (block, layer) row is the codes of [heads, 2, block_tokens x head_dim] numbers and the [heads, 2] scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from disagg.errors import LayoutMismatchError
from disagg.kv.layout import KvLayout, Packing, differences

WireDtype = Literal["stored", "fp8", "int8"]

BLOCKS = "blocks"
TOKENS = "tokens"
FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4}
NUMBER_BYTES = {**FLOATS, "float8_e4m3fn": 1, "simulated-bf16": 2, "simulated-fp8": 1}
SCALE_BYTES = 2  # bfloat16
QUANTISED = ("fp8", "int8")

_OF_THE_MODEL = ("model", "num_layers", "kv_heads", "head_dim")  # what form `tokens` cannot bridge


def agree(source: KvLayout, sink: KvLayout, wire_dtype: WireDtype = "stored") -> str:
    """The form in which KV goes from a worker with layout `source` to one with `sink`.

    Raises LayoutMismatchError with each thing that differs and cannot be bridged, or with why the numbers cannot be quantised.
    """
    form = BLOCKS if not source.differences(sink) else _tokens(source, sink)
    if wire_dtype == "stored" or NUMBER_BYTES.get(source.number) == 1:
        return form
    if source.number not in FLOATS or source.packing is Packing.OPAQUE:
        raise LayoutMismatchError(
            f"kv.wire_dtype {wire_dtype} needs a cache of {', '.join(FLOATS)} whose heads can be told apart; "
            f"backend {source.backend} keeps {source.dtype} ({source.packing}); use kv.wire_dtype: stored"
        )
    return f"{form}/{wire_dtype}"


def _tokens(source: KvLayout, sink: KvLayout) -> str:
    what = differences(source, sink, _OF_THE_MODEL)
    for layout in (source, sink):
        if not what and layout.packing is not Packing.TOKENS:
            what = source.differences(sink)
            what.append(f"only equal caches can be exchanged, because backend {layout.backend} does not keep tokens apart")
        elif not what and layout.number not in NUMBER_BYTES:
            what = source.differences(sink)
            what.append(f"{layout.number} cannot be converted")
    if what:
        raise LayoutMismatchError(f"the workers keep their KV in ways that cannot be exchanged (source != sink): {'; '.join(what)}")
    return TOKENS


def entry_layout(source: KvLayout, form: str) -> KvLayout:
    """The geometry of an entry that an engine with layout `source` writes in `form`. Raises LayoutMismatchError where it cannot."""
    kind, _, quantised = form.partition("/")
    if form == BLOCKS:
        return source
    possible = source.packing is not Packing.OPAQUE if kind == BLOCKS else kind == TOKENS and source.packing is Packing.TOKENS
    if not possible or (quantised and (quantised not in QUANTISED or source.number not in FLOATS)):
        raise LayoutMismatchError(f"a cache of backend {source.backend} ({source.packing}, {source.dtype}) cannot be exchanged as {form!r}")
    if kind == TOKENS:
        return _tokens_layout(source, source.num_shards, quantised or source.number)
    row_bytes = 2 * source.shard_heads * (source.block_tokens * source.head_dim + SCALE_BYTES)
    return replace(source, dtype=f"{source.dtype}/{quantised}", block_bytes=row_bytes)


def _tokens_layout(cache: KvLayout, num_shards: int, dtype: str) -> KvLayout:
    heads = cache.kv_heads // num_shards
    row_bytes = 2 * heads * (cache.head_dim + SCALE_BYTES if dtype in QUANTISED else cache.head_dim * NUMBER_BYTES[dtype])
    return KvLayout(
        model=cache.model,
        backend=TOKENS,
        dtype=dtype,
        block_tokens=1,
        num_layers=cache.num_layers,
        block_bytes=row_bytes,
        num_ranks=num_shards,
        kv_heads=cache.kv_heads,
        head_dim=cache.head_dim,
        packing=Packing.TOKENS,
    )


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Heads [start, start + num_heads) of an entry's `shard` are the reader's heads from `at` on."""

    shard: int
    start: int
    num_heads: int
    at: int


def head_parts(entry: KvLayout, first_head: int, num_heads: int) -> list[HeadPart]:
    """Where in an entry of form `tokens` the model's kv heads [first_head, first_head + num_heads) lie."""
    size = entry.shard_heads
    parts = []
    head = first_head
    while head < first_head + num_heads:
        shard, start = divmod(head, size)
        count = min(size - start, first_head + num_heads - head)
        parts.append(HeadPart(shard, start, count, head - first_head))
        head += count
    return parts


def check_entry(mine: KvLayout, entry: KvLayout, form: str) -> None:
    """Raise LayoutMismatchError unless an engine with layout `mine` can read an entry of geometry `entry` in `form`."""
    expected = entry_layout(mine, form)
    kind, _, quantised = form.partition("/")
    what = expected.differences(entry) if kind == BLOCKS else differences(mine, entry, _OF_THE_MODEL)
    if kind == TOKENS and not what:  # another number of shards and another dtype are bridged
        known = (quantised,) if quantised else tuple(NUMBER_BYTES)
        if entry.dtype not in known or not 0 < entry.num_ranks <= mine.kv_heads or mine.kv_heads % entry.num_ranks:
            what = [f"{entry.num_ranks} shards of {entry.kv_heads} heads of {entry.dtype}"]
        else:
            what = _tokens_layout(mine, entry.num_ranks, entry.dtype).differences(entry)
    if what:
        raise LayoutMismatchError(f"the source keeps its KV otherwise (mine != theirs): {'; '.join(what)}")
