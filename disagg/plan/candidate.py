"""The plans to choose from: pools of equal workers that use up the GPUs, ready to be screened or simulated. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from disagg.config import Topology, parse_topology
from disagg.perf.hardware import Device
from disagg.plan.question import Question
from disagg.types import Mode

COLOCATED_CHUNKS = (256, 512, 1024, 2048, 4096, 8192)
PREFILL_CHUNKS = (2048, 8192)
DECODE_CHUNK = 2048  # decode workers compute prompts only when a request was preempted
RECOMPUTED_KV_BYTES = 64  # that stand for one token's KV in simulated boxes


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """`count` workers of `tp` devices each. `chunk`: max_num_batched_tokens, `max_seqs`: max_num_seqs.

    `mixed_step_ms`: milliseconds of a step in which somebody decodes, at most; None: no such limit.
    """

    count: int
    tp: int
    device: Device
    chunk: int
    max_seqs: int
    mixed_step_ms: float | None = None

    @property
    def gpus(self) -> int:
        return self.count * self.tp


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan. Colocated serving has `colocated` alone, the other modes have `prefill` and `decode`."""

    mode: Mode
    prefill: PoolPlan | None = None
    decode: PoolPlan | None = None
    colocated: PoolPlan | None = None

    @property
    def pools(self) -> dict[str, PoolPlan]:
        named = {"prefill": self.prefill, "decode": self.decode, "colocated": self.colocated}
        return {name: pool for name, pool in named.items() if pool is not None}

    @property
    def gpus(self) -> int:
        """GPUs that its workers hold."""
        return sum(pool.gpus for pool in self.pools.values())

    @property
    def name(self) -> str:
        """For people: workers, their degree, the chunk."""
        if self.colocated is not None:
            c = self.colocated
            return f"colocated {c.count} x tp{c.tp} {c.device.name}, chunk {c.chunk}"
        assert self.prefill is not None
        assert self.decode is not None
        p, d = self.prefill, self.decode
        mixed = f", {p.mixed_step_ms:g} ms beside decodes" if p.mixed_step_ms else ""
        return f"{self.mode.value} {p.count}P:{d.count}D, {_kind(p)} + {_kind(d)}, chunk {p.chunk}{mixed}"

    def cost_per_hour(self, question: Question) -> float | None:
        """Of all its GPUs; None without a price."""
        if question.price is None:
            return None
        is_other = {pool: question.decode_device is not None and pool.device == question.decode_device for pool in self.pools.values()}
        other = question.price if question.decode_price is None else question.decode_price
        return sum(pool.gpus * (other if is_other[pool] else question.price) for pool in self.pools.values())


def _kind(pool: PoolPlan) -> str:
    return f"tp{pool.tp} {pool.device.name}"


def topology_of(question: Question, candidate: Candidate) -> Topology:
    """The candidate on simulated engines. `pools.colocated` stands in it only for a colocated plan."""
    pools: dict[str, Any] = {}
    for name, pool in candidate.pools.items():
        settings = question.settings(pool.device, pool.tp, pool.chunk, pool.max_seqs, pool.mixed_step_ms)
        pools[name] = {"count": pool.count, "simulated": settings.model_dump(exclude_defaults=True)}
    return parse_topology(
        {
            "model": question.shape.name,
            "mode": candidate.mode.value,
            "engine": {"kind": "simulated"},
            "pools": pools,
            # A simulated host is not short of memory: boxes of 16 M tokens.
            "kv": {"outbox_gib": 1, "inbox_gib": 1},
            "admission": {"max_queued_requests": 1_000_000, "max_queued_tokens": 1 << 40},
            "slo_classes": [c.model_dump(exclude_none=True) for c in question.load.classes],
        },
        "plan",
    )
