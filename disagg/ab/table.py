"""The result as a table for people: at most 100 columns, the same text in a terminal and in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from disagg.ab.result import Distribution, Figures, Result

ABSENT = "–"
WIDTH = 100
_FRAME = 3  # columns around a cell


def render(result: Result) -> RenderableType:
    """Tables, warnings and verdict. Arms that do not fit beside each other get a further table."""
    rows = _cells(result)
    lines: list[RenderableType] = [_table(result, rows, part) for part in _side_by_side(list(result.arms), rows)]
    if any(ABSENT in show(arm) for _, show in _ALL for arm in result.arms.values()):
        lines.append(Text(f"{ABSENT}  too few samples for this percentile (p95 needs 20, p99 100, p99.9 1,000)", style="dim"))
    if said := result.workload.get("description"):
        lines.append(Text(f"workload: {said}", style="dim"))
    lines += [Text(f"warning: {w}", style="yellow") for w in result.warnings]
    lines.append(Text.assemble(("verdict: ", "bold"), (result.verdict.choose, "bold green"), "\n", result.verdict.reason))
    return Group(*lines)


def _cells(result: Result) -> list[tuple[str, list[str]]]:
    """Label and one cell per arm. Without cells: the heading of a class."""
    arms = list(result.arms.values())
    rows = [(label, [show(arm) for arm in arms]) for label, show in _ALL] + _over_all_rates(result)
    for class_name in arms[0].classes:  # all arms were sent the same
        figures = [arm.classes[class_name] for arm in arms]
        rows.append((class_name, []))
        if figures[0].ttft_target_s is not None or figures[0].tpot_target_s is not None:
            rows.append(("  target TTFT / TPOT", [milliseconds(f.ttft_target_s, f.tpot_target_s) for f in figures]))
        rows += [(f"  {label}", [show(f) for f in figures]) for label, show in _CLASS]
    return rows


def _side_by_side(names: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> list[range]:
    """The arms of each table, as even as their widths allow; a cell is never broken but where one arm alone is too wide."""
    of_label = max(len(label) for label, _ in rows) + _FRAME
    of_arm = [max([len(name), *(len(cells[i]) for _, cells in rows if cells)]) + _FRAME for i, name in enumerate(names)]
    most = max(1, (WIDTH - 1 - of_label) // max(of_arm))
    tables = -(-len(names) // most)
    size = -(-len(names) // tables)
    return [range(begin, min(begin + size, len(names))) for begin in range(0, len(names), size)]


def _table(result: Result, rows: Sequence[tuple[str, list[str]]], part: range) -> Table:
    names = list(result.arms)
    is_first = part.start == 0
    table = Table(title=escape(_title(result)) if is_first else None, title_justify="left", min_width=WIDTH - 10 if is_first else None)
    table.add_column("")
    for i in part:
        table.add_column(names[i], justify="right")
    for label, cells in rows:
        if cells:
            table.add_row(escape(label), *(cells[i] for i in part))
        else:
            table.add_section()
            table.add_row(f"[bold]{escape(label)}[/]")
    return table


def _over_all_rates(result: Result) -> list[tuple[str, list[str]]]:
    """Goodput and where to operate, where several rates were measured; cost, where a price is known."""
    rows = []
    if result.curves:
        curves = [result.curves.get(name) for name in result.arms]
        bound = {"within": "", "at_least": "at least ", "below": "below, about "}
        shown = [ABSENT if c is None else f"{bound[c.goodput_bound]}{c.goodput_rps:.3g}/s" for c in curves]
        rows.append((f"goodput at {next(iter(result.curves.values())).level:.0%}", shown))
        ends = [ABSENT if c is None else f"{c.goodput_low_rps:.3g} to {c.goodput_high_rps:.3g}/s" for c in curves]
        rows.append(("  95 % interval", ends))
        rows.append(("best concurrency", [ABSENT if c is None else f"{c.recommended_concurrency:.1f}" for c in curves]))
    costs = [figures.cost_per_million_output_tokens for figures in result.arms.values()]
    if any(cost is not None for cost in costs):
        rows.append(("cost per 10^6 output tokens", [number(cost, 2) for cost in costs]))
    return rows


def _title(result: Result) -> str:
    environment = result.environment
    rounds = f"{len(result.rounds)} round{'s' if len(result.rounds) > 1 else ''}"
    at = f" at {result.rate_rps:g} requests/s" if len(result.points) > 1 else ""
    return f"{result.workload.get('name')} on {environment.get('model')}{at}: {rounds}, {environment.get('cpu')}"


def milliseconds(*values: float | None) -> str:
    """`1.5 / 320 ms`; absent values as a dash."""
    if all(v is None for v in values):
        return ABSENT
    return " / ".join(ABSENT if v is None else f"{v * 1e3:,.1f}" if v < 0.0995 else f"{v * 1e3:,.0f}" for v in values) + " ms"


def _body(d: Distribution) -> str:
    return milliseconds(d.p50, d.p95, d.p99)


def _tail(d: Distribution) -> str:
    return milliseconds(d.p50, d.p99, d.p999, d.max)


def number(value: float | None, digits: int = 1) -> str:
    """With thousands' commas; a dash for None."""
    return ABSENT if value is None else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    """In per cent; a dash for None."""
    return ABSENT if value is None else f"{value:.1%}"


_Row = tuple[str, Callable[[Figures], str]]

_LATENCIES: Sequence[_Row] = (
    ("TTFT p50 / p95 / p99", lambda f: _body(f.ttft_s)),
    ("TTFT max", lambda f: milliseconds(f.ttft_s.max)),
    ("TPOT p50 / p95 / p99", lambda f: _body(f.tpot_s)),
    ("ITL p50 / p99 / p99.9 / max", lambda f: _tail(f.itl_s)),
)
_ALL: Sequence[_Row] = (
    ("sent / completed", lambda f: f"{f.sent:,} / {f.completed:,}"),
    ("rejected / failed", lambda f: f"{f.rejected:,} / {f.failed:,}"),
    ("within SLO", lambda f: share(f.slo_attainment)),
    *_LATENCIES,
    ("E2E p50 / p95 / p99", lambda f: _body(f.e2e_s)),
    ("output tokens/s (input)", lambda f: f"{number(f.output_tokens_per_s)} ({number(f.input_tokens_per_s)})"),
    ("mean tokens in / out", lambda f: f"{number(f.mean_input_tokens, 0)} / {number(f.mean_output_tokens, 0)}"),
    ("mean concurrency", lambda f: number(f.mean_concurrency, 2)),
)
_CLASS: Sequence[_Row] = (
    ("sent, within SLO", lambda f: f"{f.sent:,}, {share(f.slo_attainment)}"),
    *_LATENCIES,
)
