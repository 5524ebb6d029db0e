"""How long an engine's step takes and what fits a device, from first principles. Pure.

The roofline of Williams, Waterman and Patterson (2009), with two roofs per step: arithmetic and memory traffic.
A step runs some prefill tokens and some decode tokens together, as vLLM's chunked prefill does:

    linear    = max(2 x active params x tokens / FLOP/s,  weight bytes touched / bandwidth)
    head      = max(2 x vocab x hidden x sampled / FLOP/s,  vocab x hidden x 2 B / bandwidth)
    attention = 4 x layers x heads x head_dim x sum(pairs) / FLOP/s    for prefill (pairs: (query, key) pairs under the causal mask)
              + KV bytes of the decoded contexts / bandwidth           for decode
    allreduce = 2 x layers x (latency + 2 (tp - 1) / tp x tokens x hidden x 2 B / link bandwidth)
    fixed     = layers x (attention kernel + 8 small kernels) + step overhead

Peaks are multiplied by the efficiencies in hardware.py. Tensor parallelism divides FLOPs and bytes. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from disagg.errors import ConfigError
from disagg.perf.hardware import Device, Dtype
from disagg.perf.shapes import ModelShape

_SMALL_KERNELS = 8  # per layer, beside attention: two norms, rope, KV write, activation, and the launch floors of the matrix products
_TP_DEGREES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """`num_tokens` prompt tokens of one request, after `num_cached_tokens` that are in the cache already."""

    num_tokens: int
    num_cached_tokens: int = 0

    @property
    def attention_pairs(self) -> float:
        """(query, key) pairs under the causal mask."""
        return self.num_tokens * (self.num_cached_tokens + (self.num_tokens + 1) / 2)


@dataclass(frozen=True)
class StepModel:
    """Step times of one model on `tp` equal devices. `dtype`: weights and matrix products; `kv_dtype`: the KV cache."""

    shape: ModelShape
    device: Device
    tp: int = 1
    dtype: Dtype = "bf16"
    kv_dtype: Dtype = "bf16"

    def __post_init__(self) -> None:
        check_tp(self.shape, self.tp)

    def step_s(self, chunks: Sequence[PrefillChunk], num_decodes: int = 0, decode_context_tokens: int = 0) -> float:
        """Seconds of one engine step.

        chunks: prefill chunks in it. num_decodes: requests that decode one token each. decode_context_tokens: sum of their contexts.
        An empty step takes no time.
        """
        num_tokens = num_decodes + sum(c.num_tokens for c in chunks)
        if num_tokens == 0:
            return 0.0
        pairs = sum(c.attention_pairs for c in chunks)
        linear = max(num_tokens * self._linear_s_per_token, self._weights_s(num_tokens))
        head = max((num_decodes + len(chunks)) * self._head_s_per_token, self._head_weights_s)
        attention = pairs * self._attention_s_per_pair + decode_context_tokens * self._kv_s_per_token
        return linear + head + attention + self._allreduce_s(num_tokens) + self._fixed_s

    def prefill_s(self, num_tokens: int, num_cached_tokens: int = 0, max_num_batched_tokens: int | None = None) -> float:
        """Seconds to prefill one prompt alone: `num_tokens` in all, of which the first `num_cached_tokens` are cached, in chunks."""
        limit = max_num_batched_tokens or max(1, num_tokens)
        starts = range(num_cached_tokens, num_tokens, limit)
        return sum(self.step_s([PrefillChunk(min(limit, num_tokens - start), start)]) for start in starts)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Seconds of one decode step of `batch` requests whose contexts sum to `context_tokens`."""
        return self.step_s((), batch, context_tokens)

    @cached_property
    def _flops(self) -> float:
        return self.device.flops(self.dtype) * self.tp

    @cached_property
    def _linear_s_per_token(self) -> float:
        return 2 * self.shape.active_params / self._flops

    @cached_property
    def _weights_bandwidth(self) -> float:
        return self.device.bandwidth * self.device.efficiency.weights * self.tp

    @cached_property
    def _dense_weights_s(self) -> float:
        return self.shape.touched_weight_bytes(0, self.dtype) / self._weights_bandwidth

    def _weights_s(self, num_tokens: int) -> float:
        if not self.shape.num_experts:
            return self._dense_weights_s
        return self.shape.touched_weight_bytes(num_tokens, self.dtype) / self._weights_bandwidth

    @cached_property
    def _head_s_per_token(self) -> float:
        return 2 * self.shape.head_params / (self.device.flops("bf16") * self.tp)

    @cached_property
    def _head_weights_s(self) -> float:
        return 2 * self.shape.head_params / self._weights_bandwidth

    @cached_property
    def _attention_s_per_pair(self) -> float:
        flops_per_pair = 4 * self.shape.num_layers * self.shape.num_heads * self.shape.head_dim
        return flops_per_pair / (self.device.bf16_flops * self.device.efficiency.attention * self.tp)

    @cached_property
    def _kv_s_per_token(self) -> float:
        num_bytes = rank_kv_bytes_per_token(self.shape, self.tp, self.kv_dtype)
        return num_bytes / (self.device.bandwidth * self.device.efficiency.kv)

    @cached_property
    def _fixed_s(self) -> float:
        per_layer = self.device.attention_kernel_s + _SMALL_KERNELS * self.device.kernel_s
        return self.shape.num_layers * per_layer + self.device.step_s

    def _allreduce_s(self, num_tokens: int) -> float:
        """Two all-reduces per layer (after attention and after the MLP) of a [tokens, hidden] bf16 tensor."""
        if self.tp == 1:
            return 0.0
        sent = 2 * (self.tp - 1) / self.tp * num_tokens * self.shape.hidden * 2
        return 2 * self.shape.num_layers * (self.device.link_latency_s + sent / self.device.link_bandwidth)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What one device of a worker holds. Bytes are per device; tokens are per worker.

    `kv_tokens`: tokens that the KV cache holds (0 when the weights alone are too much). `fits`: weights fit and the KV cache holds at least
    the tokens asked for. `needed_tp`: the smallest tensor-parallel degree that fits on such devices, None when none does.
    """

    weights_bytes: int
    budget_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    fits: bool
    needed_tp: int | None


def check_tp(shape: ModelShape, tp: int) -> None:
    """Raises ConfigError when the heads of `shape` cannot be divided over `tp` devices."""
    if tp < 1 or not _tp_is_valid(shape, tp):
        degrees = [d for d in range(1, shape.num_heads + 1) if _tp_is_valid(shape, d)]
        expected = f"a degree that divides {shape.num_heads} heads and {shape.num_kv_heads} KV heads of {shape.name}: {degrees}"
        raise ConfigError(key="tp", value=tp, expected=expected)


def _tp_is_valid(shape: ModelShape, tp: int) -> bool:
    return shape.num_heads % tp == 0 and (shape.num_kv_heads % tp == 0 or tp % shape.num_kv_heads == 0)


def rank_kv_bytes_per_token(shape: ModelShape, tp: int, kv_dtype: Dtype = "bf16") -> int:
    """KV bytes of one token on one device; KV heads are replicated where there are more devices than heads."""
    return shape.kv_bytes_per_token(kv_dtype) // shape.num_kv_heads * max(1, shape.num_kv_heads // tp)


def kv_capacity_tokens(
    shape: ModelShape, device: Device, tp: int = 1, dtype: Dtype = "bf16", utilization: float = 0.9, kv_dtype: Dtype = "bf16"
) -> int:
    """Tokens of KV that `tp` devices hold beside the weights: (memory x utilization - weights - reserve) / KV bytes per token.

    `utilization`: vLLM's gpu_memory_utilization. Never negative.
    """
    check_tp(shape, tp)
    room = int(device.memory_bytes * utilization) - device.reserve_bytes - -(-shape.weight_bytes(dtype) // tp)
    return max(0, room // rank_kv_bytes_per_token(shape, tp, kv_dtype))


def fits(
    shape: ModelShape,
    device: Device,
    tp: int = 1,
    dtype: Dtype = "bf16",
    utilization: float = 0.9,
    min_kv_tokens: int = 1,
    kv_dtype: Dtype = "bf16",
) -> bool:
    """True when weights and at least `min_kv_tokens` tokens of KV fit (use the longest request that must be served)."""
    return kv_capacity_tokens(shape, device, tp, dtype, utilization, kv_dtype) >= min_kv_tokens


def placement_memory(
    shape: ModelShape,
    device: Device,
    tp: int = 1,
    dtype: Dtype = "bf16",
    utilization: float = 0.9,
    min_kv_tokens: int = 1,
    kv_dtype: Dtype = "bf16",
) -> MemoryReport:
    """Whether a worker of `tp` devices holds `shape`, and what would. `min_kv_tokens`: usually max_model_len.

    Raises ConfigError for a `tp` that the heads cannot be divided over.
    """
    check_tp(shape, tp)
    degrees = [d for d in _TP_DEGREES if _tp_is_valid(shape, d)]
    return MemoryReport(
        weights_bytes=-(-shape.weight_bytes(dtype) // tp),
        budget_bytes=int(device.memory_bytes * utilization),
        kv_bytes_per_token=rank_kv_bytes_per_token(shape, tp, kv_dtype),
        kv_tokens=kv_capacity_tokens(shape, device, tp, dtype, utilization, kv_dtype),
        fits=fits(shape, device, tp, dtype, utilization, min_kv_tokens, kv_dtype),
        needed_tp=next((d for d in degrees if fits(shape, device, d, dtype, utilization, min_kv_tokens, kv_dtype)), None),
    )
