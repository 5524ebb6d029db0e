"""Fit the kernel constants of `disagg/perf/hardware.py` to tables of kernel timings, and print them beside those that stand there.

    python -m bench.fit_kernels --tables DIR

DIR holds AIConfigurator's tables as CSV: aic_{a100,h100,h200}_sxm_vllm_{gemm,ctx_attention,gen_attention,allreduce}.csv. They are not
part of this repository. Only isolated kernels are read here; end-to-end runs are for `bench.perf_check`.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from disagg.perf.hardware import DEVICES, Device

Floats = NDArray[np.float64]
HEAD_DIM = 128
SCALE = 0.1  # of the soft-L1 loss, in logarithms: one point further off than 10 % weighs less and less


def fit(
    model: Callable[[Floats], Floats], seconds: Floats, start: list[float], low: list[float], high: list[float]
) -> tuple[Floats, Floats]:
    """Least squares of log(model / seconds) with soft-L1 weights, by Levenberg and Marquardt; (parameters, residuals)."""
    lower, upper = np.array(low), np.array(high)
    x = np.clip(np.array(start, float), lower, upper)
    damping = 1e-2

    def residual(at: Floats) -> Floats:
        return np.asarray(np.log(model(at)) - np.log(seconds))

    def loss(r: Floats) -> float:
        return float(np.sum(np.sqrt(1 + (r / SCALE) ** 2) - 1))

    r = residual(x)
    for _ in range(100):
        jacobian = np.empty((len(r), len(x)))
        for i in range(len(x)):
            step = 1e-4 * max(abs(x[i]), 0.05)
            moved = x.copy()
            moved[i] += step if x[i] + step <= upper[i] else -step
            jacobian[:, i] = (residual(moved) - r) / (moved[i] - x[i])
        weights = 1 / np.sqrt(1 + (r / SCALE) ** 2)
        normal = jacobian.T @ (weights[:, None] * jacobian)
        gradient = jacobian.T @ (weights * r)
        for _ in range(12):
            trial = np.clip(x - np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), gradient), lower, upper)
            trial_r = residual(trial)
            if loss(trial_r) < loss(r):
                break
            damping *= 4
        else:
            return x, r
        is_done = loss(r) - loss(trial_r) < 1e-9 * loss(r)
        x, r, damping = trial, trial_r, max(damping / 4, 1e-9)
        if is_done:
            break
    return x, r


def columns(path: Path, names: tuple[str, ...], **wanted: str) -> list[Floats]:
    """Numeric columns of the rows that match `wanted`."""
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if all(row[k] == v for k, v in wanted.items())]
    return [np.array([float(row[name]) for row in rows]) for name in names]


def say(what: str, names: list[str], values: Floats, residuals: Floats) -> None:
    errors = np.abs(residuals)
    shown = ", ".join(f"{name}={value:.3g}" for name, value in zip(names, values, strict=True))
    print(f"  {what:<14} {shown}   |error| median {np.median(errors):.1%}, p90 {np.quantile(errors, 0.9):.1%} of {len(errors)} kernels")


def fit_matmul(device: Device, path: Path, dtype: str) -> None:
    m, n, k, latency_ms = columns(path, ("m", "n", "k", "latency_ms"), gemm_dtype=dtype)
    if not len(m):
        return
    width, peak = (2, device.bf16_flops) if dtype == "bfloat16" else (1, device.fp8_flops)

    def model(x: Floats) -> Floats:
        compute, weights, floor_us, sharpness, passes_in, passes_out = x
        arithmetic = (2 * m * n * k / (peak * compute)) ** sharpness
        memory = (n * k * width / (device.bandwidth * weights)) ** sharpness
        activations = 2 * m * (k * passes_in + n * passes_out) / device.bandwidth
        return np.asarray(floor_us * 1e-6 + (arithmetic + memory) ** (1 / sharpness) + activations)

    names = ["compute", "weights", "floor_us", "sharpness", "passes_in", "passes_out"]
    start, low, high = [0.75, 0.8, 4, 4, 1, 1], [0.1, 0.1, 0.1, 1, 0, 0], [1, 1.2, 20, 20, 10, 10]
    say(f"matmul {'bf16' if width == 2 else 'fp8'}", names, *fit(model, latency_ms / 1e3, start, low, high))


def fit_prefill_attention(device: Device, path: Path) -> None:
    batch, length, heads, latency_ms = columns(path, ("batch_size", "isl", "num_heads", "latency_ms"))
    flops = 4 * heads * HEAD_DIM * batch * length * (length + 1) / 2

    def model(x: Floats) -> Floats:
        floor_us, compute, passes = x
        moved = 4 * batch * length * heads * HEAD_DIM * passes / device.bandwidth
        return np.asarray(floor_us * 1e-6 + flops / (device.bf16_flops * compute) + moved)

    say("prefill attn", ["floor_us", "compute", "passes"], *fit(model, latency_ms / 1e3, [12, 0.6, 1], [1, 0.1, 0], [40, 1.2, 20]))


def fit_decode_attention(device: Device, path: Path) -> None:
    batch, step, heads, kv_heads, latency_ms = columns(path, ("batch_size", "step", "num_heads", "num_key_value_heads", "latency_ms"))
    kv_bytes = 4 * batch * (step + 1) * kv_heads * HEAD_DIM

    def model(x: Floats) -> Floats:
        floor_us, kv, row_ns = x
        return np.asarray(floor_us * 1e-6 + kv_bytes / (device.bandwidth * kv) + row_ns * 1e-9 * batch * heads)

    say("decode attn", ["floor_us", "kv", "row_ns"], *fit(model, latency_ms / 1e3, [12, 0.8, 1], [1, 0.1, 0], [40, 1.2, 100]))


def fit_allreduce(path: Path) -> None:
    ranks, elements, latency_ms = columns(path, ("num_gpus", "message_size", "latency_ms"), backend="vllm_graph")
    num_bytes = 2 * elements
    is_used = num_bytes <= 256 << 20

    def model(x: Floats) -> Floats:
        floor_us, rank_us, second_us, gb_s = x
        one = (ranks - 1) * num_bytes / (gb_s * 1e9)
        two = second_us * 1e-6 + 2 * (ranks - 1) / ranks * num_bytes / (gb_s * 1e9)
        return np.asarray((floor_us + rank_us * ranks) * 1e-6 + np.minimum(one, two))[is_used]

    names = ["floor_us", "rank_us", "second_us", "gb_s"]
    start, low, high = [4.5, 0.1, 2, 250], [0.5, 0, 0, 10], [20, 3, 20, 1000]
    say("allreduce", names, *fit(model, (latency_ms / 1e3)[is_used], start, low, high))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="folder of the kernel tables")
    tables = parser.parse_args().tables
    for name in ("a100", "h100", "h200"):
        device, prefix = DEVICES[name], tables / f"aic_{name}_sxm_vllm_"
        print(name)
        fit_matmul(device, Path(f"{prefix}gemm.csv"), "bfloat16")
        fit_matmul(device, Path(f"{prefix}gemm.csv"), "fp8")
        fit_prefill_attention(device, Path(f"{prefix}ctx_attention.csv"))
        fit_decode_attention(device, Path(f"{prefix}gen_attention.csv"))
        fit_allreduce(Path(f"{prefix}allreduce.csv"))
        for what in ("bf16", "fp8", "attention", "fabric"):
            print(f"    in hardware.py: {getattr(device, what)}")


if __name__ == "__main__":
    main()
