"""What fits a device: weights, and the KV cache beside them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.errors import ConfigError
from disagg.perf.hardware import Device, Dtype
from disagg.perf.shapes import ModelShape

_TP_DEGREES = (1, 2, 4, 8, 16, 32)


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
    """KV bytes of one token on one device; KV heads are replicated where there are more devices than heads, and so is a latent (MLA)."""
    if shape.mla is not None:
        return shape.kv_bytes_per_token(kv_dtype)
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
