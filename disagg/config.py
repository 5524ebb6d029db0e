"""Topology files: one frozen, strict tree, built once at the edge.

`load_topology(path)` reads YAML; an unknown key names the nearest known one, a bad value names its dotted path and what would be
right (ConfigError). The commented example of every key is cluster/topologies/cpu-1p1d.yaml.

Files speak of milliseconds and GiB where people do (`ttft_ms`, `outbox_gib`); the properties here give seconds and bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from disagg.cpu import fastest_dtype
from disagg.errors import ConfigError, nearest
from disagg.types import Mode, Role

GIB = 1 << 30

PositiveInt = Annotated[int, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
PoolArgs = dict[str, Any]
ModelT = TypeVar("ModelT", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class SimulatedSettings(_Strict):
    """Timing of `engine.kind: simulated`: a model's shape on a device, by the roofline, times a clock speed.

    `shape`: a bundled model's, or the path of a config.json.
    `speculative_tokens`: drafted for each step and accepted with `speculative_acceptance` (perf/speculative.py; 0: none).
    `speed`: simulated seconds per real second (10 = ten times faster than the device; 0 = no waiting at all).
    `kv_bytes_per_token`: real bytes that stand for one token's KV in boxes and on the wire; a multiple of `tp`.
    `profile`: a file of `disagg profile`, whose step times and cache size then count instead of the roofline's; by default the engine's.
    `long_prefill_tokens`: tokens of a step that one long prompt takes at most (vLLM's long_prefill_token_threshold; 0: all of it).
    `mixed_step_tokens`: tokens of a step in which somebody decodes, at most, where `max_num_batched_tokens` holds for the others;
    `mixed_step_ms`: milliseconds of such a step, at most. Both may be given.
    `eos_mean_tokens`: the end-of-sequence token comes up once in so many tokens. `enable_prefix_caching`: blocks of prompts stay until
    their room is needed, as in vLLM.
    """

    gpu: str = "h100"
    shape: str = "llama-3.1-70b"
    tp: PositiveInt = 4
    dtype: Literal["bf16", "fp8", "int8", "int4"] = "bf16"
    kv_dtype: Literal["bf16", "fp8", "int8"] = "bf16"
    speculative_tokens: Annotated[int, Field(ge=0, le=16)] = 0
    speculative_acceptance: Annotated[float, Field(ge=0, le=1)] = 0.0
    speed: Annotated[float, Field(ge=0)] = 1.0
    kv_bytes_per_token: PositiveInt = 64
    block_tokens: PositiveInt = 16
    max_num_batched_tokens: PositiveInt = 2048
    mixed_step_tokens: PositiveInt | None = None  # None: no other limit
    mixed_step_ms: Annotated[float, Field(gt=0)] | None = None
    max_num_seqs: PositiveInt = 256
    long_prefill_tokens: Annotated[int, Field(ge=0)] = 0
    profile: str | None = None
    max_model_len: PositiveInt = 32768
    kv_cache_tokens: PositiveInt | None = None  # None: what the device's memory holds
    enable_prefix_caching: bool = True
    vocab_size: Annotated[int, Field(ge=4)] = 32_000
    eos_token_id: Annotated[int, Field(ge=0)] = 2
    eos_mean_tokens: PositiveInt = 512


class EngineSettings(_Strict):
    """Which engine, and its arguments. `args`: any field of vLLM's AsyncEngineArgs, for all pools; a pool's `args` win. Two are ours:
    `mixed_step_tokens` and `mixed_step_ms`, the tokens and the milliseconds of a step in which somebody decodes, at most.

    `profile`: a file of `disagg profile`, relative to the topology's: where predictions start, and what simulated engines compute with.
    """

    kind: Literal["vllm", "simulated"] = "vllm"
    args: PoolArgs = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    simulated: SimulatedSettings = Field(default_factory=SimulatedSettings)
    profile: str | None = None

    @field_validator("env", mode="before")
    @classmethod
    def _env_values_are_text(cls, value: Any) -> Any:
        return {k: str(v) for k, v in value.items()} if isinstance(value, Mapping) else value


class PoolSettings(_Strict):
    """One pool: how many workers, and what each gets.

    `cores`: CPU cores per worker (reserved in Ray, and bound when `bind_cores`). `gpus`: GPUs per worker; must equal the
    tensor-parallel degree. `gpu`: a device name (h200), where pools run on unlike GPUs; by default `ray.gpu`. `args`/`simulated`:
    overrides of the engine's settings for this pool.
    """

    count: PositiveInt
    cores: PositiveInt = 1
    gpus: Annotated[int, Field(ge=0)] = 0
    gpu: str | None = None
    bind_cores: bool = True
    args: PoolArgs = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    simulated: dict[str, Any] = Field(default_factory=dict)
    resources: dict[str, float] = Field(default_factory=dict)  # further Ray resources per worker

    @field_validator("env", mode="before")
    @classmethod
    def _env_values_are_text(cls, value: Any) -> Any:
        return {k: str(v) for k, v in value.items()} if isinstance(value, Mapping) else value


class Pools(_Strict):
    """The pools. `colocated` is used in mode colocated; when absent it is derived: as many workers as prefill + decode."""

    prefill: PoolSettings | None = None
    decode: PoolSettings | None = None
    colocated: PoolSettings | None = None


class KvSettings(_Strict):
    """How KV moves. `carrier: auto` takes shm between workers of one host and tcp otherwise; any other value is the only one used.

    `outbox_gib`/`inbox_gib`: box sizes per worker; by default a share of the host's free memory (kv/sizes.py).
    `lease_s`: how long an outbox entry outlives a silent gateway before it is fenced.
    `wire_dtype`: numbers of KV on their way; `stored` as the cache has them, `fp8` or `int8` with scales, about half the bytes, not exact.
    `delay_s` and `gbps`: slow the carrier down on purpose (experiments and tests): extra seconds before the first frame, and a bandwidth
    cap in 10^9 bytes/s.
    """

    carrier: Literal["auto", "shm", "cuda_ipc", "tcp", "grpc", "torch_dist"] = "auto"
    outbox_gib: Annotated[float, Field(gt=0)] | None = None
    inbox_gib: Annotated[float, Field(gt=0)] | None = None
    lease_s: Annotated[float, Field(gt=0)] = 30.0
    wire_dtype: Literal["stored", "fp8", "int8"] = "stored"
    port: Port = 0
    delay_s: Annotated[float, Field(ge=0)] = 0.0
    gbps: Annotated[float, Field(gt=0)] | None = None

    @property
    def needs_one_host(self) -> bool:
        """The carrier reaches no other host, so a prefill worker and its decode workers must share one."""
        return self.carrier in ("shm", "cuda_ipc")

    @property
    def needs_no_host(self) -> bool:
        """The carrier goes over the network even within a host, so nothing is gained by sharing one."""
        return self.carrier in ("tcp", "grpc", "torch_dist")

    def box_bytes(self, default_bytes: int) -> tuple[int, int]:
        """(outbox, inbox) of one worker; `default_bytes` where no size is given."""
        outbox, inbox = [default_bytes if gib is None else int(gib * GIB) for gib in (self.outbox_gib, self.inbox_gib)]
        return outbox, inbox


def _absolute(value: str) -> str:
    if not Path(value).expanduser().is_absolute():
        raise ValueError("an absolute path, or one that begins with ~")
    return str(Path(value).expanduser())


FilePath = Annotated[str, AfterValidator(_absolute)]  # on the gateway's host


class TlsSettings(_Strict):
    """Encryption of both doors, by PEM files. With `client_ca`, clients must show a certificate that it signed (mutual TLS)."""

    cert: FilePath
    key: FilePath
    client_ca: FilePath | None = None


class GatewaySettings(_Strict):
    """The front doors: gRPC at `port`; HTTP at `http_port` (null: none). 0 takes a free one; so does `http_port` unsaid beside `port: 0`.

    HTTP is health, metrics and, with engine.kind vllm, OpenAI's API. `http_args`: arguments of vLLM's API server by their Python names,
    such as chat_template, enable_auto_tool_choice and tool_call_parser. `token_file`: bearer tokens, one a line; who calls must have one.
    `max_message_mib`: the largest request that is read, null for `max_message_bytes`; reading one takes the gateway's time from all others.
    Off loopback a token or client certificates are needed, unless `insecure` says that the network is safe.
    `wedged_after_s`: a pool whose workers all hold requests and do nothing for so long, no step and no token, is not ready.
    `traces_endpoint`: where OpenTelemetry spans go (OTLP over gRPC, http://HOST:4317). `drain_s`: how long running requests may take to end
    when the deployment is told to end.
    """

    host: str = "127.0.0.1"
    port: Port = 8500
    http_port: Port | None = 8000
    http_args: PoolArgs = Field(default_factory=dict)
    max_message_mib: PositiveInt | None = None
    tls: TlsSettings | None = None
    token_file: FilePath | None = None
    insecure: bool = False
    wedged_after_s: Annotated[float, Field(gt=0)] = 60.0
    traces_endpoint: str | None = None
    drain_s: Annotated[float, Field(ge=0, le=60)] = 10.0

    @model_validator(mode="before")
    @classmethod
    def _free_ports_together(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("port") == 0 and "http_port" not in value:
            return {**value, "http_port": 0}
        return value

    def max_message_bytes(self, max_model_len: int) -> int:
        """Bytes of the largest request. Unless the topology says it, 4 MiB, or more where a prompt of all the context could need it."""
        if self.max_message_mib is not None:
            return self.max_message_mib << 20
        return max(4 << 20, 16 * max_model_len)  # a token is a word of text, or seven digits and their comma, and some slack

    @model_validator(mode="after")
    def _open_only_to_friends(self) -> GatewaySettings:
        is_guarded = self.token_file is not None or (self.tls is not None and self.tls.client_ca is not None)
        if not (is_guarded or self.insecure or self.host in ("localhost", "::1") or self.host.startswith("127.")):
            raise ValueError(
                f"host {self.host} opens the gateway to the network: set token_file or tls.client_ca, "
                "or insecure: true where the network is safe"
            )
        return self


class AdmissionSettings(_Strict):
    """Who may enter the gateway's queue. A request that may not is rejected with a retry-after.

    `by_slo`: refuse what is predicted to miss its class's targets, where the class says so (False: only the bounds count).
    `max_prefills_per_worker`: prefills in flight on one worker, at most; further ones wait at the gateway, as they mostly do before that.
    """

    by_slo: bool = True
    max_queued_requests: PositiveInt = 512
    max_queued_tokens: PositiveInt = 2_000_000
    max_prefills_per_worker: PositiveInt = 16
    max_attempts: PositiveInt = 3
    worker_timeout_s: Annotated[float, Field(gt=0)] = 10.0


MAX_PRIORITY = 1000

# Targets in milliseconds, TTFT and TPOT. The last five are those of MLPerf Inference's server and interactive scenarios.
PRESETS: dict[str, dict[str, Any]] = {
    "chat": {"ttft_ms": 500, "tpot_ms": 50, "if_missed": "reject"},
    "search": {"ttft_ms": 200, "tpot_ms": 50, "if_missed": "reject"},
    "code": {"ttft_ms": 500, "tpot_ms": 30, "if_missed": "reject"},
    "batch": {"priority": -1},
    "mlperf-llama2-70b-server": {"ttft_ms": 2000, "tpot_ms": 200, "if_missed": "reject"},
    "mlperf-llama2-70b-interactive": {"ttft_ms": 450, "tpot_ms": 40, "if_missed": "reject"},
    "mlperf-llama3.1-8b-server": {"ttft_ms": 2000, "tpot_ms": 100, "if_missed": "reject"},
    "mlperf-llama3.1-8b-interactive": {"ttft_ms": 500, "tpot_ms": 30, "if_missed": "reject"},
    "mlperf-llama3.1-405b-server": {"ttft_ms": 6000, "tpot_ms": 175, "if_missed": "reject"},
}


class SloClass(_Strict):
    """One service-level class: targets in milliseconds (absent = none), and default priority (higher goes first).

    `if_missed`: what happens to a request that is predicted to miss them. `reject`: refused at once, with a retry-after. `best_effort`:
    served after all requests that can still be in time. In a topology a class may be given by the name of a preset alone, or as
    `{preset: chat, name: vip, priority: 5}` with other values than the preset's.
    """

    name: Annotated[str, Field(min_length=1)]
    ttft_ms: Annotated[float, Field(gt=0)] | None = None
    tpot_ms: Annotated[float, Field(gt=0)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    if_missed: Literal["reject", "best_effort"] = "best_effort"

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"preset": value}
        if not isinstance(value, Mapping) or "preset" not in value:
            return value
        given = dict(value)
        preset = given.pop("preset")
        if preset not in PRESETS:
            raise ValueError(f"no preset is called {preset!r}; {nearest(str(preset), PRESETS)}")
        return {"name": preset, **PRESETS[preset], **given}

    @property
    def ttft_s(self) -> float | None:
        return None if self.ttft_ms is None else self.ttft_ms / 1e3

    @property
    def tpot_s(self) -> float | None:
        return None if self.tpot_ms is None else self.tpot_ms / 1e3


class RaySettings(_Strict):
    """The local Ray that `disagg up` starts when no address is given, and the hosts that `disagg check` assumes.

    `num_cpus`: cores that a local Ray may hand out; default: this machine's, or as many as simulated workers ask for.
    `startup_timeout_s` bounds placing and loading. `hosts`, `cores_per_host`, `gpus_per_host`, `ram_gib_per_host` and `gpu` (a
    device name) describe a cluster that is not at hand, for `disagg check` only.
    """

    num_cpus: PositiveInt | None = None
    startup_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    hosts: PositiveInt = 1
    cores_per_host: PositiveInt | None = None
    gpus_per_host: PositiveInt | None = None
    ram_gib_per_host: Annotated[float, Field(gt=0)] | None = None
    gpu: str | None = None


class Topology(_Strict):
    """One deployment. `name` is the Ray namespace part and the prefix of worker names."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")] = "disagg"
    model: str
    mode: Literal["disagg", "colocated", "adaptive"] = "disagg"
    engine: EngineSettings = Field(default_factory=EngineSettings)
    pools: Pools
    kv: KvSettings = Field(default_factory=KvSettings)
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    admission: AdmissionSettings = Field(default_factory=AdmissionSettings)
    slo_classes: tuple[SloClass, ...] = (SloClass(name="default"),)
    ray: RaySettings = Field(default_factory=RaySettings)

    @field_validator("slo_classes")
    @classmethod
    def _classes_are_distinct(cls, value: tuple[SloClass, ...]) -> tuple[SloClass, ...]:
        names = [c.name for c in value]
        if not names:
            raise ValueError("at least one class is needed")
        if len(set(names)) < len(names):
            raise ValueError(f"two classes of one name in {names}")
        return value

    @model_validator(mode="after")
    def _pools_fit_mode(self) -> Topology:
        p = self.pools
        if self.mode != "colocated" and (p.prefill is None or p.decode is None):
            raise ValueError(f"mode {self.mode} needs pools.prefill and pools.decode")
        if self.mode == "colocated" and p.colocated is None and (p.prefill is None or p.decode is None):
            raise ValueError("mode colocated needs pools.colocated, or pools.prefill and pools.decode to derive it from")
        return self

    def active_pools(self) -> dict[Role, PoolSettings]:
        """The pools that this mode starts, in the order in which workers are placed."""
        if Mode(self.mode) is Mode.COLOCATED:
            return {Role.COLOCATED: self._colocated_pool()}
        assert self.pools.prefill is not None
        assert self.pools.decode is not None
        return {Role.PREFILL: self.pools.prefill, Role.DECODE: self.pools.decode}

    def _colocated_pool(self) -> PoolSettings:
        if self.pools.colocated is not None:
            return self.pools.colocated
        p, d = self.pools.prefill, self.pools.decode
        assert p is not None
        assert d is not None
        return d.model_copy(update={"count": p.count + d.count})

    def gpu_name(self, role: Role) -> str | None:
        """What the GPUs of a pool are called; None where the topology does not say."""
        return self.active_pools()[role].gpu or self.ray.gpu

    def with_mode(self, mode: Mode) -> Topology:
        """The same deployment in another mode: what the A/B compares."""
        return self.model_validate({**self.model_dump(), "mode": mode.value})

    def engine_args(self, role: Role) -> dict[str, Any]:
        """vLLM arguments of one pool: the engine's, overridden by the pool's. `dtype: fastest` becomes what is fastest on this machine."""
        args = {**self.engine.args, **self.active_pools()[role].args}
        return args | {"dtype": fastest_dtype()} if args.get("dtype") == "fastest" else args

    def engine_env(self, role: Role) -> dict[str, str]:
        """Environment of one pool's worker processes."""
        return {**self.engine.env, **self.active_pools()[role].env}

    def simulated(self, role: Role) -> SimulatedSettings:
        """Simulated-engine settings of one pool."""
        merged = {**self.engine.simulated.model_dump(), **self.active_pools()[role].simulated}
        merged["profile"] = merged.get("profile") or self.engine.profile
        return validated(SimulatedSettings, merged, f"pools.{role}.simulated")

    def slo_class(self, name: str) -> SloClass | None:
        """The class of that name, or None."""
        return next((c for c in self.slo_classes if c.name == name), None)


def load_topology(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Topology:
    """Read a topology file. `overrides` maps dotted keys to values ("kv.carrier": "grpc"). Raises ConfigError."""
    file = Path(path)
    try:
        raw = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"topology file {file} does not exist", key=str(file), expected="a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid YAML: {error}", key=str(file), expected="a YAML mapping") from error
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}", key=str(file), expected="a readable file") from error
    return _beside(file, parse_topology(raw, str(file), overrides))


def _beside(file: Path, topology: Topology) -> Topology:
    """`topology` with its profile's path made absolute: it counts from the topology's folder."""
    profile = topology.engine.profile
    if profile is None:
        return topology
    path = str((file.resolve().parent / Path(profile).expanduser()).resolve())
    return topology.model_copy(update={"engine": topology.engine.model_copy(update={"profile": path})})


def parse_topology(raw: Any, source: str = "topology", overrides: Mapping[str, Any] | None = None) -> Topology:
    """The Topology of a plain mapping. `source` names it in errors. Raises ConfigError."""
    if not isinstance(raw, dict):
        raise ConfigError(key=source, value=raw, expected="a mapping with at least `model` and `pools`")
    for dotted, value in (overrides or {}).items():
        raw = _with(raw, dotted.split("."), value)
    topology = validated(Topology, raw, source)
    for role in topology.active_pools():
        topology.simulated(role)
    return topology


def _with(tree: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    head, *rest = path
    if not rest:
        return {**tree, head: value}
    child = tree.get(head) or {}
    return {**tree, head: _with(child, rest, value)}


def validated(model: type[ModelT], raw: Mapping[str, Any], source: str) -> ModelT:
    """`raw` as a `model`; the first fault is a ConfigError that names `source`, the dotted key and what would be right."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise _config_error(model, error, source) from None


def _config_error(model: type[BaseModel], error: ValidationError, source: str) -> ConfigError:
    """The first fault of a pydantic error as one ConfigError; further ones are counted."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "(top level)"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        known = _keys_at(model, first["loc"][:-1])
        hint = nearest(str(first["loc"][-1]), known)
        return ConfigError(f"{source}: unknown key {key!r}; {hint}{more}", key=key, value=first["input"], expected=hint)
    if first["type"] == "missing":
        return ConfigError(f"{source}: {key} is missing{more}", key=key, expected="a value")
    expected = first["msg"].removeprefix("Value error, ")
    if first["type"] == "literal_error":
        known = re.findall("'([^']*)'", first["ctx"]["expected"])
        expected += f"; {nearest(str(first['input']), known)}"
    message = f"{source}: {key}: {expected}, got {first['input']!r}{more}" if first["loc"] else f"{source}: {expected}{more}"
    return ConfigError(message, key=key, value=first["input"], expected=expected)


def _keys_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """The known keys of the sub-model at a location of `model`."""
    current: Any = model
    for part in loc:
        if isinstance(part, int) or not hasattr(current, "model_fields"):
            continue
        annotation = current.model_fields[part].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        current = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), current)
    return list(current.model_fields) if hasattr(current, "model_fields") else []
