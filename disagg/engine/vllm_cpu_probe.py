"""This machine's CPU as a device: memory bandwidth and matrix products of one core, measured within seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from disagg.perf.hardware import Device, find_device

_READ_BYTES = 256 << 20  # beyond any core's cache
_GEMM = 512


def measured_device() -> Device:
    """The `cpu` device with this machine's memory and one core's measured bandwidth and FLOP/s (bf16 with torch, else fp32 of numpy)."""
    base = find_device("cpu")
    rate = replace(base.bf16, flops=_gemm_flops() / base.bf16.compute)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return replace(base, name="this-cpu", memory_bytes=memory_bytes, bandwidth=_read_bandwidth(), bf16=rate, fp8=rate)


def _read_bandwidth() -> float:
    """Bytes/s of reading memory once, by one thread."""
    data = np.ones(_READ_BYTES // 8)
    return _READ_BYTES / _best_s(data.max)


def _gemm_flops() -> float:
    """The quicker of bf16 and fp32: a core without bf16 instructions computes in fp32 whatever the weights are."""
    flops = 2 * _GEMM**3
    try:
        import torch
    except ImportError:
        a = np.ones((_GEMM, _GEMM), dtype=np.float32)
        return flops / _best_s(lambda: a @ a)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        quickest_s = min(_best_s(lambda x=x: torch.mm(x, x)) for x in (torch.ones(_GEMM, _GEMM), torch.ones(_GEMM, _GEMM).bfloat16()))  # type: ignore[misc]
    finally:
        torch.set_num_threads(threads)
    return flops / quickest_s


def _best_s(work: Callable[[], object]) -> float:
    """Seconds of CPU time (all threads) of the quickest of several tries: other programs then disturb less."""
    work()
    times = []
    for _ in range(5):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)
