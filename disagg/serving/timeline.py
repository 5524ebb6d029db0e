"""The instants of one request at the gateway, on one monotonic clock. Every latency is a difference of two of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Timeline:
    """Instants in seconds of `time.monotonic()`; None until reached, or when never reached.

    received -> routed -> first token -> (transferred) -> last token -> ended. With several attempts `routed_s` is the first route's
    and `transferred_s` the latest transfer's, so that queue, prefill and decode spans cover what the client waited for.
    """

    received_s: float
    routed_s: float | None = None
    first_token_s: float | None = None
    transferred_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None

    @property
    def queue_s(self) -> float:
        """Received to routed; to the end for a request that never was routed."""
        return _span(self.received_s, self.routed_s if self.routed_s is not None else self.ended_s)

    @property
    def prefill_s(self) -> float:
        """Routed to the first token at the gateway."""
        return _span(self.routed_s, self.first_token_s)

    @property
    def ttft_s(self) -> float:
        """Received to the first token, as the gateway sees it (the client adds the network)."""
        return _span(self.received_s, self.first_token_s)

    @property
    def transfer_s(self) -> float:
        """First token to the KV complete on the decode side: what the transfer added. 0 when hidden behind the prefill, or not needed."""
        return max(0.0, _span(self.first_token_s, self.transferred_s))

    @property
    def decode_s(self) -> float:
        """First token to last token."""
        return _span(self.first_token_s, self.last_token_s)

    @property
    def total_s(self) -> float:
        """Received to ended."""
        return _span(self.received_s, self.ended_s)


def _span(start_s: float | None, end_s: float | None) -> float:
    return end_s - start_s if start_s is not None and end_s is not None else 0.0
