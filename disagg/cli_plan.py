"""`disagg plan`: how many prefill and decode workers, with which degrees and settings, or none of it; and how many GPUs for a rate."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from disagg.config import SloClass
    from disagg.plan.load import Load
    from disagg.plan.planner import Plan, Say
    from disagg.plan.question import Question
    from disagg.plan.trial import Mapped


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    model: str = typer.Option(..., "--model", help="A bundled model (llama-3.1-70b, ...), a config.json, or a folder with one."),
    gpu: str = typer.Option(..., "--gpu", help="a100, h100, h200, b200, l40s, rtx-4090, rtx-pro-6000, cpu."),
    workload: str = typer.Option(..., "--workload", help="A shipped workload's or trace workload's name, or a file."),
    slo: list[str] = typer.Option(
        [],
        "--slo",
        help="A class: a preset (chat, search, code, ...), or NAME=TTFT/TPOT in ms (- for none); repeatable; the first is the default.",
    ),
    gpus: int | None = typer.Option(None, "--gpus", help="How many GPUs there are. Without it, --rate asks how many are needed."),
    rate: float | None = typer.Option(None, "--rate", help="Requests/s; with --gpus: in place of the workload's own rate."),
    decode_gpu: str | None = typer.Option(None, "--decode-gpu", help="Decode workers run on these instead; --gpus counts both kinds."),
    tp: list[int] = typer.Option([], "--tp", min=1, help="Tensor-parallel degrees to choose from; repeatable; default: all that fit."),
    quantization: str | None = typer.Option(
        None, "--quantization", help="Weights: bf16, fp8, int8 or int4; default: config.json's, else bf16."
    ),
    kv_dtype: str = typer.Option("bf16", "--kv-dtype", help="bf16, fp8 or int8."),
    speculative: str | None = typer.Option(None, "--speculative", metavar="TOKENS:ACCEPTANCE", help="Speculative decoding, such as 4:0.7."),
    link: str | None = typer.Option(
        None,
        "--link",
        help="What KV moves over: nvlink4, pcie5, ib-ndr, eth-100, ..., or GB/s one way, per GPU; default: the profile's, else ib-ndr.",
    ),
    profile: Path | None = typer.Option(
        None, "--profile", help="A file of `disagg profile`: workers on --gpu take its step times, KV cache and degree, not the roofline's."
    ),
    attainment: float = typer.Option(0.9, "--attainment", help="Share of requests that must be inside their class."),
    price: float | None = typer.Option(None, "--price", min=0, help="Of one GPU-hour."),
    decode_price: float | None = typer.Option(None, "--decode-price", min=0, help="Of one hour of a --decode-gpu; default: --price."),
    gpus_per_host: int = typer.Option(8, "--gpus-per-host", min=1, max=256, help="A worker does not span hosts."),
    requests: int = typer.Option(1500, "--requests", min=100, help="That a simulation sends at most; large clusters need more to fill."),
    jobs: int | None = typer.Option(
        None, "--jobs", min=1, help="Processes that simulate; default: as many as cores are usable, one for clusters of less than 8 GPUs."
    ),
    flips: bool = typer.Option(
        True, "--flips/--no-flips", help="Also simulate other lengths and cached prompts, to see what would turn it."
    ),
    traces: Path | None = typer.Option(None, "--traces", help="Folder of trace files; default: $DISAGG_TRACES."),
    seed: int | None = typer.Option(None, "--seed", help="Seed of the workload; default: its own."),
    out: Path | None = typer.Option(None, "--out", help="Write the plan as a topology for disagg check, sim and up."),
    as_json: bool = typer.Option(False, "--json", help="The same figures as JSON: seconds, bytes, tokens."),
) -> None:
    """Plan pools for a workload and its targets, or find that colocated workers do better. Runs nothing but simulations."""
    from rich.console import Console

    from disagg.errors import ConfigError
    from disagg.plan.planner import make_plan

    if gpus is None and rate is None:
        raise ConfigError(key="--gpus", value=None, expected="a number of GPUs, or --rate to ask for it")
    if gpus is not None and gpus < 1:
        raise ConfigError(key="--gpus", value=gpus, expected="at least 1")
    if rate is not None and not rate > 0:
        raise ConfigError(key="--rate", value=rate, expected="requests/s above 0")
    question = _question(
        model, gpu, decode_gpu, gpus or 1, _classes(slo), workload, traces, seed, requests, quantization, kv_dtype, speculative, link
    )
    if profile is not None:
        question = _measured(question, profile, link, [quantization, speculative, kv_dtype if kv_dtype != "bf16" else None])
    question = _changed(question, tp, attainment, price, decode_price, gpus_per_host)
    console = Console(stderr=True, highlight=False)
    processes = jobs or (1 if gpus is not None and gpus < 8 else _usable_cores())
    with _workers(processes) as mapped, console.status("") as status:
        if gpus is None:
            assert rate is not None
            typer.echo(_sizes(question, rate, status.update, as_json, mapped))
            return
        if rate is not None:
            question = question.with_load(_at_rate(question.load, rate))

        def tell_verdict(verdict: str) -> None:
            console.print(f"so far: {verdict}", soft_wrap=True)

        found = make_plan(question, status.update, tell_verdict=tell_verdict, with_flips=flips, mapped=mapped)
    _show(found, as_json, out, model)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _workers(processes: int) -> Iterator[Mapped]:
    """`map` over so many processes."""
    if processes == 1:
        yield map
        return
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload(["disagg.plan.planner"])
    # Ctrl-C reaches the whole process group; only this process says what it means.
    with ProcessPoolExecutor(processes, context, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as executor:
        try:
            yield executor.map
        except BaseException:  # a simulation that is under way takes many seconds, and nobody waits for it any more
            for child in multiprocessing.active_children():
                child.terminate()
            raise
        finally:
            executor.shutdown(cancel_futures=True)


def _show(found: Plan, as_json: bool, out: Path | None, model: str) -> None:
    from disagg.errors import DiskError
    from disagg.plan.text import plan_json, plan_text
    from disagg.plan.write import topology_text

    typer.echo(json.dumps(plan_json(found), indent=1) if as_json else plan_text(found))
    if out is None:
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(topology_text(found, _loadable(model)))
    except OSError as error:
        raise DiskError(f"{out}: {error.strerror}") from error
    typer.echo(f"{out}", err=True)


def _sizes(question: Question, rate: float, say: Say, as_json: bool, mapped: Mapped) -> str:
    from disagg.plan.size import find_sizes
    from disagg.plan.text import size_json, size_text

    sizes = find_sizes(question, rate, say, mapped)
    return json.dumps(size_json(question, rate, sizes), indent=1) if as_json else size_text(question, rate, sizes)


def _question(
    model: str,
    gpu: str,
    decode_gpu: str | None,
    gpus: int,
    classes: tuple[SloClass, ...],
    workload: str,
    traces: Path | None,
    seed: int | None,
    requests: int,
    quantization: str | None,
    kv_dtype: str,
    speculative: str | None,
    link: str | None,
) -> Question:
    from disagg.cli_limits import find_model
    from disagg.perf.hardware import find_device
    from disagg.perf.links import USUAL_LINK, find_link
    from disagg.perf.model_config import find_dtype, find_kv_dtype
    from disagg.perf.speculative import parse_speculation
    from disagg.plan.question import Question

    shape, dtype = find_model(model, find_dtype(quantization, "--quantization") if quantization else None)
    path = Path(model).expanduser()
    kv = find_kv_dtype(kv_dtype)
    return Question(
        shape=shape,
        shape_ref=str(path.resolve()) if path.exists() else shape.name,
        device=find_device(gpu),
        gpus=gpus,
        load=_load(workload, classes, traces, seed, shape.max_context_tokens),
        link=find_link(link or USUAL_LINK),
        decode_device=find_device(decode_gpu) if decode_gpu else None,
        dtype=dtype,
        kv_dtype=kv,
        speculation=parse_speculation(speculative) if speculative else None,
        requests=requests,
    )


def _measured(question: Question, path: Path, link: str | None, changes: list[str | None]) -> Question:
    """The same question of workers as profiled. `changes`: of what they compute with, which a measured worker does not allow."""
    from dataclasses import replace

    from disagg.errors import ConfigError
    from disagg.perf.links import Link
    from disagg.perf.profile import load_profile

    found = load_profile(path)
    found.check_model(question.shape_ref)
    if any(changes):
        value = ", ".join(c for c in changes if c)
        expected = "nothing beside --profile, whose worker was measured with its own types: measure one with those engine arguments"
        raise ConfigError(key="--quantization, --kv-dtype, --speculative", value=value, expected=expected)
    question = replace(question, profile=found, profile_ref=str(path.expanduser().resolve()))
    if link is None and found.link_bandwidth is not None:
        question = replace(question, link=Link("the profile's link", found.link_bandwidth / found.tp, share=1.0))
    return question


def _changed(
    question: Question, tp: list[int], attainment: float, price: float | None, decode_price: float | None, gpus_per_host: int
) -> Question:
    from dataclasses import replace

    return replace(
        question,
        degrees=tuple(sorted(set(tp))),
        level=attainment,
        price=price,
        decode_price=decode_price,
        gpus_per_host=gpus_per_host,
    )


def _classes(given: list[str]) -> tuple[SloClass, ...]:
    from disagg.errors import ConfigError

    if not given:
        raise ConfigError(key="--slo", value=None, expected="a class: chat, code, ..., or NAME=TTFT/TPOT in milliseconds")
    classes = tuple(_class(text) for text in given)
    names = [c.name for c in classes]
    if len(set(names)) < len(names):
        raise ConfigError(key="--slo", value=given, expected="each class once")
    return classes


def _class(text: str) -> SloClass:
    from disagg.config import PRESETS, SloClass, validated
    from disagg.errors import ConfigError, nearest

    name, is_given, targets = text.partition("=")
    if not is_given:
        if name not in PRESETS:
            raise ConfigError(key="--slo", value=text, expected=f"NAME=TTFT/TPOT in ms, or a preset: {nearest(name, PRESETS)}")
        return SloClass.model_validate(name)
    parts = [part.strip() for part in targets.split("/")]
    try:
        values = [None if part in ("", "-") else finite(part) for part in parts]
    except ValueError:
        values = []
    if not name or len(values) != 2:
        raise ConfigError(key="--slo", value=text, expected="NAME=TTFT/TPOT in ms, such as chat=500/50, with - for no target")
    base = {"preset": name} if name in PRESETS else {"name": name, "if_missed": "reject"}
    return validated(SloClass, {**base, "ttft_ms": values[0], "tpot_ms": values[1]}, "--slo")


def finite(text: str) -> float:
    """Raises ValueError for what is not a finite number."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _load(workload: str, classes: tuple[SloClass, ...], traces: Path | None, seed: int | None, context: int) -> Load:
    """The workload's requests; those of a class that was not given are held to the first one."""
    from dataclasses import replace

    from disagg.ab.trace_workload import load_any_workload, workload_trace
    from disagg.ab.workload import Workload
    from disagg.config import SloClass
    from disagg.plan.load import load_of

    wanted = load_any_workload(workload)
    known = [c.name for c in classes]
    named = [s.slo_class for s in wanted.streams] if isinstance(wanted, Workload) else [wanted.slo_class]
    others = [SloClass(name=name) for name in dict.fromkeys(named) if name is not None and name not in known]
    trace = workload_trace(wanted, (*classes, *others), traces, seed=seed)
    held = sum(r.slo_class not in known for r in trace.requests)
    if held:
        note = f"{held:,} requests of class {', '.join(c.name for c in others)} are held to {known[0]}: no --slo names theirs"
        requests = tuple(r if r.slo_class in known else replace(r, slo_class=known[0]) for r in trace.requests)
        trace = replace(trace, requests=requests, notes=(*trace.notes, note))
    return load_of(trace, classes, context)


def _at_rate(load: Load, rate: float) -> Load:
    from dataclasses import replace

    from disagg.trace import Scaling, scale

    return replace(load, trace=scale(load.trace, Scaling(rate_factor=rate / load.rate_rps)))


def _loadable(model: str) -> str | None:
    """What a topology can load: a bundled model, or a folder with weights. None: the shape's usual name on the hub, where it has one."""
    from disagg.models.catalog import BUNDLED

    if model.lower() in BUNDLED:
        return model.lower()
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() and any(path.glob("*.safetensors")) else None
