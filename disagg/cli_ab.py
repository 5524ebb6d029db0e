"""`disagg ab`: which way to serve, on your model, workload and machine."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from disagg.cli_ab_fit import FIT_HELP, fit_of, fitted_to_machine
from disagg.cli_ab_report import PRICE_HELP, DefaultCommand, add_to, print_result
from disagg.cli_up import SET_HELP, overrides_of

if TYPE_CHECKING:
    from disagg.ab.arms import Arm
    from disagg.ab.out import OutFolder
    from disagg.ab.progress import RunProgress
    from disagg.ab.result import Result
    from disagg.ab.run import Comparison
    from disagg.ab.trace_plan import AnyWorkload
    from disagg.config import Topology
    from disagg.launch.session import RaySession

HELP = (
    "Which way to serve, on your model, workload and machine. `disagg ab TOPOLOGY` is short for `disagg ab run TOPOLOGY`; "
    "its options: `disagg ab run --help`."
)
ARMS_HELP = (
    "What to compare, separated by commas: colocated, disagg (every split of the workers), disagg-1p1d (that split), adaptive, "
    "external=URL or external-NAME=URL (any server with OpenAI's API); one name twice is an A/A test. "
    "Default: the topology's split and colocated."
)


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=DefaultCommand, no_args_is_help=True, help=HELP)
    group.command("run")(ab)
    add_to(group)
    app.add_typer(group, name="ab")


def ab(
    topology: Path = typer.Argument(help="Topology file, for example cluster/topologies/cpu-1p1d.yaml."),
    workload: str = typer.Option(
        "cpu-interference", "--workload", help="A shipped workload's or trace workload's name, or a file like those in bench/workloads."
    ),
    out: Path = typer.Option(
        Path("out/ab"), "--out", help="Where result.json and requests.jsonl go; an older result there moves to older/."
    ),
    arms: str | None = typer.Option(None, "--arms", help=ARMS_HELP),
    rates: str | None = typer.Option(
        None, "--rates", metavar="A,B,...", help="Requests per second to measure, the workload scaled to each; default: its own rate."
    ),
    sweep: bool = typer.Option(False, "--sweep", help="Find the rates: from light to past saturation, by bisection on SLO attainment."),
    points: int = typer.Option(5, "--points", min=2, max=20, help="How many rates --sweep measures."),
    rounds: int | None = typer.Option(
        None, "--rounds", min=1, max=100, help="Rounds of all arms; default: the workload's, then more until differences are clear."
    ),
    max_rounds: int | None = typer.Option(None, "--max-rounds", min=1, max=100, help="The most rounds, without --rounds; default: twice."),
    limit_min: float | None = typer.Option(
        None, "--limit-min", min=0.1, help="Minutes, chunk search included, after which no further round begins; the first is always whole."
    ),
    fit_machine: str | None = typer.Option(None, "--fit-machine", metavar="tokens|time", help=FIT_HELP),
    seed: int | None = typer.Option(None, "--seed", help="Seed of due times, lengths and prompts; default: the workload's."),
    settings: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help=SET_HELP),
    chunk: str | None = typer.Option(
        None,
        "--chunk",
        "--colocated-chunk",
        metavar="N|topology",
        help="Tokens per engine step (prefill chunk) of the colocated arm: a number, or the topology's; default: found by a short search.",
    ),
    chunk_trials: int = typer.Option(5, "--chunk-trials", min=2, max=9, help="The most sizes that the search for the chunk measures."),
    duration_s: float | None = typer.Option(
        None, "--duration-s", min=1, help="How long each round sends, in seconds; default: the workload's. Not for traces."
    ),
    resume: bool = typer.Option(False, "--resume", help="Go on with the interrupted run in --out; what it has measured is kept."),
    resident: bool | None = typer.Option(
        None, "--resident/--no-resident", help="Keep all arms' engines up all the time; default: where memory allows, on a local Ray."
    ),
    address: str | None = typer.Option(None, "--address", help="A running Ray (auto or HOST:PORT); default: a local one is started."),
    price_per_gpu_hour: float | None = typer.Option(None, "--price-per-gpu-hour", min=0.0, help=PRICE_HELP),
) -> None:
    """Send the same requests at the same times to every arm, in turns, on the same cores; print a table and a verdict."""
    from rich.console import Console

    from disagg.ab.out import OutFolder
    from disagg.ab.progress import RunProgress
    from disagg.ab.result import priced
    from disagg.ab.rules import RangeSearch
    from disagg.ab.run import begin, compare
    from disagg.ab.trace_workload import load_any_workload
    from disagg.ab.turns import check_external
    from disagg.config import load_topology
    from disagg.errors import ConfigError

    loaded = load_topology(topology, overrides_of(settings))
    wanted = _lasting(load_any_workload(workload), duration_s)
    asked_rates = rates_of(rates)
    if sweep and asked_rates:
        raise ConfigError(key="--sweep", value=rates, expected="no --rates beside it: it finds them")
    chosen = _arms(loaded, arms, chunk)
    folder: OutFolder | None = None
    if fit_machine is not None:
        fit = fit_of(fit_machine)
        folder = OutFolder(out, resume=resume)
        loaded, wanted = fitted_to_machine(loaded, wanted, fit, topology.parent, folder, address)
        chosen = _arms(loaded, arms, chunk)
    comparison = compare(
        loaded,
        wanted,
        resident=_stays_up(chosen) and address is None if resident is None else resident,
        arms=chosen,
        rates=asked_rates,
        search=RangeSearch(points=points) if sweep else None,
        rounds=rounds,
        most_rounds=max_rounds,
        limit_s=None if limit_min is None else 60 * limit_min,
        seed=seed,
        vocab_size=_vocab_size(loaded, topology.parent) if all(arm.topology is None for arm in chosen) else None,
    )
    asyncio.run(check_external(comparison.arms, comparison.workload, comparison.classes))
    folder = folder or OutFolder(out, resume=resume)
    begin(comparison, folder, resume=resume)
    with RunProgress(Console(stderr=True)) as progress:
        if folder.moved_to is not None:
            progress.say(f"the older result is now in {folder.moved_to}")
        with _session(comparison, address) as session:
            try:
                result = asyncio.run(
                    _run(comparison, session, topology.parent, folder, progress, 0 if chunk else chunk_trials, resume=resume)
                )
            except (KeyboardInterrupt, asyncio.CancelledError):
                progress.say(f"interrupted; the requests that ended are in {folder.requests}; --resume goes on from there")
                raise typer.Exit(130) from None
    if price_per_gpu_hour is not None:
        result = priced(result, price_per_gpu_hour)
        folder.write_result(result.to_json())
    print_result(result, folder)
    if result.not_a_result is not None:
        raise typer.Exit(1)


def _arms(topology: Topology, text: str | None, chunk: str | None) -> tuple[Arm, ...]:
    """The arms, the colocated ones with the chunk that was given."""
    from disagg.ab.arms import own_arms, parse_arms, with_chunk
    from disagg.errors import ConfigError

    arms = own_arms(topology) if text is None else parse_arms(text, topology)
    if chunk is None or chunk == "topology":
        return arms
    if not chunk.isdecimal():
        raise ConfigError(key="--chunk", value=chunk, expected="a number of tokens, or: topology")
    return tuple(with_chunk(arm, int(chunk)) for arm in arms)


def _lasting(workload: AnyWorkload, duration_s: float | None) -> AnyWorkload:
    """The workload with another duration; streams that have one of their own keep it."""
    from disagg.ab.workload import Workload
    from disagg.errors import ConfigError

    if duration_s is None:
        return workload
    if not isinstance(workload, Workload):
        raise ConfigError(
            key="--duration-s", value=duration_s, expected="a workload of streams; a trace's part is its file's trace.window_s"
        )
    return workload.model_copy(update={"duration_s": duration_s})


def _stays_up(arms: tuple[Arm, ...]) -> bool:
    from disagg.ab.arms import can_be_resident, deployed
    from disagg.ab.environment import free_memory_bytes

    return can_be_resident(deployed(arms), free_memory_bytes())


def rates_of(text: str | None) -> tuple[float, ...]:
    """Of --rates. Raises ConfigError."""
    from disagg.errors import ConfigError

    try:
        return tuple(float(part) for part in (text or "").split(",") if part.strip())
    except ValueError:
        raise ConfigError(key="--rates", value=text, expected="requests per second, separated by commas: 0.5,1,2") from None


def _vocab_size(topology: Topology, base_dir: Path) -> int | None:
    """From the model's config, where it is on this machine: prompts are made of its token ids."""
    import json

    from disagg.models.resolve import resolve_model

    if topology.engine.kind == "simulated":
        return None
    folder = resolve_model(topology.model, base_dir, check_hub=False)
    if not isinstance(folder, Path):
        return None
    value = json.loads((folder / "config.json").read_text()).get("vocab_size")
    return value if isinstance(value, int) else None


def _session(comparison: Comparison, address: str | None) -> AbstractContextManager[RaySession | None]:
    """A Ray for the arms that are ours; external ones need none."""
    from disagg.launch.session import RaySession

    topologies = list(comparison.topologies.values())
    return RaySession.start(topologies, address) if topologies else contextlib.nullcontext()


async def _run(
    comparison: Comparison,
    session: RaySession | None,
    base_dir: Path,
    folder: OutFolder,
    progress: RunProgress,
    chunk_trials: int,
    *,
    resume: bool,
) -> Result:
    """Run, and take all arms down whatever happens; SIGTERM ends like Ctrl-C. `chunk_trials`: 0 for no search."""
    from disagg.ab.ray_arms import RayArms
    from disagg.ab.ray_tuning import tuned_on_ray
    from disagg.ab.run import run_ab

    task: asyncio.Task[Any] | None = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    if chunk_trials:
        comparison = await tuned_on_ray(comparison, session, base_dir, folder, progress, chunk_trials)
    source = RayArms(session, comparison.arms, resident=comparison.resident, base_dir=base_dir, say=progress.say)
    try:
        return await run_ab(comparison, source, folder, progress, resume=resume)
    finally:
        await source.close()
