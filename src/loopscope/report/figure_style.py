"""How does a figure look? Colours and marks of its lines, on a light and on a dark ground, and the sizes of a style.

Colours are safe for colour-blind readers (Okabe-Ito for readouts, viridis for difficulty); every readout has its own
mark too.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

Look = tuple[str, str]
"""A colour and a mark."""

_X = "M-.9,-.6L-.6,-.9L0,-.3L.6,-.9L.9,-.6L.3,0L.9,.6L.6,.9L0,.3L-.6,.9L-.9,.6L-.3,0Z"
_LOOKS: dict[str, Look] = {
    "fixed": ("#000000", "square"),
    "gate": ("#D55E00", "diamond"),
    "entropy": ("#0072B2", "circle"),
    "top1": ("#56B4E9", "triangle-up"),
    "margin": ("#009E73", "triangle-down"),
    "kl": ("#CC79A7", "cross"),
    "logit_change": ("#E69F00", "triangle-right"),
    "hidden_change": ("#999999", "triangle-left"),
    "hidden_cosine": ("#8C564B", _X),
    "patience": ("#332288", "M-.9,0L-.45,-.8L.45,-.8L.9,0L.45,.8L-.45,.8Z"),  # a hexagon
    "settling": ("#AA4499", "M0,-1L.28,-.28L1,0L.28,.28L0,1L-.28,.28L-1,0L-.28,-.28Z"),  # a star of four points
    "hidden_acceleration": ("#997700", "M-.9,-.8L-.9,.8L.9,-.8L.9,.8Z"),  # a bow tie
    "halting": ("#CC3311", "diamond"),
    "stopper:induction": ("#DC267F", "diamond"),
    "stopper:classifier": ("#785EF0", "square"),
    "oracle": ("#7F3C8D", "M0,.5L.6,.8L.5,.1L1,-.3L.3,-.4L0,-1L-.3,-.4L-1,-.3L-.5,.1L-.6,.8L0,.5Z"),  # a star
}
COLOURS = ("#882255", "#EE99AA", "#332288", "#DDAA33", "#CC3311", "#AA4499", "#997700", "#663333")
SHAPES = ("diamond", "triangle-up", "circle", "triangle-down", "square", "cross", "triangle-left")
"""For lines that are not a readout by itself: gates of several betas, fitted gates."""
_PLACES = {
    **{f"gate, β {beta:g}": place for place, beta in enumerate((0.001, 0.005, 0.02, 0.1, 0.5, 0.01, 0.05, 0.2))},
    "fitted linear-ponder": 8,
    "fitted linear-utility": 9,
    "fitted mlp-ponder": 10,
    "fitted mlp-utility": 11,
}
"""The colours and marks of the paper's lines in every figure; other lines take free ones."""
MODELS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999999")
"""For lines of several models."""
INK, GREY = "#000000", "#777777"
VERDICTS = {
    "readout": "#D55E00",
    "trajectory": "#0072B2",
    "readout and trajectory": "#7F3C8D",
    "neither": "#009E73",
    "the reference": INK,
}
"""The colours of verdicts, by the part to blame; any other verdict is grey."""
GLYPHS = {
    "circle": "●",
    "square": "■",
    "diamond": "◆",
    "triangle-up": "▲",
    "triangle-down": "▼",
    "triangle-right": "▶",
    "cross": "✚",
    "triangle-left": "◀",
}
"""Marks of models, as Vega-Lite and as a text have them."""

_VIRIDIS = ("440154", "482878", "3B528B", "2C728E", "21918C", "28AE80", "5EC962", "ADDC30", "FDE725")
_SHADES = 64


def _shades(easy: float, hard: float) -> list[str]:
    """Colours of viridis between two places from 0 (dark) to 1 (light)."""
    known = [list(bytes.fromhex(colour)) for colour in _VIRIDIS]
    places = np.linspace(easy, hard, _SHADES) * (len(known) - 1)
    channels = [np.interp(places, range(len(known)), values) for values in zip(*known, strict=True)]
    return [f"#{bytes(np.rint(colour).astype(np.uint8)).hex().upper()}" for colour in np.transpose(channels)]


_ON_LIGHT, _ON_DARK = _shades(0.75, 0.0), _shades(1.0, 0.42)
"""From easy to hard: no yellow on white, no dark blue on black."""

DARK = {
    INK: "#F2F2F2",
    GREY: "#A3ADB8",  # notes and titles of keys
    "#0072B2": "#4CA6E8",
    "#D55E00": "#FF8A3D",
    "#009E73": "#2CC79B",
    "#8C564B": "#C98F80",
    "#7F3C8D": "#C58AD4",
    "#882255": "#D9679C",
    "#332288": "#8F83E0",
    "#CC3311": "#FF7A5C",
    "#AA4499": "#D683C7",
    "#997700": "#C9A632",
    "#663333": "#B98383",
    "#DC267F": "#FF6FAE",
    "#785EF0": "#A594FF",
    **dict(zip(_ON_LIGHT, _ON_DARK, strict=True)),
}
"""The dark colours and their counterparts on a dark ground."""


def looks_of(names: Collection[str]) -> dict[str, Look]:
    """The colour and mark of each line of a figure; readouts keep theirs in every figure."""
    looks = {name: look for name, look in _LOOKS.items() if name in names}
    more = sorted(set(names) - set(looks), key=_natural_sort_key)
    taken = {_PLACES.get(name) for name in more}
    free = (place for place in count() if place not in taken)
    for name in more:
        place = _PLACES[name] if name in _PLACES else next(free)
        looks[name] = COLOURS[place % len(COLOURS)], SHAPES[place % len(SHAPES)]
    return looks


def shades_of(levels: Sequence[float]) -> dict[float, str]:
    """The colour of every difficulty, between the easiest and the hardest."""
    low, high = min(levels), max(levels)
    return {level: _ON_LIGHT[round((_SHADES - 1) * (level - low) / ((high - low) or 1))] for level in levels}


def _natural_sort_key(name: str) -> tuple[str, float]:
    """A sort key that orders names with a number at the end by that number."""
    words, _, last = name.rpartition(" ")
    try:
        return words, float(last)
    except ValueError:
        return name, 0.0


@dataclass(frozen=True)
class FigureStyle:
    """The sizes of a figure's style, in points (on a screen: pixels)."""

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

    @property
    def config(self) -> dict[str, Any]:
        """Vega-Lite's configuration: the fonts and lines that all figures have."""
        font, thin = self.font, self.stroke / 1.5
        title = {"fontSize": 1.1 * font, "anchor": "start", "fontWeight": "normal", "offset": 0.5 * font}
        axis = {
            "labelFontSize": font,
            "titleFontSize": font,
            "titleFontWeight": "normal",
            "titlePadding": 0.4 * font,
            "labelPadding": 0.2 * font,
            "tickSize": 0.4 * font,
            "grid": True,
            "gridOpacity": 0.4,
            **dict.fromkeys(("domainWidth", "tickWidth", "gridWidth"), thin),
        }
        page = {"font": "Helvetica, Arial, sans-serif", "background": "white", "padding": 2}
        return {**page, "title": title, "axis": axis, "view": {"stroke": "#dddddd", "strokeWidth": thin}}


STYLES = {
    "page": FigureStyle(width=230, height=170, font=10, stroke=1.5, most_columns=4),
    "paper": FigureStyle(width=85, height=68, font=6.5, stroke=0.9, most_columns=2, total=234, png_ppi=600),
}
"""A column of 234 points, 3.25 inches, is that of most two-column templates."""
