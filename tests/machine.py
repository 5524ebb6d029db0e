"""What the machine that runs the tests computes well."""

from __future__ import annotations

from pathlib import Path


def quick_dtype() -> str:
    """bfloat16 where the CPU has wide vectors; else float32, because PyTorch then multiplies bfloat16 matrices number by number."""
    return "bfloat16" if "avx512f" in Path("/proc/cpuinfo").read_text() else "float32"
