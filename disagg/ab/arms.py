"""The arms: which deployments are compared, on equal hardware, and the protocol by which a run gets at them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from disagg.ab.result import SetupReport
from disagg.config import GIB, Topology, parse_topology
from disagg.errors import ConfigError, nearest
from disagg.types import Mode, Role

ArmKind = Literal["disagg", "colocated", "adaptive", "external"]
DEFAULT_ARMS = "disagg,colocated"
_KINDS = ("colocated", "disagg", "disagg-1p1d", "adaptive", "external=URL", "external-NAME=URL")
_RATIO = re.compile(r"disagg-(\d+)p(\d+)d")
_EXTERNAL = re.compile(r"(external(?:-[A-Za-z0-9][A-Za-z0-9_.-]{0,40})?)=(.*)")
_CHUNK_KEY, _MIXED_KEY, _MIXED_MS_KEY = "max_num_batched_tokens", "mixed_step_tokens", "mixed_step_ms"
_ENGINE_BASE_GIB = 2.0  # a vLLM CPU engine with a small model and its actor, beside its KV and boxes: measured 1.9 GiB (PSS)
_DEFAULT_BOX_GIB = 0.5  # a box takes memory as it is filled
_DEFAULT_KV_GIB = 4.0  # what vLLM takes on CPUs when nobody says


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of the comparison. `topology` is None for an external arm, which is only a `url`."""

    name: str
    kind: ArmKind
    topology: Topology | None = None
    url: str | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    """An arm that answers at `endpoint` ("host:port", or a URL). `life` changes whenever its engines were started anew, and so are cold."""

    endpoint: str
    life: int


class ArmSource(Protocol):
    """Where the arms come from: Ray, or for tests a process that is up already."""

    async def use(self, arm: str) -> Serving:
        """Make `arm` ready to be measured, bringing it up if need be; where workers of it are down, wait until they are back."""
        ...

    async def lives(self, arm: str) -> Mapping[str, str]:
        """Worker -> a text that changes when that worker is started anew. Empty where nobody can know."""
        ...

    async def preemptions(self, arm: str) -> int | None:
        """Requests that the arm's engines have put back for want of KV memory since they were started, as of the last look at its `lives`;
        None where nobody can know."""
        ...

    async def close(self) -> None:
        """Take down what `use` brought up. Idempotent."""
        ...


def parse_arms(text: str, topology: Topology) -> tuple[Arm, ...]:
    """The arms of `--arms`, in its order, each with a topology on the same hardware. Raises ConfigError.

    `disagg` is the topology's own ratio where it stands alone in the list of what the workers allow, else one arm per ratio. A name that
    comes twice gets a number: two equal arms are an A/A test.
    """
    arms: list[Arm] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        for arm in _named(item, topology):
            again = sum(a.name == arm.name or a.name.startswith(f"{arm.name}-again") for a in arms)
            arms.append(replace(arm, name=f"{arm.name}-again{again if again > 1 else ''}") if again else arm)
    if len(arms) < 2:
        raise ConfigError(key="--arms", value=text, expected=f"at least two arms: {', '.join(_KINDS)}")
    finished = tuple(on_free_ports(arm) for arm in arms)
    _check_same_hardware(finished)
    _check_same_caches(finished)
    return finished


def own_arms(topology: Topology) -> tuple[Arm, ...]:
    """The default: the topology's own split against colocated serving."""
    return parse_arms(f"disagg-{_own_ratio(topology)},colocated", topology)


def _named(item: str, topology: Topology) -> Iterable[Arm]:
    if external := _EXTERNAL.fullmatch(item):
        name, url = external.groups()
        if not re.match(r"https?://[^/]", url):
            raise ConfigError(key="--arms", value=item, expected="a URL such as http://127.0.0.1:8000/v1")
        return [Arm(name, "external", url=url.rstrip("/"))]
    if item == "colocated":
        return [Arm("colocated", "colocated", topology.with_mode(Mode.COLOCATED))]
    pools = topology.pools
    if pools.prefill is None or pools.decode is None:
        missing = "prefill" if pools.prefill is None else "decode"
        raise ConfigError(key=f"pools.{missing}", value=None, expected=f"a pool: arm {item} needs it")
    if item == "adaptive":
        return [Arm("adaptive", "adaptive", topology.with_mode(Mode.ADAPTIVE))]
    if item == "disagg":
        found = ratios(topology)
        return [_split(topology, p, d, "disagg" if len(found) == 1 else f"disagg-{p}p{d}d") for p, d in found]
    if ratio := _RATIO.fullmatch(item):
        p, d = (int(n) for n in ratio.groups())
        if min(p, d) < 1:
            raise ConfigError(key="--arms", value=item, expected="at least one prefill and one decode worker")
        return [_split(topology, p, d, "disagg" if (p, d) == (pools.prefill.count, pools.decode.count) else item)]
    raise ConfigError(key="--arms", value=item, expected=f"an arm: {nearest(item, _KINDS)}")


def ratios(topology: Topology) -> list[tuple[int, int]]:
    """Every split of the topology's workers into prefill and decode on the same cores and GPUs."""
    p, d = topology.pools.prefill, topology.pools.decode
    assert p is not None
    assert d is not None
    if (p.cores, p.gpus) == (d.cores, d.gpus):
        workers = p.count + d.count
        return [(prefill, workers - prefill) for prefill in range(1, workers)]
    return [(p.count, d.count)]  # unlike workers: any other split would have other hardware


def _own_ratio(topology: Topology) -> str:
    p, d = topology.pools.prefill, topology.pools.decode
    return f"{p.count if p else 1}p{d.count if d else 1}d"


def _split(topology: Topology, prefill: int, decode: int, name: str) -> Arm:
    raw = topology.with_mode(Mode.DISAGG).model_dump()
    raw["pools"]["prefill"]["count"], raw["pools"]["decode"]["count"] = prefill, decode
    return Arm(name, "disagg", parse_topology(raw))


def with_chunk(arm: Arm, tokens: int, name: str | None = None) -> Arm:
    """A colocated arm whose engines take `tokens` per step; an adaptive one whose engines do so in steps in which somebody decodes,
    where the topology has no limit of its own for these (`mixed_step_tokens`, `mixed_step_ms`): what suits a colocated pool, which may
    give a long prompt another share of a step, need not suit it.

    Other arms are as they were: there no prompt is beside a decode. Raises ConfigError.
    """
    if tokens < 1:
        raise ConfigError(key="--chunk", value=tokens, expected="a positive number of tokens")
    if arm.topology is None or arm.kind not in ("colocated", "adaptive"):
        return arm
    raw = arm.topology.model_dump()
    section = "simulated" if arm.topology.engine.kind == "simulated" else "args"
    for role, settings in arm.topology.active_pools().items():
        pool = settings.model_dump()
        if role is Role.COLOCATED:
            pool[section] = {**pool[section], _CHUNK_KEY: tokens}
        elif mixed_step_tokens(arm.topology, role) is None and mixed_step_ms(arm.topology, role) is None:
            most = chunk_tokens(arm.topology, role) or tokens
            pool[section] = {**pool[section], _MIXED_KEY: min(tokens, most)}
        raw["pools"][role.value] = pool
    if name is not None:
        raw["name"] = _deployment_name(raw["name"], name)
    return replace(arm, name=name or arm.name, topology=parse_topology(raw))


def chunk_tokens(topology: Topology, role: Role) -> int | None:
    """Tokens per engine step of a pool; None where the engine chooses."""
    if topology.engine.kind == "simulated":
        return topology.simulated(role).max_num_batched_tokens
    value = topology.engine_args(role).get(_CHUNK_KEY)
    return value if isinstance(value, int) else None


def mixed_step_tokens(topology: Topology, role: Role) -> int | None:
    """Tokens of a step in which somebody decodes; None where that is no other limit."""
    simulated = topology.engine.kind == "simulated"
    value = topology.simulated(role).mixed_step_tokens if simulated else topology.engine_args(role).get(_MIXED_KEY)
    return value if isinstance(value, int) else None


def mixed_step_ms(topology: Topology, role: Role) -> float | None:
    """Milliseconds of a step in which somebody decodes, at most; None where there is no such limit."""
    simulated = topology.engine.kind == "simulated"
    value = topology.simulated(role).mixed_step_ms if simulated else topology.engine_args(role).get(_MIXED_MS_KEY)
    return float(value) if isinstance(value, int | float) else None


def setup_of(arm: Arm) -> SetupReport:
    """What the arm is, for the report."""
    if arm.topology is None:
        return SetupReport(kind=arm.kind, url=arm.url)
    pools = arm.topology.active_pools()
    counts = {role.value: pool.count for role, pool in pools.items()}
    return SetupReport(
        kind=arm.kind,
        prefill=counts.get("prefill"),
        decode=counts.get("decode"),
        colocated=counts.get("colocated"),
        cores=sum(pool.count * pool.cores for pool in pools.values()),
        gpus=sum(pool.count * pool.gpus for pool in pools.values()),
        chunk_tokens={role.value: size for role in pools if (size := chunk_tokens(arm.topology, role)) is not None},
        mixed_step_tokens={role.value: size for role in pools if (size := mixed_step_tokens(arm.topology, role)) is not None},
        mixed_step_ms={role.value: most for role in pools if (most := mixed_step_ms(arm.topology, role)) is not None},
        prefix_cache=_prefix_cache(arm.topology),
    )


def deployed(arms: Sequence[Arm]) -> dict[str, Topology]:
    """The topologies of the arms that are not external, by name."""
    return {arm.name: arm.topology for arm in arms if arm.topology is not None}


def can_be_resident(topologies: Mapping[str, Topology], free_bytes: int | None = None) -> bool:
    """Whether all arms' engines may stay up at once. On CPU cores an idle engine costs memory only; a GPU's memory holds one arm.

    `free_bytes`: memory that may be used; None: not known, and not asked for.
    """
    pools = [(topology, role, pool) for topology in topologies.values() for role, pool in topology.active_pools().items()]
    if any(pool.gpus for _, _, pool in pools):
        return False
    return free_bytes is None or sum(pool.count * _worker_gib(topology, role) for topology, role, pool in pools) * GIB <= free_bytes


def _worker_gib(topology: Topology, role: Role) -> float:
    """A generous guess of one worker's memory."""
    boxes = sum(_DEFAULT_BOX_GIB if gib is None else gib for gib in (topology.kv.outbox_gib, topology.kv.inbox_gib))
    if topology.engine.kind == "simulated":
        return 0.2 + boxes
    own_bytes = topology.engine_args(role).get("kv_cache_memory_bytes")
    kv = own_bytes / GIB if isinstance(own_bytes, int) else float(topology.engine_env(role).get("VLLM_CPU_KVCACHE_SPACE", _DEFAULT_KV_GIB))
    return _ENGINE_BASE_GIB + boxes + kv


def most_workers(topology: Topology) -> int:
    """How many workers may get a prompt: the largest pool's, in adaptive mode all."""
    counts = [pool.count for pool in topology.active_pools().values()]
    return sum(counts) if Mode(topology.mode) is Mode.ADAPTIVE else max(counts)


def known_context(topologies: Mapping[str, Topology]) -> int | None:
    """The smallest context that the topology itself names, in tokens; None when only the model says."""
    found = []
    for topology in topologies.values():
        for role in topology.active_pools():
            if topology.engine.kind == "simulated":
                found.append(topology.simulated(role).max_model_len)
            elif isinstance(length := topology.engine_args(role).get("max_model_len"), int):
                found.append(length)
    return min(found, default=None)


def on_free_ports(arm: Arm) -> Arm:
    """Arms may be up at once, beside a deployment of the same file: their ports and names must not meet."""
    if arm.topology is None:
        return arm
    raw = arm.topology.model_dump()
    raw["gateway"]["port"] = 0
    raw["gateway"]["http_port"] = None
    raw["kv"]["port"] = 0
    raw["name"] = _deployment_name(raw["name"], arm.name)
    return replace(arm, topology=parse_topology(raw))


def _deployment_name(base: str, arm: str) -> str:
    """At most 41 characters, which is what a topology's name may have."""
    return f"{base[:20].rstrip('-')}-{re.sub('[^a-z0-9-]', '-', arm.lower())[:20]}"


def _check_same_hardware(arms: Sequence[Arm]) -> None:
    own = [(arm, setup_of(arm)) for arm in arms if arm.topology is not None]
    for field, what in (("workers", "workers"), ("cores", "cores in all"), ("gpus", "GPUs in all")):
        counted = {arm.name: _count(setup, field) for arm, setup in own}
        if len(set(counted.values())) <= 1:
            continue
        first = next(iter(counted))
        odd = next(name for name, count in counted.items() if count != counted[first])
        which = odd if "colocated" not in (first, odd) else "colocated"
        other = first if which == odd else odd
        key = f"pools.colocated.{'count' if field == 'workers' else field}" if which == "colocated" else f"--arms {which}"
        expected = f"as many as prefill and decode have together: arm {other} has {counted[other]} {what}, arm {which} {counted[which]}"
        raise ConfigError(key=key, value=counted[which], expected=expected)


def _count(setup: SetupReport, field: str) -> int:
    if field == "workers":
        return sum(n or 0 for n in (setup.prefill, setup.decode, setup.colocated))
    return int(getattr(setup, field) or 0)


def _check_same_caches(arms: Sequence[Arm]) -> None:
    """Prefix caches are on in all arms or in none: one with and one without measures the cache."""
    states = {arm.name: _prefix_cache(arm.topology) for arm in arms if arm.topology is not None}
    if len(set(states.values())) > 1:
        raise ConfigError(key="enable_prefix_caching", value=states, expected="the same in all pools of all arms")


def _prefix_cache(topology: Topology) -> bool | None:
    """True and False where all of its pools agree, else a ConfigError; None where it cannot be told."""
    if topology.engine.kind == "simulated":
        return None
    said = {role.value: bool(topology.engine_args(role).get("enable_prefix_caching", True)) for role in topology.active_pools()}
    if len(set(said.values())) > 1:
        raise ConfigError(key="enable_prefix_caching", value=said, expected="the same in all pools of all arms")
    return next(iter(said.values()))
