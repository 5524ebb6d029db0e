"""Made-up rows of arms that are served as on a real machine: long prompts stall all chats that run, and the machine's speed drifts."""

from __future__ import annotations

import random
from dataclasses import dataclass

from disagg.ab.rows import Row


@dataclass(frozen=True, slots=True)
class Machine:
    """How an arm serves. `stall_s`: what a long prompt adds to one gap of every running chat. `drift`: sigma of a round's speed.

    `wobble`: sigma of a stretch of 5 s.
    """

    step_s: float = 0.025
    ttft_s: float = 0.12
    stall_s: float = 0.4
    drift: float = 0.02
    wobble: float = 0.03


def served(
    arm: str, machine: Machine, seed: int, *, rounds: int = 3, duration_s: float = 60.0, rate_rps: float = 1.0, tokens: int = 60
) -> list[Row]:
    """Chats at `rate_rps` and a long prompt every 10 s. Due times follow from the round and the rate alone: equal in every arm."""
    noise = random.Random(f"{arm}/{seed}")
    rows = []
    for round_ in range(1, rounds + 1):
        due = random.Random(f"due/{round_}/{rate_rps}")
        speed = noise.lognormvariate(0, machine.drift)
        local = [speed * noise.lognormvariate(0, machine.wobble) for _ in range(int(duration_s / 5) + 20)]
        stalls = [t + noise.uniform(0, 0.5) for t in range(5, int(duration_s) + 30, 10)]
        at, index = due.expovariate(rate_rps), 0
        while at < duration_s:
            rows.append(_chat(arm, machine, noise, round_, index, at, tokens, local, stalls, rate_rps))
            at, index = at + due.expovariate(rate_rps), index + 1
    return rows


def _chat(
    arm: str,
    machine: Machine,
    noise: random.Random,
    round_: int,
    index: int,
    sent_s: float,
    tokens: int,
    local: list[float],
    stalls: list[float],
    rate_rps: float,
) -> Row:
    now = sent_s + machine.ttft_s * local[int(sent_s / 5)] * noise.uniform(0.9, 1.1)
    times = [now]
    for _ in range(tokens - 1):
        gap = machine.step_s * local[min(int(now / 5), len(local) - 1)] * noise.uniform(0.9, 1.1)
        gap += sum(machine.stall_s for s in stalls if now <= s < now + gap)
        now += gap
        times.append(now)
    return Row(
        arm=arm,
        round=round_,
        index=index,
        stream="chat",
        slo_class="chat",
        input_tokens=64,
        max_output_tokens=tokens,
        prompt_digest=str(index),
        due_s=sent_s,
        sent_s=sent_s,
        end_s=times[-1],
        token_s=tuple(times),
        outcome="completed",
        prefill_worker=f"{arm}-p",
        decode_worker=f"{arm}-d",
        attempts=1,
        cached_tokens=0,
        queue_s=0.01,
        prefill_s=times[0] - sent_s - 0.02,
        transfer_s=0.004,
        rate_rps=rate_rps,
    )
