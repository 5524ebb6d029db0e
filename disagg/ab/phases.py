"""Where the seconds of a request went, from its row: the TTFT in queue, prefill and network, the first gap in transfer and waiting. Pure.

    sent ──network──▶ received ──queue──▶ routed ──prefill──▶ first token at the gateway ──network──▶ first token at the client
    first token ──transfer──▶ KV complete on the decode side ──waiting (decode queue and step)──▶ second token

The gateway gives queue, prefill and transfer with the answer; what it did not see of the TTFT is the network, both ways and both
ends. A transfer that was hidden behind the prefill is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.ab.rows import Row


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one whole answer. The first three sum up to its TTFT, the next two to its first gap (None for a single token)."""

    queue_s: float
    prefill_s: float
    network_s: float
    transfer_s: float | None
    waiting_s: float | None


def phases(row: Row) -> Phases | None:
    """None for what is not a whole answer, or has no timing from its gateway (an external server's)."""
    ttft_s = row.ttft_s
    if not row.is_whole or ttft_s is None or row.queue_s is None or row.prefill_s is None:
        return None
    network_s = max(0.0, ttft_s - row.queue_s - row.prefill_s)
    if row.output_tokens < 2:
        return Phases(row.queue_s, row.prefill_s, network_s, None, None)
    gap_s = row.token_s[1] - row.token_s[0]
    transfer_s = min(gap_s, row.transfer_s or 0.0)
    return Phases(row.queue_s, row.prefill_s, network_s, transfer_s, gap_s - transfer_s)


def all_phases(rows: Sequence[Row]) -> list[Phases]:
    """Of the rows that have them."""
    return [found for row in rows if (found := phases(row)) is not None]
