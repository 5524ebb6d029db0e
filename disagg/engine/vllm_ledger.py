"""What the engine's processes tell, in the worker's process: above all which box entries they may still touch.

Their messages become calls on entries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg.engine.vllm_channel import Event
from disagg.engine.vllm_plan import READ, WRITE
from disagg.engine.vllm_stats import EngineStats, StepReport
from disagg.errors import EngineError
from disagg.kv.api import InboxEntry, OutboxEntry
from disagg.kv.form import TOKENS
from disagg.kv.layout import KvLayout, Packing


@dataclass(slots=True)
class _Open:
    """An entry that the engine may still touch. `ranks`: those that have not ended it yet; `shards`: the entry's rank of each."""

    ranks: set[int]
    shards: dict[int, int]
    stage: Callable[[int, int, int, int], None] | None
    end: Callable[[], None]


@dataclass(slots=True)
class EntryLedger:
    """Open entries of one engine. Late, repeated and unknown messages are counted (`ignored`) and change nothing.

    `load_s` and `stage_s`: seconds of the ranks' steps (mean over ranks) that went into copies from and to the boxes, digests included.
    `ready` is set when every rank has said hello, or one has refused (`refusal` says why); `dead` when an engine process ended.
    """

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    layouts: dict[int, KvLayout] = field(default_factory=dict)
    refusal: str | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    ignored: int = 0
    load_s: float = 0.0
    stage_s: float = 0.0
    _open: dict[tuple[str, str], _Open] = field(default_factory=dict)

    @property
    def num_open(self) -> int:
        """Entries that the engine may still touch."""
        return len(self._open)

    def open_write(self, entry: OutboxEntry) -> None:
        """The engine may write `entry` until it says that it ended, or died. Raises EngineError when it is open already."""
        self._add(WRITE, entry.transfer_id, entry.form, entry.stage, entry.end_write)

    def open_read(self, entry: InboxEntry) -> None:
        """The engine may read `entry` until it says that it ended, or died. Raises EngineError when it is open already."""
        self._add(READ, entry.transfer_id, entry.form, None, entry.end_read)

    def _add(
        self, kind: str, transfer_id: str, form: str, stage: Callable[[int, int, int, int], None] | None, end: Callable[[], None]
    ) -> None:
        if (kind, transfer_id) in self._open:
            raise EngineError(f"transfer {transfer_id} is under way in this engine already ({kind})")
        by_token = form.partition("/")[0] == TOKENS
        shards = {rank: layout.shard_of(rank) if by_token else rank for rank, layout in self.layouts.items()}
        self._open[kind, transfer_id] = _Open(set(self.layouts), shards, stage, end)

    def end(self, kind: str, transfer_id: str) -> None:
        """Nobody touches the entry any more. Unknown is fine."""
        opened = self._open.pop((kind, transfer_id), None)
        if opened is not None:
            opened.end()

    def on_hello(self, rank: int, layout: dict[str, Any]) -> None:
        """A rank is ready. `layout`: KvLayout's fields."""
        self.layouts[rank] = KvLayout(**{**layout, "packing": Packing(layout.get("packing", Packing.OPAQUE))})
        if len(self.layouts) == self.layouts[rank].num_ranks:
            self.ready.set()

    def on_refused(self, reason: str) -> None:
        """A rank cannot serve this model."""
        self.refusal = reason
        self.ready.set()

    def on_events(self, rank: int, events: Sequence[Event]) -> None:
        """What one rank did in one step, in order."""
        for name, transfer_id, *rest in events:
            if name == "copied":
                self.load_s += rest[0] / len(self.layouts)
                self.stage_s += rest[1] / len(self.layouts)
                continue
            kind = READ if name == "read_ended" else WRITE
            opened = self._open.get((kind, transfer_id))
            if opened is None or rank not in opened.ranks:
                self.ignored += 1
            elif name == "staged":
                assert opened.stage is not None
                opened.stage(opened.shards[rank], *rest)
            else:
                opened.ranks.discard(rank)
                if not opened.ranks:
                    self.end(kind, transfer_id)

    def on_step(self, report: StepReport) -> None:
        """The engine ran a step."""
        self.stats.note(report)

    def on_cache(self, stored: Sequence[int], removed: Sequence[int], is_cleared: bool) -> None:
        """A step changed the engine's prefix cache."""
        self.stats.note_cache(stored, removed, is_cleared)

    def on_process_lost(self) -> None:
        """An engine process ended, so the engine cannot serve any more."""
        self.dead.set()

    def die_with(self, outputs: asyncio.Task[Any]) -> None:
        """An engine whose outputs nobody hands on any more is dead, though its process lives: its worker is to be started anew."""
        outputs.add_done_callback(lambda _: self.dead.set())

    def on_ranks_lost(self) -> None:
        """The last process with the boxes mapped ended."""
        for kind, transfer_id in list(self._open):
            self.end(kind, transfer_id)
