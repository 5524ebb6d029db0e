"""Which plans are worth simulating: all that use up the GPUs are screened, the best of each kind stay. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from disagg.perf.hardware import Device
from disagg.plan.candidate import COLOCATED_CHUNKS, DECODE_CHUNK, PREFILL_CHUNKS, Candidate, PoolPlan
from disagg.plan.question import Question
from disagg.plan.screen import Screen, max_seqs_of
from disagg.types import Mode

MIXED_SHARE = 0.9  # of the tightest TPOT target that an adaptive plan's steps may take beside decodes
_RATIOS = 12  # P:D counts that are screened for one pair of degrees, around the one that balances both pools


@dataclass(frozen=True, slots=True)
class Screened:
    """A plan and the goodput that the formulas give it, requests/s."""

    candidate: Candidate
    estimate_rps: float


def screened(screen: Screen, mode: Mode | None = None) -> list[Screened]:
    """Every plan worth a look, best estimate first; of plans that differ in the chunk alone only the best. `mode`: only such."""
    found = [Screened(c, screen.goodput_rps(c)) for c in _candidates(screen) if mode in (None, c.mode)]
    found.sort(key=lambda s: (-s.estimate_rps, s.candidate.name))
    seen: set[object] = set()
    best = []
    for each in found:
        kind = tuple((name, pool.count, pool.tp, pool.device.name) for name, pool in each.candidate.pools.items())
        if kind not in seen:
            seen.add(kind)
            best.append(each)
    return best


def _candidates(screen: Screen) -> Iterator[Candidate]:
    yield from colocated_candidates(screen)
    question = screen.question
    decode_device = question.decode_device or question.device
    for tp_p in question.usable_degrees(question.device):
        for tp_d in question.usable_degrees(decode_device):
            for count_p, count_d in _counts(screen, question.device, decode_device, tp_p, tp_d):
                decode = _pool(screen, count_d, tp_d, decode_device, DECODE_CHUNK)
                for chunk in PREFILL_CHUNKS:
                    prefill = PoolPlan(count_p, tp_p, question.device, chunk, max_seqs=256)
                    yield Candidate(Mode.DISAGG, prefill=prefill, decode=decode)


def colocated_candidates(screen: Screen) -> Iterator[Candidate]:
    """Every degree, chunk and kind of device."""
    question = screen.question
    for device in question.devices:
        for tp in question.usable_degrees(device):
            for chunk in COLOCATED_CHUNKS:
                yield Candidate(Mode.COLOCATED, colocated=_pool(screen, question.gpus // tp, tp, device, chunk))


def _pool(screen: Screen, count: int, tp: int, device: Device, chunk: int) -> PoolPlan:
    pool = PoolPlan(count, tp, device, chunk, max_seqs=256)
    return replace(pool, max_seqs=max_seqs_of(screen, pool))


def _counts(screen: Screen, device: Device, decode_device: Device, tp_p: int, tp_d: int) -> list[tuple[int, int]]:
    """(P, D) that use up the GPUs as far as these degrees can, nearest to balanced pools first."""
    gpus = screen.question.gpus
    pairs = [(p, (gpus - p * tp_p) // tp_d) for p in range(1, gpus // tp_p + 1)]
    pairs = [(p, d) for p, d in pairs if d >= 1 and gpus - p * tp_p - d * tp_d < min(tp_p, tp_d)]
    if len(pairs) <= _RATIOS:
        return pairs
    balance = _balance(screen, device, decode_device, tp_p, tp_d)
    nearest = sorted(pairs, key=lambda pair: abs(pair[0] - balance * pair[1]) / pair[1])
    return nearest[:_RATIOS]


def _balance(screen: Screen, device: Device, decode_device: Device, tp_p: int, tp_d: int) -> float:
    """Prefill workers for each decode worker at which both are as busy as they may be."""
    s = screen.load.sample
    _, server, _ = screen.worker(device, tp_p).prefill(s, PREFILL_CHUNKS[-1])
    sink = screen.worker(decode_device, tp_d)
    tpot_s = float(max(s.tpot_s.min(), 1e-3)) if s.tpot_s.min() < 1e9 else 1.0
    batch = sink.largest_batch(tpot_s, screen.context)
    decoded_rps = batch / (max(1e-9, float((s.outputs - 1).mean())) * sink.decode_s(batch, screen.context))
    return max(1e-3, decoded_rps * float(server.mean()) / 0.8)


def neighbours(screen: Screen, candidate: Candidate) -> list[Candidate]:
    """Plans one step away: one worker more on either side, or half and twice the chunk. All use up the GPUs as far as their degrees can."""
    if candidate.colocated is not None:
        pool = candidate.colocated
        chunks = [c for c in (pool.chunk // 2, pool.chunk * 2) if c in COLOCATED_CHUNKS]
        return [Candidate(Mode.COLOCATED, colocated=replace(pool, chunk=chunk)) for chunk in chunks]
    assert candidate.prefill is not None
    assert candidate.decode is not None
    p, d, gpus = candidate.prefill, candidate.decode, screen.question.gpus
    # A worker more or less of the wider kind, and as many of the other as there is room for: fewer would only leave GPUs idle.
    if p.tp >= d.tp:
        counts = [(count, (gpus - count * p.tp) // d.tp) for count in (p.count - 1, p.count + 1)]
    else:
        counts = [((gpus - count * d.tp) // p.tp, count) for count in (d.count + 1, d.count - 1)]
    return [
        replace(candidate, prefill=replace(p, count=count_p), decode=replace(d, count=count_d))
        for count_p, count_d in counts
        if count_p >= 1 and count_d >= 1
    ]


def adaptive_of(candidates: Iterable[Candidate], question: Question) -> Candidate | None:
    """The workers of the first plan whose two pools are alike, with every pair of them as a route; None where there is no such plan.

    Prompts run on any of them, so all take the prefill pool's chunk, and less where somebody decodes: what keeps the tightest TPOT.
    """
    tpot_s = float(question.load.sample.tpot_s.min())
    mixed_step_ms = round(MIXED_SHARE * tpot_s * 1e3, 1) if math.isfinite(tpot_s) else None
    for candidate in candidates:
        p, d = candidate.prefill, candidate.decode
        assert p is not None
        assert d is not None
        if p.tp == d.tp and p.device == d.device and candidate.gpus <= question.gpus:
            prefill = replace(p, max_seqs=d.max_seqs, mixed_step_ms=mixed_step_ms)
            decode = replace(d, chunk=p.chunk if mixed_step_ms else d.chunk, mixed_step_ms=mixed_step_ms)
            return replace(candidate, mode=Mode.ADAPTIVE, prefill=prefill, decode=decode)
    return None
