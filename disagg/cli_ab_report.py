"""`disagg ab report|compare|advise|replay`: what to do with a result. The group's default command is `disagg ab TOPOLOGY` (cli_ab.py)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from disagg.cli_up import SET_HELP, overrides_of

LEVEL = 0.9  # of attainment, from which on targets count as met

if TYPE_CHECKING:
    from disagg.ab.compare import SideBySide
    from disagg.ab.load import StreamingClient
    from disagg.ab.out import OutFolder
    from disagg.ab.replay import Recording
    from disagg.ab.result import Result

PRICE_HELP = "Price of one GPU-hour (on CPUs: of one core-hour), in any currency: adds the cost per million output tokens."


class DefaultCommand(typer.core.TyperGroup):
    """`disagg ab TOPOLOGY ...` means `disagg ab run TOPOLOGY ...`: what is no subcommand is an argument of the run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `run` in front unless a subcommand, or a question for help, stands there."""
        if args and args[0] not in self.commands and args[0] not in ("--help", "--install-completion", "--show-completion"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


def add_to(group: typer.Typer) -> None:
    """Mount the four commands."""
    group.command("report")(report)
    group.command("compare")(compare)
    group.command("advise")(advise)
    group.command("replay")(replay)


def print_result(result: Result, folder: OutFolder) -> None:
    """The table and the verdict, where the files are, and why it is no result, where it is none; writes the report."""
    from rich.console import Console

    from disagg.ab.table import WIDTH, render

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(render(result))
    console.print(f"{folder.result}  {folder.requests}", soft_wrap=True, markup=False)
    print_report(folder.path)
    if result.not_a_result is not None:
        console.print(f"not a result: {result.not_a_result}", soft_wrap=True, markup=False)


def print_report(folder: Path) -> None:
    """Write report.html and say where it is; without matplotlib say how to get it. The result is safe either way."""
    from disagg.ab.report.page import write_report
    from disagg.errors import ConfigError

    try:
        typer.echo(str(write_report(folder)))
    except ConfigError as error:
        if error.key != "matplotlib":
            raise
        typer.echo(f"no report.html: {error.message}")


def report(
    folder: Path = typer.Argument(help="A run's folder, with result.json and requests.jsonl."),
    price_per_gpu_hour: float | None = typer.Option(None, "--price-per-gpu-hour", min=0.0, help=PRICE_HELP),
) -> None:
    """Write report.html (one file, works offline) and plots/*.png for a result."""
    from disagg.ab.out import OutFolder
    from disagg.ab.report.page import write_report
    from disagg.ab.result import priced, read_result

    if price_per_gpu_hour is not None:
        OutFolder(folder, resume=True).write_result(priced(read_result(folder / "result.json"), price_per_gpu_hour).to_json())
    typer.echo(str(write_report(folder)))


def compare(
    a: Path = typer.Argument(help="A run's folder."),
    b: Path = typer.Argument(help="Another one's."),
    arms: str | None = typer.Option(None, "--arms", metavar="A,B", help="Compare arm A of the first with arm B of the second."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Lay two results side by side: what differs between the same arm in both, with intervals; or why they cannot be compared."""
    from disagg.ab.compare import side_by_side
    from disagg.ab.result import classes_of, read_result
    from disagg.ab.rows import read_rows

    results = [read_result(folder / "result.json") for folder in (a, b)]
    rows = [read_rows(folder / "requests.jsonl") for folder in (a, b)]
    classes = {c.name: c for result in reversed(results) for c in classes_of(result)}
    found = side_by_side(results[0], rows[0], results[1], rows[1], list(classes.values()), _pair(arms, *results))
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        _print_side_by_side(found, a, b)


def _pair(text: str | None, a: Result, b: Result) -> tuple[str, str] | None:
    from disagg.errors import ConfigError, nearest

    if text is None:
        return None
    names = tuple(part.strip() for part in text.split(","))
    if len(names) != 2:
        raise ConfigError(key="--arms", value=text, expected="two arms, of the first and of the second result: colocated,disagg")
    for name, result in zip(names, (a, b), strict=True):
        if name not in result.arms:
            raise ConfigError(key="--arms", value=name, expected=f"an arm of that result: {nearest(name, list(result.arms))}")
    return names[0], names[1]


def _print_side_by_side(found: SideBySide, a: Path, b: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from disagg.ab.result import ComparisonReport
    from disagg.ab.table import WIDTH
    from disagg.ab.verdict import shown
    from disagg.ab.words import change

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(f"A: {a}\nB: {b}", soft_wrap=True, markup=False)
    for sentence in found.obstacles:
        console.print(f"not comparable: {sentence}", style="yellow", soft_wrap=True, markup=False)
    for sentence in found.notes:
        console.print(sentence, markup=False)
    groups = dict.fromkeys((c.arms, rate) for rate, c in found.comparisons)
    for arms, rate in groups:
        table = Table(title=f"{arms[0]} against {arms[1]}" + (f", {rate:g} requests/s" if rate else ""), title_justify="left")
        for head in ("measure", "A", "B", "B against A", "better"):
            table.add_column(head, justify="left" if head == "measure" else "right")
        for _, c in (pair for pair in found.comparisons if (pair[1].arms, pair[0]) == (arms, rate)):
            name = f"{c.slo_class}: {c.measure}" if c.slo_class else c.measure
            better = "–" if found.obstacles else (c.better or "no difference")
            difference = change(ComparisonReport(**asdict(c)), c.arms[0])
            table.add_row(name, shown(c.values[1], c.unit), shown(c.values[0], c.unit), difference, better.partition(":")[0])
        console.print(table)
    if not found.comparisons:
        console.print("nothing to compare: the results have no arm and rate in common")


def advise(
    result: Path = typer.Argument(help="A result.json, or its folder."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Say what to tune next, and which measured numbers say so."""
    from disagg.ab.advise import advise as find
    from disagg.ab.result import read_result

    checked = read_result(result / "result.json" if result.is_dir() else result)
    found = find(checked)
    if as_json:
        typer.echo(json.dumps([asdict(advice) for advice in found], indent=2))
        return
    for advice in found:
        whose = f"{advice.arm}, {advice.slo_class}" if advice.slo_class else advice.arm
        typer.echo(f"{whose}: {advice.rule}\n  because {advice.because}\n  try: {advice.do}")
    if not found:
        typer.echo(_nothing_to_say(checked))


def _nothing_to_say(result: Result) -> str:
    shares = [figures.slo_attainment for figures in result.arms.values()]
    if any(share is None or share < LEVEL for share in shares):
        return "No rule applies: targets are missed, but too little was measured to say why."
    return "No rule applies: targets are met without much headroom, tails are short, nothing was refused or failed."


def replay(
    requests: Path = typer.Argument(help="A requests.jsonl of disagg."),
    to: str | None = typer.Option(None, "--to", metavar="ADDRESS", help="A running gateway (HOST:PORT), or an OpenAI server (http://...)."),
    topology: Path | None = typer.Option(None, "--topology", help="Bring this up, send to it, take it down."),
    arm: str | None = typer.Option(None, "--arm", help="Whose requests; default: the file's first arm."),
    out: Path = typer.Option(Path("out/replay"), "--out", help="Where both runs' rows and their comparison go."),
    settings: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help=SET_HELP),
) -> None:
    """Send the same requests again, at the same times, to any endpoint, and compare what comes with what came."""
    from rich.console import Console

    from disagg.ab.out import OutFolder
    from disagg.ab.progress import RunProgress
    from disagg.ab.replay import load_recording
    from disagg.errors import ConfigError

    if (to is None) == (topology is None):
        raise ConfigError(key="--to", value=to, expected="exactly one of --to ADDRESS and --topology FILE")
    recording = load_recording(requests, arm)
    folder = OutFolder(out)
    with RunProgress(Console(stderr=True)) as progress:
        result = asyncio.run(_replay(recording, to, topology, settings, folder, progress))
    print_result(result, folder)
    if result.not_a_result is not None:
        raise typer.Exit(1)


async def _replay(recording: Recording, to: str | None, file: Path | None, settings: list[str], folder: Any, progress: Any) -> Result:
    from disagg.ab.replay import replay as send_again
    from disagg.ab.replay import replay_environment
    from disagg.config import load_topology

    loaded = load_topology(file, overrides_of(settings)) if file is not None else None
    async with _endpoint(to, loaded, file, progress) as endpoint, _client(endpoint) as (client, model, vocab_size):
        environment = replay_environment(loaded, to or str(file), model)
        return await send_again(recording, client, vocab_size, folder, progress, environment)


@asynccontextmanager
async def _endpoint(to: str | None, loaded: Any, file: Path | None, progress: Any) -> AsyncIterator[str]:
    """The address that was given, or a deployment of the topology for as long as it is needed."""
    if to is not None:
        yield to
        return
    from disagg.ab.arms import Arm, on_free_ports
    from disagg.ab.ray_arms import RayArms
    from disagg.ab.replay import REPLAY
    from disagg.launch.session import RaySession

    assert file is not None
    with RaySession.start([loaded], None) as session:
        arm = on_free_ports(Arm(REPLAY, loaded.mode, loaded))
        source = RayArms(session, [arm], resident=False, base_dir=file.parent, say=progress.say)
        try:
            yield (await source.use(REPLAY)).endpoint
        finally:
            await source.close()


@asynccontextmanager
async def _client(endpoint: str) -> AsyncIterator[tuple[StreamingClient, str, int | None]]:
    """A client, the model's name and its vocabulary's size, None where nobody says."""
    from disagg.ab.external import KEY_VARIABLE, ExternalClient
    from disagg.client import AsyncClient

    if endpoint.startswith(("http://", "https://")):
        async with ExternalClient(endpoint, token=os.environ.get(KEY_VARIABLE)) as external:
            await external.max_model_len()
            yield external, external.model, None
        return
    async with AsyncClient(endpoint) as client:
        info = await client.model_info()
        yield client, info.model, info.vocab_size
