"""Would this topology run? Placement, memory arithmetic, engine arguments and ports, without starting anything.

The arithmetic is that of perf/roofline.py: per GPU, weights / TP + KV of at least one longest request <= memory x utilization; per host,
boxes (and, on CPUs, weights and KV) <= memory. It errs on the small side: activations are a fixed reserve.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from disagg.config import GIB, Topology
from disagg.engine.simulated_settings import simulated_layout
from disagg.errors import ConfigError, LayoutMismatchError, PlacementError
from disagg.front.ports import describe_holder
from disagg.kv.carrier import expected_carrier
from disagg.kv.form import agree
from disagg.launch.doctor import gpu_names
from disagg.launch.placement import ACCELERATOR, Host, Placed, WorkerSpec, accelerator, place, worker_specs
from disagg.models import resolve_model
from disagg.perf.hardware import Dtype, find_device
from disagg.perf.memory import MemoryReport, placement_memory
from disagg.perf.model_config import load_shape, shape_from_config
from disagg.perf.shapes import ModelShape, find_shape
from disagg.policy.feasibility import impossible
from disagg.policy.priors import priors_of
from disagg.types import Mode, Role

DEFAULT_UTILIZATION = 0.9
DEFAULT_CPU_KV_GIB = 4.0
PROCESS_BYTES = {"vllm": GIB, "simulated": 100 << 20}  # of one worker, beside weights, KV and boxes; measured on CPUs
# What must be equal in both pools; the rest, only where whole cache blocks move: CPU attention does not keep tokens apart (kv/form.py).
_EQUAL_ARGS = ("dtype", "kv_cache_dtype")
_EQUAL_ON_CPU = ("block_size", "tensor_parallel_size", "attention_backend")


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """What one worker of a role holds. `device`: for people. Bytes are per device (GPU or CPU host), tokens per worker.

    `host_bytes`: host memory that one worker takes. `problem`: why it does not fit, or empty.
    """

    device: str
    weights_bytes: int
    kv_tokens: int
    host_bytes: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """`placed` is empty when there is no room. `carriers`: by which carrier KV will move, and between how many pairs of workers.

    `problems` say why it would not run; `notes` what could not be checked.
    """

    model: str
    hosts: tuple[Host, ...]
    placed: tuple[Placed, ...]
    carriers: dict[str, int]
    memory: dict[Role, RoleMemory]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def check_topology(topology: Topology, base_dir: Path, hosts: Sequence[Host] | None = None) -> CheckReport:
    """Everything that can be said beforehand. `hosts`: of a live cluster; None: those under the topology's `ray:`, else this machine.

    Raises ConfigError (wrong engine argument, GPUs unlike TP) and ModelError.
    """
    notes: list[str] = []
    problems: list[str] = []
    _check_arguments(topology, notes)
    model = topology.model if topology.engine.kind == "simulated" else resolve_model(topology.model, base_dir, check_hub=False)
    is_here = hosts is None and not _is_assumed(topology)
    found = tuple(hosts if hosts is not None else assumed_hosts(topology) if _is_assumed(topology) else [this_host(topology)])
    placed: tuple[Placed, ...] = ()
    try:
        placed = place(topology, found, there="this machine has" if is_here else "the cluster has")
    except PlacementError as error:
        problems.append(error.message)
    memory = _memory(topology, model, notes)
    problems += [f"{role}: {each.problem}" for role, each in memory.items() if each.problem]
    problems += _host_memory_problems(found, placed, memory)
    problems += _unlike_pools(topology)
    problems += _impossible_classes(topology, model, notes)
    problems += _port_problems(topology, placed, is_here)
    carriers = _carriers(topology, placed, problems)
    return CheckReport(str(model), found, placed, carriers, memory, tuple(problems), tuple(notes))


def this_host(topology: Topology) -> Host:
    """This machine with what is free on it; simulated workers get the cores they ask for."""
    specs = worker_specs(topology)
    real = len(os.sched_getaffinity(0))
    cores = topology.ray.num_cpus or (sum(spec.cores for spec in specs) if topology.engine.kind == "simulated" else real)
    if any(spec.binds for spec in specs):
        cores = min(cores, real)
    gpus = len(gpu_names()) if any(spec.gpus for spec in specs) else 0
    named = {name: 1e9 for spec in specs for name, _ in spec.resources if not name.startswith(ACCELERATOR)}
    if gpus:
        named |= dict.fromkeys(_kinds_here(), 1.0)
    free = {"CPU": float(cores), "GPU": float(gpus), "memory": float(_available_bytes()), **named}
    return Host("127.0.0.1", tuple(sorted(free.items())))


def assumed_hosts(topology: Topology) -> tuple[Host, ...]:
    """The hosts that the topology's `ray:` describes. Each further resource is on one of them, in turn."""
    ray = topology.ray
    free = {"CPU": float(ray.cores_per_host or 0), "GPU": float(ray.gpus_per_host or 0)}
    if ray.ram_gib_per_host:
        free["memory"] = ray.ram_gib_per_host * GIB
    specs = worker_specs(topology)
    names = dict.fromkeys(name for spec in specs for name, _ in spec.resources)
    hosts = [dict(free) for _ in range(ray.hosts)]
    for index, name in enumerate(name for name in names if not name.startswith(ACCELERATOR)):
        hosts[index % len(hosts)][name] = 1e9
    for host, kind in zip(hosts, _kinds_of_hosts(specs, ray.gpus_per_host or 1), strict=False):
        host[kind] = 1.0
    return tuple(Host(f"host-{index}", tuple(sorted(each.items()))) for index, each in enumerate(hosts))


def _kinds_of_hosts(specs: Sequence[WorkerSpec], gpus_per_host: int) -> list[str]:
    """Of each host in turn, which GPUs it has: of a kind so many hosts as its workers fill."""
    gpus = Counter[str]()
    for spec in specs:
        gpus.update({name: spec.gpus for name, _ in spec.resources if name.startswith(ACCELERATOR)})
    return [name for name, count in gpus.items() for _ in range(-(-count // gpus_per_host))]


def _kinds_here() -> set[str]:
    """Ray's names for this machine's GPUs, as far as they are known."""
    kinds = set()
    for line in gpu_names():
        with contextlib.suppress(ConfigError):
            kinds.add(accelerator(line.partition(",")[0]))
    return kinds


def _is_assumed(topology: Topology) -> bool:
    return topology.ray.cores_per_host is not None or topology.ray.gpus_per_host is not None


def _check_arguments(topology: Topology, notes: list[str]) -> None:
    worker_specs(topology)
    if topology.engine.kind != "vllm":
        return
    if importlib.util.find_spec("vllm") is None:
        notes.append("vllm is not installed here, so the names of its arguments were not checked")
        return
    logging.disable(logging.WARNING)  # vLLM remarks on its surroundings when it is imported
    try:
        from disagg.engine.vllm_args import check_names
    finally:
        logging.disable(logging.NOTSET)
    for role in topology.active_pools():
        check_names(topology.engine_args(role))


def _memory(topology: Topology, model: Path | str, notes: list[str]) -> dict[Role, RoleMemory]:
    if topology.engine.kind == "simulated":
        return {role: _simulated_memory(topology, role) for role in topology.active_pools()}
    shape = _shape(model, notes)
    if shape is None:
        return {}
    memory = {}
    for role, pool in topology.active_pools().items():
        report = _gpu_memory(topology, role, shape, notes) if pool.gpus else _cpu_memory(topology, role, shape)
        if report is not None:
            memory[role] = report
    return memory


def _shape(model: Path | str, notes: list[str]) -> ModelShape | None:
    try:
        if isinstance(model, Path):
            config = json.loads((model / "config.json").read_text())
            return shape_from_config(config, model.name)
        return find_shape(model)
    except (ConfigError, ValueError, OSError):
        notes.append(f"the shape of {model} is not known here, so memory was not checked")
        return None


def _simulated_memory(topology: Topology, role: Role) -> RoleMemory:
    s = topology.simulated(role)
    report = placement_memory(load_shape(s.shape), find_device(s.gpu), s.tp, s.dtype, min_kv_tokens=s.block_tokens, kv_dtype=s.kv_dtype)
    device = f"{s.tp} x {s.gpu} sim"
    problem = "" if report.fits or s.kv_cache_tokens else _too_large(report, device, s.shape, s.block_tokens)
    return RoleMemory(device, report.weights_bytes, s.kv_cache_tokens or report.kv_tokens, _overhead_bytes(topology, role), problem)


def _gpu_memory(topology: Topology, role: Role, shape: ModelShape, notes: list[str]) -> RoleMemory | None:
    args = topology.engine_args(role)
    name = topology.gpu_name(role) or next(iter(gpu_names()), "").partition(",")[0]
    if not name:
        notes.append("no GPU here and none named by ray.gpu, so GPU memory was not checked")
        return None
    tp = int(args.get("tensor_parallel_size", 1))
    length = _longest(args)
    utilization = float(args.get("gpu_memory_utilization", DEFAULT_UTILIZATION))
    device = find_device(name)
    report = placement_memory(shape, device, tp, _weights_dtype(args, notes), utilization, length, _kv_dtype(args))
    label = f"{tp} x {device.name}"
    problem = "" if report.fits else _too_large(report, label, shape.name, length)
    return RoleMemory(label, report.weights_bytes, report.kv_tokens, _overhead_bytes(topology, role), problem)


def _cpu_memory(topology: Topology, role: Role, shape: ModelShape) -> RoleMemory:
    """On CPUs the KV cache has a size of its own, and weights, KV and boxes share the host's memory."""
    args = topology.engine_args(role)
    try:
        kv_bytes = int(float(topology.engine_env(role).get("VLLM_CPU_KVCACHE_SPACE", DEFAULT_CPU_KV_GIB)) * GIB)
    except ValueError:
        value = topology.engine_env(role)["VLLM_CPU_KVCACHE_SPACE"]
        raise ConfigError(key=f"pools.{role}.env.VLLM_CPU_KVCACHE_SPACE", value=value, expected="a number of GiB") from None
    widen = 2 if args.get("dtype") == "float32" else 1
    weights, length = widen * shape.weight_bytes(), _longest(args)
    kv_tokens = kv_bytes // (widen * shape.kv_bytes_per_token())
    problem = ""
    if kv_tokens < length:
        needed_gib = -(-length * widen * shape.kv_bytes_per_token() // GIB)
        problem = f"VLLM_CPU_KVCACHE_SPACE holds {kv_tokens:,} tokens, less than max_model_len {length:,}; expected at least {needed_gib}"
    return RoleMemory("cpu", weights, kv_tokens, weights + kv_bytes + _overhead_bytes(topology, role), problem)


def _too_large(report: MemoryReport, device: str, model: str, length: int) -> str:
    weights, budget = report.weights_bytes / 1e9, report.budget_bytes / 1e9
    kv = length * report.kv_bytes_per_token / 1e9
    fit = f"tensor_parallel_size {report.needed_tp} fits" if report.needed_tp else "no tensor-parallel degree fits such devices"
    need = f"{weights:.1f} GB of weights + {kv:.2f} GB of KV ({length:,} tokens)"
    return f"{model} on {device} needs {need} per device, of {budget:.1f} GB usable; {fit}"


def _overhead_bytes(topology: Topology, role: Role) -> int:
    """Host memory of one worker beside weights and KV: its process, and the boxes of one that moves KV."""
    boxes = 0 if role is Role.COLOCATED else sum(topology.kv.box_bytes(0))  # a default size is a share of what is free
    return PROCESS_BYTES[topology.engine.kind] + boxes


def _longest(args: dict[str, Any]) -> int:
    """Tokens of the longest request, or one block where the model's own limit is taken."""
    value = args.get("max_model_len", 16)
    return value if isinstance(value, int) else 16


def _weights_dtype(args: dict[str, Any], notes: list[str]) -> Dtype:
    quantization = args.get("quantization")
    if quantization is None:
        return "bf16"
    if str(quantization).startswith("fp8"):
        return "fp8"
    if str(quantization).startswith(("awq", "gptq")):
        return "int4"
    if quantization == "compressed-tensors":
        return "int8"  # 8 bits a weight, or 4
    note = f"quantization {quantization}: weights were counted as 16 bits each, which is too much"
    if note not in notes:
        notes.append(note)
    return "bf16"


def _kv_dtype(args: dict[str, Any]) -> Dtype:
    name = str(args.get("kv_cache_dtype", "auto"))
    return "fp8" if name.startswith("fp8") else "int8" if name.startswith("int8") else "bf16"


def _host_memory_problems(hosts: Sequence[Host], placed: Sequence[Placed], memory: dict[Role, RoleMemory]) -> list[str]:
    problems = []
    for host in hosts:
        have = host.amount("memory")
        need = sum(memory[each.spec.role].host_bytes for each in placed if each.host == host.name and each.spec.role in memory)
        if have and need > have:
            problems.append(
                f"memory of host {host.name}: its workers need {need / GIB:.1f} GiB (engines and boxes), it has {have / GIB:.1f} GiB free; "
                "expected smaller kv.outbox_gib and kv.inbox_gib, or fewer workers"
            )
    return problems


def _impossible_classes(topology: Topology, model: Path | str, notes: list[str]) -> list[str]:
    """Classes that no pair can ever meet: a problem where step times are known, a note where a roofline only estimates them."""
    is_known = topology.engine.kind == "simulated" or topology.engine.profile is not None
    shape = None if is_known else _shape(model, [])
    if not is_known and shape is None:
        return []
    said = impossible(Mode(topology.mode), topology.slo_classes, priors_of(topology, shape))
    if is_known:
        return list(said)
    notes += [f"{each} (by the roofline, an estimate)" for each in said]
    return []


def _unlike_pools(topology: Topology) -> list[str]:
    """Why no KV could move between the pools, as far as it shows before an engine runs."""
    if topology.mode == "colocated":
        return []
    if topology.engine.kind == "simulated":
        try:
            source, sink = [simulated_layout(topology.simulated(role)) for role in (Role.PREFILL, Role.DECODE)]
            agree(source, sink, topology.kv.wire_dtype)
        except LayoutMismatchError as error:
            return [f"pools: {error.message}"]
        return []
    p, d = topology.engine_args(Role.PREFILL), topology.engine_args(Role.DECODE)
    on_gpus = all(pool.gpus for pool in topology.active_pools().values())
    return [
        f"pools.decode.args.{name}: got {d.get(name)!r}, but prefill has {p.get(name)!r}; expected equal values, as whole cache blocks move"
        for name in (*_EQUAL_ARGS, *(() if on_gpus else _EQUAL_ON_CPU))
        if p.get(name) != d.get(name)
    ]


def _carriers(topology: Topology, placed: Sequence[Placed], problems: list[str]) -> dict[str, int]:
    """Pairs of workers by carrier; what none can carry is added to `problems`."""
    choice = topology.kv.carrier
    if choice == "torch_dist" and importlib.util.find_spec("torch") is None:
        problems.append("kv.carrier: got torch_dist, but torch is not installed; expected tcp, grpc or auto")
    if choice == "cuda_ipc":
        problems.append("kv.carrier: got cuda_ipc, but the workers keep their KV boxes in host memory; expected shm or auto")
    prefill = [each.host for each in placed if each.spec.role is Role.PREFILL]
    decode = [each.host for each in placed if each.spec.role is Role.DECODE]
    return dict(Counter(expected_carrier(choice, same_host=p == d) for p, d in itertools.product(prefill, decode)))


def _port_problems(topology: Topology, placed: Sequence[Placed], is_here: bool) -> list[str]:
    problems = []
    doors = {"port": topology.gateway.port, "http_port": topology.gateway.http_port or 0}
    for key, port in doors.items():
        if is_here and port and (holder := _holder(topology.gateway.host, port)):
            problems.append(f"gateway.{key}: {port} is in use by {holder}; expected a free port, or 0")
    hosts = [each.host for each in placed if each.spec.role is not Role.COLOCATED]
    if topology.kv.port and not topology.kv.needs_one_host and len(set(hosts)) < len(hosts):
        problems.append(f"kv.port: got {topology.kv.port}, but several workers share a host; expected 0 (any free port)")
    return problems


def _holder(host: str, port: int) -> str:
    """Who listens there, or empty when it is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((host, port))
        except OSError:
            return describe_holder(port)
    return ""


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def without_memory(host: Host) -> Host:
    """Ray counts memory that tasks reserve, not what is free; a check against it would mislead."""
    return replace(host, free=tuple((name, value) for name, value in host.free if name != "memory"))
