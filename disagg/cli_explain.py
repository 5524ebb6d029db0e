"""`disagg explain`: why the router sent a request where it did, or refused it."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    app.command("explain")(explain)


def explain(
    request_id: str = typer.Argument("", help="The request's id, as its answer and the logs show it; without it, the latest request."),
    address: str = typer.Option("127.0.0.1:8500", "--address", envvar="DISAGG_ADDRESS", help="Where the gateway listens, HOST:PORT."),
    token: str | None = typer.Option(None, "--token", envvar="DISAGG_TOKEN", help="A bearer token, where the gateway asks for one."),
    ca: str | None = typer.Option(None, "--ca", envvar="DISAGG_CA", help="PEM file of the authority to trust; speaks TLS."),
    cert: str | None = typer.Option(None, "--cert", envvar="DISAGG_CERT", help="PEM file of this client's certificate."),
    key: str | None = typer.Option(None, "--key", envvar="DISAGG_KEY", help="PEM file of its key."),
    as_json: bool = typer.Option(False, "--json", help="Print the decisions as JSON, one a line."),
) -> None:
    """Tell why a request went where it did: a sentence, and the pairs of workers that were weighed."""
    from rich.console import Console
    from rich.table import Table

    from disagg.client_decisions import fetch_decisions
    from disagg.client_types import Access
    from disagg.policy.explain import COLUMNS, rows, sentence
    from disagg.serving.decision_log import to_json

    records = fetch_decisions(address, request_id, Access(token=token, ca=ca, cert=cert, key=key))
    console = Console(highlight=False, soft_wrap=True)
    for record in records:
        if as_json:
            typer.echo(to_json(record))
            continue
        console.print(sentence(record), markup=False)
        if not record.candidates:
            continue
        table = Table(box=None, pad_edge=False)
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in ("prefill", "decode", "") else "right")
        for row in rows(record):
            table.add_row(*row)
        console.print(table)
