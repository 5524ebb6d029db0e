"""Fit bf16 constants of RTX 4090 and RTX PRO 6000 to layer timings, and print them beside those of `disagg/perf/hardware.py`.

    python -m bench.fit_layers --tables DIR

DIR is `profiler/perf` of LLMServingSim (github.com/casys-kaist/LLMServingSim, MIT), timings of vLLM's layers by themselves:
DEVICE/ORG/MODEL/bf16/tp1/{dense,per_sequence,attention}.csv. It is not part of this repository. Those of MODELS are read that are
there. What comes from where:

    bf16 products      dense.csv: gate_up_proj and down_proj; per_sequence.csv: lm_head
    decode attention   attention.csv, rows without prompt tokens: kv
    mixed_group        attention.csv: what decoding adds to a prompt's attention, by what it takes alone
    not from here      fp8, fabric, prefill attention and the floors of attention (hardware.py says whose they are)
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.fit_kernels import Floats, fit, say
from disagg.perf.hardware import DEVICES, Device
from disagg.perf.shapes import ModelShape, find_shape

FOLDERS = {"rtx-4090": "RTX4090", "rtx-pro-6000": "RTXPRO6000"}
MODELS = {"llama-3.1-8b": "meta-llama/Llama-3.1-8B", "qwen3-32b": "Qwen/Qwen3-32B"}
TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)  # of a step: evenly over its orders of magnitude
LEAST_CONTEXT = 4096  # tokens in all: fewer show the kernel's floor, and no bandwidth
Product = tuple[float, float, float, float]  # tokens, n, k, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="LLMServingSim's profiler/perf")
    tables = parser.parse_args().tables
    for name, folder in FOLDERS.items():
        device = DEVICES[name]
        found = {find_shape(m): tables / folder / path / "bf16" / "tp1" for m, path in MODELS.items()}
        found = {shape: at for shape, at in found.items() if at.is_dir()}
        print(f"{name}: {', '.join(shape.name for shape in found) or 'no tables'}")
        if found:
            fit_products(device, [product for shape, at in found.items() for product in products(shape, at)])
            for shape, at in found.items():
                fit_attention(device, shape, at / "attention.csv")
        print(f"    in hardware.py: {device.bf16}")
        print(f"    in hardware.py: {device.attention}")


def rows(path: Path) -> Iterator[dict[str, str]]:
    """Of a table, none where it does not exist."""
    if path.is_file():
        with path.open() as file:
            yield from csv.DictReader(file)


def products(shape: ModelShape, folder: Path) -> Iterator[Product]:
    """Timed products of one model's layers. Weights are [k, n]."""
    sizes = {"gate_up_proj": (2 * shape.intermediate, shape.hidden), "down_proj": (shape.hidden, shape.intermediate)}
    sizes["lm_head"] = (shape.vocab, shape.hidden)
    for file, column in (("dense.csv", "tokens"), ("per_sequence.csv", "sequences")):
        for row in rows(folder / file):
            if row["layer"] in sizes and int(row[column]) in TOKENS:
                n, k = sizes[row["layer"]]
                yield float(row[column]), n, k, float(row["time_us"]) * 1e-6


def fit_products(device: Device, timed: list[Product]) -> None:
    """MatmulRate of bf16, its floor and what goes in as they stand: these products are too long to show either."""
    m, n, k, seconds = (np.array(column, float) for column in zip(*timed, strict=True))
    rate = device.bf16

    def model(x: Floats) -> Floats:
        compute, weights, sharpness, passes_out = x
        arithmetic = (2 * m * n * k / (device.bf16_flops * compute)) ** sharpness
        memory = (2 * n * k / (device.bandwidth * weights)) ** sharpness
        activations = 2 * m * (k * rate.passes_in + n * passes_out) / device.bandwidth
        return np.asarray(rate.floor_s + (arithmetic + memory) ** (1 / sharpness) + activations)

    names, low, high = ["compute", "weights", "sharpness", "passes_out"], [0.1, 0.1, 1, 0], [1, 1.2, 20, 10]
    say("matmul bf16", names, *fit(model, seconds, [0.8, 0.9, 3, 0.5], low, high))
    standing = np.array([rate.compute, rate.weights, rate.sharpness, rate.passes_out])
    say("  as it stands", names, standing, np.log(model(standing)) - np.log(seconds))


def fit_attention(device: Device, shape: ModelShape, path: Path) -> None:
    """kv from decoding alone; mixed_group from what the same decoding adds to a prompt chunk's attention."""
    times = {
        tuple(int(row[c]) for c in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")): float(row["time_us"]) for row in rows(path)
    }
    alone = {(n, kv): us * 1e-6 for (chunk, _, n, kv), us in times.items() if chunk == 0 and n * kv >= LEAST_CONTEXT}
    if not alone:
        return
    kv_bytes = np.array([n * kv * shape.num_kv_heads * shape.head_dim * 4 for n, kv in alone], float)
    rows_s = np.array([n * shape.num_heads for n, _ in alone], float) * device.attention.row_s

    def model(x: Floats) -> Floats:
        return np.asarray(device.attention.floor_s + kv_bytes / (device.bandwidth * x[0]) + rows_s)

    say(f"kv, {shape.name}", ["kv"], *fit(model, np.array(list(alone.values())), [0.8], [0.1], [1.2]))
    group = shape.num_heads // shape.num_kv_heads
    more = [
        (us - times[(chunk, before, 0, 0)]) * 1e-6 / alone[(n, kv)]
        for (chunk, before, n, kv), us in times.items()
        if chunk and (n, kv) in alone and (chunk, before, 0, 0) in times
    ]
    if more and group > 1:
        found = np.quantile(more, [0.25, 0.5, 0.75])
        print(
            f"  mixed, {shape.name}: decoding takes {found[1]:.2f} times as long ({found[0]:.2f} to {found[2]:.2f}, {len(more)} pairs)",
            end="",
        )
        print(f" with {group} heads per KV head: mixed_group={(found[1] - 1) / (group - 1):.2f}")


if __name__ == "__main__":
    main()
