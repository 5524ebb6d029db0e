"""How large a worker's boxes are, and whether host and prompts fit them. Pure; asked once, when a worker starts.

A size that the topology does not give comes from the memory that is free: an even share of a quarter of it among all boxes of the host,
as the rest is for engines. Boxes are memory only where they have been written.
"""

from __future__ import annotations

from disagg.errors import ConfigError
from disagg.kv.box import ALIGN_BYTES
from disagg.kv.layout import KvLayout

GIB = 1 << 30
MAX_DEFAULT_BYTES = 4 * GIB  # more is only of use where many long prompts wait at once
_GRAIN_BYTES = 1 << 20


def default_box_bytes(available_bytes: int, workers_on_host: int) -> int:
    """Bytes of each box where the topology says nothing; a whole number of MiB, at least one."""
    share = available_bytes // 4 // (2 * max(1, workers_on_host))
    return max(_GRAIN_BYTES, min(share, MAX_DEFAULT_BYTES) // _GRAIN_BYTES * _GRAIN_BYTES)


def check_host(outbox_bytes: int, inbox_bytes: int, workers_on_host: int, memory_bytes: int) -> None:
    """Raise ConfigError when the boxes of all workers of a host exceed its memory (or its container's limit)."""
    total_bytes = workers_on_host * (outbox_bytes + inbox_bytes)
    if total_bytes > memory_bytes:
        room_gib = memory_bytes / workers_on_host / 2 / GIB
        raise ConfigError(
            f"the boxes of {workers_on_host} workers on this host come to {total_bytes / GIB:.2f} GiB ({outbox_bytes / GIB:.2f} out and "
            f"{inbox_bytes / GIB:.2f} in, each); it has {memory_bytes / GIB:.2f} GiB of memory, for engines too: "
            f"lower kv.outbox_gib and kv.inbox_gib below {room_gib:.2f}, or use fewer workers",
            key="kv.outbox_gib",
            value=outbox_bytes / GIB,
            expected=f"less than {room_gib:.2f}",
        )


def check_longest_prompt(layout: KvLayout, max_context_tokens: int, outbox_bytes: int, inbox_bytes: int) -> None:
    """Raise ConfigError when a box cannot hold the KV of the longest prompt that the engine permits (its context less one token)."""
    num_tokens = max(1, max_context_tokens - 1)
    needed = layout.entry_bytes(num_tokens)
    for key, num_bytes in (("kv.outbox_gib", outbox_bytes), ("kv.inbox_gib", inbox_bytes)):
        if num_bytes // ALIGN_BYTES * ALIGN_BYTES < needed:  # regions are whole pages
            needed_gib = _rounded_up_gib(needed)
            raise ConfigError(
                f"{key}: {num_bytes / GIB:.6g} GiB cannot hold the KV of the longest prompt, {num_tokens} tokens and {needed} bytes; "
                f"give at least {needed_gib}, or lower max_model_len",
                key=key,
                value=num_bytes / GIB,
                expected=f"at least {needed_gib}",
            )


def _rounded_up_gib(num_bytes: int) -> float:
    """GiB with four digits behind the point that hold `num_bytes` in whole pages."""
    pages = -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return -(-pages * 10_000 // GIB) / 10_000
