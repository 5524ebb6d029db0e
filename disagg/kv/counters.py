"""What an outbox and an inbox have done since their start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class OutboxCounters:
    """Since the start. `late`: calls and messages after a transfer's end; `refused`: reads; `duplicates`: blocks staged again.

    `frames` and `bytes` were staged, `sent_frames` and `sent_bytes` handed to readers. The carriers that serve the outbox count here, too:
    `garbage` connections, and those that were `turned_away` because there were too many.
    """

    opened: int = 0
    frames: int = 0
    bytes: int = 0
    acked: int = 0
    released: int = 0
    expired: int = 0
    incomplete: int = 0
    refused: int = 0
    late: int = 0
    duplicates: int = 0
    sent_frames: int = 0
    sent_bytes: int = 0
    garbage: int = 0
    turned_away: int = 0


@dataclass(slots=True)
class InboxCounters:
    """Since the start. `late`: messages after a transfer's end; `duplicates`: fetches of a transfer that is known already.

    `transfer_s`: seconds from the source's first message (and room for it) to the last block verified, summed over the completed.
    `saved_bytes`: of KV that the engine had already, so that it did not move.
    """

    fetches: int = 0
    frames: int = 0
    bytes: int = 0
    completed: int = 0
    failed: int = 0
    corrupt: int = 0
    released: int = 0
    expired: int = 0
    late: int = 0
    duplicates: int = 0
    transfer_s: float = 0.0
    saved_bytes: int = 0
