"""Workers of a topology, started in this process, measured, and ended again."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import platform
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from disagg.config import Topology
from disagg.engine.engine import Engine
from disagg.engine.measure import Measurement, Say, plan_for
from disagg.engine.simulated_settings import simulated_model_info
from disagg.engine.start import start_engine
from disagg.errors import ConfigError
from disagg.kv.box import Box
from disagg.kv.carrier import this_host_id
from disagg.kv.inbox import Inbox
from disagg.kv.layout import hash_tokens
from disagg.kv.outbox import Outbox
from disagg.perf.profile import Profile
from disagg.perf.profile_fit import fit_steps
from disagg.serving.start import box_bytes, make_carriers
from disagg.types import KvAddress, Mode, ModelInfo, Request, Role, Sampling, Transfer, new_id

_TRANSFER_TRIES = 3


async def profile_worker(
    topology: Topology,
    model: str | None,
    cores: Sequence[Sequence[int] | None],
    say: Say,
    *,
    budget_s: float = float("inf"),
    quick: bool = False,
) -> Profile:
    """Starts colocated workers of `topology`, runs prompts and decodes on them, and fits one profile to all their steps.

    `model`: path or hub name (None when simulated). `cores`: what each worker is bound to (None: nothing); with several workers, all run
    the same at the same time, for neighbours share a host's memory and slow each other. `budget_s`: no point begins later.

    Raises ConfigError, also when the fit is not physical.
    """
    measured = topology.with_mode(Mode.COLOCATED)
    async with contextlib.AsyncExitStack() as undo:
        say("the engine starts" if len(cores) == 1 else f"{len(cores)} engines start")
        starting = [undo.enter_async_context(_worker(topology, model, own, f"profile-{i}", len(cores))) for i, own in enumerate(cores)]
        workers = []
        for started in await asyncio.gather(*starting, return_exceptions=True):  # all of them, so that `undo` knows each that is up
            if isinstance(started, BaseException):
                raise started
            workers.append(started)
        engine = workers[0].engine
        info = _info(measured, engine)
        state = engine.state()
        plan = plan_for(info.max_model_len, state.max_running_requests or 1, state.total_kv_tokens, quick=quick)
        runs = [Measurement(w.engine, info.vocab_size, seed).run(plan, say, budget_s) for seed, w in enumerate(workers)]
        fitted = fit_steps([step for records in await asyncio.gather(*runs) for step in records])
        link = await _measure_link(topology, engine, info, workers[0].outbox_box, workers[0].inbox_box, say)
    args = measured.engine_args(Role.COLOCATED) if topology.engine.kind == "vllm" else measured.simulated(Role.COLOCATED).model_dump()
    return Profile(
        model=_fingerprint(measured, engine),
        hardware=_hardware(measured, cores[0], len(cores)),
        args={key: value for key, value in args.items() if isinstance(value, (str, int, float, bool))},
        steps=fitted.steps,
        kv_cache_tokens=state.total_kv_tokens,
        block_tokens=engine.layout.block_tokens,
        kv_bytes_per_token=info.kv_bytes_per_token,
        num_steps=fitted.num_steps,
        median_error=round(fitted.median_error, 4),
        measured_at=datetime.datetime.now(datetime.UTC).date().isoformat(),
        link_bandwidth=link.bandwidth if link else None,
        link_latency_s=link.latency_s if link else None,
    )


@dataclass(frozen=True, slots=True)
class _Worker:
    engine: Engine
    outbox_box: Box
    inbox_box: Box


@contextlib.asynccontextmanager
async def _worker(topology: Topology, model: str | None, cores: Sequence[int] | None, name: str, on_host: int) -> AsyncIterator[_Worker]:
    """A colocated worker's engine and its boxes; ended when left."""
    outbox_bytes, inbox_bytes = box_bytes(topology, workers_on_host=on_host)
    with contextlib.closing(Box(outbox_bytes, f"{name}-outbox")) as outbox, contextlib.closing(Box(inbox_bytes, f"{name}-inbox")) as inbox:
        engine = await start_engine(topology.with_mode(Mode.COLOCATED), Role.COLOCATED, name, model, outbox, inbox, cores)
        try:
            yield _Worker(engine, outbox, inbox)
        finally:
            await engine.close()


def _info(topology: Topology, engine: Engine) -> ModelInfo:
    if topology.engine.kind == "simulated":
        return simulated_model_info(topology.simulated(Role.COLOCATED), topology.model)
    info = getattr(engine, "model_info", None)
    assert isinstance(info, ModelInfo)
    return info


def _fingerprint(topology: Topology, engine: Engine) -> str:
    """NAME@DIGEST; a simulated engine's is that of the shape that it stands for."""
    return topology.simulated(Role.COLOCATED).shape if topology.engine.kind == "simulated" else engine.layout.model


def _hardware(topology: Topology, cores: Sequence[int] | None, num_workers: int) -> str:
    pool = topology.active_pools()[Role.COLOCATED]
    if topology.engine.kind == "simulated":
        settings = topology.simulated(Role.COLOCATED)
        return f"simulated {settings.tp} x {settings.gpu}"
    if pool.gpus:
        return f"{pool.gpus} x {topology.gpu_name(Role.COLOCATED) or 'GPU'}"
    names = [line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    beside = f", {num_workers} workers at once" if num_workers > 1 else ""
    return f"{len(cores) if cores else pool.cores} cores of {next(iter(names), platform.machine())}{beside}"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class _Link:
    bandwidth: float
    latency_s: float


async def _measure_link(topology: Topology, engine: Engine, info: ModelInfo, outbox_box: Box, inbox_box: Box, say: Say) -> _Link | None:
    """Bytes/s and latency of moving a finished prompt's KV through the topology's own carrier, from this worker to itself.

    From a short and a long prompt; None where the long one is not clearly slower (then the link is not what anybody waits for).
    """
    epoch = new_id()
    carriers = make_carriers(topology, "127.0.0.1")
    outbox = Outbox(outbox_box, engine.layout, epoch, topology.kv.lease_s)
    inbox = Inbox(inbox_box, engine.layout, carriers, this_host_id(), topology.kv.carrier, topology.kv.lease_s)
    longest = min(info.max_model_len - 8, 2048)
    lengths = (min(64, longest), longest)
    try:
        endpoints = tuple([(carrier.name, await carrier.serve(outbox)) for carrier in carriers.values()])
        address = KvAddress("profile", epoch, this_host_id(), endpoints)
        times = []
        for length in lengths:
            say(f"the KV of {length:,} tokens moves")
            times.append(min([await _transfer_s(engine, info, outbox, inbox, address, length) for _ in range(_TRANSFER_TRIES)]))
    finally:
        await inbox.close()
        for carrier in carriers.values():
            await carrier.close()
    short_s, long_s = times
    num_bytes = engine.layout.entry_bytes(lengths[1]) - engine.layout.entry_bytes(lengths[0])
    if long_s <= 1.05 * short_s or num_bytes <= 0:
        return None
    bandwidth = num_bytes / (long_s - short_s)
    return _Link(bandwidth, max(0.0, short_s - engine.layout.entry_bytes(lengths[0]) / bandwidth))


async def _transfer_s(engine: Engine, info: ModelInfo, outbox: Outbox, inbox: Inbox, address: KvAddress, length: int) -> float:
    """Seconds from the request for a prompt's KV, all of it staged already, until it is whole in the inbox."""
    ids = tuple(random.randrange(3, info.vocab_size) for _ in range(length))
    request = Request(new_id(), ids, Sampling(max_tokens=2, temperature=0.0, ignore_eos=True))
    transfer = Transfer(new_id(), 0, address, length, hash_tokens(ids))
    entry = await outbox.open(transfer)
    await engine.prefill(request, entry)
    start_s = time.perf_counter()
    await asyncio.wait_for(inbox.fetch(transfer), 60.0)
    seconds = time.perf_counter() - start_s
    (await inbox.take(transfer.transfer_id)).end_read()
    return seconds


def write_profile(profile: Profile, path: Path) -> None:
    """Raises ConfigError when the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(profile.to_json() + "\n")
    except OSError as error:
        raise ConfigError(key="--out", value=str(path), expected=f"a file that can be written ({error.strerror})") from error
