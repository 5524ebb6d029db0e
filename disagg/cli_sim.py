"""`disagg sim`: a topology under a workload in simulated time, with the router that would run live."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from disagg.ab.trace_plan import AnyWorkload
    from disagg.config import SloClass, Topology
    from disagg.perf.profile import Profile
    from disagg.sim.settings import SimSettings
    from disagg.trace import Trace


def register(app: typer.Typer) -> None:
    app.command("sim")(sim)


def sim(
    topology: Path = typer.Argument(
        help="Topology file with engine.simulated settings, for example cluster/topologies/sim-h100-4p4d.yaml."
    ),
    workload: str = typer.Option("sim-mixed", "--workload", help="A shipped workload's or trace workload's name, or a file."),
    modes: list[str] = typer.Option([], "--mode", help="disagg, colocated or adaptive; repeatable; default: the topology's."),
    rate: float = typer.Option(1.0, "--rate", help="Send this many times as fast: arrivals are divided by it."),
    rates: str | None = typer.Option(
        None, "--rates", metavar="A,B,...", help="Requests per second to simulate, the workload scaled to each, as in disagg ab."
    ),
    goodput: bool = typer.Option(False, "--goodput", help="Find the highest rate at which 90 % of requests are inside their class."),
    out: Path = typer.Option(Path("out/sim"), "--out", help="Where result.json and requests.jsonl go; an older result there moves away."),
    traces: Path | None = typer.Option(None, "--traces", help="Folder of trace files; default: $DISAGG_TRACES."),
    seed: int | None = typer.Option(None, "--seed", help="Seed of the workload; default: its own."),
    link_gbps: float | None = typer.Option(
        None, "--link-gbps", help="Bandwidth of one worker's link each way, in 10^9 bytes/s; default: the profile's, else 50."
    ),
    network_ms: float = typer.Option(0.5, "--network-ms", help="One message one way, in milliseconds."),
    max_tokens: int | None = typer.Option(
        None, "--max-tokens", help="What every request asks for at most: the router has to guess answers' lengths; default: it is told."
    ),
    profile: Path | None = typer.Option(
        None, "--profile", help="A file of `disagg profile`: its step times and link, with the engine arguments of the topology's pools."
    ),
    report: bool = typer.Option(True, "--report/--no-report", help="Write report.html and plots beside the result."),
    settings: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Override a key of the topology, dotted; repeatable."),
) -> None:
    """Simulate: seconds of computing for hours of traffic; the same requests, rows and figures as `disagg ab`, marked simulated."""
    from disagg.ab.trace_workload import load_any_workload
    from disagg.cli_ab import rates_of
    from disagg.cli_up import overrides_of
    from disagg.config import load_topology
    from disagg.engine.simulated_settings import profiled_topology
    from disagg.errors import ConfigError
    from disagg.perf.profile import load_profile
    from disagg.sim.settings import SimSettings

    if rates is not None and (goodput or rate != 1.0):
        raise ConfigError(key="--rates", value=rates, expected="neither --rate nor --goodput beside it: it names each rate itself")
    loaded = load_topology(topology, overrides_of(settings))
    measured = None
    if profile is not None:
        loaded, measured = profiled_topology(loaded, profile), load_profile(profile)
    arms = {mode: loaded.with_mode(_mode(mode)) for mode in modes or [loaded.mode]}
    wanted = load_any_workload(workload)
    if seed is not None:
        wanted = wanted.model_copy(update={"seed": seed})
    sent = _traces(wanted, loaded.slo_classes, traces, 1.0 if goodput else rate, rates_of(rates))
    world = SimSettings(
        network_s=network_ms / 1e3,
        **_link(link_gbps, measured),
        timeout_s=wanted.timeout_s,
        prefix_block_tokens=next(iter(sent.values())).prefix_block_tokens,
        max_tokens=max_tokens,
    )
    if goodput:
        _print_goodput(arms, next(iter(sent.values())), world, rate)
    else:
        _print_result(arms, sent, world, wanted.model_dump(mode="json", exclude_none=True), out, report)


def _traces(
    workload: AnyWorkload, classes: Sequence[SloClass], folder: Path | None, factor: float, rates: Sequence[float]
) -> dict[float, Trace]:
    """What is sent, by mean requests/s: the workload at each of `rates` as `disagg ab` scales it, or else `factor` times as fast.

    Raises ConfigError.
    """
    from disagg.ab.rules import rounded
    from disagg.ab.trace_plan import RATELESS
    from disagg.ab.trace_workload import workload_trace
    from disagg.ab.workload import Workload, faster, mean_rate_rps
    from disagg.errors import ConfigError
    from disagg.trace import Scaling, scale

    trace = workload_trace(workload, classes, folder)
    own_rps = mean_rate_rps(workload) if isinstance(workload, Workload) else trace.mean_rate_rps
    if not rates:
        return {rounded(own_rps * factor): scale(trace, Scaling(rate_factor=factor)) if factor != 1.0 else trace}
    for rate in rates:
        if not 0 < rate < 1e6:
            raise ConfigError(key="--rates", value=rate, expected="requests per second above 0, separated by commas")
    if own_rps <= 0:
        raise ConfigError(key="--rates", value=rates, expected=RATELESS)
    if isinstance(workload, Workload):
        return {rate: workload_trace(faster(workload, rate / own_rps), classes) for rate in sorted(map(rounded, rates))}
    return {rate: scale(trace, Scaling(rate_factor=rate / own_rps)) for rate in sorted(map(rounded, rates))}


def _link(link_gbps: float | None, measured: Profile | None) -> dict[str, Any]:
    """Bandwidth, latency and bytes per token of transfers, as far as they are known."""
    known: dict[str, Any] = {} if measured is None else {"kv_bytes_per_token": measured.kv_bytes_per_token}
    if measured is not None and measured.link_bandwidth is not None:
        known |= {"link_bandwidth": measured.link_bandwidth, "link_latency_s": measured.link_latency_s}
    return known if link_gbps is None else known | {"link_bandwidth": link_gbps * 1e9}


def _mode(name: str) -> Any:
    from disagg.errors import ConfigError, nearest
    from disagg.types import Mode

    if name not in list(Mode):
        raise ConfigError(key="--mode", value=name, expected=nearest(name, list(Mode)))
    return Mode(name)


def _print_result(
    arms: dict[str, Topology], sent: dict[float, Trace], world: SimSettings, workload: dict[str, Any], out: Path, report: bool
) -> None:
    from rich.console import Console

    from disagg.ab.out import OutFolder
    from disagg.ab.rows import Row, RowFile
    from disagg.ab.simulate import check_arms, sim_rows, simulate_arms, simulated_result
    from disagg.ab.table import WIDTH, render

    check_arms(arms, world)  # before an older result moves away
    folder = OutFolder(out)
    trace = next(iter(sent.values()))
    rows: dict[str, list[Row]] = {name: [] for name in arms}
    simulated = []
    with Console(stderr=True, highlight=False).status("") as status, RowFile(folder.requests) as file:
        for rate_rps, name in itertools.product(sent, arms):
            status.update(f"simulating {name}: {len(sent[rate_rps].requests):,} requests at {rate_rps:g}/s")
            (arm,) = simulate_arms({name: arms[name]}, sent[rate_rps], world, rate_rps)
            for row in sim_rows(arm, trace.name):
                file.append(row)
                rows[name].append(row)
            simulated.append(arm.without_outcomes())
    result = simulated_result(simulated, rows, trace, workload, world)
    folder.write_result(result.to_json())
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(render(result))
    for note in trace.notes:
        console.print(f"trace: {note}", markup=False)
    console.print(f"{folder.result}  {folder.requests}", soft_wrap=True, markup=False)
    if report:
        from disagg.cli_ab_report import print_report

        print_report(folder.path)


def _print_goodput(arms: dict[str, Topology], trace: Trace, world: SimSettings, start: float) -> None:
    from disagg.sim.cluster import simulate
    from disagg.sim.goodput import find_goodput
    from disagg.trace import Scaling, scale

    for name, topology in arms.items():

        def attainment(rate: float, topology: Topology = topology) -> float:
            sent = scale(trace, Scaling(rate_factor=rate))
            return simulate(topology, sent.requests, world).attainment(topology.slo_classes) or 0.0

        found = find_goodput(attainment, start=start)
        rps = found.rate * trace.mean_rate_rps
        typer.echo(f"{name}: {rps:.2f} requests/s ({found.rate:.3f} x the workload's rate, {len(found.probes)} rates tried)")
