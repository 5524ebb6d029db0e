"""Which pair of workers serves a request: the pair with the least predicted time, among those that have room.

Pure. One code path for all modes: disaggregated serving picks from prefill x decode workers, colocated serving is the pair (w, w).

The cost of a pair, in seconds:

    cost(p, d) = (waiting tokens of p + own context) x seconds per token of p          the wait for the first token
               + expected output x step x (1 + 0.05 x running requests of d + used KV share of d)    decoding beside d's others
               + context bytes / 1 GB/s, when the two are on different hosts

0.05 is the growth of a decode step per further request, from the step times measured on a CPU engine (DESIGN section 7) and near
what the roofline gives for a GPU. A pair's cost is separable but for the host term, so the best pair is found in time P x hosts + D.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

from disagg.config import AdmissionSettings
from disagg.policy.view import EXPECTED_OUTPUT_TOKENS, Need, PoolView, WorkerView, need_of
from disagg.types import Mode, Request, Route

DEFAULT_PREFILL_S_PER_TOKEN = 1e-3
DEFAULT_STEP_S = 20e-3
STEP_GROWTH_PER_REQUEST = 0.05
CROSS_HOST_BYTES_PER_S = 1e9
PREFILL_TOLERANCE = 0.10  # costs this near to the least are equal: noise must not send everything to one worker
DECODE_TOLERANCE = 0.02  # less than one more running request adds
PRIOR_TOKENS = 4096  # evidence of so many prompt tokens counts as much as the pool's median
EVIDENCE_HALF_LIFE_S = 30.0
AVOIDED_S = 1e6  # makes a worker that just failed this request the last choice, but still a choice


@dataclass(frozen=True, slots=True)
class NoRoute:
    """No pair can take the request now. `no_worker`: a needed pool has no live worker, so only a join can help."""

    reason: str
    no_worker: bool


def pick(request: Request, view: PoolView, settings: AdmissionSettings, avoid: Container[str] = ()) -> Route | NoRoute:
    """The pair with the least predicted time, or why there is none. `avoid` names workers that failed this request before.

    Workers that are as good as equal take turns: the least recently used goes first.
    """
    if (role := view.missing_role) is not None:
        return NoRoute(f"no live {role} worker", no_worker=True)
    need = need_of(request, view.model)
    if view.mode is Mode.COLOCATED:
        return _pick_colocated(request, need, view, settings, avoid)
    return _pick_pair(request, need, view, settings, avoid)


def _pick_colocated(request: Request, need: Need, view: PoolView, settings: AdmissionSettings, avoid: Container[str]) -> Route | NoRoute:
    speeds = _speeds(view)
    ranked = [
        _Ranked(w, _prefill_s(w, need, speeds) + _decode_s(w, request, speeds) + _penalty_s(w, avoid))
        for w in view.prefill_workers
        if _has_prefill_room(w, settings) and _has_kv_room(w, need)
    ]
    if not ranked:
        return NoRoute(f"all {len(view.prefill_workers)} workers are full", no_worker=False)
    w = _fair(ranked, DECODE_TOLERANCE)
    return Route(w.name, w.name, f"{w.name}: {_load(w)}")


def _pick_pair(request: Request, need: Need, view: PoolView, settings: AdmissionSettings, avoid: Container[str]) -> Route | NoRoute:
    moves_kv = request.remaining_tokens > 1
    sources = [w for w in view.prefill_workers if _has_prefill_room(w, settings) and _has_outbox_room(w, need)]
    if not sources:
        return NoRoute(f"all {len(view.prefill_workers)} prefill workers are full", no_worker=False)
    sinks = [w for w in view.decode_workers if not moves_kv or (_has_kv_room(w, need) and _has_inbox_room(w, need))]
    if not sinks:
        return NoRoute(f"no decode worker has room for {need.kv_tokens} KV tokens", no_worker=False)
    speeds = _speeds(view)
    far_s = need.box_bytes / CROSS_HOST_BYTES_PER_S
    ranked_sinks = [_Ranked(d, _decode_s(d, request, speeds) + _penalty_s(d, avoid)) for d in sinks]
    nearest_s = {host: min(_distance_s(r, host, far_s) for r in ranked_sinks) for host in {w.host_id for w in sources}}
    floor_s = min(nearest_s.values())
    ranked = [_Ranked(p, _prefill_s(p, need, speeds) + _penalty_s(p, avoid) + nearest_s[p.host_id] - floor_s) for p in sources]
    p = _fair(ranked, PREFILL_TOLERANCE)
    d = _fair([_Ranked(r.worker, _distance_s(r, p.host_id, far_s)) for r in ranked_sinks], DECODE_TOLERANCE)
    return Route(p.name, d.name, f"{p.name}: {p.waiting_tokens} prompt tokens ahead; {d.name}: {_load(d)}")


@dataclass(frozen=True, slots=True)
class _Ranked:
    """A worker and what it would cost, in seconds."""

    worker: WorkerView
    cost_s: float


def _fair(ranked: list[_Ranked], tolerance: float) -> WorkerView:
    """The cheapest; of those as good as equally cheap, the least recently used."""
    limit_s = min(r.cost_s for r in ranked) * (1.0 + tolerance) + 1e-9
    equal = [r.worker for r in ranked if r.cost_s <= limit_s]
    return min(equal, key=lambda w: (w.last_used_s, w.name))


def _distance_s(sink: _Ranked, host_id: str, far_s: float) -> float:
    return sink.cost_s if sink.worker.host_id == host_id else sink.cost_s + far_s


def _penalty_s(w: WorkerView, avoid: Container[str]) -> float:
    return AVOIDED_S if w.name in avoid else 0.0


def _load(w: WorkerView) -> str:
    return f"{w.running_requests} running, {w.free_kv_tokens} KV tokens free"


@dataclass(frozen=True, slots=True)
class _Speeds:
    """What is typical of the pools at the instant `at_s`: the medians over their workers."""

    at_s: float
    prefill_s_per_token: float
    step_s: float


def _speeds(view: PoolView) -> _Speeds:
    """The step is a median because a single worker's latest steps say more of its batch then than of its speed."""
    return _Speeds(
        view.at_s,
        _median((w.prefill_s_per_token for w in view.prefill_workers), DEFAULT_PREFILL_S_PER_TOKEN),
        _median((w.state.step_s for w in view.decode_workers), DEFAULT_STEP_S),
    )


def _prefill_s(w: WorkerView, need: Need, speeds: _Speeds) -> float:
    """Wait and run of a prompt, by what the worker has shown of its speed.

    A little evidence says little, and old evidence less: both pull towards the pool's median, so that one slow answer does not shut a
    worker out.
    """
    weight = w.prefill_tokens_seen * math.exp2((w.prefill_seen_s - speeds.at_s) / EVIDENCE_HALF_LIFE_S)
    s_per_token = (w.prefill_s_per_token * weight + speeds.prefill_s_per_token * PRIOR_TOKENS) / (weight + PRIOR_TOKENS)
    return (w.waiting_tokens + need.context_tokens) * s_per_token


def _decode_s(w: WorkerView, request: Request, speeds: _Speeds) -> float:
    """Decoding of the expected answer beside the worker's other requests."""
    running = max(w.running_requests, w.state.running_requests)
    output = min(request.remaining_tokens, EXPECTED_OUTPUT_TOKENS)
    return output * speeds.step_s * (1.0 + STEP_GROWTH_PER_REQUEST * running + w.used_kv_share)


def _median(values: Iterable[float], default: float) -> float:
    known = sorted(v for v in values if v > 0)
    return known[len(known) // 2] if known else default


def _has_prefill_room(w: WorkerView, settings: AdmissionSettings) -> bool:
    return w.prefills < settings.max_prefills_per_worker


def _has_kv_room(w: WorkerView, need: Need) -> bool:
    """Room for context and expected answer. A worker that holds nothing of ours is never too small: admission checked the total."""
    return need.kv_tokens <= w.free_kv_tokens or w.reserved_kv_tokens == 0


def _has_outbox_room(w: WorkerView, need: Need) -> bool:
    return w.outbox_bytes == 0 or w.outbox_bytes + need.box_bytes <= w.state.outbox_total_bytes


def _has_inbox_room(w: WorkerView, need: Need) -> bool:
    return w.inbox_bytes == 0 or w.inbox_bytes + need.box_bytes <= w.state.inbox_total_bytes
