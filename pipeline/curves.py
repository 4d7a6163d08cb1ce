"""The curves of a run, from its metrics.jsonl: on a terminal by plotext, in a file by matplotlib. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.metrics import flat, is_evaluation

Series = tuple[list[int], list[float]]

# Panel: (name in the legend, path in the metrics) of each curve. What a run does not log is left out.
_PANELS: dict[str, tuple[tuple[str, str], ...]] = {
    "loss": (("loss", "loss"), ("objective", "objective"), ("token", "token")),
    "validation R@1 (%)": (("text to image", "val/t2i/1"), ("image to text", "val/i2t/1")),
    "learning rate": (("lr", "lr"),),
    "gradient norm": (("gradient norm", "grad_norm"),),
    "share of losses that read 0.0": (
        ("images", "saturation/zero_rows"),
        ("captions", "saturation/zero_columns"),
    ),
    "share of the time": (
        ("data", "time_share/data"),
        ("objective", "time_share/objective"),
        ("communication", "time_share/communication"),
    ),
}
_FROM_ZERO = "share"
_MOST_RATES = 4
_MANY = 4000  # points; more are thinned out for a terminal
_COLOURS = ("blue", "orange", "green", "red", "magenta", "cyan")
_ROOM_FOR_TWO, _HEIGHT = 100, 14  # characters


@dataclass(frozen=True)
class Panel:
    """Curves that share their axes: steps and values by name."""

    title: str
    curves: dict[str, Series]


def panels(lines: Iterable[dict[str, Any]]) -> list[Panel]:
    """What there is to draw; values that are not finite leave a gap."""
    numbers = [(line["step"], is_evaluation(line), flat(line)) for line in lines]
    found = []
    for title, curves in _PANELS.items():
        series = {name: _series(numbers, path) for name, path in curves}
        if title == "loss" and not _series(numbers, "token")[0]:
            series.pop("objective")  # it is the loss
        if title == "learning rate":
            series = _rates(numbers) or series
        if series := {name: points for name, points in series.items() if points[0]}:
            found.append(Panel(title, series))
    return found


def draw(found: list[Panel], width: int, colour: bool) -> str:
    """The panels as text of at most that many columns: one beside another where there is room for two.

    Without colour, several curves of a panel are drawn in letters.
    """
    columns = 2 if width >= _ROOM_FOR_TWO else 1
    lines: list[str] = []
    for start in range(0, len(found), columns):
        row = [_draw_panel(panel, width // columns, colour) for panel in found[start : start + columns]]
        joined = row[0]
        for other in row[1:]:
            joined = joined + other
        lines += str(joined.string(not colour)).splitlines()
    return "\n".join(line.rstrip() for line in lines)


def _draw_panel(panel: Panel, width: int, colour: bool) -> Any:
    """One panel as a matrix of characters; its title says which curve is which."""
    import plotext

    figure = plotext.figure  # there is one in the package
    figure.clear()
    figure.theme("simple")  # the colours of the terminal around the curves
    figure.plot_size(width, _HEIGHT)
    title = plotext.colorize(panel.title)
    several = len(panel.curves) > 1
    letters: list[str] = []
    for (name, (steps, values)), pixel in zip(panel.curves.items(), _COLOURS, strict=False):
        letters.append(next((c for c in (name[0], name[-1]) if c not in letters), "*"))
        symbol = "braille" if colour or not several else letters[-1]
        stride = math.ceil(len(steps) / _MANY)
        marker = plotext.marker(symbol, pixel)
        figure.draw(figure.signal(steps[::stride], values[::stride], marker=marker).lines())
        if several:
            title = title + "  " + plotext.colorize(name if colour else f"{letters[-1]} {name}", pixel)
    figure.title(title)
    steps = [step for curve in panel.curves.values() for step in curve[0]]
    ticks = _ticks(min(steps), max(steps))
    figure.ruler("x").ticks(ticks, [str(tick) for tick in ticks])
    matrix = figure.build()
    figure.clear()
    return matrix


def _ticks(first: int, last: int) -> list[int]:
    """At most seven round steps."""
    unit = next(u for k in range(20) for u in (10**k, 2 * 10**k, 5 * 10**k) if (last - first) / u <= 6)
    return list(range(-(-first // unit) * unit, last + 1, unit))


def write_png(found: list[Panel], title: str, path: Path) -> None:
    """The panels as a picture, complete or absent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = max(1, math.ceil(len(found) / 2))
    figure = Figure(figsize=(11, 0.6 + 2.8 * rows), layout="constrained")
    figure.suptitle(title)
    for number, panel in enumerate(found):
        axes = figure.add_subplot(rows, 2, number + 1)
        for name, (steps, values) in panel.curves.items():
            axes.plot(steps, values, linewidth=1.2, marker="o" if len(steps) <= 40 else None, markersize=3, label=name)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel("step", fontsize=9)
        if panel.title.startswith(_FROM_ZERO):
            axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", scilimits=(-3, 4))
        axes.grid(alpha=0.3)
        if len(panel.curves) > 1:
            axes.legend(fontsize=8)
    aside = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(aside)
    aside.replace(path)


def _series(numbers: list[tuple[int, bool, dict[str, float]]], path: str) -> Series:
    points = [(step, found[path]) for step, _, found in numbers if math.isfinite(found.get(path, math.nan))]
    return [step for step, _ in points], [value for _, value in points]


def _rates(numbers: list[tuple[int, bool, dict[str, float]]]) -> dict[str, Series]:
    """The learning rates of the parameter groups, equal ones once; of many, the highest and the lowest."""
    first = next((found for _, evaluation, found in numbers if not evaluation), {})
    curves: dict[tuple[float, ...], tuple[str, Series]] = {}
    for path in (name for name in first if name.startswith("lr_groups/")):
        series = _series(numbers, path)
        curves.setdefault(tuple(series[1]), (f"group {path.removeprefix('lr_groups/')}", series))
    if len(curves) > _MOST_RATES:
        ordered = sorted(curves)
        return {"highest": curves[ordered[-1]][1], "lowest": curves[ordered[0]][1]}
    return dict(curves.values())
