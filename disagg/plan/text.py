"""A plan in words, and as plain values for JSON. Pure."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import numpy as np

from disagg.plan.candidate import Candidate
from disagg.plan.planner import SHOWN, TOLERANCE, Plan
from disagg.plan.question import LEAST_REQUESTS, Question
from disagg.plan.screen import Screen
from disagg.plan.size import Size
from disagg.plan.trial import Figures, Trial
from disagg.slo import Summary, little

_SHORT = 2.0  # a run shorter than so many mean answers has not come to rest


def plan_text(plan: Plan) -> str:
    """For people: the question, the best few plans, the verdict, what would turn it."""
    parts = [_question(plan.question), _table(plan), _details(plan), f"verdict: {plan.verdict}", _rates(plan), _flips(plan), _notes(plan)]
    return "\n\n".join(part for part in parts if part)


def plan_json(plan: Plan) -> dict[str, Any]:
    """Seconds, requests/s, tokens, bytes."""
    q = plan.question
    return {
        "question": question_json(q),
        "verdict": plan.verdict,
        "chosen": plan.chosen.candidate.name,
        "mode": plan.chosen.candidate.mode.value,
        "goodput_ratio": plan.ratio,
        "plans": [_trial_json(q, trial, at) for trial, at in itertools.zip_longest(plan.trials, plan.at_rate)],
        "flips": [asdict(flip) for flip in plan.flips],
        "turning_points": list(plan.turns),
        "screened": plan.screened,
        "runs": plan.runs,
        "cut_runs": plan.cut,
        "simulated": True,
    }


def question_json(q: Question) -> dict[str, Any]:
    """What was asked."""
    return {
        "model": q.shape.name,
        "gpu": q.device.name,
        "decode_gpu": q.decode_device.name if q.decode_device else None,
        "gpus": q.gpus,
        "dtype": q.dtype,
        "kv_dtype": q.kv_dtype,
        "speculative": asdict(q.speculation) if q.speculation else None,
        "profile": q.profile_ref or None,
        "link": q.link.name,
        "workload": q.load.trace.name,
        "rate_rps": q.load.rate_rps,
        "mean_input_tokens": q.load.mean_input,
        "mean_output_tokens": q.load.mean_output,
        "cached_share": q.load.cached_share,
        "classes": [c.model_dump(exclude_none=True) for c in q.load.classes],
        "attainment": q.level,
        "requests": q.requests,
    }


def size_text(question: Question, rate_rps: float, sizes: list[Size]) -> str:
    """For people: GPUs for a rate, and Little's law with the numbers put in."""
    lines = [_question(question, with_gpus=False), f"for {rate_rps:,.4g} requests/s with {question.level:.0%} of them inside their class:"]
    lines += [_size(question, rate_rps, size) for size in sizes]
    if any(size.cells > 1 for size in sizes):
        lines.append("note: cells are simulated one by one; a router over all of them has more choice, and does no worse")
    return "\n\n".join(lines)


def size_json(question: Question, rate_rps: float, sizes: list[Size]) -> dict[str, Any]:
    """Seconds, requests/s, tokens."""
    found = [
        {
            "plan": size.candidate.name,
            "cells": size.cells,
            "gpus": size.gpus,
            "cost_per_hour": _times(size.candidate.cost_per_hour(question), size.cells),
            "figures": _figures_json(size.figures),
            "in_flight": little(rate_rps, size.figures.e2e_s),
        }
        for size in sizes
    ]
    return {"question": question_json(question), "rate_rps": rate_rps, "sizes": found, "simulated": True}


def _times(value: float | None, factor: int) -> float | None:
    return None if value is None else value * factor


def _question(q: Question, *, with_gpus: bool = True) -> str:
    devices = f"{q.gpus} x {q.device.name}" if with_gpus else q.device.name
    if q.decode_device is not None:
        devices += f", decode on {q.decode_device.name}"
    classes = "; ".join(f"{c.name}: TTFT {_target(c.ttft_ms)}, TPOT {_target(c.tpot_ms)}" for c in q.load.classes)
    extra = f", {q.speculation.tokens} drafted tokens of which {q.speculation.acceptance:.0%} are accepted" if q.speculation else ""
    cached = f", {q.load.cached_share:.0%} of prompt tokens seen before" if q.load.cached_share else ""
    types = f"in {q.dtype}, KV in {q.kv_dtype}{extra}"
    if q.profile is not None:
        steps = f"{q.profile.num_steps} steps, {q.profile.median_error:.0%} off"
        types = f"as measured on {q.profile.hardware} ({q.profile.measured_at}, {steps})"
    return (
        f"{q.shape.name} {types}, on {devices}; KV over {q.link.name} "
        f"({q.link.usable / 1e9:,.3g} GB/s a GPU)\n"
        f"{q.load.trace.name}: {q.load.rate_rps:,.3g} requests/s of {q.load.mean_input:,.0f} tokens in and {q.load.mean_output:,.0f} "
        f"out on the mean{cached}\n{classes}; {q.level:.0%} of the requests must keep them"
    )


def _target(value_ms: float | None) -> str:
    return "any" if value_ms is None else f"{value_ms:g} ms"


def _table(plan: Plan) -> str:
    q = plan.question
    head = f"{'':<3}{'plan':<52}{'goodput/s':>10}{'per GPU':>9}{'TTFT p50':>10}{'p95':>8}{'p99':>8}"
    head += f"{'TPOT p50':>10}{'p95':>7}{'p99':>7}{'in class':>9}"
    lines = [head + (f"{'$/M out':>9}" if q.price is not None else "")]
    for number, (trial, at) in enumerate(zip(plan.trials[:SHOWN], plan.at_rate, strict=False), start=1):
        lines.append(_row(q, number, trial, at))
    shown = {at.rate_rps for at in plan.at_rate[:SHOWN] if at is not None}
    low, high = (min(shown), max(shown)) if shown else (0.0, 0.0)
    at_rate = f"{low:,.3g}" if low == high else f"{low:,.3g} to {high:,.3g}"
    lines.append(
        f"goodput: requests/s with {q.level:.0%} inside their class, to {TOLERANCE:.0%}; ~: lost to another plan in one run, in which "
        f"it served about so many in class; latencies in ms at {at_rate} requests/s; all simulated"
    )
    return "\n".join(lines)


def _row(q: Question, number: int, trial: Trial, at: Figures | None) -> str:
    line = f"{number:<3}{trial.candidate.name:<52}{_about(trial):>10}{trial.goodput_rps / q.gpus:>9,.3f}"
    if at is not None:
        line += f"{_percentiles(at.ttft, 10, 8)}{_percentiles(at.tpot, 10, 7, digits=1)}{at.attainment:>9.1%}"
    cost = cost_per_million(q, trial)
    return line + (f"{cost:>9,.2f}" if cost is not None else "")


def _about(trial: Trial) -> str:
    return f"{'~' if trial.is_rough else ''}{trial.goodput_rps:,.2f}"


def _percentiles(summary: Summary, first: int, rest: int, digits: int = 0) -> str:
    shown = ["–" if v is None else f"{v * 1e3:,.{digits}f}" for v in (summary.p50, summary.p95, summary.p99)]
    return f"{shown[0]:>{first}}{shown[1]:>{rest}}{shown[2]:>{rest}}"


def cost_per_million(q: Question, trial: Trial) -> float | None:
    """Price of a million output tokens at the goodput; None without a price or a goodput."""
    per_hour = trial.candidate.cost_per_hour(q)
    if per_hour is None or not trial.goodput_rps:
        return None
    return per_hour / (trial.goodput_rps * q.load.mean_output * 3600) * 1e6


def _details(plan: Plan) -> str:
    lines = []
    for number, trial in enumerate(plan.trials[:SHOWN], start=1):
        lines.append(f"{number}  limit: {trial.limit()}")
        lines += [f"   {text}" for text in _memory(plan.question, trial.candidate)]
    return "\n".join(lines)


def _memory(q: Question, candidate: Candidate) -> list[str]:
    lines = []
    for name, pool in candidate.pools.items():
        weights = q.shape.weight_bytes(q.dtype) / pool.tp / 1e9
        kv = q.kv_tokens(pool.device, pool.tp)
        lines.append(
            f"{name}: {pool.count} x tp{pool.tp}, batch up to {pool.max_seqs}; each GPU {weights:,.1f} GB of weights of "
            f"{pool.device.memory_bytes / 1e9:,.0f}; each worker {kv:,} tokens of KV"
        )
    return lines


def _rates(plan: Plan) -> str:
    own = plan.question.load.rate_rps
    lines = []
    sides = (("two pools", plan.disagg), ("colocated", plan.colocated))
    for name, trial in sides:
        if trial is None:
            continue
        carried = [f"{what} ({own * f:,.3g}/s) {'yes' if trial.goodput_rps >= own * f else 'NO'}" for what, f in _RATES]
        room = f"{trial.goodput_rps / own:.2f} x the workload's rate" if own else ""
        lines.append(f"{name:<10} carries {room}: {', '.join(carried)}")
    return "\n".join(lines)


_RATES = (("-20 %", 0.8), ("as it is", 1.0), ("+20 %", 1.2))


def _flips(plan: Plan) -> str:
    if not plan.flips:
        return ""
    assert plan.disagg is not None
    ahead = plan.disagg.goodput_rps > plan.colocated.goodput_rps
    lines = ["if the workload were another (both plans at one rate between what they carry):"]
    for flip in plan.flips:
        turned = "" if flip.prefers_disagg == ahead or flip.disagg == flip.colocated else "   <- the other plan is ahead"
        lines.append(
            f"  {flip.change:<28} at {flip.rate_rps:,.3g}/s: two pools {flip.disagg:.1%} in class, colocated {flip.colocated:.1%}{turned}"
        )
    trend = f"would turn with {', or '.join(plan.turns)}" if plan.turns else "would not turn for lengths a quarter to four times these"
    lines.append(f"  by the formulas' trend the order {trend}")
    return "\n".join(lines)


def _notes(plan: Plan) -> str:
    best = plan.chosen.best
    notes = [f"note: {note}" for note in plan.question.load.trace.notes]
    if plan.question.shape.is_windowed(plan.question.load.longest_tokens):
        notes.append(f"note: {plan.question.shape.window_note}")
    most = plan.question.requests
    sent = f"{LEAST_REQUESTS} to about {most:,}" if most > LEAST_REQUESTS else f"about {most}"
    notes.append(
        f"{plan.screened} plans screened, {plan.runs} simulations of {sent} requests, "
        f"{plan.cut} of which ended early, when too many had missed"
    )
    if best is not None and best.span_s < _SHORT * best.e2e_s:
        notes.append(
            f"note: a simulation at the goodput sends for {best.span_s:.1f} s, answers take {best.e2e_s:.1f} s: the cluster has hardly "
            "filled, and goodputs are on the high side; --requests sends more"
        )
    return "\n".join(notes)


def _size(question: Question, rate_rps: float, size: Size) -> str:
    at, s = size.figures, question.load.sample
    cell = f"{size.cells} cells of " if size.cells > 1 else ""
    cost = size.candidate.cost_per_hour(question)
    price = f", {cost * size.cells:,.2f} an hour" if cost is not None else ""
    lines = [f"{size.gpus:,} GPUs: {cell}{size.candidate.name}{price}"]
    lines.append(f"  TTFT {_three(at.ttft)} ms, TPOT {_three(at.tpot, 1)} ms (p50 / p95 / p99), {at.attainment:.1%} inside their class")
    in_flight = little(rate_rps, at.e2e_s)
    lines.append(f"  Little: {rate_rps:,.4g}/s x {at.e2e_s:.2f} s = {in_flight:,.0f} requests in flight")
    tpot = at.tpot.mean or 0.0
    gaps = float(np.mean(np.maximum(0.0, s.outputs - 1)))
    decoding = little(rate_rps, gaps * tpot)
    pool = size.candidate.decode or size.candidate.colocated
    assert pool is not None
    workers = pool.count * size.cells
    lines.append(
        f"          {rate_rps:,.4g}/s x {gaps:,.0f} tokens x {tpot * 1e3:.1f} ms = {decoding:,.0f} of them decoding, "
        f"{decoding / workers:,.1f} on each of {workers:,} workers"
    )
    screen = Screen(question)
    first = size.candidate.prefill or size.candidate.colocated
    assert first is not None
    _, server, _ = screen.worker(first.device, first.tp).prefill(s, first.chunk)
    prompt_s, servers = float(server.mean()), first.count * size.cells
    lines.append(
        f"          {rate_rps:,.4g}/s x {prompt_s * 1e3:,.1f} ms of prefill = {little(rate_rps, prompt_s):,.1f} workers' worth of prompts, "
        f"run one by one, on {servers:,}"
    )
    return "\n".join(lines)


def _three(summary: Summary, digits: int = 0) -> str:
    return " / ".join("–" if v is None else f"{v * 1e3:,.{digits}f}" for v in (summary.p50, summary.p95, summary.p99))


def _trial_json(q: Question, trial: Trial, at: Figures | None) -> dict[str, Any]:
    pools = {
        name: {"count": p.count, "tp": p.tp, "gpu": p.device.name, "max_num_batched_tokens": p.chunk, "max_num_seqs": p.max_seqs,
               "mixed_step_ms": p.mixed_step_ms,
               "weights_bytes_per_gpu": q.shape.weight_bytes(q.dtype) // p.tp, "kv_tokens": q.kv_tokens(p.device, p.tp)}
        for name, p in trial.candidate.pools.items()
    }  # fmt: skip
    return {
        "plan": trial.candidate.name,
        "mode": trial.candidate.mode.value,
        "pools": pools,
        "goodput_rps": trial.goodput_rps,
        "goodput_is_rough": trial.is_rough,
        "goodput_rps_per_gpu": trial.goodput_rps / q.gpus,
        "limit": trial.limit(),
        "cost_per_hour": trial.candidate.cost_per_hour(q),
        "cost_per_million_output_tokens": cost_per_million(q, trial),
        "at_rate": _figures_json(at) if at is not None else None,
        "at_goodput": _figures_json(trial.best) if trial.best is not None else None,
    }


def _figures_json(at: Figures) -> dict[str, Any]:
    return asdict(at)
