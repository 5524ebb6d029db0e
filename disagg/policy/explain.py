"""A decision in words: one sentence, and the pairs that were weighed as rows of a table. Pure."""

from __future__ import annotations

from disagg.policy.decision import Candidate, DecisionRecord, Verdict

COLUMNS = ("prefill", "decode", "TTFT ms", "of it queue", "TPOT ms", "transfer ms", "cached", "KV reserved", "cost", "")


def sentence(record: DecisionRecord) -> str:
    """What was decided on the request, and why."""
    asked = f"request {record.request_id} (class {record.slo_class}, priority {record.priority}, {record.context_tokens} tokens in"
    asked += f", up to {record.max_tokens} out{_targets(record)})"
    again = f", attempt {record.attempt + 1}," if record.attempt else ""
    after = f" after {_ms(record.waited_s)} in the queue" if record.waited_s >= 1e-3 else " at once"
    if record.verdict is Verdict.GRANTED and record.chosen is not None:
        chosen = record.chosen
        where = chosen.prefill if chosen.prefill == chosen.decode else f"{chosen.prefill} -> {chosen.decode}"
        return f"{asked}{again} went to {where}{after}: {record.reason}. {_expected(chosen)}."
    if record.verdict is Verdict.REJECTED:
        hint = f"; it may try again in {record.retry_after_s:.1f} s" if record.retry_after_s is not None else ""
        return f"{asked}{again} was refused{after}: {record.reason}{hint}."
    return f"{asked}{again} waits: {record.reason}."


def rows(record: DecisionRecord) -> list[tuple[str, ...]]:
    """One row per pair, in the order of COLUMNS."""
    return [_row(candidate, is_chosen=candidate is record.chosen) for candidate in record.candidates]


def _row(candidate: Candidate, *, is_chosen: bool) -> tuple[str, ...]:
    p = candidate.prediction
    times = (f"{seconds * 1e3:.1f}" for seconds in (p.ttft_s, p.queue_s, p.tpot_s, p.transfer_s))
    note = "chosen" if is_chosen else candidate.note
    return (candidate.prefill, candidate.decode, *times, str(p.cached_tokens), str(p.kv_tokens), f"{candidate.cost:.3f}", note)


def _targets(record: DecisionRecord) -> str:
    wanted = []
    if record.ttft_target_s is not None:
        wanted.append(f"TTFT {_ms(record.ttft_target_s)}")
    if record.tpot_target_s is not None:
        wanted.append(f"TPOT {_ms(record.tpot_target_s)}")
    return f"; targets {' and '.join(wanted)}" if wanted else ""


def _expected(chosen: Candidate) -> str:
    p = chosen.prediction
    return f"Expected: first token {_ms(p.ttft_s)} after its arrival, then {_ms(p.tpot_s)} per token for {p.output_tokens} tokens"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
