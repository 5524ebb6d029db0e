"""The open-loop sender: each request leaves when it is due, whatever became of those before it.

One asyncio loop, no thread, no polling: a timer per request and a stream each. It measures itself too, since it shares the machine with
what it measures: how late it sent, how late its loop woke, and the mean number of requests in flight (for the check by Little's law).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from disagg.ab.rows import Outcome, Row
from disagg.ab.workload import PlannedRequest
from disagg.client import Part, Usage
from disagg.errors import DisaggError, EngineError, RejectedError
from disagg.types import FinishReason

LATE_S = 0.010  # a send or a wake-up later than this counts as late
LATE_SHARE = 0.01  # and this share of late ones is worth a warning
BEHIND_SHARE = 0.01  # a schedule that slips by this share of its own length is not the workload any more
_SHORTEST_S = 10.0  # of a schedule, for that share: a hiccup of the machine is not a sender that cannot keep up
DEFAULT_VOCAB = 32_000  # prompts' token ids stay below it where nobody says how large the model's vocabulary is
_HEARTBEAT_S = 0.05
_GRACE_S = 5.0  # past a request's own deadline, before the sender gives up on its stream


class StreamingClient(Protocol):
    """What the sender needs of disagg.client.AsyncClient."""

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        ignore_eos: bool,
        slo_class: str | None,
        timeout_s: float,
    ) -> AsyncGenerator[Part, None]: ...


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How well the sender kept its own schedule in one round.

    `late_share`: share of requests sent more than LATE_S late. `loop_late_share` and `max_loop_late_s`: the same for its regular wake-ups,
    which is by how much its clock readings may be late. `behind_share`: lateness by the length of the schedule (10 s at
    least), of the worst tenth of the requests on average. `mean_in_flight`: integral of requests in flight over the round, by its length.
    """

    sent: int
    max_late_s: float
    late_share: float
    max_loop_late_s: float
    loop_late_share: float
    mean_in_flight: float
    behind_share: float = 0.0

    @property
    def fault(self) -> str | None:
        """Why this round is no measurement of the workload: the sender itself fell behind; else None."""
        if self.behind_share <= BEHIND_SHARE:
            return None
        return f"the sender fell behind its schedule by {self.behind_share:.1%} of its length, {self.max_late_s:.2f} s at worst"

    @property
    def warning(self) -> str | None:
        """One sentence when the sender lagged enough to blur what it measured, else None."""
        if self.late_share > LATE_SHARE:
            late = f"{self.late_share:.0%} of requests left over {LATE_S * 1e3:.0f} ms late, at most {self.max_late_s * 1e3:.0f} ms"
            return f"the sender lagged: {late}"
        if self.loop_late_share > LATE_SHARE:
            return (
                f"the sender's own clock lagged: {self.loop_late_share:.0%} of its wake-ups came over {LATE_S * 1e3:.0f} ms late, "
                f"at most {self.max_loop_late_s * 1e3:.0f} ms"
            )
        return None


class OpenLoop:
    """One round's requests on one client.

        loop = OpenLoop(client, requests, arm="disagg", vocab_size=49152, timeout_s=120)
        async with aclosing(loop.rows()) as rows:
            async for row in rows: ...          # each row as its request ends
        loop.report

    Closing `rows` cancels what is still in flight. Every request ends: by its deadline at the latest.
    """

    def __init__(
        self,
        client: StreamingClient,
        requests: Sequence[PlannedRequest],
        *,
        arm: str,
        vocab_size: int,
        timeout_s: float,
        rate_rps: float | None = None,
    ) -> None:
        self._client = client
        self._requests = requests
        self._arm = arm
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._rate_rps = rate_rps
        self._start_s = 0.0
        self._ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
        self._running: set[asyncio.Task[Row]] = set()
        self._rows: list[Row] = []
        self._loop_late_s: list[float] = []
        self._in_flight = 0
        self._in_flight_since_s = 0.0
        self._in_flight_area = 0.0

    async def rows(self) -> AsyncGenerator[Row, None]:
        """Send all requests; yields one row per request, in the order in which they end."""
        self._start_s = time.monotonic() + _HEARTBEAT_S
        pacer = asyncio.create_task(self._pace())
        pacer.add_done_callback(self._pacer_ended)
        heartbeat = asyncio.create_task(self._heartbeat())
        try:
            for _ in self._requests:
                row = (await self._ended.get()).result()
                self._rows.append(row)
                yield row
        finally:
            owned = [pacer, heartbeat, *self._running]
            for task in owned:
                task.cancel()
            await asyncio.gather(*owned, return_exceptions=True)

    def _pacer_ended(self, pacer: asyncio.Task[None]) -> None:
        """A failure of the pacer ends the round at once: nobody waits for requests that will not be sent."""
        if not pacer.cancelled() and pacer.exception() is not None:
            self._ended.put_nowait(pacer)

    async def send_now(self, request: PlannedRequest) -> Row:
        """One request at once, for whoever has a schedule of their own; its row's clock is this process's."""
        prompt, digest = self._prompt(request)
        return await self._one(request, prompt, digest)

    def _prompt(self, request: PlannedRequest) -> tuple[tuple[int, ...], str]:
        prompt = request.prompt_ids(self._vocab_size)
        return prompt, hashlib.blake2b(array("l", prompt).tobytes(), digest_size=8).hexdigest()

    async def _pace(self) -> None:
        for request in self._requests:
            prompt, digest = self._prompt(request)  # made ahead of its time, one by one: a round's prompts may not fit the memory
            wait_s = self._start_s + request.due_s - time.monotonic()
            await asyncio.sleep(max(0.0, wait_s))
            task = asyncio.create_task(self._one(request, prompt, digest))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            task.add_done_callback(self._ended.put_nowait)

    async def _heartbeat(self) -> None:
        while True:
            due_s = time.monotonic() + _HEARTBEAT_S
            await asyncio.sleep(_HEARTBEAT_S)
            self._loop_late_s.append(time.monotonic() - due_s)

    async def _one(self, request: PlannedRequest, prompt: tuple[int, ...], digest: str) -> Row:
        sent_s = self._now_s()
        self._count(+1, sent_s)
        token_s: list[float] = []
        usage: Usage | None = None
        finish: FinishReason | None = None
        error: DisaggError | None = None
        left = False
        try:
            async with asyncio.timeout(self._timeout_s + _GRACE_S), aclosing(self._stream(request, prompt)) as parts:
                async for part in parts:
                    now_s = self._now_s()
                    token_s.extend([now_s] * len(part.tokens))
                    finish, usage = part.finish or finish, part.usage or usage
                    if request.cancel_after_tokens is not None and len(token_s) >= request.cancel_after_tokens and finish is None:
                        left = True
                        break
        except TimeoutError:
            error = EngineError(f"the stream did not end within {_GRACE_S:g} s after its deadline")
        except DisaggError as caught:
            error = caught
        if error is None and not left:
            error = _cut_answer(request, finish is not None, len(token_s))
        end_s = self._now_s()
        self._count(-1, end_s)
        outcome: Outcome = "cancelled" if left else "completed"
        if error is not None:
            outcome = "rejected" if isinstance(error, RejectedError) else "failed"
        return self._row(request, digest, sent_s, end_s, tuple(token_s), outcome, error, usage)

    def _stream(self, request: PlannedRequest, prompt: tuple[int, ...]) -> AsyncGenerator[Part, None]:
        return self._client.stream(
            prompt,
            max_tokens=request.output_tokens,
            temperature=request.temperature,
            ignore_eos=request.ignore_eos,
            slo_class=request.slo_class,
            timeout_s=self._timeout_s,
        )

    def _row(
        self,
        request: PlannedRequest,
        digest: str,
        sent_s: float,
        end_s: float,
        token_s: tuple[float, ...],
        outcome: Outcome,
        error: DisaggError | None,
        usage: Usage | None,
    ) -> Row:
        row = Row(
            arm=self._arm,
            round=request.round + 1,
            index=request.index,
            stream=request.stream,
            slo_class=request.slo_class,
            input_tokens=request.input_tokens,
            max_output_tokens=request.output_tokens,
            prompt_digest=digest,
            due_s=request.due_s,
            sent_s=sent_s,
            end_s=end_s,
            token_s=token_s,
            outcome=outcome,
            error=None if error is None else type(error).__name__,
            message=None if error is None else error.message[:500],
            rate_rps=self._rate_rps,
        )
        return row if usage is None else _with_usage(row, usage)

    def _now_s(self) -> float:
        return round(time.monotonic() - self._start_s, 6)

    def _count(self, change: int, now_s: float) -> None:
        self._in_flight_area += self._in_flight * (now_s - self._in_flight_since_s)
        self._in_flight_since_s = now_s
        self._in_flight += change

    @property
    def report(self) -> LoadReport:
        """Of what was sent so far; complete once `rows` is exhausted."""
        late = [r.send_late_s for r in self._rows]
        loop_late = self._loop_late_s
        length_s = max((r.due_s for r in self._requests), default=0.0)
        span = max((r.end_s for r in self._rows), default=0.0) - min((r.sent_s for r in self._rows), default=0.0)
        return LoadReport(
            sent=len(late),
            max_late_s=max(late, default=0.0),
            late_share=sum(x > LATE_S for x in late) / max(1, len(late)),
            max_loop_late_s=max(loop_late, default=0.0),
            loop_late_share=sum(x > LATE_S for x in loop_late) / max(1, len(loop_late)),
            mean_in_flight=self._in_flight_area / span if span > 0 else 0.0,
            behind_share=_worst_tenth_s(self._rows) / max(length_s, _SHORTEST_S),
        )


def _worst_tenth_s(rows: Sequence[Row]) -> float:
    """Mean lateness of the worst tenth of the requests, tenths taken in the order of their due times."""
    late = [row.send_late_s for row in sorted(rows, key=lambda row: row.due_s)]
    size = -(-len(late) // 10)
    return max((sum(part) / len(part) for i in range(0, len(late), size) if (part := late[i : i + size])), default=0.0) if late else 0.0


def _cut_answer(request: PlannedRequest, has_finish: bool, num_tokens: int) -> EngineError | None:
    """The error of an answer that ended without one and yet is not whole; a truncated answer must not count as a completed one."""
    if not has_finish:
        return EngineError(f"the answer ended after {num_tokens} tokens without a finish reason")
    if request.ignore_eos and num_tokens != request.output_tokens:
        return EngineError(f"the answer has {num_tokens} tokens, {request.output_tokens} were asked for (ignore_eos)")
    return None


def _with_usage(row: Row, usage: Usage) -> Row:
    return replace(
        row,
        prefill_worker=usage.prefill_worker,
        decode_worker=usage.decode_worker,
        attempts=usage.attempts,
        cached_tokens=usage.cached_tokens,
        queue_s=round(usage.queue_s, 6),
        prefill_s=round(usage.prefill_s, 6),
        transfer_s=round(usage.transfer_s, 6),
        predicted_ttft_s=_rounded(usage.predicted_ttft_s),
        predicted_tpot_s=_rounded(usage.predicted_tpot_s),
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
