"""`disagg model`: get, list, find and check bundled models."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.table import Table

from disagg.errors import ModelError
from disagg.models import get_model, list_models, model_path, verify_model

model_app = typer.Typer(help="Get, list, find and check bundled models.", no_args_is_help=True)

_STYLES = {"present": "green", "missing": "yellow", "damaged": "bold red"}


def register(app: typer.Typer) -> None:
    app.add_typer(model_app, name="model")


@model_app.command("get")
def get(name: str = typer.Argument(help="A name from `disagg model list`.")) -> None:
    """Download and convert a bundled model, or check that it is there. Prints its folder; progress goes to standard error."""
    typer.echo(get_model(name, progress=_progress))


@model_app.command("list")
def list_() -> None:
    """List the bundled models and their state."""
    table = Table("name", "state", "download", "stored", "licence", "what it is")
    for entry in list_models():
        style = _STYLES[entry.state]
        sizes = (f"{entry.download_num_bytes / 1e6:.0f} MB", f"{entry.stored_num_bytes / 1e6:.0f} MB")
        table.add_row(entry.name, f"[{style}]{entry.state}[/]", *sizes, entry.license, entry.summary)
    Console().print(table)


@model_app.command("path")
def path(name: str = typer.Argument(help="A name from `disagg model list`.")) -> None:
    """Print the folder of a bundled model that is in the store."""
    typer.echo(model_path(name))


@model_app.command("verify")
def verify(name: str = typer.Argument(help="A name from `disagg model list`.")) -> None:
    """Hash every file of a stored model and compare."""
    entry = verify_model(name)
    if entry.state != "present":
        detail = "; ".join(entry.faults) or "not in the store"
        raise ModelError(f"model: {name} is {entry.state}: {detail}; run `disagg model get {name}`", key="model", value=name)
    typer.echo(f"{name}: every file of {entry.path} matches its checksum")


def _progress(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
