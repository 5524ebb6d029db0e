"""`disagg ab`: disaggregated against colocated serving, on your model, workload and machine."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from disagg.cli_up import SET_HELP, overrides_of

if TYPE_CHECKING:
    from disagg.ab.out import OutFolder
    from disagg.ab.progress import RunProgress
    from disagg.ab.result import Result
    from disagg.ab.run import Comparison
    from disagg.launch.session import RaySession


def register(app: typer.Typer) -> None:
    app.command("ab")(ab)


def ab(
    topology: Path = typer.Argument(help="Topology file, for example cluster/topologies/cpu-1p1d.yaml."),
    workload: str = typer.Option(
        "cpu-interference", "--workload", help="A shipped workload's or trace workload's name, or a file like those in bench/workloads."
    ),
    out: Path = typer.Option(
        Path("out/ab"), "--out", help="Where result.json and requests.jsonl go; an older result there moves to older/."
    ),
    rounds: int | None = typer.Option(None, "--rounds", min=1, max=100, help="Rounds of both arms; default: the workload's."),
    seed: int | None = typer.Option(None, "--seed", help="Seed of due times, lengths and prompts; default: the workload's."),
    settings: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help=SET_HELP),
    colocated_chunk: int | None = typer.Option(
        None, "--colocated-chunk", help="Tokens per engine step (prefill chunk) of the colocated arm; default: the topology's."
    ),
    resident: bool | None = typer.Option(
        None, "--resident/--no-resident", help="Keep both arms' engines up all the time; default: yes on a local Ray without GPUs."
    ),
    address: str | None = typer.Option(None, "--address", help="A running Ray (auto or HOST:PORT); default: a local one is started."),
) -> None:
    """Send the same requests at the same times to both arms, in turns, on the same cores; print a table and a verdict."""
    from rich.console import Console

    from disagg.ab.arms import arm_topologies, can_be_resident
    from disagg.ab.out import OutFolder
    from disagg.ab.progress import RunProgress
    from disagg.ab.run import compare
    from disagg.ab.table import WIDTH, render
    from disagg.ab.trace_workload import load_any_workload
    from disagg.config import load_topology
    from disagg.launch.session import RaySession

    loaded = load_topology(topology, overrides_of(settings))
    stays_up = address is None and can_be_resident(arm_topologies(loaded)) if resident is None else resident
    comparison = compare(loaded, load_any_workload(workload), resident=stays_up, rounds=rounds, seed=seed, colocated_chunk=colocated_chunk)
    folder = OutFolder(out)
    with RunProgress(Console(stderr=True)) as progress:
        if folder.moved_to is not None:
            progress.say(f"the older result is now in {folder.moved_to}")
        with RaySession.start(list(comparison.topologies.values()), address) as session:
            try:
                result = asyncio.run(_run(comparison, session, topology.parent, folder, progress))
            except (KeyboardInterrupt, asyncio.CancelledError):
                progress.say(f"interrupted; the requests that ended are in {folder.requests}")
                raise typer.Exit(130) from None
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(render(result))
    console.print(f"{folder.result}  {folder.requests}", soft_wrap=True)


async def _run(comparison: Comparison, session: RaySession, base_dir: Path, folder: OutFolder, progress: RunProgress) -> Result:
    """Run, and take both arms down whatever happens; SIGTERM ends like Ctrl-C."""
    from disagg.ab.ray_arms import RayArms
    from disagg.ab.run import run_ab

    task: asyncio.Task[Any] | None = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    source = RayArms(session, comparison.topologies, resident=comparison.resident, base_dir=base_dir, say=progress.say)
    try:
        return await run_ab(comparison, source, folder, progress)
    finally:
        await source.close()
