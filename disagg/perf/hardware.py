"""What one device can do: memory, bandwidth, peak FLOP/s, and what serving kernels make of them. Pure data.

Peaks are the vendors' dense figures (no sparsity), with fp32 accumulation. Memory is what the driver reports, not the marketing figure.

Kernel constants of A100, H100 and H200 are fits to vLLM kernel timings published by AIConfigurator (NVIDIA, Apache-2.0; vLLM 0.24, for
the A100 0.14): `python -m bench.fit_kernels --tables DIR` prints them again. Those of RTX PRO 6000 and RTX 4090 are fits to layer timings
of vLLM 0.28 published with LLMServingSim (MIT): gate/up, down and head products of Qwen3-32B and Llama-3.1-8B, decode attention alone
and in mixed batches (`python -m bench.fit_layers --tables DIR` prints those again), and an all-reduce of two cards over PCIe. Their prefill
attention (`compute`, `passes`) is the A100's, as both run FlashAttention 2. No serving run took part.

B200, L40S and all devices made by `_like` take the constants of their nearest kin, an assumption until somebody measures them; so do
int8 (as fp8) and int4 (4-bit weights widened to bf16 in the kernel, at the bf16 rate) everywhere. `step_s` and `request_s`, the engine's
own work between two steps, are assumptions too: 1 ms, and 10 us for each sequence.

`cpu` is one core with AMX on a quiet machine, from our own runs of SmolLM2-135M under vLLM 0.32: prefills of 512, 2,048 and 3,000 tokens in
0.36, 2.1 and 3.6 s, decode steps of 19, 22, 26 and 33 ms at batch 1, 4, 8 and 16. A core computes or waits for memory, one after the
other (sharpness near 1). Cores differ from host to host: `--gpu this-cpu` measures this one, and `disagg profile` measures a worker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from disagg.errors import ConfigError, nearest

Dtype = Literal["bf16", "fp8", "int8", "int4"]
KvDtype = Literal["bf16", "fp8", "int8"]

_TERA = 1e12
_MIB = 1 << 20
_GIB = 1 << 30
_US = 1e-6


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """Time of one product [tokens, k] x [k, n] with weights of one type.

        floor_s + (arithmetic^sharpness + weights^sharpness)^(1 / sharpness) + activations
        arithmetic   2 x tokens x k x n / (`flops` x `compute`)
        weights      bytes of k x n weights / (bandwidth x `weights`)
        activations  2 B x tokens x (k x `passes_in` + n x `passes_out`) / bandwidth: reading, writing and quantising them

    `flops`: peak FLOP/s; `compute`, `weights`: shares reached by a large product. `sharpness`: how well the two overlap.
    """

    flops: float
    compute: float
    weights: float
    floor_s: float
    sharpness: float
    passes_in: float = 0.0
    passes_out: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """Time of one layer's attention over a whole step.

        floor_s + 4 x pairs x heads x head_dim / (bf16 FLOP/s x `compute`) + `passes` x prompt tokens x heads x head_dim x 4 B / bandwidth
                + KV bytes of decoding contexts / (bandwidth x `kv`)
                + `row_s` x decoding requests x heads

    `mixed_group`: in a step that also runs prompt tokens, decoding costs 1 + mixed_group x (heads per KV head - 1) times as much where the
    kernel for mixed batches reads KV once for each query head, mostly from cache (FlashAttention 2). 0: it packs them (FlashAttention 3).
    """

    floor_s: float
    compute: float
    kv: float
    row_s: float
    passes: float
    mixed_group: float = 0.0


@dataclass(frozen=True, slots=True)
class Fabric:
    """All-reduce of x bytes over g devices: the quicker of two algorithms.

    one shot   floor_s + rank_s x g + (g - 1) x / bandwidth
    two shots  floor_s + rank_s x g + second_s + 2 (g - 1) / g x / bandwidth
    """

    floor_s: float
    rank_s: float
    second_s: float
    bandwidth: float

    def allreduce_s(self, num_bytes: float, ranks: int) -> float:
        """Seconds; none for one rank."""
        if ranks == 1:
            return 0.0
        floor_s = self.floor_s + self.rank_s * ranks
        one = (ranks - 1) * num_bytes / self.bandwidth
        two = self.second_s + 2 * (ranks - 1) / ranks * num_bytes / self.bandwidth
        return floor_s + min(one, two)


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or one CPU core with its share of the host.

    `memory_bytes`; `bandwidth` in bytes/s; `bf16_flops`, `fp8_flops` in FLOP/s. `kernel_s`: floor of one small kernel inside a step.
    `step_s`, `request_s`: the engine's work for each step and for each sequence in it (scheduling, sampling, output).
    `reserve_bytes`: taken by the runtime, graphs and activations beside weights and KV.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    bf16: MatmulRate
    fp8: MatmulRate
    attention: AttentionRate
    fabric: Fabric
    kernel_s: float = 2.5e-6
    step_s: float = 1e-3
    request_s: float = 10e-6
    reserve_bytes: int = 2 * _GIB

    @property
    def bf16_flops(self) -> float:
        return self.bf16.flops

    @property
    def fp8_flops(self) -> float:
        return self.fp8.flops

    def rate(self, dtype: Dtype) -> MatmulRate:
        """The products of weights of `dtype`. int4 weights are multiplied as bf16."""
        return self.bf16 if dtype in ("bf16", "int4") else self.fp8

    def flops(self, dtype: Dtype) -> float:
        """FLOP/s that large matrix products of `dtype` weights reach on this device."""
        rate = self.rate(dtype)
        return rate.flops * rate.compute


_NVLINK3 = Fabric(4.73 * _US, 0.146 * _US, 6.3 * _US, 182e9)
_NVLINK4 = Fabric(4.41 * _US, 0.049 * _US, 3.13 * _US, 310e9)
_NVLINK5 = Fabric(4.41 * _US, 0.049 * _US, 3.13 * _US, 620e9)  # twice NVLink 4
_NVLINK3_400 = replace(_NVLINK3, bandwidth=_NVLINK3.bandwidth * 400 / 600)  # A800
_NVLINK4_400 = replace(_NVLINK4, bandwidth=_NVLINK4.bandwidth * 400 / 900)  # H800
_PCIE5 = Fabric(13.0 * _US, 0.0, 2.0 * _US, 36e9)  # two cards: 13 us, 8.4 MB in 241 us
_PCIE4 = Fabric(13.0 * _US, 0.0, 2.0 * _US, 18e9)  # half of it

_HOPPER = AttentionRate(11.5 * _US, compute=0.681, kv=0.919, row_s=3.3e-9, passes=2.62)
_FA2_MIXED = 0.26  # RTX PRO 6000: Llama-3.1-8B (4 heads per KV head) 1.7 to 1.8 times, Qwen3-32B (8) 2.6 to 3 times
_GEFORCE = AttentionRate(12 * _US, compute=0.585, kv=0.89, row_s=3.3e-9, passes=3.17, mixed_group=_FA2_MIXED)

DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        # The A100 has no fp8 units: fp8 weights are widened and multiplied at bf16 speed.
        Device(
            "a100", 81920 * _MIB, 2.04e12,
            MatmulRate(312 * _TERA, 0.957, 0.750, 5.41 * _US, 1.96, 2.96, 1.83),
            MatmulRate(312 * _TERA, 0.900, 0.700, 5.41 * _US, 1.96, 2.96, 1.83),
            AttentionRate(17.8 * _US, compute=0.585, kv=0.743, row_s=4.55e-9, passes=3.17, mixed_group=_FA2_MIXED),
            _NVLINK3,
        ),
        Device(
            "h100", 81559 * _MIB, 3.35e12,
            MatmulRate(989 * _TERA, 0.830, 0.864, 3.68 * _US, 3.78, 0.06, 0.55),
            MatmulRate(1979 * _TERA, 0.772, 0.831, 6.35 * _US, 3.86, 4.80, 0.86),
            _HOPPER, _NVLINK4,
        ),
        Device(
            "h200", 143771 * _MIB, 4.8e12,
            MatmulRate(989 * _TERA, 0.804, 0.830, 4.0 * _US, 4.86, 0.00, 0.42),
            MatmulRate(1979 * _TERA, 0.910, 0.794, 6.81 * _US, 3.19, 7.29, 1.26),
            AttentionRate(11.5 * _US, compute=0.672, kv=0.877, row_s=3.41e-9, passes=3.63), _NVLINK4,
        ),
        Device(
            "b200", 183359 * _MIB, 8.0e12,
            MatmulRate(2250 * _TERA, 0.75, 0.83, 4.0 * _US, 4.0, 0.06, 0.5),
            MatmulRate(4500 * _TERA, 0.75, 0.80, 6.5 * _US, 3.5, 4.8, 0.9),
            _HOPPER, _NVLINK5,
        ),
        Device(
            "l40s", 46068 * _MIB, 864e9,
            MatmulRate(362 * _TERA, 0.80, 0.906, 4.0 * _US, 2.49, 0.0, 0.17),
            MatmulRate(733 * _TERA, 0.75, 0.90, 6.5 * _US, 4.0, 4.8, 0.9),
            _GEFORCE, _PCIE4,
        ),
        Device(
            "rtx-4090", 24564 * _MIB, 1008e9,
            MatmulRate(165.2 * _TERA, 1.0, 0.906, 4.0 * _US, 2.49, 0.0, 0.17),
            MatmulRate(330.3 * _TERA, 0.90, 0.90, 6.5 * _US, 4.0, 4.8, 0.9),
            _GEFORCE, _PCIE4,
        ),
        # The Server Edition's memory clock gives 1,598 GB/s; the Workstation Edition's 1,792.
        Device(
            "rtx-pro-6000", 97887 * _MIB, 1598e9,
            MatmulRate(503.8 * _TERA, 0.81, 0.908, 4.0 * _US, 2.09, 0.0, 0.98),
            MatmulRate(1007.6 * _TERA, 0.70, 0.90, 6.5 * _US, 4.0, 4.8, 0.9),
            _GEFORCE, _PCIE5,
        ),
        Device(
            "cpu", 16 * _GIB, 15.8e9,
            MatmulRate(0.45 * _TERA, 0.84, 1.0, 4 * _US, 1.15),
            MatmulRate(0.45 * _TERA, 0.84, 1.0, 4 * _US, 1.15),
            AttentionRate(10 * _US, compute=0.385, kv=0.80, row_s=0.65e-6, passes=0.0), Fabric(50 * _US, 0.0, 0.0, 5e9),
            kernel_s=2e-6, step_s=0.5e-3, reserve_bytes=_GIB,
        ),
    )
}  # fmt: skip


def _like(
    kin: str, name: str, memory_mib: int, bandwidth: float, bf16_tera: float, fp8_tera: float, fabric: Fabric | None = None
) -> Device:
    """A device whose kernels are taken to reach the shares of the peaks that those of its `kin` do: an assumption."""
    like = DEVICES[kin]
    return replace(
        like,
        name=name,
        memory_bytes=memory_mib * _MIB,
        bandwidth=bandwidth,
        bf16=replace(like.bf16, flops=bf16_tera * _TERA),
        fp8=replace(like.fp8, flops=fp8_tera * _TERA),
        fabric=fabric or like.fabric,
    )


# Without fp8 units (A100, A10) fp8 weights are multiplied at the bf16 rate.
DEVICES |= {
    d.name: d
    for d in (
        _like("a100", "a100-40gb", 40960, 1.555e12, 312, 312),
        _like("a100", "a800", 81920, 2.04e12, 312, 312, _NVLINK3_400),
        _like("a100", "a10", 23028, 600e9, 125, 125, _PCIE4),
        _like("h100", "h100-pcie", 81559, 2.04e12, 756, 1513, _PCIE5),
        _like("h100", "h100-nvl", 95830, 3.9e12, 835, 1671, _PCIE5),
        _like("h100", "gh200", 97871, 4.0e12, 989, 1979),
        _like("h100", "h800", 81559, 3.35e12, 989, 1979, _NVLINK4_400),
        _like("h200", "h20", 97871, 4.0e12, 148, 296),
        _like("b200", "gb200", 189471, 8.0e12, 2500, 5000),
        _like("b200", "b300", 275040, 8.0e12, 2250, 4500),
        _like("b200", "gb300", 275040, 8.0e12, 2500, 5000),
        _like("l40s", "l40", 46068, 864e9, 181, 362),
        _like("l40s", "l4", 23034, 300e9, 121, 242),
        _like("rtx-4090", "rtx-6000-ada", 49140, 960e9, 364.2, 728.5),
        _like("rtx-pro-6000", "rtx-5090", 32607, 1792e9, 209.5, 419),
    )
}

# Names whose form factor or memory makes another device of them; anything else about a name is noise.
_VARIANTS = (
    (re.compile(r"a100.*\b40 ?gi?b?\b"), "a100-40gb"),
    (re.compile(r"h100.*pcie"), "h100-pcie"),
    (re.compile(r"h100.*nvl(?!ink)"), "h100-nvl"),
    (re.compile(r"6000.*\bada\b"), "rtx-6000-ada"),
)
_NOISE = re.compile(
    r"nvidia|geforce|tesla|blackwell|grace|hopper|ada|generation|server|workstation|edition|max-?q|sxm\d?|hgx|dgx|pcie|nvl(?:ink|\d+)?"
    r"|hbm\d?e?|\d+ ?gi?b?\b"
)


def find_device(name: str) -> Device:
    """The device that `name` means: case and vendor words do not matter ("NVIDIA H100 80GB HBM3" is h100, "H100 PCIe" is h100-pcie).

    Raises ConfigError naming the nearest known one.
    """
    lower = name.lower().replace("_", " ")
    for pattern, variant in _VARIANTS:
        if pattern.search(lower):
            return DEVICES[variant]
    plain = _squeeze(_NOISE.sub(" ", lower))
    for key, device in DEVICES.items():
        if plain in (_squeeze(key), _squeeze(key).removeprefix("rtx")):
            return device
    hint = nearest(name.lower(), DEVICES)
    raise ConfigError(f"unknown device {name!r}; {hint}", key="gpu", value=name, expected=hint)


def _squeeze(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text)
