"""May a request enter the gateway's queue? Pure; every refusal says why, with the predictions that it rests on.

check_fits     raises InvalidRequestError when no live worker could ever hold the request
why_not        None, or why no pair is predicted to meet the class's targets
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from disagg.errors import InvalidRequestError
from disagg.policy.decision import Candidate, Prediction
from disagg.policy.outlook import Outlook
from disagg.policy.router import Ask, Pair, candidate, tpot_s
from disagg.policy.worker_book import WorkerBook
from disagg.types import Mode, ModelInfo, Request

ADMIT_BELOW = 0.95  # of the TTFT target: a prediction nearer to it is about as likely to miss it
RECORDED_PAIRS = 4
MIN_RETRY_S = 0.5
MAX_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class WhyNot:
    """Why a request may not enter. `candidates`: the best pairs, with the predictions that are too high."""

    reason: str
    retry_after_s: float
    candidates: tuple[Candidate, ...] = ()


class Largest(NamedTuple):
    """Of the live workers: the KV cache of those that may run a prompt, and of those that may decode, in tokens, and either box, in bytes.

    0: no worker, or not told.
    """

    prompt_kv_tokens: int
    kv_tokens: int
    outbox_bytes: int
    inbox_bytes: int

    @classmethod
    def of(cls, sources: Sequence[WorkerBook], sinks: Sequence[WorkerBook]) -> Largest:
        """Of workers that may take a first leg, and a second one."""
        return cls(
            max([w.state.total_kv_tokens for w in sources], default=0),
            max([w.state.total_kv_tokens for w in sinks], default=0),
            max([w.state.outbox_total_bytes for w in sources], default=0),
            max([w.state.inbox_total_bytes for w in sinks], default=0),
        )


def check_fits(request: Request, mode: Mode, model: ModelInfo, largest: Largest) -> None:
    """Raise InvalidRequestError when no live worker could hold the request even if it were alone there.

    Nothing is said of a pool without live workers.
    """
    context = request.num_context_tokens
    whole = context + max(0, request.remaining_tokens)
    for most in (largest.prompt_kv_tokens, largest.kv_tokens):
        if most and context > most:
            expected = f"at most {most} tokens, the largest KV cache of a worker"
            raise InvalidRequestError(field="prompt", value=f"{context} tokens", expected=expected)
    most = largest.kv_tokens
    if most and whole > most:
        raise InvalidRequestError(
            field="max_tokens",
            value=request.sampling.max_tokens,
            expected=f"at most {most - request.num_prompt_tokens} with this prompt (the largest KV cache of a worker: {most} tokens)",
        )
    if request.remaining_tokens > 1 and mode is Mode.DISAGG:
        per_token = model.kv_bytes_per_token
        for box, size in (("outbox", largest.outbox_bytes), ("inbox", largest.inbox_bytes)):
            if size and context * per_token > size:
                expected = f"at most {size // per_token} tokens: the largest {box} of a worker holds {size} bytes (kv.{box}_gib)"
                raise InvalidRequestError(field="prompt", value=f"{context} tokens", expected=expected)


def foreseen(pair: Pair, ask: Ask, ahead: Outlook) -> Candidate:
    """The pair's prediction for a request that starts at its turn rather than now."""
    later_s = max(0.0, ahead.start_s - pair.first.wait_s)
    found = candidate(pair, ask)
    p = found.prediction
    prediction = Prediction(p.ttft_s + later_s, p.tpot_s, p.queue_s + later_s, *p[3:])
    return Candidate(found.prefill, found.decode, prediction, found.cost, _note(ask, prediction.ttft_s, prediction.tpot_s))


def why_not(ask: Ask, pairs: Sequence[Pair], ahead: Outlook, prefill_s: float) -> WhyNot | None:
    """Whether some pair meets the targets. `pairs`: with room now (may be none); `prefill_s`: on a typical worker."""
    targets = ask.targets
    if (targets.ttft_s is None and targets.tpot_s is None) or any(_meets(pair, ask, ahead) for pair in pairs):
        return None
    seen = tuple(foreseen(pair, ask, ahead) for pair in pairs[:RECORDED_PAIRS])
    first_s = min((c.prediction.ttft_s for c in seen), default=ask.waited_s + ahead.start_s + prefill_s)
    first_s = min([first_s, *(_ttft_s(pair, ask, ahead) for pair in pairs)])
    # A pair that has no place for it now will have one when an answer there ends; that wait is in the outlook already.
    per_token_s = min((tpot_s(pair, ask) for pair in pairs), default=0.0) if ahead.place_s == 0.0 else 0.0
    late_s = first_s - ADMIT_BELOW * targets.ttft_s if targets.ttft_s is not None else 0.0
    is_slow = targets.tpot_s is not None and per_token_s > targets.tpot_s
    if late_s <= 0.0 and not is_slow:
        return None
    return WhyNot(_reason(ask, first_s, per_token_s, late_s > 0.0, is_slow), retry_after(late_s), seen)


def _ttft_s(pair: Pair, ask: Ask, ahead: Outlook) -> float:
    """From its arrival, when it starts at its turn."""
    return ask.waited_s + max(ahead.start_s, pair.first.wait_s) + pair.first.prefill_s


def _meets(pair: Pair, ask: Ask, ahead: Outlook) -> bool:
    """Whether the pair is predicted to meet both targets."""
    targets = ask.targets
    if targets.ttft_s is not None and _ttft_s(pair, ask, ahead) > ADMIT_BELOW * targets.ttft_s:
        return False
    return targets.tpot_s is None or tpot_s(pair, ask) <= targets.tpot_s


def retry_after(late_s: float) -> float:
    """When a request that would be `late_s` too late now may be in time: work that stands before it is done by then."""
    return min(MAX_RETRY_S, max(MIN_RETRY_S, late_s))


def _note(ask: Ask, ttft_s: float, per_token_s: float) -> str:
    targets, notes = ask.targets, []
    if targets.ttft_s is not None and ttft_s > ADMIT_BELOW * targets.ttft_s:
        notes.append(f"TTFT {_ms(ttft_s)} of {_ms(targets.ttft_s)}")
    if targets.tpot_s is not None and per_token_s > targets.tpot_s:
        notes.append(f"TPOT {_ms(per_token_s)} of {_ms(targets.tpot_s)}")
    return ", ".join(notes)


def _reason(ask: Ask, first_s: float, per_token_s: float, is_late: bool, is_slow: bool) -> str:
    targets, parts = ask.targets, []
    if is_late and targets.ttft_s is not None:
        parts.append(f"a first token after {_ms(first_s)} (target {_ms(targets.ttft_s)})")
    if is_slow and targets.tpot_s is not None:
        parts.append(f"{_ms(per_token_s)} per token (target {_ms(targets.tpot_s)})")
    return f"class {targets.name} cannot be met: the best pair gives {' and '.join(parts)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
