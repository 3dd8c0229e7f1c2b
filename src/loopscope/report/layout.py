"""How are the panels of a figure laid out? In a full grid, with one key and a line below; in the sizes of a style.

The key takes the place that the grid leaves, or a row of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import wrap as wrapped
from typing import Any

import altair as alt

from loopscope.errors import UserError
from loopscope.report.colours import INK

Specification = dict[str, Any]
Chart = alt.LayerChart | alt.FacetChart
GREY = "#777777"
wrap = partial(wrapped, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True)
class FigureStyle:
    """Sizes in points (of a screen: pixels)."""

    width: float  # of a panel
    height: float
    font: float
    stroke: float
    most_columns: int
    total: float | None = None  # the width of the whole, to which panels are fitted
    png_ppi: int = 144

    @property
    def mark(self) -> float:
        """The area of a mark."""
        return 0.4 * self.font**2

    @property
    def letter(self) -> float:
        """About the width of a letter."""
        return 0.53 * self.font

    def columns(self, panels: int, per_row: int | None = None) -> int:
        """So that at most one place of the grid is left, for the key."""
        if per_row is not None and per_row <= self.most_columns and panels % per_row == 0:
            return per_row
        if panels <= min(self.most_columns, 3):
            return panels
        return 3 if self.most_columns >= 3 and panels % 3 != 1 else 2


STYLES = {
    "page": FigureStyle(width=230, height=170, font=10, stroke=1.5, most_columns=4),
    "paper": FigureStyle(width=85, height=68, font=6.5, stroke=0.9, most_columns=2, total=234, png_ppi=600),
}
"""A column of 234 points, 3.25 inches, is that of most two-column templates."""


def figure_style(name: str) -> FigureStyle:
    if name not in STYLES:
        raise UserError(f"There is no style '{name}'; choose one of {', '.join(STYLES)}.")
    return STYLES[name]


class FigureGrid:
    """The panels of a figure in a grid, and their numbers, apart: Altair copies what is in charts, again and again."""

    def __init__(self, style: FigureStyle, panels: int, per_row: int | None = None) -> None:
        self.style, self.panels = style, panels
        self.columns = style.columns(panels, per_row)
        self._sets: dict[str, list[dict[str, Any]]] = {}

    def named(self, values: list[dict[str, Any]]) -> alt.NamedData:
        name = f"panel-{len(self._sets)}"
        self._sets[name] = values
        return alt.NamedData(name=name)

    def x_title(self, place: int, title: str) -> str | None:
        """Below the lowest panel of a column."""
        return title if place + self.columns >= self.panels else None

    def y_title(self, place: int, title: str) -> str | None:
        """On the left."""
        return title if place % self.columns == 0 else None

    def panel(self, chart: Chart, title: str) -> Chart:
        whole = title.replace("β ", "β\N{NO-BREAK SPACE}")
        lines = wrap(whole, int(self.style.width * 1.2 / self.style.letter)) or [title]
        return chart.properties(title=lines, width=self.style.width, height=self.style.height)

    def specification(
        self, charts: Sequence[Chart], key: Sequence[Specification], notes: Sequence[str], title: str = ""
    ) -> Specification:
        style, font = self.style, self.style.font
        whole = self.columns * (style.width + 4.5 * font) if style.total is None else style.total - 2 * font
        gap = self.panels % self.columns != 0
        cells = [*charts, *([self._key(key, title, style.width, style.height)] if gap and key else [])]
        spaces = {"column": 1.4 * font, "row": 1.2 * font}
        rows: list[alt.ConcatChart | Chart] = [alt.concat(*cells, columns=self.columns, spacing=spaces, align="each")]
        if key and not gap:
            rows.append(self._key(key, title, whole - 4.5 * font))  # it begins where the first panel does
        words = " ".join(notes)
        foot = alt.TitleParams(
            text=wrap(words, int(whole / (0.95 * style.letter))),
            orient="bottom",
            anchor="start",
            fontSize=font,
            offset=0.8 * font,
            color=GREY,
        )
        return self._configured(alt.vconcat(*rows, spacing=font, title=foot))

    def _key(self, entries: Sequence[Specification], title: str, room: float, height: float = 0.0) -> Chart:
        """Lines with their names, in as many columns as there is room for; at least so high."""
        font, letter = self.style.font, self.style.letter
        step, y = 1.25 * font, 1.6 * font if title else 0.0
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
            y += step * max(len(name) for _, name in beside) + 0.2 * font
        base = alt.Chart(self.named(rows)).encode(y=alt.Y("y:Q", scale=None, axis=None))

        def at(field: str) -> alt.X:
            return alt.X(f"{field}:Q", scale=None, axis=None)

        colour = alt.Color("colour:N", scale=None)
        layers = [
            base.transform_filter("datum.line")
            .mark_rule(strokeWidth=self.style.stroke)
            .encode(x=at("x"), x2="end", color=colour, strokeDash=alt.StrokeDash("dash:N", scale=None)),
            base.mark_point(filled=True, opacity=1, size=self.style.mark, strokeWidth=0.8 * self.style.stroke).encode(
                x=at("middle"), color=colour, shape=alt.Shape("shape:N", scale=None)
            ),
            base.mark_text(
                align="left", baseline="top", dy=-0.4 * font, fontSize=font, lineBreak="\n", color=INK
            ).encode(x=at("text"), text="name:N"),
        ]
        if title:
            heading = alt.Chart(self.named([{"name": title}]))
            layers.append(
                heading.mark_text(align="left", baseline="top", fontSize=font, color=GREY).encode(
                    x=alt.value(0), y=alt.value(0), text="name:N"
                )
            )
        size = {"width": room if height else across * columns, "height": max(y, height)}
        return alt.layer(*layers).properties(view=alt.ViewBackground(stroke=None), **size)

    def _configured(self, chart: alt.VConcatChart) -> Specification:
        return {**configured(chart, self.style), "usermeta": {"columns": self.columns}, "datasets": self._sets}


def configured(chart: alt.VConcatChart | alt.HConcatChart, style: FigureStyle) -> Specification:
    """With the fonts and lines that all figures have."""
    font = style.font
    styled = (
        chart.configure(font="Helvetica, Arial, sans-serif", background="white", padding=2)
        .configure_title(fontSize=font * 1.1, anchor="start", fontWeight="normal", offset=0.5 * font)
        .configure_axis(
            labelFontSize=font,
            titleFontSize=font,
            titleFontWeight="normal",
            titlePadding=0.4 * font,
            labelPadding=0.2 * font,
            tickSize=0.4 * font,
            grid=True,
            gridOpacity=0.4,
            **dict.fromkeys(("domainWidth", "tickWidth", "gridWidth"), style.stroke / 1.5),
        )
        .configure_view(stroke="#dddddd", strokeWidth=style.stroke / 1.5)
    )
    specification: Specification = styled.to_dict()
    return specification
