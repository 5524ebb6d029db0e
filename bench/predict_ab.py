"""How well a profile and the simulator foresee an A/B of real engines: the same requests, at the instants at which they were sent.

    disagg profile TOPOLOGY --out profile.json
    disagg ab TOPOLOGY --workload NAME --out OUT           (or `make bench`: OUT is out/bench/NAME, TOPOLOGY out/bench/topology.yaml)
    python -m bench.predict_ab OUT --profile profile.json [--rescale]

Nothing of the A/B is fitted on: the simulator takes the profile's step times and link, the engine arguments of OUT's arms and the live
router. For each arm, rate and class (in brackets how many were answered, measured and foreseen): TPOT and TTFT, measured, foreseen and
foreseen over measured; then attainment and both verdicts. Aims: TPOT p50 and p99 within 15 %, attainment within 0.05, the same verdict.

A machine that is shared with others is not as quick in the A/B as it was when the profile was taken. `--rescale` fits that, and that alone:
all step times are multiplied by one number, the same for all arms, with which the median TPOT over all arms at the lightest rate comes out
as measured. That rate then shows how well the arms agree on the number, and is no prediction (it says "fitted"); the other rates are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from disagg.ab.conclude import conclude
from disagg.ab.result import arm_figures
from disagg.ab.rows import Row, read_rows
from disagg.ab.simulate import SimulatedArm, sim_rows
from disagg.config import SloClass, Topology, parse_topology
from disagg.engine.simulated_settings import profiled_topology, simulated_model_info
from disagg.errors import ConfigError
from disagg.perf.model_config import load_shape
from disagg.perf.profile import Profile, StepCoefficients, load_profile
from disagg.sim.cluster import Simulation
from disagg.sim.dispatch import make_dispatcher
from disagg.sim.settings import SimSettings
from disagg.trace import TraceRequest

FITTING_ROUNDS = 3


def foreseen(rows: Sequence[Row], live: Topology, topology: Topology, profile: Profile, timeout_s: float) -> list[Row]:
    """The same requests of one arm as the simulator serves them, its turns one after the other: the router keeps what it has learned.

    A turn is a round at a rate. `topology`: with the profile's step times. The router starts from what that of the `live` topology
    started from.
    """
    link = {"link_bandwidth": profile.link_bandwidth, "link_latency_s": profile.link_latency_s} if profile.link_bandwidth else {}
    world = SimSettings(kv_bytes_per_token=profile.kv_bytes_per_token, timeout_s=timeout_s, **link)  # type: ignore[arg-type]  # by name
    sent = sorted(rows, key=lambda row: (*_turn(row), row.sent_s))
    begins_s, end_s = {}, 0.0
    for turn in sorted({_turn(row) for row in rows}):
        begins_s[turn] = end_s
        end_s += max(row.end_s for row in rows if _turn(row) == turn) + timeout_s
    requests = tuple(TraceRequest(begins_s[_turn(r)] + r.sent_s, r.input_tokens, r.max_output_tokens, r.slo_class) for r in sent)
    model = simulated_model_info(topology.simulated(next(iter(topology.active_pools()))), topology.model)
    report = Simulation(topology, requests, world, dispatcher=make_dispatcher(live, model, load_shape(profile.model_name))).run()
    made = sim_rows(SimulatedArm(rows[0].arm, topology, report, rows[0].rate_rps or 0.0), "measured")
    return [_of_turn(row, real, begins_s[_turn(real)]) for row, real in zip(made, sent, strict=True)]


def scaled(profile: Profile, factor: float) -> Profile:
    """The same worker, its steps `factor` times as long."""
    s = profile.steps
    times = [factor * value for value in (s.base_s, s.over_s, s.prompt_token_s, s.pair_s, s.decode_s, s.context_s)]
    return replace(profile, steps=StepCoefficients(*times, ridge_tokens=s.ridge_tokens))


def drift(measured: Mapping[str, Sequence[Row]], live: Mapping[str, Topology], profile: Profile, timeout_s: float) -> tuple[float, float]:
    """(how many times as long steps were in the A/B as in the profile, the rate that says so): by the median TPOT at the lightest rate.

    Raises ConfigError where there is one rate only, for nothing would be left to foresee, and where it has no TPOT.
    """
    rates = sorted({row.rate_rps or 0.0 for rows in measured.values() for row in rows})
    light = {arm: [row for row in rows if (row.rate_rps or 0.0) == rates[0]] for arm, rows in measured.items()}
    wanted = _tpots(row for rows in light.values() for row in rows)
    if len(rates) < 2 or not wanted:
        raise ConfigError(key="--rescale", value=rates, expected="an A/B at several rates, with answers of several tokens at the lightest")
    factor = 1.0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(FITTING_ROUNDS):
            tried = scaled(profile, factor)
            file = Path(folder) / "profile.json"
            file.write_text(tried.to_json())
            made = [foreseen(rows, live[arm], profiled_topology(live[arm], file), tried, timeout_s) for arm, rows in light.items() if rows]
            factor *= statistics.median(wanted) / statistics.median(_tpots(row for rows in made for row in rows))
    return factor, rates[0]


def _tpots(rows: Iterable[Row]) -> list[float]:
    return [row.tpot_s for row in rows if row.is_whole and row.tpot_s is not None]


def _turn(row: Row) -> tuple[int, float]:
    return row.round, row.rate_rps or 0.0


def _of_turn(row: Row, real: Row, begin_s: float) -> Row:
    times = {"due_s": row.due_s - begin_s, "sent_s": row.sent_s - begin_s, "end_s": row.end_s - begin_s}
    return replace(row, round=real.round, rate_rps=real.rate_rps, token_s=tuple(t - begin_s for t in row.token_s), **times)


def line(name: str, what: str, ours: Sequence[float | None], theirs: Sequence[float | None], percents: Sequence[int]) -> str:
    """Measured, foreseen, and the ratio at each percentile, in milliseconds."""
    parts = []
    for percent in percents:
        known = [[v for v in values if v is not None] for values in (theirs, ours)]
        if all(known):  # of few requests the 99th percentile is the largest
            measured, found = (float(np.percentile(values, percent)) for values in known)
            parts.append(f"p{percent} {measured * 1e3:,.0f} / {found * 1e3:,.0f} ms ({found / measured:.2f})")
    return f"{name:<40}{what}  " + "   ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--rescale", action="store_true", help="multiply the profile's step times by what the lightest rate says")
    given = parser.parse_args()
    try:
        show(given.out, load_profile(given.profile), given.rescale)
    except ConfigError as error:
        parser.error(str(error))


def show(out: Path, profile: Profile, rescale: bool) -> None:
    """Print measured and foreseen of the A/B in `out`."""
    run = json.loads((out / "run.json").read_text())
    timeout_s = run["workload"]["timeout_s"]
    measured: dict[str, list[Row]] = {}
    found: dict[str, list[Row]] = {}
    classes: Sequence[SloClass] = ()
    for row in read_rows(out / "requests.jsonl"):
        if not isinstance(run["arms"][row.arm], str):  # the URL of an external arm: nobody knows what serves there
            measured.setdefault(row.arm, []).append(row)
    live = {arm: parse_topology(run["arms"][arm]) for arm in measured}
    fitted_rps = -1.0
    if rescale:
        factor, fitted_rps = drift(measured, live, profile, timeout_s)
        profile = scaled(profile, factor)
        print(f"step times x {factor:.3f}: the median TPOT at {fitted_rps:g}/s, which is fitted, is then as measured")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.json"
        file.write_text(profile.to_json())
        for arm, own in measured.items():
            found[arm] = foreseen(own, live[arm], profiled_topology(live[arm], file), profile, timeout_s)
            classes = live[arm].slo_classes
    print("measured / foreseen (foreseen over measured)")
    for arm in measured:
        for rate in sorted({row.rate_rps or 0.0 for row in measured[arm]}):
            real, ours = ([row for row in rows[arm] if (row.rate_rps or 0.0) == rate] for rows in (measured, found))
            compare(f"{arm} {rate:g}/s{' fitted' if rate == fitted_rps else ''}", real, ours, classes)
    if len(measured) > 1:
        for said, all_rows, simulated in (("measured", measured, False), ("foreseen", found, True)):
            verdict, _ = conclude(all_rows, classes, simulated=simulated)
            print(f"verdict, {said}: {verdict.choose}: {verdict.reason}")


def compare(what: str, measured: Sequence[Row], found: Sequence[Row], classes: Sequence[SloClass]) -> None:
    """Print one arm at one rate."""
    for name in dict.fromkeys(row.slo_class for row in measured):
        real, ours = ([r for r in rows if r.slo_class == name and r.is_whole] for rows in (measured, found))
        print(line(f"{what} {name} ({len(real)}/{len(ours)})", "TPOT", [r.tpot_s for r in ours], [r.tpot_s for r in real], (50, 99)))
        print(line("", "TTFT", [r.ttft_s for r in ours], [r.ttft_s for r in real], (50, 95)))
    shares = [arm_figures(rows, classes, None).slo_attainment or 0.0 for rows in (measured, found)]
    print(f"{what:<40}in class  {shares[0]:.3f} / {shares[1]:.3f} ({shares[1] - shares[0]:+.3f})")


if __name__ == "__main__":
    main()
