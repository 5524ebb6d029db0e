"""Request traces: when requests came and how long they were. Values, and the rules by which a trace is fitted to a smaller machine. Pure.

Files of five formats are read by trace_files.py. A trace has no text: prompts are made up by whoever sends them. Instants are seconds
since the trace's begin, lengths are tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from disagg.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    `prefix_hashes`: one identity per block of the prompt (`Trace.prefix_block_tokens` each, the last one may be partly filled); two
    prompts share exactly the blocks up to the first unlike identity. Empty where the trace says nothing of prefixes.
    `slo_class`: None where the trace names no class.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    slo_class: str | None = None
    prefix_hashes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival.

    `prefix_block_tokens`: 0 without prefix identity. `notes`: what was done to the trace, one sentence each.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    prefix_block_tokens: int = 0
    notes: tuple[str, ...] = ()

    @property
    def span_s(self) -> float:
        """First to last arrival."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0

    @property
    def mean_rate_rps(self) -> float:
        """Requests per second over the span; 0 for fewer than two."""
        return (len(self.requests) - 1) / self.span_s if self.span_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a trace is changed before it is sent. The order: window, lengths, limits, rate.

    `start_s`, `window_s`: the part of the trace that is taken, in its own time; its first instant becomes 0.
    `input_factor`, `output_factor`: lengths are multiplied and rounded, to at least one token.
    `max_input_tokens`, `max_output_tokens`, `max_total_tokens`: what is longer is clipped or dropped, as `over` says. Clipping to the
    total shortens the prompt, and leaves it at least one token.
    `rate_factor`: arrivals are divided by it, so that bursts keep their shape: 2 sends twice as many requests per second.
    """

    start_s: float = 0.0
    window_s: float | None = None
    input_factor: float = 1.0
    output_factor: float = 1.0
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_total_tokens: int | None = None
    over: Literal["clip", "drop"] = "clip"
    rate_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("window_s", "input_factor", "output_factor", "max_input_tokens", "max_output_tokens", "rate_factor"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(key=name, value=value, expected="a finite number above 0")
        if self.max_total_tokens is not None and self.max_total_tokens < 2:
            raise ConfigError(key="max_total_tokens", value=self.max_total_tokens, expected="at least 2: one token in, one out")
        if not (self.start_s >= 0 and math.isfinite(self.start_s)):
            raise ConfigError(key="start_s", value=self.start_s, expected="a finite number of seconds, 0 or more")
        if self.over not in ("clip", "drop"):
            raise ConfigError(key="over", value=self.over, expected="clip or drop")


def scale(trace: Trace, scaling: Scaling) -> Trace:
    """The trace by that rule, with what was done appended to its notes. Raises ConfigError when no request is left."""
    taken = _window(trace.requests, scaling)
    kept: list[TraceRequest] = []
    changed = dropped = 0
    for request in taken:
        wanted = _resized(request, trace.prefix_block_tokens, scaling)
        fitted = _limited(wanted, trace.prefix_block_tokens, scaling)
        if fitted != wanted and scaling.over == "drop":
            dropped += 1
            continue
        changed += fitted != wanted
        kept.append(replace(fitted, arrival_s=(request.arrival_s - scaling.start_s) / scaling.rate_factor))
    if not kept:
        raise ConfigError(
            f"trace {trace.name}: no request is left of {len(trace.requests)} ({len(taken)} in the window, {dropped} dropped as too long)",
            key="window_s",
            value=scaling.window_s,
            expected="a window and limits that leave at least one request",
        )
    notes = (*trace.notes, *_described(trace, scaling, len(taken), changed, dropped))
    return replace(trace, requests=tuple(kept), notes=notes)


def _window(requests: Sequence[TraceRequest], scaling: Scaling) -> list[TraceRequest]:
    end_s = math.inf if scaling.window_s is None else scaling.start_s + scaling.window_s
    return [r for r in requests if scaling.start_s <= r.arrival_s < end_s]


def _resized(request: TraceRequest, block_tokens: int, scaling: Scaling) -> TraceRequest:
    """Lengths times their factors. A prompt of another length has other blocks: identities are stretched or thinned alike."""
    if scaling.input_factor == scaling.output_factor == 1.0:
        return request
    given = max(1, round(request.input_tokens * scaling.input_factor))
    wanted = max(1, round(request.output_tokens * scaling.output_factor))
    hashes = request.prefix_hashes
    if hashes and given != request.input_tokens:
        num_blocks = -(-given // block_tokens)
        # Block i takes the identity that stood at its place before, with its own place: prefixes stay prefixes.
        before = [min(len(hashes) - 1, int(i / scaling.input_factor)) for i in range(num_blocks)]
        hashes = tuple(hash((hashes[at], i)) for i, at in enumerate(before))
    return replace(request, input_tokens=given, output_tokens=wanted, prefix_hashes=hashes)


def _limited(request: TraceRequest, block_tokens: int, scaling: Scaling) -> TraceRequest:
    wanted = min(request.output_tokens, scaling.max_output_tokens or request.output_tokens)
    given = min(request.input_tokens, scaling.max_input_tokens or request.input_tokens)
    if scaling.max_total_tokens is not None:
        wanted = min(wanted, scaling.max_total_tokens - 1)
        given = min(given, scaling.max_total_tokens - wanted)
    if (given, wanted) == (request.input_tokens, request.output_tokens):
        return request
    hashes = request.prefix_hashes
    return replace(
        request,
        input_tokens=given,
        output_tokens=wanted,
        prefix_hashes=hashes[: -(-given // block_tokens)] if hashes else (),
    )


def _described(trace: Trace, scaling: Scaling, num_taken: int, num_clipped: int, num_dropped: int) -> list[str]:
    notes = []
    if num_taken != len(trace.requests):
        end_s = f"{scaling.start_s + scaling.window_s:g}" if scaling.window_s is not None else "the end"
        notes.append(f"{num_taken} of {len(trace.requests)} requests: those from {scaling.start_s:g} s to {end_s} s")
    for what, factor in (("prompts", scaling.input_factor), ("answers", scaling.output_factor)):
        if factor != 1.0:
            notes.append(f"{what} {factor:g} x as long")
    limits = [
        f"{limit} tokens {what}"
        for limit, what in (
            (scaling.max_input_tokens, "in"),
            (scaling.max_output_tokens, "out"),
            (scaling.max_total_tokens, "in and out together"),
        )
        if limit is not None
    ]
    if limits:
        done = f"{num_dropped} longer requests dropped" if scaling.over == "drop" else f"{num_clipped} longer requests clipped"
        notes.append(f"at most {', '.join(limits)}: {done}")
    if scaling.rate_factor != 1.0:
        notes.append(f"arrivals {scaling.rate_factor:g} x as fast")
    return notes
