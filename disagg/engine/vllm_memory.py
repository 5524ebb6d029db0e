"""Copies between vLLM's paged KV cache and a box entry.

    cache:  per layer a tensor whose first dimension is the block; inside a block whatever order the attention backend keeps
    entry:  [blocks, layers, block_bytes] of one rank, contiguous; other forms in vllm_forms.py

Form `blocks` is raw bytes both ways, so a round trip is exact for every backend. CPU copies are done when the call returns. GPU copies are
ordered on the compute stream against page-locked box memory, one gather for all layers and one copy to the host; their events are sent
by a thread that sleeps until the copy is over, so the engine's step never waits for them. (The GPU half has not run on a GPU yet;
everything specific to it is in `_GpuBoxes` and kv/tensors/kernels.py.)
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from disagg.engine.vllm_forms import FormCopies, Span, fits, span_of
from disagg.engine.vllm_plan import Copy
from disagg.errors import ConfigError
from disagg.kv.form import BLOCKS
from disagg.kv.layout import KvLayout
from disagg.kv.tensors.token_copy import on_device

Frame = tuple[str, int, int, int]  # transfer id, first block of the entry, number of blocks, xxh3_64 of their bytes


WORD_BYTES = 8


def layer_words(cache: torch.Tensor) -> torch.Tensor:
    """A view [num_blocks, block_words] of one layer's cache [num_blocks, ...], without a copy, in words of 8 bytes.

    Words, because torch's indexed copies go element by element: single bytes take six times as long.

    Raises ConfigError when a block's bytes are not one contiguous run (a cache layout that interleaves layers or blocks by head).
    """
    inner = [(size, stride) for size, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True) if size > 1]
    block_elements = cache[0].numel()
    span = 1 + sum((size - 1) * stride for size, stride in inner)
    if span != block_elements:
        raise ConfigError(
            f"the attention backend keeps a block of {block_elements} elements spread over {span}; KV hand-over needs blocks in one piece",
            key="engine.args.kv_cache_layout",
            value=f"shape {tuple(cache.shape)}, strides {cache.stride()}",
            expected="a block-compact cache layout (layers and blocks outermost)",
        )
    if block_elements * cache.element_size() % WORD_BYTES or cache.stride(0) * cache.element_size() % WORD_BYTES:
        raise ConfigError(
            key="engine.args.block_size",
            value=f"{block_elements * cache.element_size()} bytes a block",
            expected=f"blocks of a multiple of {WORD_BYTES} bytes",
        )
    rows = cache.as_strided((cache.shape[0], block_elements), (cache.stride(0), 1))
    return rows.view(torch.int64)


@dataclass(frozen=True, slots=True)
class CacheBlocks:
    """All layers of one rank's cache: `layers[i]` is [num_blocks, block_words], `views[i]` the same as the backend sees it."""

    layers: tuple[torch.Tensor, ...]
    views: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> CacheBlocks:
        """From vLLM's per-layer tensors, in layer order; layers that share a tensor count once. Raises ConfigError."""
        rows: dict[int, torch.Tensor] = {}
        views: dict[int, torch.Tensor] = {}
        for name, cache in kv_caches.items():
            if not isinstance(cache, torch.Tensor) or cache.shape[0] != num_blocks:
                raise ConfigError(
                    f"layer {name} keeps state that is not {num_blocks} KV blocks; only attention caches can be handed over",
                    key="model",
                    value=name,
                    expected="a decoder model with full attention in every layer",
                )
            rows.setdefault(cache.data_ptr(), layer_words(cache))
            views.setdefault(cache.data_ptr(), cache)
        layers = tuple(rows.values())
        if len({layer.shape for layer in layers}) != 1:
            shapes = sorted({tuple(layer.shape) for layer in layers})
            raise ConfigError(f"layers of unlike cache sizes {shapes}", key="model", value=shapes, expected="equal layers")
        return cls(layers, tuple(views.values()))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return int(self.layers[0].shape[1]) * WORD_BYTES

    @property
    def slab_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return len(self.layers) * self.block_bytes

    @property
    def is_cpu(self) -> bool:
        return bool(self.layers[0].device.type == "cpu")

    def gather(self, block_ids: Sequence[int], out: torch.Tensor) -> None:
        """Cache -> `out` [len(block_ids), layers, block_words]."""
        index = self.index(block_ids)
        if not self.is_cpu:
            from disagg.kv.tensors.kernels import gather_blocks

            gather_blocks(self.layers, index, out)
            return
        for i, layer in enumerate(self.layers):
            out[:, i].copy_(layer[index] if isinstance(index, slice) else layer.index_select(0, index))

    def scatter(self, block_ids: Sequence[int], source: torch.Tensor) -> None:
        """`source` [len(block_ids), layers, block_words] -> cache."""
        index = self.index(block_ids)
        if not self.is_cpu:
            from disagg.kv.tensors.kernels import scatter_blocks

            scatter_blocks(self.layers, index, source)
            return
        for i, layer in enumerate(self.layers):
            if isinstance(index, slice):
                layer[index].copy_(source[:, i])
            else:
                layer.index_copy_(0, index, source[:, i])

    def index(self, block_ids: Sequence[int]) -> slice | torch.Tensor:
        """On a CPU a slice when the ids are consecutive (the usual case: plain memcpy), else an index tensor."""
        if not self.is_cpu:
            return on_device(block_ids, self.layers[0].device)
        first = block_ids[0]
        if list(block_ids) == list(range(first, first + len(block_ids))):
            return slice(first, first + len(block_ids))
        return torch.tensor(block_ids, dtype=torch.int64)


class RankBoxes:
    """One rank's part of both boxes: stages and loads `Copy` jobs, and knows when each is over.

    `outbox`/`inbox`: the mapped boxes. `layout`: the cache's. `send`: takes one step's events in order.
    """

    def __init__(
        self, cache: CacheBlocks, layout: KvLayout, rank: int, outbox: mmap.mmap, inbox: mmap.mmap, send: Callable[[list[Any]], None]
    ) -> None:
        self._cache = cache
        self._layout = layout
        self._forms = FormCopies(cache.views, cache.layers, layout, rank)
        self._outbox = torch.frombuffer(outbox, dtype=torch.uint8)
        self._inbox = torch.frombuffer(inbox, dtype=torch.uint8)
        self._rank = rank
        self._outbox_bytes = memoryview(outbox)
        self._send = send
        self._gpu = None if cache.is_cpu else _GpuBoxes((self._outbox, self._inbox), cache.layers[0].device, send)

    def can_load(self, copy: Copy) -> bool:
        """Whether the copy lies inside its entry, and the entry inside the inbox."""
        return fits(copy, self._entry(copy), self._inbox.numel(), self._layout.block_tokens)

    def can_stage(self, copy: Copy) -> bool:
        """Whether the copy lies inside its entry, and the entry inside the outbox."""
        return fits(copy, self._entry(copy), self._outbox.numel(), self._layout.block_tokens)

    def _entry(self, copy: Copy) -> KvLayout:
        return copy.entry or self._layout

    def _words(self, box: torch.Tensor, copy: Copy) -> torch.Tensor:
        """A copy of form `blocks` in `box` as words [blocks, layers, block_words]."""
        span = span_of(copy, self._layout, self._rank, self._layout.block_tokens)
        flat = box[span.start : span.start + span.num_bytes]
        return flat.view(torch.int64).view(span.count, len(self._cache.layers), -1)

    def load(self, copies: Sequence[Copy]) -> None:
        """Inbox -> cache, before the step's forward pass."""
        for copy in copies:
            if copy.form == BLOCKS:
                self._cache.scatter(copy.block_ids, self._words(self._inbox, copy))
            else:
                self._forms.scatter(copy, self._entry(copy), self._inbox, self._cache.index(copy.block_ids))

    def stage(self, copies: Sequence[Copy]) -> list[tuple[Copy, Span]]:
        """Cache -> outbox, after the step's forward pass. Returns where each copy that this rank writes lies, for `frames`."""
        placed = []
        for copy in copies:
            if not self._forms.stages(copy.form):
                continue
            if copy.form == BLOCKS:
                self._cache.gather(copy.block_ids, self._words(self._outbox, copy))
            else:
                self._forms.gather(copy, self._entry(copy), self._outbox, self._cache.index(copy.block_ids))
            rank = self._forms.entry_rank(copy.form)
            placed.append((copy, span_of(copy, self._entry(copy), rank, self._layout.block_tokens)))
        return placed

    def frames(self, placed: Sequence[tuple[Copy, Span]]) -> list[Frame]:
        """Digests of staged copies, a frame of at most `frame_blocks` of the entry's blocks each."""
        frames = []
        for copy, span in placed:
            entry = self._entry(copy)
            for first in range(0, span.count, entry.frame_blocks):
                n = min(entry.frame_blocks, span.count - first)
                at = span.start + first * entry.slab_bytes
                digest = xxhash.xxh3_64_intdigest(self._outbox_bytes[at : at + n * entry.slab_bytes])
                frames.append((copy.transfer_id, span.first + first, n, digest))
        return frames

    def finish_step(self, make_events: Callable[[], list[Any]]) -> None:
        """Sends `make_events()` once this step's copies are over: now on a CPU, after the stream reached here on a GPU."""
        if self._gpu is None:
            self._send(make_events())
        else:
            self._gpu.after_copies(make_events)


class _GpuBoxes:
    """Page-locks the boxes, and sends events when the compute stream has passed their copies."""

    def __init__(self, boxes: Sequence[torch.Tensor], device: torch.device, send: Callable[[list[Any]], None]) -> None:
        runtime = torch.cuda.cudart()
        for box in boxes:
            torch.cuda.check_error(runtime.cudaHostRegister(box.data_ptr(), box.numel(), 0))
        self._device = device
        self._send = send
        self._pending: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], list[Any]]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="disagg-copies", daemon=True).start()

    def after_copies(self, make_events: Callable[[], list[Any]]) -> None:
        event = torch.cuda.Event(blocking=True)  # blocking: the thread sleeps instead of spinning
        event.record()
        self._pending.put((event, make_events))

    def _run(self) -> None:
        torch.cuda.set_device(self._device)  # a thread begins with GPU 0, and would take memory there
        while True:
            event, make_events = self._pending.get()
            event.synchronize()
            self._send(make_events())
