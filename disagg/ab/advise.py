"""What to tune next, as rules over a result; each piece of advice carries the numbers that triggered it. Pure.

requests failed                    -> why, before anything is tuned
TPOT far below its target          -> larger decode batches: throughput is left unused
TPOT near or over its target       -> quantise weights or KV, or more decode workers
TTFT missed                        -> by its largest phase: more prefill workers, chunk size, prefix cache, network
p99 over 3 x p50                   -> preemptions, reserved memory, bounded concurrency
memory full (preempted, waiting)   -> smaller batches, or FP8 KV
transfer is a large part of a gap  -> a faster carrier, or workers on one host
attainment lost past the knee      -> bound concurrency at the recommended one
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from disagg.ab.result import ArmFigures, ClassFigures, Distribution, Figures, PhasesReport, Result

HEADROOM = 0.5  # TPOT p95 below this share of its target leaves room for a larger batch
NEAR = 0.9
TAIL = 3.0
_TRANSFER_SHARE = 0.25
_LEVEL = 0.9


@dataclass(frozen=True, slots=True)
class Advice:
    """`rule`: what triggered it, in short. `because`: the measured numbers. `do`: what to try, most promising first."""

    arm: str
    slo_class: str | None
    rule: str
    because: str
    do: str


def advise(result: Result) -> list[Advice]:
    """All advice, arm by arm, in the order of the module's table. Of the reference rate of a result."""
    found: list[Advice] = []
    for arm, figures in result.arms.items():
        setup = result.setups.get(arm)
        kind = setup.kind if setup is not None else arm.split("-")[0]
        found += _failures(arm, figures)
        for name, own in figures.classes.items():
            found += _tpot(arm, name, own, kind)
            found += _ttft(arm, name, own, own.phases or figures.phases, kind)
        # Chats and documents together have a long tail whatever is tuned: each class has its own.
        for slo_class, part in figures.classes.items() if len(figures.classes) > 1 else [(None, figures)]:
            found += _tails(arm, slo_class, part)
        found += _memory(result, arm, figures)
        found += _transfer(arm, figures.phases)
        found += _knee(result, arm, figures)
    return found


def _failures(arm: str, figures: ArmFigures) -> Iterator[Advice]:
    if not figures.failed:
        return
    kinds = {kind: n for kind, n in figures.errors.items() if kind != "RejectedError"}
    because = f"{figures.failed} of {figures.sent} requests failed ({', '.join(f'{n} x {kind}' for kind, n in sorted(kinds.items()))})"
    do = "read their messages in requests.jsonl first: what failed is in no latency, so the other figures are of those that were left"
    if "DeadlineError" in kinds:
        do += "; past the deadline: a lower rate, or a longer timeout_s"
    yield Advice(arm, None, "requests fail", because, do)


def _tpot(arm: str, name: str, own: ClassFigures, kind: str) -> Iterator[Advice]:
    target, measured = own.tpot_target_s, _best(own.tpot_s)
    if target is None or measured is None:
        return
    label, value = measured
    because = f"TPOT {label} {_ms(value)} against a target of {_ms(target)} ({value / target:.0%})"
    if value < HEADROOM * target:
        fewer = ", or fewer decode workers" if kind in ("disagg", "adaptive") else ""
        do = f"let more requests decode together (max_num_seqs up{fewer}): a step's weights are read once for all of them"
        yield Advice(arm, name, "TPOT has headroom", because, do)
    elif value > NEAR * target:
        more = "more decode workers" if kind in ("disagg", "adaptive") else "more workers, or a smaller chunk (max_num_batched_tokens)"
        rule = "TPOT misses its target" if value > target else "TPOT is near its target"
        yield Advice(arm, name, rule, because, f"quantise weights (INT4, FP8) or KV (FP8): a step reads fewer bytes; or {more}")


def _ttft(arm: str, name: str, own: ClassFigures, phases: PhasesReport | None, kind: str) -> Iterator[Advice]:
    target, measured = own.ttft_target_s, _best(own.ttft_s)
    if target is None or measured is None or measured[1] <= target:
        return
    label, value = measured
    because = f"TTFT {label} {_ms(value)} against a target of {_ms(target)}"
    workers = "more prefill workers" if kind in ("disagg", "adaptive") else "more workers"
    largest = _largest_phase(phases)
    if largest is None:
        yield Advice(
            arm, name, "TTFT misses its target", because, f"a prefix cache where prompts begin alike; {workers}; a tuned chunk size"
        )
        return
    phase, mean_s, share = largest
    do = {
        "queue": f"{workers}: requests wait for a turn; or a lower rate, or priorities for this class",
        "prefill": f"a larger prefill chunk (max_num_batched_tokens), a prefix cache where prompts begin alike, more TP; {workers}",
        "network": "look at the client's and the gateway's host: neither the queue nor the prefill is the largest part",
    }[phase]
    yield Advice(arm, name, "TTFT misses its target", f"{because}; the largest part is {phase}, {_ms(mean_s)} on average ({share:.0%})", do)


def _tails(arm: str, slo_class: str | None, figures: Figures) -> Iterator[Advice]:
    for name, distribution in (("TTFT", figures.ttft_s), ("TPOT", figures.tpot_s), ("ITL", figures.itl_s)):
        if distribution.p99 is None or not distribution.p50 or distribution.p99 <= TAIL * distribution.p50:
            continue
        because = f"{name} p99 {_ms(distribution.p99)} is {distribution.p99 / distribution.p50:.1f} x its p50 of {_ms(distribution.p50)}"
        if name == "ITL":
            do = "gaps come from prefills in the decode batch (smaller chunk, or disaggregate) or from preemptions (reserve KV memory)"
        else:
            do = "look at preemptions, reserve KV memory for running requests, bound concurrency (max_num_seqs, admission)"
        yield Advice(arm, slo_class, "the tail is long", because, do)


def _memory(result: Result, arm: str, figures: ArmFigures) -> Iterator[Advice]:
    workers = (result.environment.get("workers") or {}).get(arm) or []  # of a simulation
    measured = (result.environment.get("preemptions") or {}).get(arm, 0)
    preempted = measured + sum(int(w.get("preemptions", 0)) for w in workers if isinstance(w, dict))
    if preempted:
        because = f"{preempted} preemptions over {figures.sent} requests: running requests lost their KV memory"
        yield Advice(arm, None, "KV memory is full", because, "a smaller decode batch (max_num_seqs), FP8 KV, or more memory for the cache")
    if figures.rejected:
        because = f"{figures.rejected} of {figures.sent} requests were refused by admission"
        yield Advice(arm, None, "requests are refused", because, "a lower rate, more workers, or a longer queue for classes that can wait")


def _transfer(arm: str, phases: PhasesReport | None) -> Iterator[Advice]:
    if phases is None or phases.transfer_s.mean is None or phases.waiting_s.mean is None:
        return
    gap_s = phases.transfer_s.mean + phases.waiting_s.mean
    if gap_s > 0 and phases.transfer_s.mean > _TRANSFER_SHARE * gap_s:
        because = f"the first gap waits {_ms(phases.transfer_s.mean)} for KV on average, {phases.transfer_s.mean / gap_s:.0%} of it"
        yield Advice(
            arm, None, "the KV transfer shows", because, "a faster carrier or link, prefill and decode on one host, FP8 KV on the wire"
        )


def _knee(result: Result, arm: str, figures: ArmFigures) -> Iterator[Advice]:
    curve = result.curves.get(arm)
    attained, concurrency = figures.slo_attainment, figures.mean_concurrency
    if curve is None or attained is None or concurrency is None or attained >= _LEVEL or concurrency <= curve.recommended_concurrency:
        return
    because = f"{attained:.0%} within SLO with {concurrency:.1f} requests in the system at {result.rate_rps or 0:g}/s; "
    if curve.goodput_bound == "below":
        do = "a lower rate, looser targets, or more workers: what it can keep was not measured"
        yield Advice(arm, None, "operated past its goodput", f"{because}no measured rate keeps {curve.level:.0%}", do)
        return
    because += f"up to {curve.recommended_concurrency:.1f} (at {curve.recommended_rps:.3g}/s) it keeps {curve.level:.0%}"
    bound = max(1, round(curve.recommended_concurrency))
    yield Advice(arm, None, "operated past its goodput", because, f"bound concurrency near {bound}, or add workers")


def _best(distribution: Distribution) -> tuple[str, float] | None:
    """The highest percentile of p95, p90, p50 that has samples enough."""
    for label in ("p95", "p90", "p50"):
        value = getattr(distribution, label)
        if value is not None:
            return label, float(value)
    return None


def _largest_phase(phases: PhasesReport | None) -> tuple[str, float, float] | None:
    if phases is None:
        return None
    means = {name: getattr(phases, f"{name}_s").mean or 0.0 for name in ("queue", "prefill", "network")}
    name = max(means, key=lambda n: means[n])
    total = sum(means.values())
    return (name, means[name], means[name] / total) if total > 0 else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"
