"""What one device can do: memory, bandwidth, peak FLOP/s, and the share of each that serving kernels reach. Pure data.

Peaks are the vendors' dense figures (no sparsity), with fp32 accumulation. Memory is what the driver reports, not the marketing figure.

Efficiencies of A100, H100 and H200 are medians over vLLM kernel timings published by AIConfigurator (NVIDIA, Apache-2.0; vLLM 0.24, for
the A100 0.14): large bf16 and fp8 GEMMs, weight streaming at one token (bf16), prefill attention above 2 ms, decode attention over 0.4 GB
of KV, the floor of one attention kernel, and the all-reduce of two to eight GPUs (its floor, and its bandwidth around 4 to 16 MB).
`kernel_s` and `step_s` are assumptions: 2 us for each small kernel inside a CUDA graph, 1 ms of host work per step. The other GPUs take
the typical values of those three (`_TYPICAL`), an assumption until somebody measures them.

`cpu` is one core with AMX, from our own runs of SmolLM2-135M under vLLM: prefill of 512 and 3,000 tokens in 0.36 and 3.6 s, 17 ms to
read 269 MB of weights. Real memory per core differs from host to host: take the host's where it is known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from disagg.errors import ConfigError, nearest

Dtype = Literal["bf16", "fp8"]

_TERA = 1e12
_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares (0 to 1) of a device's peaks that kernels reach.

    `bf16`/`fp8`: large matrix products, of the peak FLOP/s of that type. `attention`: prefill attention, of the bf16 peak.
    `weights`: reading weights at small batches, of bandwidth. `kv`: decode attention reading KV, of bandwidth.
    """

    bf16: float
    fp8: float
    attention: float
    weights: float
    kv: float


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or one CPU core with its share of the host.

    `memory_bytes`; `bandwidth` in bytes/s; `bf16_flops`, `fp8_flops` in FLOP/s. `link_bandwidth`: bytes/s that one device sends in an
    all-reduce, `link_latency_s`: floor of one all-reduce. `kernel_s`: floor of one kernel inside a step; `step_s`: fixed cost of a step
    (scheduling, sampling, launch). `reserve_bytes`: taken by the runtime, graphs and activations beside weights and KV.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    bf16_flops: float
    fp8_flops: float
    efficiency: Efficiency
    link_bandwidth: float
    link_latency_s: float
    kernel_s: float = 2e-6
    attention_kernel_s: float = 12e-6
    step_s: float = 1e-3
    reserve_bytes: int = 2 * _GIB

    def flops(self, dtype: Dtype) -> float:
        """FLOP/s that matrix products of `dtype` weights reach on this device."""
        return self.bf16_flops * self.efficiency.bf16 if dtype == "bf16" else self.fp8_flops * self.efficiency.fp8


_TYPICAL = Efficiency(bf16=0.77, fp8=0.60, attention=0.58, weights=0.78, kv=0.82)
# bytes/s and seconds of an all-reduce
_NVLINK4 = (300e9, 4.6e-6)
_NVLINK3 = (180e9, 5.2e-6)
_PCIE4 = (20e9, 20e-6)
_PCIE5 = (40e9, 20e-6)

DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        # The A100 has no fp8 units: fp8 weights are widened and multiplied at bf16 speed.
        Device(
            "a100", 81920 * _MIB, 2.04e12, 312 * _TERA, 312 * _TERA,
            Efficiency(bf16=0.90, fp8=0.85, attention=0.54, weights=0.72, kv=0.75), *_NVLINK3, attention_kernel_s=18e-6,
        ),
        Device(
            "h100", 81559 * _MIB, 3.35e12, 989 * _TERA, 1979 * _TERA,
            Efficiency(bf16=0.77, fp8=0.58, attention=0.59, weights=0.84, kv=0.86), *_NVLINK4,
        ),
        Device(
            "h200", 143771 * _MIB, 4.8e12, 989 * _TERA, 1979 * _TERA,
            Efficiency(bf16=0.75, fp8=0.65, attention=0.58, weights=0.78, kv=0.82), *_NVLINK4,
        ),
        Device("b200", 183359 * _MIB, 8.0e12, 2250 * _TERA, 4500 * _TERA, _TYPICAL, 600e9, 4.6e-6),
        Device("l40s", 46068 * _MIB, 864e9, 362 * _TERA, 733 * _TERA, _TYPICAL, *_PCIE4),
        Device("rtx-4090", 24564 * _MIB, 1008e9, 165.2 * _TERA, 330.3 * _TERA, _TYPICAL, *_PCIE4),
        Device("rtx-pro-6000", 97887 * _MIB, 1792e9, 503.8 * _TERA, 1007.6 * _TERA, _TYPICAL, *_PCIE5),
        Device(
            "cpu", 16 * _GIB, 15.8e9, 0.45 * _TERA, 0.45 * _TERA,
            Efficiency(bf16=0.80, fp8=0.80, attention=0.385, weights=1.0, kv=0.80), 5e9, 50e-6,
            kernel_s=4e-6, attention_kernel_s=20e-6, step_s=1e-3, reserve_bytes=_GIB,
        ),
    )
}  # fmt: skip

_NOISE = re.compile(
    r"nvidia|geforce|tesla|blackwell|ada|generation|server|workstation|edition|max-?q|sxm\d?|pcie|nvl|hbm\d?e?|\d+ ?gi?b?\b"
)


def find_device(name: str) -> Device:
    """The device that `name` means: case, vendor words, form factor and memory size do not matter ("NVIDIA H100 80GB HBM3" is h100).

    Raises ConfigError naming the nearest known one.
    """
    plain = _squeeze(_NOISE.sub(" ", name.lower()))
    for key, device in DEVICES.items():
        if plain in (_squeeze(key), _squeeze(key).removeprefix("rtx")):
            return device
    hint = nearest(name.lower(), DEVICES)
    raise ConfigError(f"unknown device {name!r}; {hint}", key="gpu", value=name, expected=hint)


def _squeeze(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text)
