"""What is asked of the planner, and what no hardware could do. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from disagg.config import SimulatedSettings
from disagg.engine.simulated_timing import step_model
from disagg.errors import ConfigError
from disagg.perf.hardware import Device, Dtype
from disagg.perf.limits import find_limits, sizes_of
from disagg.perf.links import Link
from disagg.perf.memory import kv_capacity_tokens
from disagg.perf.profile import StepTimes
from disagg.perf.shapes import ModelShape
from disagg.perf.speculative import Speculation
from disagg.plan.load import Load

DEGREES = (1, 2, 4, 8, 16)
BLOCK_TOKENS = 16
LEAST_REQUESTS = 400  # of a simulation
_SETTLED = 2.5  # mean answers that a simulation lasts
_SLOW_TOKEN_S = 0.1  # where no target is given
_USUAL_PACE = 0.7  # of a target, that tokens come at
KvDtype = Literal["bf16", "fp8", "int8"]


@dataclass(frozen=True)
class Question:
    """`shape_ref`: what SimulatedSettings call the shape. `decode_device`: what decode workers may run on instead of `device`.

    `degrees`: tensor-parallel degrees to choose from; none: all that the heads divide by, up to the GPUs of a host. `level`: share of
    requests that must be inside their class. `price`: of one GPU-hour, `decode_price` of one of `decode_device`. `requests`: that a
    simulation sends at most.
    """

    shape: ModelShape
    shape_ref: str
    device: Device
    gpus: int
    load: Load
    link: Link
    decode_device: Device | None = None
    dtype: Dtype = "bf16"
    kv_dtype: KvDtype = "bf16"
    speculation: Speculation | None = None
    degrees: tuple[int, ...] = ()
    level: float = 0.9
    price: float | None = None
    decode_price: float | None = None
    gpus_per_host: int = 8
    requests: int = 1500

    def with_gpus(self, gpus: int) -> Question:
        return replace(self, gpus=gpus)

    def with_load(self, load: Load) -> Question:
        return replace(self, load=load)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The kinds of devices that workers may run on."""
        other = self.decode_device
        return (self.device,) if other is None or other == self.device else (self.device, other)

    def requests_at(self, rate_rps: float) -> int:
        """What a simulation at that rate sends: for so long that the cluster fills, and answers of its full state come to their end."""
        s = self.load.sample
        pace_s = np.minimum(s.tpot_s, _SLOW_TOKEN_S) * _USUAL_PACE
        settled_s = _SETTLED * float(np.mean(s.outputs * pace_s))
        return int(min(self.requests, max(LEAST_REQUESTS, rate_rps * settled_s)))

    def settings(self, device: Device, tp: int, chunk: int = 2048, max_seqs: int = 256) -> SimulatedSettings:
        """Of one worker's engine."""
        longest = self.load.longest_tokens
        return SimulatedSettings(
            gpu=device.name,
            shape=self.shape_ref,
            tp=tp,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            speculative_tokens=self.speculation.tokens if self.speculation else 0,
            speculative_acceptance=self.speculation.acceptance if self.speculation else 0.0,
            kv_bytes_per_token=64,
            block_tokens=BLOCK_TOKENS,
            max_num_batched_tokens=chunk,
            max_num_seqs=max_seqs,
            max_model_len=self.shape.max_context_tokens or -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS,
        )

    def steps(self, device: Device, tp: int) -> StepTimes:
        """Step times of one worker."""
        return step_model(self.settings(device, tp))

    def kv_tokens(self, device: Device, tp: int) -> int:
        """Tokens of KV that one worker holds; 0 when not even the weights fit."""
        return kv_capacity_tokens(self.shape, device, tp, self.dtype, kv_dtype=self.kv_dtype)

    def usable_degrees(self, device: Device) -> tuple[int, ...]:
        """Degrees at which a worker holds the longest request. Raises ConfigError when there is none, saying what would fit."""
        wanted = self.degrees or tuple(d for d in DEGREES if d <= self.gpus_per_host)
        possible = [d for d in wanted if self._divides(d)]
        if not possible:
            expected = f"degrees that divide the {self.shape.num_heads} heads and {self.shape.num_kv_heads} KV heads of {self.shape.name}"
            raise ConfigError(key="tp", value=list(wanted), expected=expected)
        fitting = tuple(d for d in possible if self.kv_tokens(device, d) >= self.load.longest_tokens)
        if not fitting or min(fitting) > self.gpus:
            self._does_not_fit(device, possible)
        return tuple(d for d in fitting if d <= self.gpus)

    def _divides(self, degree: int) -> bool:
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)

    def _does_not_fit(self, device: Device, possible: list[int]) -> None:
        weights = self.shape.weight_bytes(self.dtype)
        all_degrees = [d for d in (*DEGREES, 32) if self._divides(d)]
        needed = next((d for d in all_degrees if self.kv_tokens(device, d) >= self.load.longest_tokens), None)
        expected = f"at least {needed} {device.name} (tp {needed})" if needed else "a smaller type of weights, or larger devices"
        if needed and needed > self.gpus_per_host:
            expected += ", more than the GPUs of a host"
        message = (
            f"gpus: {self.shape.name} in {self.dtype} has {weights / 1e9:.0f} GB of weights, which with the KV of its longest request "
            f"({self.load.longest_tokens:,} tokens) do not fit {self.gpus} x {device.name} of {device.memory_bytes / 1e9:.0f} GB "
            f"at tp {', '.join(map(str, possible))}; expected {expected}"
        )
        raise ConfigError(message, key="gpus", value=self.gpus, expected=expected)


def check(question: Question) -> None:
    """Raises ConfigError for what no plan could do: no GPUs, weights that do not fit, targets below the physical limits."""
    if question.gpus < 1:
        raise ConfigError(key="gpus", value=question.gpus, expected="at least 1")
    if not 0 < question.level <= 1:
        raise ConfigError(key="attainment", value=question.level, expected="a share above 0, at most 1")
    widest = [(device, max(question.usable_degrees(device))) for device in question.devices]
    load = question.load
    typical_context = round(load.mean_input + load.mean_output / 2)
    for slo_class in load.classes:
        own = [r for r in load.trace.requests if r.slo_class == slo_class.name]
        if not own:
            continue
        if slo_class.tpot_s is not None:
            floor_s, device, tp = min((_token_floor_s(question, d, tp, typical_context), d.name, tp) for d, tp in widest)
            read_gb = question.shape.weight_bytes(question.dtype) / 1e9
            why = f"a step reads {read_gb:,.1f} GB of weights and a context of {typical_context:,} tokens"
            _refuse_below(slo_class.name, "tpot_ms", slo_class.tpot_s, floor_s, f"one token on {tp} x {device}: {why}")
        if slo_class.ttft_s is not None:
            # The shortest prompts are the easiest; where those of the share that must be in time cannot be, nothing helps.
            longest = int(np.quantile([r.input_tokens for r in own], question.level, method="lower"))
            floor_s, device, tp = min((_prompt_floor_s(question, d, tp, longest), d.name, tp) for d, tp in widest)
            why = f"the prefill of {longest:,} tokens (the {question.level:.0%} quantile of the prompts) on {tp} x {device} at peak FLOP/s"
            _refuse_below(slo_class.name, "ttft_ms", slo_class.ttft_s, floor_s, why)


def _token_floor_s(question: Question, device: Device, tp: int, context: int) -> float:
    sizes = sizes_of(question.shape, question.dtype, question.kv_dtype, tp)
    page = find_limits(
        device, sizes, model=question.shape.name, shape=question.shape, tp=tp, dtype=question.dtype, kv_dtype=question.kv_dtype,
        context_tokens=max(1, context), prompt_tokens=1, batches=(1,),
    )  # fmt: skip
    return page.rows[0].limit_tpot_s / (question.speculation.tokens_per_step if question.speculation else 1.0)


def _prompt_floor_s(question: Question, device: Device, tp: int, tokens: int) -> float:
    new = max(1, round(tokens * (1 - question.load.cached_share)))
    sizes = sizes_of(question.shape, question.dtype, question.kv_dtype, tp)
    page = find_limits(
        device, sizes, model=question.shape.name, shape=question.shape, tp=tp, dtype=question.dtype, kv_dtype=question.kv_dtype,
        context_tokens=1, prompt_tokens=new, batches=(1,),
    )  # fmt: skip
    return page.limit_prefill_s


def _refuse_below(name: str, key: str, target_s: float, floor_s: float, why: str) -> None:
    if target_s < floor_s:
        expected = f"at least {floor_s * 1e3:.1f} ms, the physical limit: {why}"
        raise ConfigError(
            f"class {name}: {key}: {target_s * 1e3:g} ms is below the physical limit of {floor_s * 1e3:.1f} ms: {why}",
            key=f"{name}.{key}", value=target_s * 1e3, expected=expected,
        )  # fmt: skip
