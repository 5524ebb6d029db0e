"""What one granted request holds of its two workers. Each share is given back once, whatever happens in which order. Pure.

open -> first_token   the prompt's place                       (source)   and the answer begins to decode (sink)
     -> arrived       room in both boxes                       (source, sink)
     -> decoding      its KV shows in the sink's own reports   (stays reserved)
     -> end           everything
"""

from __future__ import annotations

from collections.abc import Sequence

from disagg.policy.outputs import TELL_FROM, Keep
from disagg.policy.router import Ask, Pair
from disagg.policy.worker_book import WorkerBook
from disagg.types import Request

LEARNING_RATE = 0.1
# What a first token takes beyond its steps: about so much at most, and by so much later it is late for a reason of its own. On an engine
# whose steps are long both are shares of one: what a prompt waits for there, and what the host's other workers take from it, is longer.
MAX_OVERHEAD_S, MAX_OVERHEAD_STEPS = 0.05, 1.0
SURPRISE_S, SURPRISE_STEPS = 0.01, 0.5


class Booking:
    """One request on one route."""

    __slots__ = (
        "_arrives_s", "_busy_s", "_context_tokens", "_expected_output", "_in_boxes", "_is_alone", "_is_coming", "_is_decoding", "_is_open",
        "_is_prefilling", "_is_unseen", "_kv_tokens", "_kv_variance", "_moves_kv", "_passes", "_prefill_s", "_reserved_output", "_seats",
        "_source_kv_tokens", "_source_seats", "_spread", "_spread_tokens", "_started_s", "_target_s", "_tokens", "box_bytes",
        "first_token_s", "key", "output_tokens", "prefix", "request", "sink", "source", "tell_at_tokens", "told_tokens",
    )  # fmt: skip

    def __init__(self, key: int, request: Request, pair: Pair, ask: Ask, now_s: float) -> None:
        """Books everything at once."""
        self.key = key
        self.request = request
        self.source: WorkerBook = pair.first.worker
        self.sink: WorkerBook = pair.second.worker
        self.prefix: Sequence[int] = ()  # identities of its context's blocks
        self.first_token_s: float | None = None
        self.output_tokens = 0
        self.told_tokens = 1  # of them when its class last learned from it, and from how many on it learns again
        self.tell_at_tokens: float = TELL_FROM
        holds_kv = ask.moves_kv or pair.is_colocated
        self._tokens = ask.context_tokens - pair.first.cached_tokens
        self._prefill_s = pair.first.prefill_s
        self._started_s = now_s
        self._target_s = ask.targets.tpot_scale_s
        self._expected_output = ask.output_tokens
        self._reserved_output = ask.kv_tokens - ask.context_tokens
        self._kv_tokens = ask.kv_tokens if holds_kv else 0
        self._kv_variance = ask.kv_variance if holds_kv else 0
        self._source_kv_tokens = 0 if pair.is_colocated else ask.context_tokens
        self._source_seats = 0 if pair.is_colocated else 1
        self._seats = 1 if holds_kv else 0
        self._spread, self._spread_tokens = ask.spread, ask.spread_tokens
        self.box_bytes = ask.box_bytes
        self._busy_s = pair.second.busy_s
        self._arrives_s = now_s + pair.first.wait_s + pair.first.prefill_s + pair.transfer_s - pair.second.busy_s
        self._moves_kv = ask.moves_kv
        self._is_open = self._is_prefilling = True
        self._is_alone = not self.source.prefilling
        self._passes = pair.first.passes
        self._in_boxes = ask.moves_kv and not pair.is_colocated
        self._is_unseen = holds_kv
        self._is_coming = ask.moves_kv
        self._is_decoding = False
        self._context_tokens = 0  # booked as decoding
        self._open(now_s)

    def _open(self, now_s: float) -> None:
        source, sink = self.source, self.sink
        a = source.accounts
        a.prefills += 1
        a.prefill_tokens += self._tokens
        a.kv_tokens += self._source_kv_tokens
        a.unseen_kv_tokens += self._source_kv_tokens
        a.seats += self._source_seats
        if self._passes:
            source.takes_passer(self.key, self._tokens, now_s)
        else:
            source.took(self.key, self._tokens, self._prefill_s, now_s)
        if self._in_boxes:
            a.outbox_bytes += self.box_bytes
            sink.accounts.inbox_bytes += self.box_bytes
            sink.coming_at[self.key] = (self._arrives_s, self._target_s, self._spread)
        sink.accounts.kv_tokens += self._kv_tokens
        sink.accounts.unseen_kv_tokens += self._kv_tokens
        sink.accounts.kv_variance += self._kv_variance
        sink.accounts.seats += self._seats
        if self._is_coming:
            sink.accounts.coming += 1
            sink.accounts.coming_tokens += self.request.num_context_tokens
        source.last_used_s = sink.last_used_s = now_s
        self._touch()

    def first_token(self, now_s: float, cached_tokens: int = 0) -> None:
        """The prompt is through."""
        if not self._is_prefilling:
            return
        was_alone = self._is_alone and len(self.source.prefilling) == 1
        self._leave_prefill(now_s)
        self.first_token_s = now_s
        self.output_tokens = max(1, self.output_tokens)
        if was_alone and cached_tokens == 0:
            beyond_s, step_s = now_s - self._started_s - self._prefill_s, self.source.fit.cost.base_s
            surprise_s = max(SURPRISE_S, SURPRISE_STEPS * step_s)
            overhead_s = self.source.overhead_s + LEARNING_RATE * min(surprise_s, max(-surprise_s, beyond_s))
            self.source.overhead_s = min(max(MAX_OVERHEAD_S, MAX_OVERHEAD_STEPS * step_s), max(0.0, overhead_s))
        if self._is_coming:
            self._leave_coming()
            a = self.sink.accounts
            if not a.decodes:
                self.sink.heard_s = now_s  # it had nothing to say before
            a.decodes += 1
            self._context_tokens = self.request.num_context_tokens + self.output_tokens
            a.context_tokens += self._context_tokens
            a.output_tokens += self._expected_output
            a.spread_tokens += self._spread_tokens
            a.groups[self._target_s] = a.groups.get(self._target_s, 0) + 1
            self._is_decoding = True
        self._touch()

    def arrived(self) -> None:
        """The KV has left the outbox, and the inbox as good as: the engine loads it at its next step."""
        if self._in_boxes:
            self._in_boxes = False
            self.sink.coming_at.pop(self.key, None)
            self.source.accounts.outbox_bytes -= self.box_bytes
            self.sink.accounts.inbox_bytes -= self.box_bytes

    def decoding(self, now_s: float) -> float | None:
        """The sink's engine holds the KV. Returns what the hand-over took beyond a decode step; None when none is to be told."""
        if not self._is_unseen:
            return None
        self._is_unseen = False
        self.sink.accounts.unseen_kv_tokens -= self._kv_tokens
        if self.first_token_s is None or self.source is self.sink:
            return None
        return max(0.0, now_s - self.first_token_s - self.sink.outline(now_s).step_s - self._busy_s)

    def progress(self, output_tokens: int, now_s: float) -> bool:
        """Counts the answer's tokens. True when it has become longer than what room was kept for."""
        more = output_tokens - self.output_tokens
        if more <= 0 or not self._is_open:
            return False
        self.output_tokens = output_tokens
        if self._is_decoding:
            self._context_tokens += more
            self.sink.accounts.context_tokens += more
            self.sink.heard_s = now_s
        return self._moves_kv and output_tokens > self._reserved_output

    def reserve(self, keep: Keep) -> None:
        """Keep room for so many tokens of answer."""
        more = keep.tokens - self._reserved_output
        if self._is_open and self._moves_kv:
            self.sink.accounts.kv_variance += keep.variance - self._kv_variance
            self._kv_variance = keep.variance
            self._reserved_output = keep.tokens
            self._kv_tokens += more
            self.sink.accounts.kv_tokens += more
            if self._is_unseen:
                self.sink.accounts.unseen_kv_tokens += more

    def end(self, now_s: float) -> None:
        """Give back what is still held."""
        if not self._is_open:
            return
        self._leave_prefill(now_s)
        self._leave_coming()
        self.arrived()
        self._is_open = False
        a = self.sink.accounts
        a.kv_tokens -= self._kv_tokens
        a.kv_variance -= self._kv_variance
        a.seats -= self._seats
        if self._is_unseen:
            a.unseen_kv_tokens -= self._kv_tokens
        if self._is_decoding:
            a.decodes -= 1
            a.output_tokens -= self._expected_output
            a.spread_tokens -= self._spread_tokens
            a.context_tokens -= self._context_tokens
            a.groups[self._target_s] -= 1
            if not a.groups[self._target_s]:
                del a.groups[self._target_s]
        self._touch()

    def _leave_prefill(self, now_s: float) -> None:
        if not self._is_prefilling:
            return
        self._is_prefilling = False
        source = self.source
        a = source.accounts
        a.prefills -= 1
        a.prefill_tokens -= self._tokens
        a.kv_tokens -= self._source_kv_tokens
        a.unseen_kv_tokens -= self._source_kv_tokens
        a.seats -= self._source_seats
        source.gave(self.key, now_s)
        if self._passes:
            source.passing_tokens -= self._tokens

    def _leave_coming(self) -> None:
        if self._is_coming:
            self._is_coming = False
            self.sink.accounts.coming -= 1
            self.sink.accounts.coming_tokens -= self.request.num_context_tokens

    def _touch(self) -> None:
        self.source.touch()
        self.sink.touch()
