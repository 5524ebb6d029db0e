"""`disagg top`: a gateway's pools, queue, latencies and transfers, live in the terminal; read from its /metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from disagg.front.scrape import Scrape

DEFAULT_URL = "http://127.0.0.1:8000"
SCRAPE_TIMEOUT_S = 5.0


def register(app: typer.Typer) -> None:
    app.command("top")(top)


def top(
    url: str = typer.Argument(DEFAULT_URL, envvar="DISAGG_URL", help="The gateway's HTTP door, as http://HOST:PORT."),
    interval_s: float = typer.Option(2.0, "--interval", min=0.2, help="Seconds between looks, over which rates are taken."),
    once: bool = typer.Option(False, "--once", help="Look twice, print once, and end."),
    token: str | None = typer.Option(None, "--token", envvar="DISAGG_TOKEN", help="A bearer token, where the gateway asks for one."),
    ca: str | None = typer.Option(None, "--ca", envvar="DISAGG_CA", help="PEM file of the authority to trust, for https."),
) -> None:
    """Watch a gateway: pools, queue, TTFT and TPOT, transfers. Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    from disagg.front.scrape import scrape

    def look() -> Scrape:
        return scrape(url, token=token, ca=ca, timeout_s=SCRAPE_TIMEOUT_S)

    before = look()
    console = Console(highlight=False)
    if once:
        time.sleep(interval_s)
        console.print(screen(before, look()))
        return
    with Live(screen(before, before), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval_s)
                now = look()
                live.update(screen(before, now), refresh=True)
                before = now
        except KeyboardInterrupt:
            return


def screen(before: Scrape, now: Scrape) -> Group:
    """What is shown: `now`, with rates and percentiles since `before`."""
    from rich.console import Group
    from rich.text import Text

    info = next(iter(now.labels("disagg_gateway_info")), {})
    ready = "[green]ready[/]" if now.obstacle is None else f"[bold red]{now.obstacle}[/]"
    head = Text.from_markup(f"{info.get('deployment', '?')}: {info.get('model', '?')}, {info.get('mode', '?')}   {ready}")
    return Group(head, Text(_flow(before, now)), "", _classes(before, now), "", _workers(before, now))


def _flow(before: Scrape, now: Scrape) -> str:
    phases = {labels["phase"]: int(now.value("disagg_open_requests", **labels)) for labels in now.labels("disagg_open_requests")}
    order = ("queued", "prefilling", "transferring", "waiting", "decoding")
    counts = "  ".join(f"{name} {phases.get(name, 0)}" for name in order)
    tokens = now.rate(before, "disagg_output_tokens_total")
    prompt = now.rate(before, "disagg_prompt_tokens_total")
    return f"{counts}   out {tokens:,.0f} tokens/s, in {prompt:,.0f} tokens/s"


def _classes(before: Scrape, now: Scrape) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("class")
    for heading in ("req/s", "in SLO", "rejected/s", "failed/s", "TTFT p50", "p95", "TPOT p50", "p95", "queue p95", "transfer p95"):
        table.add_column(heading, justify="right")
    for name in sorted({labels["slo_class"] for labels in now.labels("disagg_requests_total")}):
        ended = {o: now.rate(before, "disagg_requests_total", outcome=o, slo_class=name) for o in ("finished", "rejected", "failed")}
        sent = sum(ended.values())
        met = now.rate(before, "disagg_requests_slo_met_total", slo_class=name)
        quantiles = [
            now.quantile(before, metric, q, slo_class=name)
            for metric, q in (
                ("disagg_ttft_seconds", 0.5),
                ("disagg_ttft_seconds", 0.95),
                ("disagg_tpot_seconds", 0.5),
                ("disagg_tpot_seconds", 0.95),
                ("disagg_queue_seconds", 0.95),
                ("disagg_transfer_exposed_seconds", 0.95),
            )
        ]
        share = f"{met / sent:.0%}" if sent else "-"
        rates = (f"{sent:.1f}", share, f"{ended['rejected']:.1f}", f"{ended['failed']:.1f}")
        table.add_row(name, *rates, *("-" if q is None else f"{q * 1e3:,.1f} ms" for q in quantiles))
    return table


def _workers(before: Scrape, now: Scrape) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("worker")
    for heading in ("running", "waiting", "step", "KV", "outbox", "inbox", "KV out", "KV in", "KV failed", "preempted"):
        table.add_column(heading, justify="right")
    for labels in sorted(now.labels("disagg_worker_running_requests"), key=lambda labels: (labels["role"], labels["worker"])):

        def read(name: str, labels: dict[str, str] = labels) -> float:
            return now.value(f"disagg_worker_{name}", **labels)

        table.add_row(
            labels["worker"],
            f"{read('running_requests'):.0f}",
            f"{read('waiting_requests'):.0f}",
            f"{read('step_seconds') * 1e3:.1f} ms",
            *(_used(read(f"{box}_free_{unit}"), read(f"{box}_total_{unit}")) for box, unit in _ROOMS),
            *(f"{now.rate(before, f'disagg_kv_{way}_bytes_total', **labels) / 1e6:,.1f} MB/s" for way in ("sent", "received")),
            f"{now.value('disagg_kv_failed_transfers_total', **labels):.0f}",
            f"{read('preemptions_total'):.0f}",
        )
    for labels in now.labels("disagg_pool_live_workers"):
        missing = int(now.value("disagg_pool_wanted_workers", **labels) - now.value("disagg_pool_live_workers", **labels))
        if missing > 0:
            table.add_row(f"[bold red]{missing} of pool {labels['role']} missing[/]")
    return table


_ROOMS = (("kv", "tokens"), ("outbox", "bytes"), ("inbox", "bytes"))


def _used(free: float, total: float) -> str:
    return f"{1 - free / total:.0%}" if total else "-"
