"""`disagg up`, `disagg status` and `disagg down`: a deployment on Ray, from start to end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from disagg.config import load_topology
from disagg.errors import ConfigError

if TYPE_CHECKING:
    from disagg.launch.records import Record
    from disagg.launch.report import DeploymentStatus, WorkerStatus

ADDRESS_HELP = "Ray to use: `auto` or HOST:PORT. Without it, a Ray of its own on this machine."
SET_HELP = "Override a key of the topology, as kv.carrier=grpc; may be repeated."


def register(app: typer.Typer) -> None:
    app.command("up")(up)
    app.command("status")(status)
    app.command("down")(down)


def up(
    topology: Path = typer.Argument(help="A topology file, such as cluster/topologies/cpu-1p1d.yaml."),
    address: str | None = typer.Option(None, "--address", help=ADDRESS_HELP),
    detach: bool = typer.Option(False, "--detach", help="Return once it is up; end it with `disagg down`."),
    settings: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help=SET_HELP),
    mode: str | None = typer.Option(None, "--mode", help="disagg, colocated or adaptive."),
    port: int | None = typer.Option(None, "--port", help="The gateway's port; 0 takes a free one."),
    name: str | None = typer.Option(None, "--name", help="Name of the deployment; default: the topology's."),
) -> None:
    """Start a deployment and serve until Ctrl-C, then leave nothing behind. Progress goes to standard error."""
    from disagg.launch.supervisor import UpRequest, run, start_background

    overrides = overrides_of(settings)
    overrides |= {key: value for key, value in (("mode", mode), ("gateway.port", port), ("name", name)) if value is not None}
    request = UpRequest(load_topology(topology, overrides), topology.resolve().parent, address, detach)
    console = Console(stderr=True, highlight=False)

    def progress(line: str) -> None:
        console.print(line, markup=False)

    def ready(endpoint: str) -> None:
        typer.echo(f"{request.name} serves {request.topology.model} at {endpoint}")
        typer.echo(f'try: disagg generate "Once upon a time" --stream --address {reachable(endpoint)}')
        if detach:
            typer.echo(f"end it with: disagg down --name {request.name}")
        else:
            progress("Ctrl-C ends it")

    if detach and address is None:
        ready(start_background(request, progress))
    else:
        run(request, progress, ready)


def status(
    name: str | None = typer.Option(None, "--name", help="One deployment; default: all of this user."),
    address: str | None = typer.Option(None, "--address", help="Ask this Ray instead of this user's records."),
) -> None:
    """Show deployments and their workers. Exit 1 when a worker is not live."""
    from disagg.launch.ending import statuses
    from disagg.launch.records import Record

    found = statuses(name, address)
    console = Console(highlight=False)
    if not found:
        console.print("no deployment is up")
    for each in found:
        if isinstance(each, Record):
            console.print(_without_answer(each))
        else:
            http = "" if each.http_url is None else f" and {each.http_url}{'/v1' if each.has_openai_api else ''}"
            console.print(f"{each.name}: {escape(each.model)}, {each.mode}, at {each.endpoint}{http}", soft_wrap=True)
            console.print(_table(each))
    if any(isinstance(each, Record) or not each.is_healthy for each in found):
        raise typer.Exit(1)


def down(
    name: str | None = typer.Option(None, "--name", help="The deployment; default: the only one."),
    address: str | None = typer.Option(None, "--address", help="Look in this Ray instead of this user's records."),
) -> None:
    """End a deployment; returns when nothing of it is left."""
    from disagg.launch.ending import down as end_deployment

    typer.echo(f"{end_deployment(name, address)} is down")


def overrides_of(settings: list[str]) -> dict[str, Any]:
    """`KEY=VALUE` arguments as a mapping; values are read as YAML. Raises ConfigError."""
    overrides: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not key or not equals:
            raise ConfigError(key="--set", value=setting, expected="KEY=VALUE, for example kv.carrier=grpc")
        try:
            overrides[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(key=f"--set {key}", value=text, expected="a YAML value") from None
    return overrides


def reachable(endpoint: str) -> str:
    """An address that a client on this machine can use: 0.0.0.0 names no machine."""
    host, _, port = endpoint.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "") else endpoint


def _without_answer(record: Record) -> str:
    if record.is_abandoned:
        return f"{record.name}: abandoned, its process was killed; clean up with `disagg down --name {record.name}`"
    if not record.endpoint:
        return f"{record.name}: starting"
    return f"{record.name}: does not answer (Ray at {record.address}); end it with `disagg down --name {record.name}`"


def _table(status: DeploymentStatus) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for heading in ("worker", "state", "epoch", "host", "pid"):
        table.add_column(heading, no_wrap=heading != "state")
    for heading in ("restarts", "running", "waiting", "KV"):
        table.add_column(heading, no_wrap=True, justify="right")
    for worker in status.workers:
        table.add_row(*_row(worker))
    return table


def _row(worker: WorkerStatus) -> tuple[str, ...]:
    report, state = worker.report, worker.state
    used = f"{1 - state.free_kv_tokens / state.total_kv_tokens:.0%}" if state and state.total_kv_tokens else "-"
    return (
        worker.name,
        "[green]live[/]" if worker.is_live else f"[bold red]{escape(worker.trouble)}[/]",
        *((report.epoch[:8], report.host, str(report.pid)) if report else ("-", "-", "-")),
        str(worker.restarts),
        *((str(state.running_requests), str(state.waiting_requests)) if state else ("-", "-")),
        used,
    )
