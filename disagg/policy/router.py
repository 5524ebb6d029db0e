"""Which pair of workers serves a request: the pair with the least predicted time, among those that have room.

Pure. One code path for all modes: disaggregated serving picks from prefill x decode workers, colocated serving is the pair (w, w).

The cost of a pair, in seconds:

    cost(p, d) = (waiting tokens of p + own context) x seconds per token of p          the wait for the first token
               + expected output x step x (1 + 0.05 x running requests of d + used KV share of d)    decoding beside d's others
               + context bytes / 1 GB/s, when the two are on different hosts

0.05 is the growth of a decode step per further request, from the step times measured on a CPU engine (DESIGN section 7) and near
what the roofline gives for a GPU. A pair's cost is separable but for the host term, so the best pair is found in time P + D.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from disagg.config import AdmissionSettings
from disagg.policy.view import EXPECTED_OUTPUT_TOKENS, Need, PoolView, WorkerView, need_of
from disagg.types import Mode, Request, Route

DEFAULT_PREFILL_S_PER_TOKEN = 1e-3
DEFAULT_STEP_S = 20e-3
STEP_GROWTH_PER_REQUEST = 0.05
CROSS_HOST_BYTES_PER_S = 1e9
AVOIDED_S = 1e6  # makes a worker that just failed this request the last choice, but still a choice


@dataclass(frozen=True, slots=True)
class NoRoute:
    """No pair can take the request now. `no_worker`: a needed pool has no live worker, so only a join can help."""

    reason: str
    no_worker: bool


def pick(request: Request, view: PoolView, settings: AdmissionSettings, avoid: Container[str] = ()) -> Route | NoRoute:
    """The pair with the least predicted time, or why there is none. `avoid` names workers that failed this request before.

    Equal pairs take turns: the least recently used goes first.
    """
    if (role := view.missing_role) is not None:
        return NoRoute(f"no live {role} worker", no_worker=True)
    need = need_of(request, view.model)
    if view.mode is Mode.COLOCATED:
        return _pick_colocated(request, need, view, settings, avoid)
    return _pick_pair(request, need, view, settings, avoid)


def _pick_colocated(request: Request, need: Need, view: PoolView, settings: AdmissionSettings, avoid: Container[str]) -> Route | NoRoute:
    known_s, step_s = _typical_prefill_s(view), _typical_step_s(view)
    best: tuple[tuple[float, float, str], WorkerView] | None = None
    for w in view.prefill_workers:
        if not _has_prefill_room(w, settings) or not _has_kv_room(w, need):
            continue
        cost_s = _prefill_s(w, need, known_s) + _decode_s(w, request, step_s) + (AVOIDED_S if w.name in avoid else 0.0)
        key = (round(cost_s, 6), w.last_used_s, w.name)
        if best is None or key < best[0]:
            best = (key, w)
    if best is None:
        return NoRoute(f"all {len(view.prefill_workers)} workers are full", no_worker=False)
    w = best[1]
    return Route(
        w.name, w.name, f"{w.name}: {w.waiting_tokens} tokens ahead, {w.running_requests} running, {w.free_kv_tokens} KV tokens free"
    )


def _pick_pair(request: Request, need: Need, view: PoolView, settings: AdmissionSettings, avoid: Container[str]) -> Route | NoRoute:
    known_s, step_s = _typical_prefill_s(view), _typical_step_s(view)
    moves_kv = request.remaining_tokens > 1
    sources = [w for w in view.prefill_workers if _has_prefill_room(w, settings) and _has_outbox_room(w, need)]
    if not sources:
        return NoRoute(f"all {len(view.prefill_workers)} prefill workers are full", no_worker=False)
    sinks = [w for w in view.decode_workers if not moves_kv or (_has_kv_room(w, need) and _has_inbox_room(w, need))]
    if not sinks:
        return NoRoute(f"no decode worker has room for {need.kv_tokens} KV tokens", no_worker=False)
    ranked_sinks = sorted(
        ((_decode_s(d, request, step_s) + (AVOIDED_S if d.name in avoid else 0.0), d.last_used_s, d.name, d) for d in sinks),
        key=lambda item: (round(item[0], 6), item[1], item[2]),
    )
    far_s = need.box_bytes / CROSS_HOST_BYTES_PER_S
    best: tuple[tuple[float, float, float, str], WorkerView, WorkerView] | None = None
    for p in sources:
        prefill_s = _prefill_s(p, need, known_s) + (AVOIDED_S if p.name in avoid else 0.0)
        for cost_s, used_s, _, d in _candidates(p, ranked_sinks):
            key = (round(prefill_s + cost_s + (far_s if d.host_id != p.host_id else 0.0), 6), p.last_used_s, used_s, p.name)
            if best is None or key < best[0]:
                best = (key, p, d)
    assert best is not None
    p, d = best[1], best[2]
    reason = f"{p.name}: {p.waiting_tokens} tokens ahead; {d.name}: {d.running_requests} running, {d.free_kv_tokens} KV tokens free"
    return Route(p.name, d.name, reason)


def _candidates(p: WorkerView, ranked_sinks: list[tuple[float, float, str, WorkerView]]) -> Iterable[tuple[float, float, str, WorkerView]]:
    """The best sink of all and the best on p's host: no other can be the best pair for p."""
    yield ranked_sinks[0]
    near = next((item for item in ranked_sinks if item[3].host_id == p.host_id), None)
    if near is not None and near is not ranked_sinks[0]:
        yield near


def _prefill_s(w: WorkerView, need: Need, known_s: float) -> float:
    return (w.waiting_tokens + need.context_tokens) * (w.prefill_s_per_token or known_s)


def _decode_s(w: WorkerView, request: Request, step_s: float) -> float:
    running = max(w.running_requests, w.state.running_requests)
    output = min(request.remaining_tokens, EXPECTED_OUTPUT_TOKENS)
    return output * step_s * (1.0 + STEP_GROWTH_PER_REQUEST * running + w.used_kv_share)


def _typical_prefill_s(view: PoolView) -> float:
    """Seconds per prompt token to assume of a worker of which nothing is known: the median of the known ones."""
    return _median((w.prefill_s_per_token for w in view.prefill_workers), DEFAULT_PREFILL_S_PER_TOKEN)


def _typical_step_s(view: PoolView) -> float:
    """One decode step, the median over workers: a single worker's latest steps say more of its batch then than of its speed."""
    return _median((w.state.step_s for w in view.decode_workers), DEFAULT_STEP_S)


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
