"""How arms and phases look: colours of Okabe and Ito (2008) that colour-blind readers tell apart, and never colour alone.

Each arm has a colour, a line style and a marker; each phase a colour and a hatch. matplotlib is imported here and in plots.py only.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PHASES = {
    "queue": ("#E69F00", "//"),
    "prefill": ("#0072B2", ""),
    "network": ("#BBBBBB", ""),
    "transfer": ("#D55E00", "xx"),
    "waiting": ("#CC79A7", ".."),
    "decode": ("#009E73", "\\\\"),
}
_SETTINGS = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "hatch.linewidth": 0.5,
    "svg.hashsalt": "disagg",  # the same figures give the same bytes
}


@dataclass(frozen=True, slots=True)
class Look:
    """One arm's."""

    colour: str
    line: Any
    marker: str


def looks(arms: Sequence[str]) -> dict[str, Look]:
    """By arm, in the order of the result; the eighth arm begins anew with other markers."""
    return {
        name: Look(_COLOURS[i % len(_COLOURS)], _LINES[i % len(_LINES)], _MARKERS[(i + i // len(_COLOURS)) % len(_MARKERS)])
        for i, name in enumerate(arms)
    }


@dataclass(frozen=True, slots=True)
class Plot:
    """A finished figure. `alt`: what it shows, for who cannot see it. `svg`: as a data URI; `png`: bytes."""

    name: str
    title: str
    alt: str
    svg: str
    png: bytes

    def write(self, folder: Path) -> Path:
        """Save the PNG."""
        path = folder / f"{self.name}.png"
        path.write_bytes(self.png)
        return path


@contextmanager
def drawing(width_in: float = 5.4, height_in: float = 3.4, *, rows: int = 1, columns: int = 1) -> Iterator[tuple[Any, Any]]:
    """A matplotlib figure and its axes, closed at the end. Raises ConfigError without matplotlib."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "the report's plots need matplotlib: pip install 'disagg[bench]'",
            key="matplotlib",
            value=None,
            expected="pip install 'disagg[bench]'",
        ) from error
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False)


def log_scale(axis: Any) -> None:
    """A logarithmic axis with a few plain numbers on it."""
    from matplotlib.ticker import FuncFormatter, Locator, NullFormatter, NullLocator

    class FewTicks(Locator):
        def __call__(self) -> list[float]:
            return log_ticks(*axis.get_view_interval())

    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    axis.set_major_locator(FewTicks())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers in [low, high] for a logarithmic axis: three where that can be, seven at most."""
    low, high = sorted((max(low, 1e-12), max(high, 1e-12)))
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.7, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)):
        found = [step * 10.0**n for n in decades for step in steps if low <= step * 10.0**n <= high]
        if len(found) >= 3:
            break
    if len(found) < 2:  # too narrow for round ones
        return [float(f"{low + share * (high - low):.3g}") for share in (0.1, 0.5, 0.9)]
    return found[:: -(-len(found) // 7)]


def finished(figure: Any, name: str, title: str, alt: str) -> Plot:
    """Both forms of a figure. The layout is most of the work: it is found once, where `savefig` would find it twice for each form."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    svg, png = io.BytesIO(), io.BytesIO()
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})
    figure.set_dpi(150)
    FigureCanvasAgg(figure).print_png(png)
    return Plot(name, title, alt, "data:image/svg+xml;base64," + base64.b64encode(svg.getvalue()).decode(), png.getvalue())
