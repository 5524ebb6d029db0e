"""Other people's serving, on the cores of our topology: stock vLLM servers and what stands in front of them."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disagg.config import Topology
from disagg.models.resolve import resolve_model
from disagg.types import Mode, Role

OURS = ("mixed_step_tokens", "mixed_step_ms")  # arguments of our engines that stock vLLM has not
START_TIMEOUT_S = 600.0  # stock vLLM compiles the model anew at each start on CPUs
NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'


@dataclass(frozen=True, slots=True)
class Server:
    """A process that serves HTTP. `core`: what it and its children are bound to once they are up, None for none."""

    name: str
    command: Sequence[str]
    port: int
    health: str
    core: int | None = None
    env: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def free_port() -> int:
    """A port that nobody listens on now; below those that the kernel hands out, of which a server that starts meanwhile takes some."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def router_program(tools: Path) -> Path:
    """vllm-router's program, in a virtual environment below `tools` (it brings a web stack of its own); installed there on first use."""
    program = (tools / "router" / "bin" / "vllm-router").absolute()
    if not program.exists():
        venv.create(tools / "router", with_pip=True)
        subprocess.run([program.parent / "pip", "install", "-q", "vllm-router"], check=True)
    return program


def colocated(topology: Topology, base_dir: Path, router: Path) -> list[Server]:
    """Stock `vllm serve` per worker, with the colocated pool's engine arguments, behind vllm-router (least loaded first)."""
    workers = [_vllm(topology, base_dir, Role.COLOCATED, i, core, {}) for i, core in enumerate(_cores(topology))]
    return [*workers, _router(router, ["--worker-urls", *(w.url for w in workers), "--policy", "power_of_two"])]


def nixl(topology: Topology, base_dir: Path, router: Path, packages: Path) -> list[Server]:
    """vLLM's own disaggregation: one prefill and one decode server, NixlConnector (UCX over TCP), vllm-router in front.

    `packages`: a folder with the nixl wheels, for the servers' PYTHONPATH.
    """
    extra = {"PYTHONPATH": str(packages), "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    servers = []
    for i, (role, core) in enumerate(zip((Role.PREFILL, Role.DECODE), _cores(topology), strict=False)):
        side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        servers.append(_vllm(topology, base_dir, role, i, core, {**extra, **side}, "--kv-transfer-config", NIXL))
    prefill, decode = servers
    pd = ["--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url, "--kv-connector", "nixl"]
    return [*servers, _router(router, pd)]


def _cores(topology: Topology) -> list[int]:
    """One core per worker, from the first that this process may use: where our workers are bound, too."""
    count = topology.with_mode(Mode.COLOCATED).active_pools()[Role.COLOCATED].count
    return sorted(os.sched_getaffinity(0))[:count]


def _vllm(topology: Topology, base_dir: Path, role: Role, number: int, core: int, env: dict[str, str], *more: str) -> Server:
    mode = Mode.COLOCATED if role is Role.COLOCATED else Mode.DISAGG
    own = topology.with_mode(mode)
    arguments: dict[str, Any] = {"gpu_memory_utilization": 0.2, **own.engine_args(role)}
    for name in OURS:
        arguments.pop(name, None)
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(resolve_model(topology.model, base_dir))]
    command += ["--served-model-name", topology.model, "--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        command += ([f"--{flag}"] if value else [f"--no-{flag}"]) if isinstance(value, bool) else [f"--{flag}", str(value)]
    bound = {"VLLM_CPU_OMP_THREADS_BIND": str(core), "OMP_NUM_THREADS": "1"}
    return Server(f"vllm-{role}-{number}", [*command, *more], port, "/health", core, {**own.engine_env(role), **bound, **env})


def _router(program: Path, arguments: Sequence[str]) -> Server:
    port = free_port()
    command = [str(program), "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()), *arguments]
    return Server("router", [*command, "--worker-startup-timeout-secs", str(int(START_TIMEOUT_S))], port, "/health")


@dataclass(frozen=True, slots=True)
class Running:
    """Servers that are up. They are stopped while others are measured: some poll even when idle, on the cores of all."""

    url: str
    processes: Sequence[subprocess.Popen[bytes]]

    def pause(self) -> None:
        """Stop all their processes where they are."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo `pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


@contextlib.contextmanager
def running(servers: Sequence[Server], logs: Path) -> Iterator[Running]:
    """Start them, the last one in front; yields once all answer. Whatever happens, their process groups are ended."""
    logs.mkdir(parents=True, exist_ok=True)
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.extend(_start(server, logs) for server in servers[:-1])  # one by one, so that a failure leaves what to end
        for server, process in zip(servers[:-1], started, strict=True):
            _wait(server, process, logs)
        for server, process in zip(servers[:-1], started, strict=True):
            _bind(process.pid, server.core)
        started.append(_start(servers[-1], logs))
        _wait(servers[-1], started[-1], logs)
        yield Running(servers[-1].url, started)
    finally:
        for process in reversed(started):
            _end(process)


def _start(server: Server, logs: Path) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if k.lower() not in ("http_proxy", "https_proxy", "all_proxy")}
    with (logs / f"{server.name}.log").open("wb") as log:
        return subprocess.Popen(
            server.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment | server.env, start_new_session=True
        )


def _wait(server: Server, process: subprocess.Popen[bytes], logs: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
            connection.request("GET", server.health)
            if connection.getresponse().status == 200:
                return
        time.sleep(0.5)
    tail = (logs / f"{server.name}.log").read_text(errors="replace")[-1500:]
    raise RuntimeError(f"{server.name} did not come up; the end of its log:\n{tail}")


def _bind(group: int, core: int | None) -> None:
    """Bind every thread of the process group: not before it is up, since compiling on one core beside a waiting parent takes minutes."""
    for process in _members(group) if core is not None else ():
        with contextlib.suppress(OSError):
            for thread in (process / "task").iterdir():
                os.sched_setaffinity(int(thread.name), {core or 0})


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process group to end, then make it; a group of ours only, since each server began one. Its shared memory goes, too."""
    segments = _shared_memory(process.pid)
    for number, patience_s in ((signal.SIGTERM, 15), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            os.killpg(process.pid, signal.SIGCONT)  # what is paused hears nothing
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for segment in segments:
        segment.unlink(missing_ok=True)


def _members(group: int) -> Iterator[Path]:
    """The group's processes, as folders of /proc."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                yield process


def _shared_memory(group: int) -> set[Path]:
    """Segments that vLLM's processes have mapped; killed, they leave them behind."""
    found = set()
    for process in _members(group):
        with contextlib.suppress(OSError):
            lines = (process / "maps").read_text().splitlines()
            found |= {Path(line[line.index("/dev/shm/") :]) for line in lines if "/dev/shm/psm_" in line and "(deleted)" not in line}
    return found
