"""`disagg doctor`: what this machine lacks, and the command that mends it."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "missing": "[bold red]missing[/]"}


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    topology: Path | None = typer.Option(None, "--topology", help="Check what this topology file needs."),
    skip_ray: bool = typer.Option(False, "--skip-ray", help="Do not start a Ray to see whether it works (saves seconds)."),
) -> None:
    """Say what is there, what is missing, and how to mend it. Exit 1 when something needed is missing."""
    from disagg.launch.doctor import run_checks

    checks = run_checks(topology, start_ray=not skip_ray)
    table = Table("what", "state", "found", "to mend it")
    for check in checks:
        table.add_row(check.name, _MARKS[check.state], escape(check.found), escape(check.mend) if check.state != "ok" else "")
    Console().print(table)
    missing = [check.name for check in checks if check.state == "missing"]
    if missing:
        typer.echo(f"missing: {', '.join(missing)}")
        raise typer.Exit(1)
    typer.echo("everything needed is there")
