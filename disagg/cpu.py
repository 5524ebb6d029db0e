"""What the CPU of this machine computes well."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def fastest_dtype() -> str:
    """vLLM's `dtype` for `dtype: fastest`: float32 where an x86 CPU has no 512-bit vectors, else auto, the model's own.

    oneDNN, which multiplies PyTorch's bfloat16 matrices on x86, has kernels for them from AVX-512 on (its documentation, "Data types":
    bf16 needs AVX512-core or newer). Without, PyTorch takes a plain loop: measured on an AMD EPYC with AVX2, a prefill of SmolLM2-135M
    takes six times as long as in float32.
    """
    if platform.machine() in ("x86_64", "AMD64") and CPUINFO.is_file() and "avx512f" not in CPUINFO.read_text().split():
        return "float32"
    return "auto"
