"""What is asked of the planner, and what no hardware could do. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from disagg.config import SimulatedSettings
from disagg.engine.simulated_timing import step_model
from disagg.errors import ConfigError
from disagg.perf.hardware import Device, Dtype, KvDtype
from disagg.perf.limits import find_limits, sizes_of
from disagg.perf.links import Link
from disagg.perf.memory import kv_capacity_tokens, rank_kv_bytes_per_token
from disagg.perf.profile import Profile, StepTimes
from disagg.perf.roofline import PrefillChunk
from disagg.perf.shapes import ModelShape
from disagg.perf.speculative import Speculation
from disagg.plan.load import Load

DEGREES = (1, 2, 4, 8, 16)
BLOCK_TOKENS = 16
MOST_GPUS = 512  # of one question: a simulation of more takes minutes, and would need many thousand requests to fill
LEAST_REQUESTS = 400  # of a simulation
_SETTLED = 2.5  # mean answers that a simulation lasts
_SLOW_TOKEN_S = 0.1  # where no target is given
_USUAL_PACE = 0.7  # of a target, that tokens come at


@dataclass(frozen=True)
class Question:
    """`shape_ref`: what SimulatedSettings call the shape. `decode_device`: what decode workers may run on instead of `device`.

    `degrees`: tensor-parallel degrees to choose from; none: all that the heads divide by, up to the GPUs of a host. `level`: share of
    requests that must be inside their class. `price`: of one GPU-hour, `decode_price` of one of `decode_device`. `requests`: that a
    simulation sends at most, about the expected goodput; `span_s`: for so long each sends then at most, whatever its rate, for a shorter
    one finds the cluster emptier. `profile`: measured step times, cache and bytes of a worker on `device`, in the roofline's place;
    `profile_ref`: its file.
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
    span_s: float = math.inf
    profile: Profile | None = None
    profile_ref: str = ""

    def with_gpus(self, gpus: int) -> Question:
        return replace(self, gpus=gpus)

    def with_load(self, load: Load) -> Question:
        return replace(self, load=load)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The kinds of devices that workers may run on."""
        other = self.decode_device
        return (self.device,) if other is None or other == self.device else (self.device, other)

    def is_measured(self, device: Device) -> bool:
        """Whether the profile is of workers on `device`."""
        return self.profile is not None and device == self.device

    def wire_bytes_per_token(self, tp: int) -> int:
        """Of one token's KV between two workers over `tp` links, copies that ranks keep (more of them than KV heads; MLA) included."""
        return self.profile.kv_bytes_per_token if self.profile else tp * rank_kv_bytes_per_token(self.shape, tp, self.kv_dtype)

    def requests_at(self, rate_rps: float) -> int:
        """What a simulation at that rate sends: for so long that the cluster fills, and answers of its full state come to their end."""
        s = self.load.sample
        pace_s = np.minimum(s.tpot_s, _SLOW_TOKEN_S) * _USUAL_PACE
        settled_s = _SETTLED * float(np.mean(s.outputs * pace_s))
        if math.isinf(self.span_s):
            return int(min(self.requests, max(LEAST_REQUESTS, rate_rps * settled_s)))
        return int(max(min(LEAST_REQUESTS, self.requests), rate_rps * min(settled_s, self.span_s)))

    def overhang(self, rate_rps: float) -> float:
        """By how much longer a simulation at that rate serves than it sends, at most: 1.2 is a fifth."""
        s = self.load.sample
        last_s = float(np.mean(s.outputs * np.minimum(s.tpot_s, _SLOW_TOKEN_S) + np.minimum(s.ttft_s, s.outputs * _SLOW_TOKEN_S)))
        return 1 + last_s * rate_rps / self.requests_at(rate_rps)

    def settings(
        self, device: Device, tp: int, chunk: int = 2048, max_seqs: int = 256, mixed_step_ms: float | None = None
    ) -> SimulatedSettings:
        """Of one worker's engine."""
        block_tokens = self.profile.block_tokens if self.profile else BLOCK_TOKENS
        return SimulatedSettings(
            profile=self.profile_ref if self.is_measured(device) else None,
            gpu=device.name,
            shape=self.shape_ref,
            tp=tp,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            speculative_tokens=self.speculation.tokens if self.speculation else 0,
            speculative_acceptance=self.speculation.acceptance if self.speculation else 0.0,
            kv_bytes_per_token=64,
            block_tokens=block_tokens,
            max_num_batched_tokens=chunk,
            max_num_seqs=max_seqs,
            mixed_step_ms=mixed_step_ms,
            max_model_len=self._max_model_len(block_tokens),
        )

    def _max_model_len(self, block_tokens: int) -> int:
        if self.profile is not None and self.profile.max_model_len:
            return self.profile.max_model_len
        return self.shape.max_context_tokens or -(-self.load.longest_tokens // block_tokens) * block_tokens

    def steps(self, device: Device, tp: int) -> StepTimes:
        """Step times of one worker."""
        return step_model(self.settings(device, tp))

    def kv_tokens(self, device: Device, tp: int) -> int:
        """Tokens of KV that one worker holds; 0 when not even the weights fit."""
        if self.profile is not None and device == self.device:
            return self.profile.kv_cache_tokens
        return kv_capacity_tokens(self.shape, device, tp, self.dtype, kv_dtype=self.kv_dtype)

    def usable_degrees(self, device: Device) -> tuple[int, ...]:
        """Degrees at which a worker holds the longest request. Raises ConfigError when there is none, saying what would fit."""
        if self.profile is not None and device == self.device:
            return self._measured_degree(self.profile)
        wanted = self.degrees or tuple(d for d in DEGREES if d <= self.gpus_per_host)
        possible = [d for d in wanted if self._divides(d)]
        if not possible:
            expected = f"degrees that divide the {self.shape.num_heads} heads and {self.shape.num_kv_heads} KV heads of {self.shape.name}"
            raise ConfigError(key="tp", value=list(wanted), expected=expected)
        fitting = tuple(d for d in possible if self.kv_tokens(device, d) >= self.load.longest_tokens)
        if not fitting or (min(fitting) > self.gpus and not self.degrees):
            self._does_not_fit(device, possible)
        if min(fitting) > self.gpus:
            raise ConfigError(key="tp", value=list(self.degrees), expected=f"degrees up to {self.gpus}, the GPUs that there are")
        return tuple(d for d in fitting if d <= self.gpus)

    def _measured_degree(self, profile: Profile) -> tuple[int, ...]:
        """That of the measured worker: nothing is known of others."""
        if self.degrees and profile.tp not in self.degrees:
            raise ConfigError(key="tp", value=list(self.degrees), expected=f"{profile.tp}, that of the profile's worker")
        most = min(profile.kv_cache_tokens, profile.max_model_len or profile.kv_cache_tokens)
        if most < self.load.longest_tokens:
            expected = f"requests of at most {most:,} tokens, what the profile's worker takes"
            raise ConfigError(key="workload", value=self.load.longest_tokens, expected=expected)
        if profile.tp > self.gpus:
            raise ConfigError(key="gpus", value=self.gpus, expected=f"at least {profile.tp}, the devices of the profile's worker")
        return (profile.tp,)

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
    if question.gpus > MOST_GPUS:
        expected = f"at most {MOST_GPUS}: plan a larger cluster as equal cells, each with its part of the rate, or ask how many with --rate"
        raise ConfigError(key="gpus", value=question.gpus, expected=expected)
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
            if question.profile is not None:
                why = f"a step with a context of {typical_context:,} tokens, as measured"
            _refuse_below(question, slo_class.name, "tpot_ms", slo_class.tpot_s, floor_s, f"one token on {tp} x {device}: {why}")
        if slo_class.ttft_s is not None:
            # The shortest prompts are the easiest; where those of the share that must be in time cannot be, nothing helps.
            longest = int(np.quantile([r.input_tokens for r in own], question.level, method="lower"))
            floor_s, device, tp = min((_prompt_floor_s(question, d, tp, longest), d.name, tp) for d, tp in widest)
            how = "in one step, as measured" if question.profile else "at peak FLOP/s"
            why = f"the prefill of {longest:,} tokens (the {question.level:.0%} quantile of the prompts) on {tp} x {device} {how}"
            _refuse_below(question, slo_class.name, "ttft_ms", slo_class.ttft_s, floor_s, why)


def _token_floor_s(question: Question, device: Device, tp: int, context: int) -> float:
    if question.is_measured(device):
        return question.steps(device, tp).decode_step_s(1, max(1, context))
    sizes = sizes_of(question.shape, question.dtype, question.kv_dtype, tp)
    page = find_limits(
        device, sizes, model=question.shape.name, shape=question.shape, tp=tp, dtype=question.dtype, kv_dtype=question.kv_dtype,
        context_tokens=max(1, context), prompt_tokens=1, batches=(1,),
    )  # fmt: skip
    return page.rows[0].limit_tpot_s / (question.speculation.tokens_per_step if question.speculation else 1.0)


def _prompt_floor_s(question: Question, device: Device, tp: int, tokens: int) -> float:
    new = max(1, round(tokens * (1 - question.load.cached_share)))
    if question.is_measured(device):
        return question.steps(device, tp).step_s([PrefillChunk(new)])
    sizes = sizes_of(question.shape, question.dtype, question.kv_dtype, tp)
    page = find_limits(
        device, sizes, model=question.shape.name, shape=question.shape, tp=tp, dtype=question.dtype, kv_dtype=question.kv_dtype,
        context_tokens=1, prompt_tokens=new, batches=(1,),
    )  # fmt: skip
    return page.limit_prefill_s


def _refuse_below(question: Question, name: str, key: str, target_s: float, floor_s: float, why: str) -> None:
    if target_s < floor_s:
        limit = "limit of the profile" if question.profile else "physical limit"
        expected = f"at least {floor_s * 1e3:.1f} ms, the {limit}: {why}"
        raise ConfigError(
            f"class {name}: {key}: {target_s * 1e3:g} ms is below the {limit} of {floor_s * 1e3:.1f} ms: {why}",
            key=f"{name}.{key}", value=target_s * 1e3, expected=expected,
        )  # fmt: skip
