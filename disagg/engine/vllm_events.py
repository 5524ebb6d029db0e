"""vLLM's KV events, from the engine's process to the worker: what came into its prefix cache and what went, after each step.

vLLM tells them to a publisher. Ours names blocks by disagg's identities (disagg/prefix.py), which every gateway can work out from a prompt,
and sends them over the lifeline. vLLM's own block hashes do not leave the process: they depend on its version and settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
    EventPublisherFactory,
)

from disagg.engine.vllm_channel import report_cache
from disagg.prefix import block_identities, root_identity

PUBLISHER = "disagg"


def events_config() -> KVEventsConfig:
    """Events on, told to our publisher. vLLM's own check of the name knows its two only, so the name is set behind it."""
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    object.__setattr__(config, "publisher", PUBLISHER)
    return config


def register_publisher() -> None:
    """Make the publisher known in this process. Idempotent."""
    if PUBLISHER not in EventPublisherFactory._registry:
        EventPublisherFactory.register_publisher(PUBLISHER, CachePublisher)


class CachePublisher(EventPublisher):  # type: ignore[misc]  # vLLM is untyped to us
    """Made by vLLM's scheduler, and called in its thread."""

    def __init__(self, data_parallel_rank: int = 0, **_: Any) -> None:
        super().__init__(data_parallel_rank)
        self._names = CacheNames()

    def publish(self, events: EventBatch) -> None:
        stored, removed, is_cleared = self._names.translate(events.events)
        if stored or removed or is_cleared:
            report_cache(stored, removed, is_cleared)

    def shutdown(self) -> None:
        return


class CacheNames:
    """vLLM's hashes of the blocks that are cached now, with our identities."""

    def __init__(self) -> None:
        self._identities: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self._identities)

    def translate(self, events: Sequence[Any]) -> tuple[list[int], list[int], bool]:
        """What came in all, what went, and whether everything that was there before went first.

        Left out is what a prompt's tokens do not name: blocks behind an adapter, images or embeddings, parts of blocks, further groups of
        a hybrid model's cache, tiers beside the device's memory.
        """
        stored: dict[int, None] = {}
        removed: dict[int, None] = {}
        is_cleared = False
        for event in events:
            if isinstance(event, AllBlocksCleared):
                stored, removed, is_cleared = {}, {}, True
                self._identities.clear()
            elif event.group_idx or event.medium not in (None, MEDIUM_GPU):
                continue
            elif isinstance(event, BlockStored):
                for identity in self._stored(event):
                    removed.pop(identity, None)
                    stored[identity] = None
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    gone = self._identities.pop(block_hash, None)
                    if gone is not None:
                        stored.pop(gone, None)
                        removed[gone] = None
        return list(stored), list(removed), is_cleared

    def _stored(self, event: BlockStored) -> list[int]:
        """Identities of the event's blocks; of those that were known already, too: vLLM tells again of blocks that it uses again."""
        salt = _salt(event)
        if event.lora_name is not None or salt is None or len(event.token_ids) != event.block_size * len(event.block_hashes):
            return []
        if event.parent_block_hash is None:
            parent = root_identity(salt)
        elif (known := self._identities.get(event.parent_block_hash)) is not None:
            parent = known
        else:
            return []
        identities = block_identities(event.token_ids, event.block_size, parent)
        self._identities.update(zip(event.block_hashes, identities, strict=True))
        return list(identities)


def _salt(event: BlockStored) -> str | None:
    """The prompt's cache salt ("": none); None where something else than tokens and salt is in the block."""
    extra = [key for keys in event.extra_keys or () for key in keys or ()]
    if not extra:
        return ""
    is_salt = event.parent_block_hash is None and len(extra) == 1 and isinstance(extra[0], str)
    return extra[0] if is_salt else None
