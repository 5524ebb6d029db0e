"""From a folder with result.json and requests.jsonl to report.html, one file that needs nothing else, and PNG plots beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

import disagg
from disagg.ab.curve import METHOD
from disagg.ab.flip import target_flips
from disagg.ab.measures import tpot, ttft
from disagg.ab.report import plots
from disagg.ab.report.bands import attainment_bands, by_rate, latency_bands
from disagg.ab.report.busy import busy_workers
from disagg.ab.report.pick import same_requests
from disagg.ab.report.style import Plot, looks
from disagg.ab.report.tables import Table, curve_table, effect_table, figure_table, law_table, phase_table, rate_table
from disagg.ab.result import Result, classes_of, read_result
from disagg.ab.rows import Row, read_rows
from disagg.ab.verdict import EITHER, judge
from disagg.ab.words import comparisons_of, opening, verdict_pair
from disagg.errors import DisaggError

_SHOWN_REQUESTS = 9


@dataclass(slots=True)
class Section:
    """One part of the page."""

    title: str
    notes: list[str] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def add(self, *items: Plot | Table | None) -> Section:
        """Append what there is."""
        self.plots += [item for item in items if isinstance(item, Plot)]
        self.tables += [item for item in items if isinstance(item, Table)]
        return self


def write_report(folder: Path) -> Path:
    """Write report.html and plots/*.png beside a result; returns the page's path.

    Raises ConfigError when the result cannot be read or matplotlib is missing, DisaggError when the folder cannot be written.
    """
    result, rows = read_result(folder / "result.json"), read_rows(folder / "requests.jsonl")
    by_arm = {name: [r for r in rows if r.arm == name] for name in result.arms}
    sections = _sections(result, by_arm)
    text = _page(result, by_arm, sections)
    path = folder / "report.html"
    try:
        (folder / "plots").mkdir(exist_ok=True)
        for section in sections:
            for plot in section.plots:
                plot.write(folder / "plots")
        unfinished = folder / "report.html.unfinished"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise DisaggError(f"cannot write {path}: {error.strerror}; result.json and requests.jsonl are whole") from error
    return path


def _page(result: Result, rows: dict[str, list[Row]], sections: Sequence[Section]) -> str:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((Path(__file__).parent / "page.html.j2").read_text(encoding="utf-8"))
    simulated = " (simulated)" if result.environment.get("simulated") else ""
    return template.render(
        title=f"{result.workload.get('name')} on {result.environment.get('model')}{simulated}",
        opening=_opening(result, rows),
        warnings=result.warnings,
        sections=sections,
        method=_method(result),
        workload=json.dumps(result.workload, indent=1, ensure_ascii=False),
        environment=json.dumps(result.environment, indent=1, ensure_ascii=False),
        version=disagg.__version__,
    )


def _opening(result: Result, rows: dict[str, list[Row]]) -> list[str]:
    pair = verdict_pair(result)
    if pair is None:
        return opening(result, {}, ())
    classes, simulated = classes_of(result), bool(result.environment.get("simulated"))
    at = {arm: by_rate(rows[arm]) for arm in pair}
    shared = [rate for rate in at[pair[0]] if rate in at[pair[1]]]
    choices = {rate: judge(at[pair[0]][rate], at[pair[1]][rate], classes, pair, simulated=simulated).choose for rate in shared}
    flips = []
    if result.verdict.choose != EITHER:
        other = pair[1] if pair[0] == result.verdict.choose else pair[0]
        flips = target_flips(_reference(result, rows[result.verdict.choose]), _reference(result, rows[other]), classes)
    return opening(result, choices, flips)


def _reference(result: Result, rows: Sequence[Row]) -> list[Row]:
    """The rows of the rate that the figures are about; of a result without rates, all."""
    return [r for r in rows if result.rate_rps is None or r.rate_rps is None or r.rate_rps == result.rate_rps]


def _sections(result: Result, rows: dict[str, list[Row]]) -> list[Section]:
    look, classes = looks(list(rows)), classes_of(result)
    at_reference = {arm: _reference(result, own) for arm, own in rows.items()}
    pairs = list(dict.fromkeys(c.arms for c in result.verdict.comparisons))
    verdict = Section("The comparison", [result.verdict.reason])
    for pair in pairs:
        verdict.add(plots.effects([c for c in comparisons_of(result, pair) if c.arms == pair]), effect_table(comparisons_of(result, pair)))
    curves = Section("Over the offered rate", [METHOD[:1].upper() + METHOD[1:] + "."])
    if len({r.rate_rps for own in rows.values() for r in own}) > 1:
        loads = {
            arm: [(p.rate_rps, f.output_tokens_per_s or 0.0, f.e2e_s.mean or 0.0) for p in result.points if (f := p.arms.get(arm))]
            for arm in rows
        }
        attained = {arm: {"": attainment_bands(own, classes)} for arm, own in rows.items()}
        curves.add(
            plots.against_rate(attained, "attainment", "SLO attainment (band: 95 % interval; dotted: the level)", "% within SLO", look),
            plots.latency_against_throughput(loads, result.curves, look),
            *(
                plots.against_rate(
                    {arm: latency_bands(own, kind, (50, 95)) for arm, own in rows.items()},
                    name.lower(),
                    f"{name} p50 and p95",
                    f"{name}, ms",
                    look,
                )
                for name, kind in (("TTFT", ttft), ("TPOT", tpot))
            ),
            curve_table(result),
            rate_table(result),
        )
    spread = Section("How latencies are distributed", _at(result)).add(plots.distributions(at_reference, look), figure_table(result))
    phases = Section(
        "Where the time goes",
        [*_at(result), "Network: what the gateway did not see of the TTFT. Transfer: KV not yet there at the first token."],
    )
    phases.add(*_phase_plots(result), plots.timeline(same_requests(at_reference, _SHOWN_REQUESTS)), phase_table(result))
    busy = Section(
        "What the workers did", ["From the rows: a prompt ran there, or only streams were decoded; not the use of its hardware."]
    )
    busy.add(plots.utilisation({arm: busy_workers(own) for arm, own in at_reference.items()}))
    law = Section("Is the run consistent?").add(law_table(result))
    return [verdict, curves, spread, phases, busy, law]


def _at(result: Result) -> list[str]:
    return [f"At {result.rate_rps:g} requests/s."] if result.rate_rps is not None else []


def _phase_plots(result: Result) -> list[Plot | None]:
    known = {name: a.phases for name, a in result.arms.items() if a.phases is not None}

    def means(*names: str) -> dict[str, dict[str, float]]:
        return {arm: {name: getattr(p, f"{name}_s").mean or 0.0 for name in names} for arm, p in known.items()}

    return [
        plots.phase_bars(means("queue", "prefill", "network"), "TTFT by phase (mean)", "ttft-phases"),
        plots.phase_bars(means("transfer", "waiting"), "First gap by phase (mean)", "first-gap-phases"),
    ]


def _method(result: Result) -> list[str]:
    said = [
        "Every arm got the same requests at the same instants, in turns. Latencies are those of completed requests; attainment counts "
        "every request that was sent. A percentile is left out where there are too few samples for it.",
        "Intervals: block bootstrap over windows of time, widened for how rounds differ, 95 % for all measures of the verdict together. A "
        "difference is shown when its interval leaves out zero and it is larger than 2 points of attainment or 5 % of a latency or rate.",
    ]
    if result.chunk_search is not None:
        said.append(f"The colocated arm's chunk was tuned first: {result.chunk_search.chosen_tokens} tokens ({result.chunk_search.rule}).")
    if result.environment.get("simulated"):
        said.append("Simulated: no engine ran, so nothing here is a claim about a real one.")
    return said
