"""`disagg profile`: what the steps of a real worker cost, as a file for router, simulator and simulated engine."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from disagg.cli_up import SET_HELP, overrides_of

if TYPE_CHECKING:
    from disagg.config import Topology
    from disagg.perf.profile import Profile


def register(app: typer.Typer) -> None:
    app.command("profile")(profile)


def profile(
    topology: Path = typer.Argument(help="Topology file; workers of it are started here and measured."),
    out: Path = typer.Option(Path("out/profile.json"), "--out", help="The profile file."),
    minutes: float = typer.Option(5.0, "--minutes", min=0.1, help="Begin nothing new after so long, and fit what there is."),
    workers: int | None = typer.Option(
        None, "--workers", min=1, help="Workers to measure at once. [default: on CPUs those that this machine has cores for, else 1]"
    ),
    quick: bool = typer.Option(False, "--quick", help="A third of the lengths and batches, each once."),
    settings: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help=SET_HELP),
) -> None:
    """Measure a worker: prompts of many lengths, decoding at many batches and contexts, KV transfer. Takes minutes.

    CPU workers are measured side by side, as they will run: they share the machine's memory, and slow each other.

    Use the file as `engine.profile` in a topology (the router then starts from it, and simulated engines take its times), or with
    `disagg sim --profile`. Steps that no hardware can have are refused.
    """
    from rich.console import Console

    from disagg.config import load_topology
    from disagg.models import resolve_model
    from disagg.serving.start_profile import profile_worker, write_profile

    loaded = load_topology(topology, overrides_of(settings))
    simulated = loaded.engine.kind == "simulated"
    model = None if simulated else str(resolve_model(loaded.model, topology.resolve().parent))
    console = Console(stderr=True, highlight=False)
    with console.status("") as status:
        found = asyncio.run(profile_worker(loaded, model, _cores(loaded, workers), status.update, budget_s=60 * minutes, quick=quick))
    write_profile(found, out)
    typer.echo(describe(found))
    typer.echo(f"{out}")


def _cores(topology: Topology, workers: int | None) -> list[list[int] | None]:
    """What each worker is bound to: the last of this process's cores, for the first are the busiest. Raises ConfigError."""
    from disagg.errors import ConfigError
    from disagg.types import Mode, Role

    pool = topology.with_mode(Mode.COLOCATED).active_pools()[Role.COLOCATED]
    if topology.engine.kind == "simulated" or pool.gpus:
        return [None] * (workers or 1)
    usable = sorted(os.sched_getaffinity(0))
    room = max(1, len(usable) // pool.cores)
    count = workers or min(room, sum(p.count for p in topology.active_pools().values()))
    if count > room:
        raise ConfigError(
            key="--workers", value=count, expected=f"at most {room}: each has {pool.cores} of this machine's {len(usable)} cores"
        )
    if not pool.bind_cores:
        return [None] * count
    return [usable[len(usable) - (i + 1) * pool.cores :][: pool.cores] for i in range(count)]


def describe(found: Profile) -> str:
    """What was measured, for people."""
    steps = found.steps
    lines = [
        f"{found.model_name} on {found.hardware}: {found.num_steps:,} steps, median error {found.median_error:.1%}",
        f"a step            {steps.base_s * 1e3:.2f} ms",
        f"+ a prompt token  {(steps.prompt_token_s + (0 if steps.ridge_tokens else steps.over_s)) * 1e6:,.1f} us",
        f"+ a pair          {steps.pair_s * 1e9:,.2f} ns of (query, key)",
        f"+ a decode        {steps.decode_s * 1e3:.3f} ms, and {steps.context_s * 1e6:.3f} us for each token of its context",
    ]
    if steps.ridge_tokens:
        lines.insert(3, f"+ beyond {steps.ridge_tokens:.0f} tokens, {steps.over_s * 1e6:,.1f} us for each")
    if found.link_bandwidth is not None and found.link_latency_s is not None:
        lines.append(f"KV moves at       {found.link_bandwidth / 1e9:.2f} GB/s after {found.link_latency_s * 1e3:.1f} ms")
    return "\n".join(lines)
