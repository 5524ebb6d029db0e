"""`disagg check`: what a topology would place where, and whether it fits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from disagg.cli_up import SET_HELP, overrides_of
from disagg.config import GIB, load_topology

if TYPE_CHECKING:
    from disagg.launch.check import CheckReport
    from disagg.launch.placement import Placed


def register(app: typer.Typer) -> None:
    app.command("check")(check)


def check(
    topology: Path = typer.Argument(help="A topology file, such as cluster/topologies/cpu-1p1d.yaml."),
    address: str | None = typer.Option(None, "--address", help="Check against the Ray at `auto` or HOST:PORT instead of this machine."),
    settings: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help=SET_HELP),
    mode: str | None = typer.Option(None, "--mode", help="disagg, colocated or adaptive."),
) -> None:
    """Validate a topology: placement, memory, engine arguments, ports. Starts nothing. Exit 1 when it would not run."""
    from disagg.launch.check import check_topology, without_memory

    overrides = overrides_of(settings) | ({"mode": mode} if mode else {})
    loaded = load_topology(topology, overrides)
    hosts = None
    if address is not None:
        from disagg.launch.session import RaySession

        with RaySession.start([], address) as session:
            hosts = [without_memory(host) for host in session.hosts()]
    report = check_topology(loaded, topology.resolve().parent, hosts)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{escape(loaded.name)}: {escape(report.model)}, {loaded.engine.kind}, {loaded.mode}, carrier {loaded.kv.carrier}")
    for host in report.hosts:
        memory = f", {host.amount('memory') / GIB:.0f} GiB" if host.amount("memory") else ""
        console.print(f"{escape(host.describe(['GPU', 'CPU']))}{memory}")
    if report.placed:
        console.print(_table(report))
        console.print("weights per device; KV tokens and RAM (engine and boxes on the host) per worker", style="dim")
    for carrier, pairs in report.carriers.items():
        console.print(f"KV moves by {carrier} between {pairs} {'pair' if pairs == 1 else 'pairs'} of workers")
    for note in report.notes:
        console.print(f"[yellow]note:[/] {escape(note)}")
    for problem in report.problems:
        console.print(f"[bold red]problem:[/] {escape(problem)}")
    if report.problems:
        raise typer.Exit(1)
    console.print("[green]fits[/]")


def _table(report: CheckReport) -> Table:
    """One row for each run of workers that differ in nothing but their number."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("worker", "host", "cores", "device"):
        table.add_column(heading, no_wrap=True)
    for heading in ("weights", "KV tokens", "RAM"):
        table.add_column(heading, no_wrap=True, justify="right")
    for row, alike in itertools.groupby(report.placed, key=lambda placed: (placed.spec.role, *_row(report, placed))):
        first, *others = alike
        name = f"{first.spec.name}..{others[-1].spec.name.rpartition('-')[2]}" if others else first.spec.name
        table.add_row(name, *row[1:])
    return table


def _row(report: CheckReport, placed: Placed) -> tuple[str, ...]:
    memory = report.memory.get(placed.spec.role)
    cores = f"any {placed.spec.cores}"
    if placed.core_slots is not None:
        cores = "#" + "-".join(str(slot) for slot in dict.fromkeys((placed.core_slots[0], placed.core_slots[-1])))
    if memory is None:
        return (placed.host, cores, f"{placed.spec.gpus} x GPU" if placed.spec.gpus else "cpu", "-", "-", "-")
    numbers = (f"{memory.weights_bytes / 1e9:.2f} GB", f"{memory.kv_tokens:,}", f"{memory.host_bytes / GIB:.1f} GiB")
    return (placed.host, cores, memory.device, *numbers)
