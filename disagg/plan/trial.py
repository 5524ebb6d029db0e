"""What a plan does with a workload, by simulation: its goodput, and its figures at one rate. Pure.

The simulator runs the live router and the engines' scheduler. A run sends requests at one mean rate; those of its beginning find the
cluster emptier than it will be and are not counted. The router is not told how long answers will be.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from disagg.plan.candidate import Candidate, topology_of
from disagg.plan.load import Load
from disagg.plan.question import Question
from disagg.sim.cluster import Simulation
from disagg.sim.goodput import Goodput, find_goodput
from disagg.sim.outcome import Outcome, SimReport
from disagg.sim.settings import SimSettings
from disagg.slo import Summary, summarise

WARM_UP = 0.35  # of the requests, at the beginning
_BUSY = 0.9  # share of its time from which on a pool is the limit
TIMEOUT_S = 1800.0
_FIRST = ("ttft", "refused_ttft")
_NEXT = ("tpot", "refused_tpot")


@dataclass(frozen=True, slots=True)
class Figures:
    """One run at one rate. Seconds. `attainment`: share of the counted requests inside their class.

    `missed`: of the counted requests, how many missed what: `ttft` and `tpot`, `refused_ttft` and `refused_tpot` because they would have,
    `refused` for another reason, `late` (no whole answer). `busy`: share of the time that each pool's workers spent in steps; `batch`:
    requests that got a token in a step, on the mean. `concurrency`: mean requests in the system; `e2e_s`: their mean time in it.
    """

    rate_rps: float
    attainment: float
    ttft: Summary
    tpot: Summary
    missed: dict[str, int]
    counted: int
    busy: dict[str, float]
    batch: dict[str, float]
    concurrency: float
    e2e_s: float
    span_s: float
    preemptions: int

    @property
    def output_rps(self) -> float:
        """Requests/s that were answered in their class."""
        return self.rate_rps * self.attainment


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulated plan. `goodput_rps`: the highest rate that was seen to hold; 0: none was found.

    `best`: its figures there; `beyond`: at the lowest rate that did not hold, which says what limits it.
    """

    candidate: Candidate
    goodput_rps: float
    best: Figures | None
    beyond: Figures | None
    num_runs: int

    def limit(self) -> str:
        """What limits it, in a few words: which target is missed, by how many, and how busy the pool behind it is then."""
        at = self.beyond
        if at is None:
            return "nothing found: no rate that was tried is too high"
        shares = {what: count / at.counted for what, count in at.missed.items() if count}
        first, second = (sum(shares.get(what, 0.0) for what in kind) for kind in (_FIRST, _NEXT))
        first_pool, next_pool = ("colocated", "colocated") if "colocated" in at.busy else ("prefill", "decode")
        batch = f"{at.batch[next_pool]:.0f} requests decoding on each {next_pool} worker"
        if first > second:
            is_full = "the pool is full" if at.busy[first_pool] >= _BUSY else "prompts wait for each other, or are long"
            said = f"first tokens ({first:.0%} late or refused for it); {first_pool} workers {at.busy[first_pool]:.0%} busy: {is_full}"
            said += f"; {batch}" if first_pool == "colocated" else ""
        elif second:
            said = f"time per token ({second:.0%} slow or refused for it); {batch}"
        else:
            said = f"requests that wait too long or are refused ({sum(shares.values()):.0%}); {batch}"
        return f"{said}; {at.preemptions} preemptions: KV memory" if at.preemptions else said


class Trials:
    """Runs of one question; equal runs are made once. `num_runs`: simulations made."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.num_runs = 0
        self._kept: dict[tuple[Candidate, int, float], Figures] = {}

    def goodput(self, candidate: Candidate, start_rps: float, *, tolerance: float = 0.03, enough_rps: float | None = None) -> Trial:
        """Find the highest rate that the plan holds, from `start_rps` on; `enough_rps`: stop once it is known to be below."""
        before = self.num_runs

        def attainment(rate_rps: float) -> float:
            return self.at(candidate, rate_rps).attainment

        level = self.question.level
        found: Goodput = find_goodput(attainment, start=start_rps, level=level, tolerance=tolerance, enough=enough_rps)
        best = self.at(candidate, found.rate) if found.rate else None
        beyond = self.at(candidate, found.failing_rate) if found.failing_rate else None
        return Trial(candidate, found.rate, best, beyond, self.num_runs - before)

    def at(self, candidate: Candidate, rate_rps: float, load: Load | None = None) -> Figures:
        """Figures at `rate_rps`; `load`: another one than the question's."""
        load = load or self.question.load
        key = (candidate, id(load), rate_rps)
        if key not in self._kept:
            self.num_runs += 1
            self._kept[key] = _run(self.question.with_load(load), candidate, rate_rps)
        return self._kept[key]


def _run(question: Question, candidate: Candidate, rate_rps: float) -> Figures:
    topology = topology_of(question, candidate)
    requests = question.load.sent(rate_rps, question.requests_at(rate_rps))
    degrees = [pool.tp for pool in candidate.pools.values()]
    settings = SimSettings(
        link_bandwidth=question.link.usable * min(degrees),
        kv_bytes_per_token=question.wire_bytes_per_token,
        timeout_s=TIMEOUT_S,
        prefix_block_tokens=question.load.trace.prefix_block_tokens,
        max_tokens=max(r.output_tokens for r in requests),
        keep_tokens=False,
    )
    return _figures(question, candidate, rate_rps, Simulation(topology, requests, settings).run())


def _figures(question: Question, candidate: Candidate, rate_rps: float, report: SimReport) -> Figures:
    counted = report.outcomes[int(len(report.outcomes) * WARM_UP) :]
    by_name = {c.name: c for c in question.load.classes}
    missed = Counter(_miss(o, by_name[o.slo_class].ttft_s, by_name[o.slo_class].tpot_s) for o in counted)
    sent_s = report.outcomes[-1].sent_s - report.outcomes[0].sent_s
    busy_s: dict[str, float] = defaultdict(float)
    decoded: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for worker in report.workers:
        busy_s[worker.role] += worker.busy_s
        decoded[worker.role] += worker.decode_tokens
        steps[worker.role] += worker.steps
    whole = [o.end_s - o.sent_s for o in report.outcomes if o.is_whole and o.end_s is not None]
    return Figures(
        rate_rps=rate_rps,
        attainment=missed[""] / len(counted),
        ttft=summarise([o.ttft_s for o in counted if o.ttft_s is not None]),
        tpot=summarise([o.tpot_s for o in counted if o.tpot_s is not None]),
        missed={what: missed[what] for what in (*_FIRST, *_NEXT, "refused", "late")},
        counted=len(counted),
        busy={name: min(1.0, busy_s[name] / pool.count / max(report.end_s, 1e-9)) for name, pool in candidate.pools.items()},
        batch={name: decoded[name] / max(1, steps[name]) for name in candidate.pools},
        concurrency=report.mean_in_flight,
        e2e_s=math.fsum(whole) / len(whole) if whole else 0.0,
        span_s=sent_s,
        preemptions=report.num_preemptions,
    )


def _miss(o: Outcome, ttft_s: float | None, tpot_s: float | None) -> str:
    """What kept it out of its class; empty: nothing."""
    if o.status == "rejected":
        said = o.message or ""
        if "first token" in said or "any more" in said:  # policy/admission.py's and policy/dispatch.py's words
            return "refused_ttft"
        return "refused_tpot" if "per token" in said else "refused"
    if not o.is_whole:
        return "late"
    if ttft_s is not None and o.ttft_s is not None and o.ttft_s > ttft_s:
        return "ttft"
    return "tpot" if tpot_s is not None and o.tpot_s is not None and o.tpot_s > tpot_s else ""


def best_of(trials: Sequence[Trial]) -> Trial:
    """The one with the highest goodput; of equal ones the first."""
    return max(trials, key=lambda t: t.goodput_rps)
