"""How is a figure drawn? As a Vega-Lite chart: panels in a full grid, with one key, the same as PNG, PDF and SVG.

A drawing is what a figure shows, to be laid out in a style: `page`, or `paper`, which is as wide as a column.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from textwrap import wrap as wrapped
from typing import Any

import vl_convert

from loopscope.files import write_bytes
from loopscope.report.curves import POINTS, Binning, Difficulty, Dose, Line, Panel, Seeds, chosen_lines
from loopscope.report.figure_style import GREY, INK, MODELS, SHAPES, STYLES, FigureStyle, looks_of, shades_of

Specification = dict[str, Any]
Drawing = Callable[[FigureStyle], Specification]
Limits = tuple[float, float]
_DASHES = ([1, 0], [6, 2], [2, 2], [8, 2, 2, 2])
"""Dashes beside colour and mark, in turn, so that a line shows through another one that covers it."""
_MARKS_PER_LINE = 5
_LISTED_DIFFICULTIES = 10
"""The number of difficulties in a key; the shades between them tell the rest."""
wrap = partial(wrapped, break_long_words=False, break_on_hyphens=False)


def frontiers(panels: Sequence[Panel], scaled_alone: bool = False) -> Drawing | None:
    """The figure of frontiers: panels on one scale with their targets, or each panel on its own scale."""
    panels = [replace(panel, target=None if scaled_alone else panel.target) for panel in panels if panel.lines]
    return cache(partial(_frontiers_figure, panels, scaled_alone)) if panels else None


def difficulty_chart(panels: Sequence[Binning], shares: bool = False, per_row: int | None = None) -> Drawing | None:
    """A figure with one line per difficulty; `shares`: all panels show one quantity in percent."""
    return cache(partial(_by_difficulty, panels, shares, per_row)) if panels else None


def forced_exits(groups: Iterable[tuple[str, Seeds]]) -> Drawing | None:
    """The figure of forced exits: accuracy by loop and difficulty, one panel per group of runs."""
    tables = [(title, [model.forced_accuracy_by_difficulty for model in seeds]) for title, seeds in groups]
    return difficulty_chart([Binning(title, "accuracy", each) for title, each in tables], shares=True)


def exit_distributions(groups: Iterable[tuple[str, Seeds]]) -> Drawing | None:
    """The figure of exit distributions, for groups of runs that have a gate."""
    tables = [(title, [each.exit_distribution for each in seeds if each.exit_distribution]) for title, seeds in groups]
    return difficulty_chart([Binning(title, "exit probability", each) for title, each in tables if each], shares=True)


@dataclass(frozen=True)
class DosePanel:
    """A panel of a dose chart: each line is a value against a dose."""

    title: str
    lines: Mapping[str, Sequence[Dose]]


def dose_chart(panels: Sequence[DosePanel], dose: str, value: str) -> Drawing | None:
    """A figure of values against doses on one scale, with a dashed line at 0; `dose` and `value` title the axes."""
    panels = [panel for panel in panels if panel.lines]
    return cache(partial(_by_dose, panels, dose, value)) if panels else None


def write_figure(drawing: Drawing, folder: Path, name: str, style: str = "page") -> None:
    """Write a figure as PNG, PDF and SVG."""
    chosen = STYLES[style]
    specification = drawing(chosen)
    svg = vl_convert.vegalite_to_svg(specification)
    if chosen.total is not None:  # the room of axes and titles is known after drawing
        found = re.search(r'<svg[^>]* width="([\d.]+)', svg)
        assert found is not None
        fitted = chosen.width + (chosen.total - float(found[1])) / specification["usermeta"]["columns"]
        svg = vl_convert.vegalite_to_svg(drawing(replace(chosen, width=fitted)))
    svg = _with_own_clip_numbers(svg)
    write_bytes(folder / f"{name}.svg", svg.encode())
    write_bytes(folder / f"{name}.png", vl_convert.svg_to_png(svg, ppi=chosen.png_ppi))
    write_bytes(folder / f"{name}.pdf", vl_convert.svg_to_pdf(svg))


def _with_own_clip_numbers(svg: str) -> str:
    """Number the clip paths of an SVG from 0; the renderer counts them over all drawings of a process."""
    numbers: dict[str, int] = {}
    pattern = r'((?:id="|url\(#)(?:clip|gradient_))(\d+)'
    return re.sub(pattern, lambda found: f"{found[1]}{numbers.setdefault(found[2], len(numbers))}", svg)


def _number_field(field: str, **more: Any) -> Specification:
    """The Vega-Lite encoding of a number."""
    return {"field": field, "type": "quantitative", **more}


def _name_field(field: str) -> Specification:
    """The Vega-Lite encoding of a name."""
    return {"field": field, "type": "nominal"}


def _literal_field(field: str) -> Specification:
    """The Vega-Lite encoding of a colour, mark or dash that the rows hold themselves."""
    return {"field": field, "type": "nominal", "scale": None}


def _layer(mark: str, looks: Specification, encoding: Specification, only: str = "") -> Specification:
    """A Vega-Lite layer: marks for all rows of a panel, or only for rows where `only` holds."""
    rows = {"transform": [{"filter": only}]} if only else {}
    return {**rows, "mark": {"type": mark, **looks}, "encoding": encoding}


@dataclass(frozen=True)
class FigureGrid:
    """The grid of a figure's panels; the key takes a free place of the grid, or a row of its own."""

    style: FigureStyle
    panels: int
    per_row: int | None = None

    @property
    def columns(self) -> int:
        return self.style.columns(self.panels, self.per_row)

    def x_title(self, place: int, title: str) -> str | None:
        """The title of the x axis, for the lowest panel of a column only."""
        return title if place + self.columns >= self.panels else None

    def y_title(self, place: int, title: str) -> str | None:
        """The title of the y axis, for the first panel of a row only."""
        return title if place % self.columns == 0 else None

    def panel(self, rows: list[Specification], layers: list[Specification], title: str) -> Specification:
        whole = title.replace("β ", "β\N{NO-BREAK SPACE}")
        lines = wrap(whole, int(self.style.width * 1.2 / self.style.letter)) or [title]
        size = {"width": self.style.width, "height": self.style.height}
        return {"data": {"values": rows}, "layer": layers, "title": lines, **size}

    def specification(
        self, panels: Sequence[Specification], key: Sequence[Specification], notes: Sequence[str], title: str = ""
    ) -> Specification:
        style, font = self.style, self.style.font
        whole = self.columns * (style.width + 4.5 * font) if style.total is None else style.total - 2 * font
        cells, below = list(panels), []
        if key and self.panels % self.columns != 0:
            cells.append(self._key(key, title, style.width, style.height))
        elif key:
            below.append(self._key(key, title, whole - 4.5 * font))  # it begins where the first panel does
        spaces = {"column": 1.4 * font, "row": 1.2 * font}
        grid = {"concat": cells, "columns": self.columns, "spacing": spaces, "align": "each"}
        text = wrap(" ".join(notes), int(whole / (0.95 * style.letter)))
        foot = {"text": text, "orient": "bottom", "anchor": "start", "fontSize": font, "offset": 0.8 * font}
        return {
            "vconcat": [grid, *below],
            "spacing": font,
            "title": {**foot, "color": GREY},
            "config": style.config,
            "usermeta": {"columns": self.columns},
        }

    def _key(self, entries: Sequence[Specification], title: str, room: float, height: float = 0.0) -> Specification:
        """Lines with their names, in as many columns as there is room for; at least so high."""
        font, letter = self.style.font, self.style.letter
        y = 1.6 * font if title else 0.0
        names = [wrap(entry["name"], int((room - 3 * font) / letter)) for entry in entries]
        across = letter * (max(len(line) for name in names for line in name) + 1) + 3.5 * font
        columns = max(1, min(int(room / across), len(entries)))
        rows = []
        for start in range(0, len(entries), columns):
            beside = list(zip(entries, names, strict=True))[start : start + columns]
            for place, (entry, name) in enumerate(beside):
                x = across * place
                marks = {"x": x, "end": x + 2.2 * font, "middle": x + 1.1 * font, "text": x + 2.8 * font}
                rows.append({**entry, **marks, "name": "\n".join(name), "y": y + 0.6 * font})
            y += 1.25 * font * max(len(name) for _, name in beside) + 0.2 * font

        def at(field: str) -> Specification:
            axes = {"scale": None, "axis": None}
            return {"x": _number_field(field, **axes), "y": _number_field("y", **axes)}

        colour, text = {"color": _literal_field("colour")}, {"align": "left", "baseline": "top", "fontSize": font}
        dashes = {"x2": {"field": "end"}, "strokeDash": _literal_field("dash")}
        point = {"filled": True, "opacity": 1, "size": self.style.mark, "strokeWidth": 0.8 * self.style.stroke}
        name_looks = {**text, "dy": -0.4 * font, "lineBreak": "\n", "color": INK}
        layers = [
            _layer("rule", {"strokeWidth": self.style.stroke}, {**at("x"), **colour, **dashes}, "datum.line"),
            _layer("point", point, {**at("middle"), **colour, "shape": _literal_field("shape")}),
            _layer("text", name_looks, {**at("text"), "text": _name_field("name")}),
        ]
        if title:
            corner = {"x": {"value": 0}, "y": {"value": 0}, "text": _name_field("name")}
            layers.append({"data": {"values": [{"name": title}]}, **_layer("text", {**text, "color": GREY}, corner)})
        size = {"width": room if height else across * columns, "height": max(y, height)}
        return {"data": {"values": rows}, "layer": layers, "view": {"stroke": None}, **size}


def _key_entry(name: str, colour: str, shape: str, dash: Sequence[float] = (1, 0), line: bool = True) -> Specification:
    """One entry of a figure's key: name, colour, mark and dash."""
    return {"name": name, "colour": colour, "shape": shape, "dash": list(dash), "line": line}


def _frontiers_figure(panels: Sequence[Panel], scaled_alone: bool, style: FigureStyle) -> Specification:
    """The Vega-Lite specification of the figure of frontiers."""
    floor = min(float(line.accuracy.min()) for panel in panels for line in panel.lines)
    limits = [panel.heights if scaled_alone else (max(0.0, floor - 0.01), 1.0) for panel in panels]
    drawn = chosen_lines(panels, limits)
    looks = looks_of({line.name for panel in drawn.panels for line in panel.lines})
    joined = {group[0]: " ≈ ".join(group) for group in drawn.merged}
    dashes = {
        name: [each * style.font / 10 for each in _DASHES[k % len(_DASHES)]]
        for k, name in enumerate(name for name in looks if name not in POINTS)
    }
    key = {
        name: _key_entry(joined.get(name, name), *look, dashes.get(name, (1, 0)), name not in POINTS)
        for name, look in looks.items()
    }
    grid = FigureGrid(style, len(panels))
    charts = [
        _frontier_panel(grid, place, panel, key, limit)
        for place, (panel, limit) in enumerate(zip(drawn.panels, limits, strict=True))
    ]
    notes = [_bands_note({line.seeds for panel in drawn.panels for line in panel.lines})]
    if any(panel.wide for panel in drawn.panels):
        notes.append("Where they are wider than the lines' whole range, at the fixed depths only.")
    if drawn.merged or any(panel.same for panel in drawn.panels):
        notes.append("≈ and 'as': closer than a line's width, so drawn once.")
    if drawn.left_out:
        notes.append(f"Not drawn: {', '.join(drawn.left_out)}.")
    return grid.specification(charts, list(key.values()), notes)


def _frontier_panel(
    grid: FigureGrid, place: int, panel: Panel, key: Mapping[str, Specification], limits: Limits
) -> Specification:
    """One panel of the figure of frontiers."""
    style = grid.style
    rows = []
    for number, line in enumerate(panel.lines):
        marked = _marked_points(line, number)
        looks = {name: key[line.name][name] for name in ("colour", "shape", "dash")}
        columns = {"loops": line.loops, "accuracy": line.accuracy, "low": line.low, "high": line.high}
        for index in range(len(line.loops)):
            point = {name: float(values[index]) for name, values in columns.items()}
            drawn = {"alone": line.name in POINTS, "mark": index in marked, "order": index}
            rows.append({**point, "line": line.name, **looks, **drawn})
    ticks = {"values": list(range(1, panel.loops + 1))} if panel.loops <= 10 else {}
    loops, accuracy = grid.x_title(place, "average loops"), grid.y_title(place, "accuracy")
    scale = {"domain": list(limits), "nice": False}
    x = _number_field("loops", title=loops, axis={"format": "d", **ticks}, scale={"domain": [1, max(panel.loops, 2)]})
    y = _number_field("accuracy", title=accuracy, axis={"format": "%", "tickCount": 5}, scale=scale)
    at = {"x": x, "y": y, "color": _literal_field("colour")}
    span = {**at, "y": _number_field("low", scale=scale), "y2": {"field": "high"}}
    one_line = {"detail": _name_field("line"), "order": _number_field("order"), "strokeDash": _literal_field("dash")}
    size = {"condition": {"test": "datum.alone", "value": style.mark}, "value": 0.6 * style.mark}
    stroke = {"strokeWidth": style.stroke, "clip": True}
    point = {"filled": True, "opacity": 1, "strokeWidth": 0.8 * style.stroke}
    layers = [
        _layer("rule", stroke, span, "datum.alone"),
        _layer("line", stroke, {**at, **one_line}, "!datum.alone"),
        _layer("point", point, {**at, "shape": _literal_field("shape"), "size": size}, "datum.mark"),
    ]
    if not panel.wide:
        band = {"opacity": 0.18, "clip": True}
        layers.insert(0, _layer("area", band, {**span, "detail": _name_field("line")}, "!datum.alone"))
    if panel.target is not None:
        dashed = {"strokeDash": [4, 4], "color": GREY, "strokeWidth": 0.6 * style.stroke, "clip": True}
        layers.insert(0, {"data": {"values": [{"accuracy": panel.target}]}, **_layer("rule", dashed, {"y": y})})
    texts = [panel.note] * bool(panel.note) + [f"as {first}: {', '.join(others)}" for first, *others in panel.same]
    if texts:
        lines = [line for text in texts for line in wrap(text, int(style.width / style.letter))]
        layers.append(_corner_text(style, lines))
    return grid.panel(rows, layers, panel.title)


def _corner_text(style: FigureStyle, lines: list[str]) -> Specification:
    """A text in the lower right corner of a panel, where frontiers seldom run."""
    size = style.font * 0.85
    rows = [{"text": line, "down": -3 - 1.2 * size * place} for place, line in enumerate(reversed(lines))]
    at = {"x": {"value": style.width}, "y": {"value": style.height}, "yOffset": _number_field("down", scale=None)}
    looks = {"align": "right", "baseline": "bottom", "fontSize": size, "color": GREY, "dx": -3}
    return {"data": {"values": rows}, **_layer("text", looks, {**at, "text": _name_field("text")})}


def _marked_points(line: Line, number: int) -> set[int]:
    """The points of a line that get a mark: all if they are few, else some, away from other lines' marks."""
    size = len(line.loops)
    if line.name in POINTS or size <= _MARKS_PER_LINE:
        return set(range(size))
    start, end, count = line.loops[0], line.loops[-1], _MARKS_PER_LINE
    spaced = [start + (end - start) * (each + 0.15 + 0.13 * (number % 6)) / count for each in range(count)]
    return {int(abs(line.loops - x).argmin()) for x in spaced}


def _by_difficulty(panels: Sequence[Binning], shares: bool, per_row: int | None, style: FigureStyle) -> Specification:
    """The Vega-Lite specification of a figure with one line per difficulty."""
    grid = FigureGrid(style, len(panels), per_row)
    lines = {line.level: line for panel in panels for line in panel.difficulties}
    shades = shades_of(list(lines))
    tables = [list(panel.rows(shades)) for panel in panels]
    limits = [_y_limits(rows, shares) for rows in tables]
    if shares:
        limits = [(min(low for low, _ in limits), max(high for _, high in limits))] * len(panels)
    charts = []
    for place, (panel, rows, limit) in enumerate(zip(panels, tables, limits, strict=True)):
        axis = {"format": "%", "tickCount": 5} if shares else {"tickCount": 5}
        title = grid.y_title(place, panel.quantity) if shares else None
        y = _number_field("value", title=title, axis=axis, scale={"domain": list(limit), "nice": False})
        charts.append(_difficulty_panel(grid, place, panel.title, rows, y))
    notes = [_bands_note({panel.seeds for panel in panels})]
    if any(len(line.places) > 1 for line in lines.values()):
        notes.append("Neighbouring difficulties are joined: means over their examples.")
    listed = _difficulties_in_key([lines[level] for level in sorted(lines)])
    if len(listed) < len(lines):
        notes.append(f"The key has {len(listed)} of {len(lines)} difficulties.")
    key = [_key_entry(line.name, shades[line.level], "circle") for line in listed]
    return grid.specification(charts, key if len(lines) > 1 else [], notes, "difficulty")


def _difficulties_in_key(lines: Sequence[Difficulty]) -> list[Difficulty]:
    """The difficulties that fit into a figure's key: first, last, the last of training, and some between."""
    last, most = len(lines) - 1, min(len(lines), _LISTED_DIFFICULTIES)
    places = {round(step * last / max(most - 1, 1)) for step in range(most)}
    marked = next((place for place, line in enumerate(lines) if line.ends_training), last)
    if marked not in places:
        nearest = min(places - {0, last}, key=lambda place: abs(place - marked))
        places.remove(nearest)
        places.add(marked)
    return [lines[place] for place in sorted(places)]


def _y_limits(rows: Sequence[Specification], shares: bool) -> Limits:
    """The limits of a chart's y axis, a little beyond its rows."""
    low, high = min((row["low"] for row in rows), default=0.0), max((row["high"] for row in rows), default=1.0)
    room = 0.04 * (high - low) or 0.05
    low, high = low - room if low < 0 or low > room else 0.0, high + room
    return (max(0.0, low), min(1.0, high)) if shares else (low, high)


def _difficulty_panel(
    grid: FigureGrid, place: int, title: str, rows: list[Specification], y: Specification
) -> Specification:
    """One panel of a figure with one line per difficulty."""
    loops = sorted({row["loop"] for row in rows})
    ticks = {"values": loops} if len(loops) <= 10 else {}
    scale = {"domain": [loops[0] - 0.2, loops[-1] + 0.2] if loops else [0.8, 1.2], "nice": False}
    x = _number_field("loop", title=grid.x_title(place, "loop"), axis={"format": "d", **ticks}, scale=scale)
    at = {"x": x, "y": y, "color": _literal_field("colour"), "detail": _name_field("level")}
    span = {**at, "y": _number_field("low", scale=y["scale"]), "y2": {"field": "high"}}
    layers = [_layer("area", {"opacity": 0.2}, span), _layer("line", {"strokeWidth": grid.style.stroke}, at)]
    if len(loops) <= 8:
        layers.append(_layer("point", {"filled": True, "opacity": 1, "size": 0.5 * grid.style.mark}, at))
    return grid.panel(rows, layers, title)


def _by_dose(panels: Sequence[DosePanel], dose: str, value: str, style: FigureStyle) -> Specification:
    """The Vega-Lite specification of a dose chart."""
    grid = FigureGrid(style, len(panels))
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    key = {name: _key_entry(name, colour, shape) for name, colour, shape in zip(names, cycle(MODELS), cycle(SHAPES))}
    points = [point for panel in panels for line in panel.lines.values() for point in line]
    limits = _y_limits([{"low": min(0.0, point.low), "high": max(0.0, point.high)} for point in points], shares=False)
    doses = sorted({point.dose for point in points})
    ticks = {"values": doses, "labelExpr": "'' + datum.value"}  # a format would round them
    charts = []
    for place, panel in enumerate(panels):
        rows = [
            {**asdict(point), "line": name, "colour": key[name]["colour"], "shape": key[name]["shape"]}
            for name, line in panel.lines.items()
            for point in line
        ]
        x = _number_field("dose", title=grid.x_title(place, dose), scale={"domain": [0, 1]}, axis=ticks)
        y = _number_field("value", title=grid.y_title(place, value), scale={"domain": list(limits), "nice": False})
        at = {"x": x, "y": y, "color": _literal_field("colour")}
        span = {**at, "y": _number_field("low", scale=y["scale"]), "y2": {"field": "high"}}
        one_line = {"detail": _name_field("line")}
        zero = {"strokeDash": [4, 4], "color": GREY, "strokeWidth": 0.6 * style.stroke}
        point = {"filled": True, "opacity": 1, "size": style.mark}
        layers = [
            {"data": {"values": [{"value": 0}]}, **_layer("rule", zero, {"y": y})},
            _layer("area", {"opacity": 0.18}, {**span, **one_line}),
            _layer("line", {"strokeWidth": style.stroke}, {**at, **one_line}),
            _layer("point", point, {**at, "shape": _literal_field("shape")}),
        ]
        charts.append(grid.panel(rows, layers, panel.title))
    return grid.specification(charts, [key[name] for name in names], [_bands_note({point.seeds for point in points})])


def _bands_note(seeds: set[int]) -> str:
    """The sentence on what a figure's lines and bands show: test examples, or seeds."""
    several = sorted(seeds - {1})
    if not several:
        return "Bands: 95 % intervals over test examples."
    count = " to ".join(map(str, dict.fromkeys((several[0], several[-1]))))
    over = f"Lines: the mean of {count} seeds, bands: from the lowest to the highest"
    return over + ("; of one seed: 95 % over test examples." if 1 in seeds else ".")
