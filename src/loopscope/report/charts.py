"""How is a figure drawn? As a Vega-Lite chart: panels in a full grid, with one key, the same as PNG, PDF and SVG.

A drawing is what a figure shows, to be laid out in a style: `page`, or `paper`, which is as wide as a column.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import altair as alt
import vl_convert

from loopscope.report.colours import looks_of, shades_of
from loopscope.report.curves import MOST, POINTS, Binning, Line, Panel, chosen_lines
from loopscope.report.layout import GREY, Chart, FigureGrid, FigureStyle, Specification, figure_style, wrap
from loopscope.writing import write_bytes

_DASHES = ([1, 0], [6, 2], [2, 2], [8, 2, 2, 2])
"""In turn, beside colour and mark: a line that another one nearly covers shows through."""
_MARKS = 5
"""On a line."""


Drawing = Callable[[FigureStyle], Specification]


def frontiers(panels: Sequence[Panel], scaled_alone: bool = False) -> Drawing | None:
    """Panels of curves on one scale, with their targets; or each on a scale of its own, without."""
    panels = [panel for panel in panels if panel.lines]
    return partial(_frontiers, panels, scaled_alone) if panels else None


def difficulty_chart(
    panels: Sequence[Binning], percent: bool = False, shared: bool = True, per_row: int | None = None
) -> Drawing | None:
    """A line a difficulty; with shared heights the panels show the same quantity on the same scale."""
    return partial(_difficulties, panels, percent, shared, per_row) if panels else None


def write_figure(drawing: Drawing, folder: Path, name: str, style: str = "page") -> None:
    """Writes a figure as PNG, PDF and SVG."""
    chosen = figure_style(style)
    specification = drawing(chosen)
    svg = vl_convert.vegalite_to_svg(specification)
    if chosen.total is not None:  # what axes and titles take is known once they are drawn
        fitted = chosen.width + (chosen.total - _width(svg)) / specification["usermeta"]["columns"]
        specification = drawing(replace(chosen, width=fitted))
        svg = vl_convert.vegalite_to_svg(specification)
    svg = _renumbered(svg)
    write_bytes(folder / f"{name}.svg", svg.encode())
    write_bytes(folder / f"{name}.png", vl_convert.svg_to_png(svg, ppi=chosen.png_ppi))
    write_bytes(folder / f"{name}.pdf", vl_convert.svg_to_pdf(svg))


def _renumbered(svg: str) -> str:
    """With clip paths from 0 on: they are numbered through all drawings of a process otherwise, not by figure."""
    numbers: dict[str, int] = {}
    pattern = r'((?:id="|url\(#)(?:clip|gradient_))(\d+)'
    return re.sub(pattern, lambda found: f"{found[1]}{numbers.setdefault(found[2], len(numbers))}", svg)


def _width(svg: str) -> float:
    found = re.search(r'<svg[^>]* width="([\d.]+)', svg)
    assert found is not None
    return float(found[1])


def _frontiers(panels: Sequence[Panel], scaled_alone: bool, style: FigureStyle) -> Specification:
    floor = min(float(line.accuracy.min()) for panel in panels for line in panel.lines)
    heights = [panel.heights if scaled_alone else (max(0.0, floor - 0.01), 1.0) for panel in panels]
    drawn = chosen_lines(panels, heights)
    looks = looks_of({line.name for panel in drawn.panels for line in panel.lines})
    joined = {group[0]: " ≈ ".join(group) for group in drawn.merged}
    dashes = {
        name: [each * style.font / 10 for each in _DASHES[k % len(_DASHES)]]
        for k, name in enumerate(name for name in looks if name not in POINTS)
    }
    key = [
        {
            "name": joined.get(name, name),
            "colour": colour,
            "shape": shape,
            "dash": dashes.get(name, [1, 0]),
            "line": name not in POINTS,
        }
        for name, (colour, shape) in looks.items()
    ]
    figure = FigureGrid(style, len(panels))
    by_name = dict(zip(looks, key, strict=True))
    charts = [
        _frontier_panel(figure, place, panel, by_name, limits, not scaled_alone)
        for place, (panel, limits) in enumerate(zip(drawn.panels, heights, strict=True))
    ]
    notes = [_bands({line.seeds for panel in drawn.panels for line in panel.lines})]
    if any(panel.wide for panel in drawn.panels):
        notes.append("Where they are wider than the lines' whole range, at the fixed depths only.")
    if drawn.merged or any(panel.same for panel in drawn.panels):
        notes.append("≈ and 'as': closer than a line's width, so drawn once.")
    if drawn.left_out:
        notes.append(f"Not drawn: {', '.join(drawn.left_out)}.")
    return figure.specification(charts, key, notes)


def _frontier_panel(
    figure: FigureGrid,
    place: int,
    panel: Panel,
    key: Mapping[str, Specification],
    heights: tuple[float, float],
    rule: bool,
) -> Chart:
    style = figure.style
    rows = [
        {"loops": float(x), "accuracy": float(y), "low": float(low), "high": float(high), "line": line.name}
        | {"colour": key[line.name]["colour"], "shape": key[line.name]["shape"], "dash": key[line.name]["dash"]}
        | {"alone": line.name in POINTS, "mark": index in marks, "order": index}
        for number, line in enumerate(panel.lines)
        for marks in [_marked(line, number)]
        for index, (x, y, low, high) in enumerate(zip(line.loops, line.accuracy, line.low, line.high, strict=True))
    ]
    ticks = list(range(1, panel.loops + 1)) if panel.loops <= 10 else alt.Undefined
    x = alt.X(
        "loops:Q",
        title=figure.x_title(place, "average loops"),
        axis=alt.Axis(values=ticks, format="d"),
        scale=alt.Scale(domain=[1, max(panel.loops, 2)]),
    )
    y = alt.Y(
        "accuracy:Q",
        title=figure.y_title(place, "accuracy"),
        axis=alt.Axis(format="%", tickCount=5),
        scale=alt.Scale(domain=list(heights), nice=False),
    )
    base = alt.Chart(figure.named(rows)).encode(x=x, y=y, color=alt.Color("colour:N", scale=None))
    lines, points = base.transform_filter("!datum.alone"), base.transform_filter("datum.mark")
    low = alt.Y("low:Q", scale=alt.Scale(domain=list(heights), nice=False))
    band = lines.mark_area(opacity=0.18, clip=True).encode(y=low, y2="high:Q", detail="line:N")
    bars = (
        base.transform_filter("datum.alone").mark_rule(strokeWidth=style.stroke, clip=True).encode(y=low, y2="high:Q")
    )
    curves = lines.mark_line(strokeWidth=style.stroke, clip=True).encode(
        detail="line:N", order="order:Q", strokeDash=alt.StrokeDash("dash:N", scale=None)
    )
    size = alt.condition("datum.alone", alt.value(style.mark), alt.value(0.6 * style.mark))
    marks = points.mark_point(filled=True, opacity=1, strokeWidth=0.8 * style.stroke).encode(
        shape=alt.Shape("shape:N", scale=None), size=size
    )
    layers = [bars, curves, marks] if panel.wide else [band, bars, curves, marks]
    if rule and panel.target is not None:
        target = alt.Chart(figure.named([{"accuracy": panel.target}]))
        layers.insert(
            0, target.mark_rule(strokeDash=[4, 4], color=GREY, strokeWidth=0.6 * style.stroke, clip=True).encode(y=y)
        )
    if panel.same:
        texts = [f"as {first}: {', '.join(others)}" for first, *others in panel.same]
        layers.append(_corner(figure, [line for text in texts for line in wrap(text, int(style.width / style.letter))]))
    return figure.panel(alt.layer(*layers), panel.title)


def _corner(figure: FigureGrid, lines: list[str]) -> alt.Chart:
    """A text in the lower right of a panel, where frontiers have been and gone."""
    size = figure.style.font * 0.85
    rows = [{"text": line, "down": -3 - 1.2 * size * place} for place, line in enumerate(reversed(lines))]
    return (
        alt.Chart(figure.named(rows))
        .mark_text(align="right", baseline="bottom", fontSize=size, color=GREY, dx=-3)
        .encode(
            x=alt.value(figure.style.width),
            y=alt.value(figure.style.height),
            yOffset=alt.YOffset("down:Q", scale=None),
            text="text:N",
        )
    )


def _marked(line: Line, number: int) -> set[int]:
    """At which places a line has a mark: all where there are few, else some, not where those of other lines are."""
    size = len(line.loops)
    if line.name in POINTS or size <= _MARKS:
        return set(range(size))
    start, end = line.loops[0], line.loops[-1]
    spaced = [start + (end - start) * (each + 0.15 + 0.13 * (number % 6)) / _MARKS for each in range(_MARKS)]
    return {int(abs(line.loops - x).argmin()) for x in spaced}


def _difficulties(
    panels: Sequence[Binning], percent: bool, shared: bool, per_row: int | None, style: FigureStyle
) -> Specification:
    figure = FigureGrid(style, len(panels), per_row)
    shades = shades_of([level for panel in panels for level in panel.levels])
    tables = [list(panel.rows()) for panel in panels]
    limits = [_limits([row[3:] for row in rows], percent) for rows in tables]
    if shared:
        limits = [(min(low for low, _ in limits), max(high for _, high in limits))] * len(panels)
    charts = [
        _difficulty_panel(figure, place, panel, rows, shades, limit, percent, shared)
        for place, (panel, rows, limit) in enumerate(zip(panels, tables, limits, strict=True))
    ]
    levels = sorted(shades)
    listed = levels if len(levels) <= MOST else [levels[round(k * (len(levels) - 1) / (MOST - 1))] for k in range(MOST)]
    key = [
        {"name": f"{level:g}", "colour": shades[level], "shape": "circle", "dash": [1, 0], "line": True}
        for level in listed
    ]
    notes = [_bands({panel.seeds for panel in panels})]
    if len(listed) < len(levels):
        notes.append(f"The key has {len(listed)} of {len(levels)} difficulties.")
    return figure.specification(charts, key if len(levels) > 1 else [], notes, "difficulty")


def _limits(bounds: Sequence[tuple[float, float]], percent: bool) -> tuple[float, float]:
    low, high = min((low for low, _ in bounds), default=0.0), max((high for _, high in bounds), default=1.0)
    room = 0.04 * (high - low) or 0.05
    low, high = low - room if low < 0 or low > room else 0.0, high + room
    return (max(0.0, low), min(1.0, high)) if percent else (low, high)


def _difficulty_panel(
    figure: FigureGrid,
    place: int,
    panel: Binning,
    table: Sequence[tuple[float, int, float, float, float]],
    shades: Mapping[float, str],
    limits: tuple[float, float],
    percent: bool,
    shared: bool,
) -> Chart:
    style = figure.style
    rows = [
        {"level": level, "loop": loop, "value": value, "low": low, "high": high, "colour": shades[level]}
        for level, loop, value, low, high in table
    ]
    loops = sorted({row[1] for row in table})
    x = alt.X(
        "loop:Q",
        title=figure.x_title(place, "loop"),
        axis=alt.Axis(values=loops if len(loops) <= 10 else alt.Undefined, format="d"),
        scale=alt.Scale(domain=[loops[0] - 0.2, loops[-1] + 0.2] if loops else [0.8, 1.2], nice=False),
    )
    scale = alt.Scale(domain=list(limits), nice=False)
    axis = alt.Axis(format="%", tickCount=5) if percent else alt.Axis(tickCount=5)
    y = alt.Y("value:Q", title=figure.y_title(place, panel.quantity) if shared else None, axis=axis, scale=scale)
    base = alt.Chart(figure.named(rows)).encode(x=x, y=y, color=alt.Color("colour:N", scale=None), detail="level:N")
    band = base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", scale=scale), y2="high:Q")
    layers = [band, base.mark_line(strokeWidth=style.stroke)]
    if len(loops) <= 8:
        layers.append(base.mark_point(filled=True, opacity=1, size=0.5 * style.mark))
    return figure.panel(alt.layer(*layers), panel.title)


def _bands(seeds: set[int]) -> str:
    several = sorted(seeds - {1})
    if not several:
        return "Bands: 95 % intervals over test examples."
    count = " to ".join(map(str, dict.fromkeys((several[0], several[-1]))))
    over = f"lines: the mean of {count} seeds, bands: from the lowest to the highest"
    return f"{over[0].upper()}{over[1:]}" + ("; of one seed: 95 % over test examples." if 1 in seeds else ".")
