"""Quick estimates of what a plan carries, from step times and queueing formulas, to choose which plans are worth simulating. Pure.

    prefill pool   M/G/c: P(wait > t) = C(c, a) exp(-t / w), C Erlang's delay formula, w = m1 (ca^2 + cs^2) / 2 / (c (1 - rho))
                   (Allen and Cunneen's approximation; one worker, Poisson and equal prompts: M/D/1's mean D + R D^2 / (2 (1 - R D)))
    decode pool    Little: a worker decodes B = rate x tokens x T(B) requests at once, T the step of B sequences; B is a Poisson number
    colocated      a prompt's steps carry the decodes too: with n steps a second beside prompts that take the share f of the time,
                   time per token = 1 / (n + (1 - f) / T(B)); prompts of others that fall into one answer are a Poisson number
    hand-over      the last chunk's KV over the link, spread over the answer's tokens

A request is inside its class with P(first token in time) x P(tokens in time); the rate at which the mean over a sample of the workload
falls to the wanted share is the estimate. Estimates only order plans and start the simulations' searches: no figure of a plan is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from disagg.perf.hardware import Device
from disagg.perf.profile import StepTimes
from disagg.perf.roofline import PrefillChunk
from disagg.plan.candidate import Candidate, PoolPlan
from disagg.plan.load import Load, Numbers, Sample
from disagg.plan.question import Question
from disagg.types import Mode

FULL = 0.98  # share of its time that a queueing formula still describes
_ROUND_TRIPS_S = 3e-3  # client, gateway, worker and back; and the wait for the step under way counts in addition
_FILLED_STEP = 2048  # prompts that wait are computed together up to so many tokens
_SLACK = 1.1  # that prompts in steps longer than a filled one may save
_MOST_HOPE = 1.5  # times the formulas' goodput
_SQRT2 = math.sqrt(2)


@dataclass(frozen=True)
class Worker:
    """One worker of `tp` devices under a load. Arrays are [sampled requests]."""

    question: Question
    device: Device
    tp: int
    _prefills: dict[int, tuple[Numbers, Numbers, Numbers]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def steps(self) -> StepTimes:
        return self.question.steps(self.device, self.tp)

    @cached_property
    def kv_tokens(self) -> int:
        return self.question.kv_tokens(self.device, self.tp)

    def decode_s(self, batch: float, context: float) -> float:
        """Seconds of a step of `batch` sequences of `context` tokens, between whole batches by a straight line."""
        low = max(1, int(batch))
        share = max(0.0, batch - low)
        first = self.steps.decode_step_s(low, round(low * context))
        if share == 0.0:
            return float(first)
        return float(first + share * (self.steps.decode_step_s(low + 1, round((low + 1) * context)) - first))

    def largest_batch(self, tpot_s: float, context: float) -> int:
        """The largest batch whose step keeps `tpot_s` and whose KV fits, 1 at the least."""
        most = max(1, int(self.kv_tokens / max(1.0, context)))
        low, high = 1, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.decode_s(middle, context) <= tpot_s else (low, middle)
        return low

    def prefill(self, sample: Sample, chunk: int) -> tuple[Numbers, Numbers, Numbers]:
        """(seconds alone, seconds of a server's time, steps) of each prompt: those that wait share steps, up to a filled one."""
        if chunk not in self._prefills:
            full = min(chunk, _FILLED_STEP)
            per_token = self.steps.step_s([PrefillChunk(full)]) / full
            alone = np.array([self._prompt_s(int(n), int(c), chunk) for n, c in zip(sample.inputs, sample.cached, strict=True)])
            new = sample.inputs - sample.cached
            self._prefills[chunk] = (alone, np.minimum(alone, new * per_token) if full > 1 else alone, np.ceil(new / chunk))
        return self._prefills[chunk]

    def _prompt_s(self, tokens: int, cached: int, chunk: int) -> float:
        starts = range(cached, tokens, chunk)
        return sum(self.steps.step_s([PrefillChunk(min(chunk, tokens - start), start)]) for start in starts)


class Screen:
    """Estimates for one question; step times are kept between candidates."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.load: Load = question.load
        self._workers: dict[tuple[str, int], Worker] = {}

    def worker(self, device: Device, tp: int) -> Worker:
        return self._workers.setdefault((device.name, tp), Worker(self.question, device, tp))

    @cached_property
    def context(self) -> float:
        """Mean context of a decoding request, seen at a random instant: long answers are seen more often."""
        s = self.load.sample
        gaps = np.maximum(s.outputs - 1, 1e-9)
        return float(np.sum((s.inputs + s.outputs / 2) * gaps) / np.sum(gaps))

    def goodput_rps(self, candidate: Candidate) -> float:
        """The rate at which the wanted share is still inside its class; 0 when not even an idle cluster keeps it."""
        low, high = 0.0, 1.0
        while self.attainment(candidate, high) >= self.question.level and high < 1e6:
            low, high = high, 2 * high
        if low == 0.0:
            while high > 1e-4 and self.attainment(candidate, high) < self.question.level:
                high /= 4
            low, high = (high, 4 * high) if high > 1e-4 else (0.0, 0.0)
        while high > low * 1.005:
            middle = (low + high) / 2
            low, high = (middle, high) if self.attainment(candidate, middle) >= self.question.level else (low, middle)
        return low

    def most_rps(self, candidate: Candidate) -> float:
        """A rate that no scheduler can pass: the wanted share of requests, the cheapest ones, fill all the workers' time.

        Prompts at their quickest, in filled steps; a token's share of a step of the largest batch that keeps the loosest target.
        """
        s = self.load.sample
        gaps = np.maximum(0.0, s.outputs - 1)
        if candidate.colocated is not None:
            pool = candidate.colocated
            worker = self.worker(pool.device, pool.tp)
            return _SLACK * pool.count / self._cheapest(worker.prefill(s, pool.chunk)[1] + gaps * self._token_s(worker, pool.max_seqs))
        p, d = candidate.prefill, candidate.decode
        assert p is not None
        assert d is not None
        source, sink = self.worker(p.device, p.tp), self.worker(d.device, d.tp)
        prompts, tokens = source.prefill(s, p.chunk)[1], gaps * self._token_s(sink, d.max_seqs)
        if candidate.mode is Mode.ADAPTIVE:  # any worker may do either
            return _SLACK * (p.count + d.count) / self._cheapest(prompts + tokens)
        return _SLACK * min(p.count / self._cheapest(prompts), d.count / max(1e-9, self._cheapest(tokens)))

    def likely_rps(self, candidate: Candidate, estimate_rps: float) -> float:
        """Where to look first for a goodput that the formulas put at `estimate_rps`, rather low: half way to what no scheduler can pass."""
        return min(math.sqrt(estimate_rps * max(estimate_rps, self.most_rps(candidate))), _MOST_HOPE * estimate_rps)

    def _cheapest(self, seconds: Numbers) -> float:
        """Mean over all requests of what the wanted share of them costs at least."""
        kept = np.sort(seconds)[: math.ceil(self.question.level * len(seconds))]
        return float(np.sum(kept)) / len(seconds)

    def _token_s(self, worker: Worker, max_seqs: int) -> float:
        """Of a worker's time for one token, at least: the step is shared by as many as may be."""
        context = max(1.0, float(np.min(self.load.sample.inputs)))
        loosest_s = float(np.max(self.load.sample.tpot_s))
        batch = min(max_seqs, worker.largest_batch(loosest_s, context) if math.isfinite(loosest_s) else max_seqs)
        return worker.decode_s(batch, context) / batch

    def attainment(self, candidate: Candidate, rate_rps: float) -> float:
        """Expected share of requests inside their class, 0 where a pool cannot keep up."""
        if candidate.colocated is not None:
            return self._colocated(candidate.colocated, rate_rps)
        assert candidate.prefill is not None
        assert candidate.decode is not None
        return self._disagg(candidate.prefill, candidate.decode, rate_rps)

    # ---- two pools

    def _disagg(self, prefill: PoolPlan, decode: PoolPlan, rate_rps: float) -> float:
        s, p, d = self.load.sample, self.worker(prefill.device, prefill.tp), self.worker(decode.device, decode.tp)
        alone, server, _ = p.prefill(s, prefill.chunk)
        in_time = self._in_time(rate_rps, prefill.count, server, s.ttft_s - alone - _ROUND_TRIPS_S)
        hand_over = self._hand_over(prefill, decode, rate_rps)
        batch = self._batch(d, rate_rps * float(np.mean(s.outputs > 1)) / decode.count, decode.max_seqs)
        if in_time is None or hand_over is None or batch is None:
            return 0.0
        step_s = d.decode_s(batch, self.context)
        spread_s = d.decode_s(batch + math.sqrt(batch), self.context) - step_s
        delay_s = (hand_over + step_s / 2) / np.maximum(1.0, s.outputs - 1)
        return float(np.mean(in_time * self._keeps_pace(step_s + delay_s, spread_s)))

    def _hand_over(self, prefill: PoolPlan, decode: PoolPlan, rate_rps: float) -> Numbers | None:
        """Seconds by which the move of each prompt's last chunk delays its second token; None when the links cannot keep up."""
        s = self.load.sample
        links = min(prefill.tp, decode.tp)
        kv_bytes = self.question.wire_bytes_per_token(links)
        bandwidth = self.question.link.usable * links
        busy = rate_rps * float(np.mean(s.inputs)) * kv_bytes / (bandwidth * min(prefill.count, decode.count))
        if busy >= FULL:
            return None
        tail: Numbers = np.minimum(s.inputs, prefill.chunk) * kv_bytes / bandwidth / (1 - busy)
        return tail + _ROUND_TRIPS_S

    def _batch(self, worker: Worker, rate_rps: float, max_seqs: int) -> float | None:
        """Mean batch of one decode worker by Little's law; None when it grows without end, or its KV does not fit."""
        gaps = float(np.mean(np.maximum(0.0, self.load.sample.outputs - 1)[self.load.sample.outputs > 1])) if rate_rps else 0.0
        most = min(max_seqs, worker.kv_tokens / self.context)
        batch = 1e-3
        for _ in range(60):
            wanted = rate_rps * gaps * worker.decode_s(max(1.0, batch), self.context)
            if wanted > most:
                return None
            if abs(wanted - batch) < 0.01 * batch:
                break
            batch = max(1e-3, wanted)
        return batch if batch + math.sqrt(batch) <= most else None

    # ---- one pool

    def _colocated(self, pool: PoolPlan, rate_rps: float) -> float:
        s, worker = self.load.sample, self.worker(pool.device, pool.tp)
        rate = rate_rps / pool.count
        alone, server, steps = worker.prefill(s, pool.chunk)
        shared = steps * server / alone  # short prompts that wait share a step
        gaps = np.maximum(0.0, s.outputs - 1)
        most = min(pool.max_seqs, worker.kv_tokens / self.context)
        batch, step_s, tpot_s, extra, mixed = 1.0, 0.0, 0.0, server, server
        for _ in range(40):
            step_s = worker.decode_s(batch, self.context)
            beside_s = self._beside(worker, pool.chunk, batch)
            mixed = server + shared * beside_s
            share = rate * float(np.mean(mixed))
            if share >= FULL:
                return 0.0
            per_s = rate * float(np.mean(shared)) + (1 - share) / step_s
            tpot_s = 1 / per_s
            wanted = max(1.0, rate * float(np.mean(gaps)) * tpot_s)
            extra = np.maximum(0.0, mixed - shared * step_s)
            if wanted > most:
                return 0.0
            if abs(wanted - batch) < 0.01 * batch:
                break
            batch = wanted
        if batch + math.sqrt(batch) > most:
            return 0.0
        own = alone + steps * self._beside(worker, pool.chunk, batch)
        in_time = self._in_time(rate_rps, pool.count, mixed, s.ttft_s - own - step_s / 2 - _ROUND_TRIPS_S)
        if in_time is None:
            return 0.0
        step_spread = worker.decode_s(batch + math.sqrt(batch), self.context) - step_s
        spread = np.sqrt(rate * float(np.mean(extra**2)) * tpot_s / np.maximum(1.0, gaps) + step_spread**2)
        return float(np.mean(in_time * self._keeps_pace(np.full_like(gaps, tpot_s), spread)))

    def _beside(self, worker: Worker, chunk: int, batch: float) -> float:
        """Seconds by which `batch` decodes lengthen a step with prompt tokens."""
        prompt = [PrefillChunk(min(chunk, max(1, round(float(np.mean(self.load.sample.inputs))))))]
        decodes = max(1, round(batch))
        return float(worker.steps.step_s(prompt, decodes, round(decodes * self.context)) - worker.steps.step_s(prompt))

    # ---- shared

    def _in_time(self, rate_rps: float, servers: int, service: Numbers, left_s: Numbers) -> Numbers | None:
        """P(wait <= left) for each request; None when the servers cannot keep up."""
        mean = float(np.mean(service))
        busy = rate_rps * mean / servers
        if busy >= FULL:
            return None
        varied = float(np.var(service)) / mean**2 if mean else 0.0
        wait_s = mean * (self.load.burstiness + varied) / 2 / (servers * (1 - busy))
        waits = erlang_c(servers, rate_rps * mean) * np.exp(-np.maximum(0.0, left_s) / max(wait_s, 1e-9))
        return np.where(left_s >= 0, 1 - waits, 0.0)

    def _keeps_pace(self, mean_s: Numbers, spread_s: Numbers | float) -> Numbers:
        """P(time per token <= target), normal around `mean_s`; certain for answers of one token."""
        s = self.load.sample
        z = (s.tpot_s - mean_s) / np.maximum(spread_s, 1e-9)
        chance = np.array([0.5 * (1 + math.erf(v / _SQRT2)) for v in np.clip(z, -10, 10)])
        return np.where(s.outputs > 1, chance, 1.0)


def erlang_c(servers: int, offered: float) -> float:
    """Probability that an arrival waits, of `servers` servers offered `offered` of work; by the stable recursion of Erlang's B formula."""
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    busy = offered / servers
    return 1.0 if busy >= 1 else blocked / (1 - busy * (1 - blocked))


def max_seqs_of(screen: Screen, pool: PoolPlan) -> int:
    """The smallest power of two that holds the largest batch within the loosest target, 16 to 1,024: so many decode at once, at most."""
    targets = screen.load.sample.tpot_s
    loosest = float(np.max(targets))
    worker = screen.worker(pool.device, pool.tp)
    batch = worker.largest_batch(loosest, screen.context) if math.isfinite(loosest) else 1024
    return min(1024, max(16, 1 << (max(1, batch) - 1).bit_length()))


def with_max_seqs(screen: Screen, pool: PoolPlan) -> PoolPlan:
    return replace(pool, max_seqs=max_seqs_of(screen, pool))
