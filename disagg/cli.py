"""The command line. Each `disagg/cli_*.py` holds one family of commands and a `register(app)` that mounts them here.

Every error of ours ends as one line on standard error: exit 2 when what the user gave is wrong (a file, a flag, a model), 1
otherwise. `DISAGG_DEBUG=1` shows the traceback instead.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from disagg import __version__
from disagg.errors import ConfigError, DisaggError, InvalidRequestError

# Command modules import their libraries inside the command functions, so that `disagg --help` stays quick.
COMMAND_MODULES = (
    "disagg.cli_model",
    "disagg.cli_doctor",
    "disagg.cli_check",
    "disagg.cli_up",
    "disagg.cli_generate",
    "disagg.cli_explain",
    "disagg.cli_top",
    "disagg.cli_ab",
    "disagg.cli_sim",
    "disagg.cli_limits",
    "disagg.cli_profile",
    "disagg.cli_plan",
)


class _ErrorsAsOneLine(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DisaggError as error:
            if os.environ.get("DISAGG_DEBUG") == "1":
                raise
            Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(error.message)}")
            raise typer.Exit(exit_code(error)) from error


def exit_code(error: DisaggError) -> int:
    """2 for wrong input, 1 for anything that failed with right input."""
    return 2 if isinstance(error, (ConfigError, InvalidRequestError)) else 1


app = typer.Typer(
    name="disagg",
    help="Serve one LLM from separate prefill and decode pools of vLLM workers on Ray.",
    cls=_ErrorsAsOneLine,
    no_args_is_help=True,
    pretty_exceptions_enable=os.environ.get("DISAGG_DEBUG") == "1",
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"disagg {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
) -> None:
    pass


for _name in COMMAND_MODULES:
    importlib.import_module(_name).register(app)
