"""How is a figure drawn? Vega-Lite charts, written as PNG and PDF for a paper, and drawn by the page itself.

Colours are safe for colour-blind readers (Okabe-Ito for readouts, viridis for difficulty); every readout has its own
mark too.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import altair as alt
import vl_convert

from loopscope.analysis.schema import Binned, FrontierResult
from loopscope.bench.guarantees import GuaranteeBench
from loopscope.writing import write_bytes

Chart = alt.Chart | alt.LayerChart
Specification = dict[str, Any]
Style = tuple[str, str]
T = TypeVar("T")

_STYLES: dict[str, Style] = {
    "fixed": ("#000000", "square"),
    "gate": ("#D55E00", "diamond"),
    "entropy": ("#0072B2", "circle"),
    "top1": ("#56B4E9", "triangle-up"),
    "margin": ("#009E73", "triangle-down"),
    "kl": ("#CC79A7", "cross"),
    "logit_change": ("#E69F00", "triangle-right"),
    "hidden_change": ("#999999", "triangle-left"),
    "hidden_cosine": ("#8C564B", "M-.7,-.7L.7,.7M.7,-.7L-.7,.7"),  # an x
    "patience": ("#332288", "circle"),
    "settling": ("#AA4499", "square"),
    "hidden_acceleration": ("#997700", "cross"),
    "stopper:induction": ("#DC267F", "diamond"),
    "stopper:classifier": ("#785EF0", "square"),
    "oracle": ("#7F3C8D", "M0,.5L.6,.8L.5,.1L1,-.3L.3,-.4L0,-1L-.3,-.4L-1,-.3L-.5,.1L-.6,.8L0,.5Z"),  # a star
}
_COLOURS = ("#882255", "#EE99AA", "#332288", "#DDAA33", "#CC3311", "#AA4499", "#997700", "#663333")
_SHAPES = ("diamond", "triangle-up", "circle", "triangle-down", "square", "cross", "triangle-left")
"""For lines that are not a readout by itself: gates of several betas, fitted gates."""
MODELS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999999")
"""For lines of several models."""
DARK = {
    "#000000": "#F2F2F2",
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
}
"""What the darker colours become on a dark ground."""
_POINTS = ("fixed", "oracle")
"""Between two fixed depths there is no fixed depth, and the oracle is one point: no lines, larger marks."""
_PANEL = {"width": 230, "height": 170}


@dataclass(frozen=True)
class Line:
    """A curve of accuracy against average loops; `name` is a readout's, or what the legend should say."""

    name: str
    average_loops: Sequence[float]
    accuracy: Sequence[float]

    @classmethod
    def of(cls, frontier: FrontierResult, name: str | None = None) -> "Line":
        return cls(name or frontier.readout, frontier.average_loops, frontier.accuracy)


@dataclass(frozen=True)
class Panel:
    title: str
    lines: list[Line]
    loops: int
    target: float  # the accuracy that is sought of its model

    @property
    def heights(self) -> tuple[float, float]:
        """From the least to the greatest accuracy, with a little room."""
        values = [value for line in self.lines for value in line.accuracy]
        margin = 0.05 * (max(values) - min(values)) + 1e-3
        return max(0.0, min(values) - margin), min(1.0, max(values) + margin)


def frontiers(panels: Sequence[Panel], per_row: int = 2, scaled_alone: bool = False) -> Specification | None:
    """Panels of curves with one legend and one scale, and their targets; or each on a scale of its own, without."""
    panels = [panel for panel in panels if panel.lines]
    if not panels:
        return None
    styles = styles_of({line.name for panel in panels for line in panel.lines})
    floor = min(value for panel in panels for line in panel.lines for value in line.accuracy)
    data = _Data()
    if scaled_alone:
        charts = [_frontier_panel(panel, styles, panel.heights, None, data) for panel in panels]
        return data.specification(_grid(in_rows(charts, per_row), "independent"))
    heights = (max(0.0, floor - 0.01), 1.0)
    charts = [_frontier_panel(panel, styles, heights, panel.target, data) for panel in panels]
    return data.specification(_grid(in_rows(charts, per_row), "shared"))


@dataclass(frozen=True)
class Binning:
    """A quantity by loop, one line a difficulty; from its first loop on."""

    title: str
    quantity: str
    table: Binned
    first: int = 1


def styles_of(names: Collection[str]) -> dict[str, Style]:
    """The colour and the mark of each, readouts by themselves first."""
    more = sorted((name for name in names if name not in _STYLES), key=_natural)
    styles = {name: style for name, style in _STYLES.items() if name in names}
    return styles | {name: (_COLOURS[k % len(_COLOURS)], _SHAPES[k % len(_SHAPES)]) for k, name in enumerate(more)}


def difficulty_chart(
    rows: Sequence[Sequence[Binning]], percent: bool = False, shared: bool = True
) -> Specification | None:
    """Panels in rows; with shared heights they show the same quantity on the same scale."""
    data = _Data()
    charts = [[_difficulty_panel(panel, percent, data) for panel in row] for row in rows if row]
    return data.specification(_grid(charts, "shared" if shared else "independent")) if charts else None


def guarantee_panels(bench: GuaranteeBench) -> Specification:
    """How often promises are broken, and what they cost against hindsight, by the number of examples."""
    data = _Data()
    methods = {"promise": "with a promise", "usual": "laxest within the limit"}
    broken = [
        {"population": each.population, "method": methods[each.method], "broken": each.broken}
        for each in bench.coverage
        if each.method in methods
    ]
    share = alt.X("broken:Q", title="share of calibrations that break the limit", axis=alt.Axis(format="%"))
    names = list(dict.fromkeys(each.population for each in bench.coverage))
    bars = (
        alt.Chart(data.named(broken))
        .mark_bar()
        .encode(
            x=share,
            y=alt.Y("population:N", title=None, sort=names, axis=alt.Axis(labelLimit=200)),
            yOffset=alt.YOffset("method:N", sort=list(methods.values())),
            color=alt.Color(
                "method:N",
                title="threshold",
                scale=alt.Scale(domain=list(methods.values()), range=["#0072B2", "#E69F00"]),
                legend=alt.Legend(orient="bottom"),
            ),
        )
    )
    allowed = alt.Chart(data.named([{"broken": 1 - bench.confidence}])).mark_rule(strokeDash=[4, 4]).encode(x=share)
    price = [
        {"examples": each.examples, "ratio": each.loops / each.hindsight_loops, "population": each.population}
        for each in bench.price
    ]
    priced = list(dict.fromkeys(each.population for each in bench.price))
    lines = (
        alt.Chart(data.named(price))
        .mark_line(point=alt.OverlayMarkDef(filled=True, size=30), strokeWidth=1.5)
        .encode(
            x=alt.X(
                "examples:Q",
                title="calibration examples",
                axis=alt.Axis(values=sorted({each.examples for each in bench.price}), format=","),
                scale=alt.Scale(type="log", nice=False),
            ),
            y=alt.Y("ratio:Q", title="average loops / hindsight's", scale=alt.Scale(zero=False)),
            color=alt.Color("population:N", sort=priced, scale=alt.Scale(domain=priced, range=list(_COLOURS))),
            shape=alt.Shape("population:N", sort=priced, scale=alt.Scale(domain=priced, range=list(_SHAPES))),
        )
    )
    size = {"width": 300, "height": 220}
    panels = alt.hconcat(
        (bars + allowed).properties(title="Is the promise kept? (dashed: allowed)", **size),
        lines.properties(title="What does it cost?", **size),
    ).resolve_scale(color="independent", shape="independent")
    return data.specification(alt.vconcat(panels))


def in_rows(panels: Sequence[T], per_row: int) -> list[Sequence[T]]:
    return [panels[start : start + per_row] for start in range(0, len(panels), per_row)]


def write_figure(specification: Specification, folder: Path, name: str) -> None:
    """Writes a figure as PNG and PDF."""
    write_bytes(folder / f"{name}.png", vl_convert.vegalite_to_png(specification, scale=2))
    write_bytes(folder / f"{name}.pdf", vl_convert.vegalite_to_pdf(specification))


def _frontier_panel(
    panel: Panel, styles: dict[str, Style], heights: tuple[float, float], target: float | None, data: "_Data"
) -> alt.LayerChart:
    points = [
        {"loops": loops, "accuracy": accuracy, "readout": line.name, "order": index}
        for line in panel.lines
        for index, (loops, accuracy) in enumerate(sorted(zip(line.average_loops, line.accuracy, strict=True)))
    ]
    names = list(styles)
    colour = alt.Color(
        "readout:N",
        scale=alt.Scale(domain=names, range=[styles[name][0] for name in names]),
        legend=alt.Legend(title="readout", symbolType="circle", symbolOpacity=1, labelLimit=260),
    )
    shape = alt.Shape("readout:N", scale=alt.Scale(domain=names, range=[styles[name][1] for name in names]))
    height = alt.Y("accuracy:Q", title="accuracy", axis=alt.Axis(format="%"), scale=alt.Scale(domain=list(heights)))
    base = alt.Chart(data.named(points)).encode(
        x=alt.X("loops:Q", title="average loops", scale=alt.Scale(domain=[1, panel.loops])),
        y=height,
        color=colour,
        shape=shape,
    )
    alone = " || ".join(f"datum.readout == '{name}'" for name in _POINTS)
    lines = base.mark_line(strokeWidth=1.2, opacity=0.8).encode(order="order:Q").transform_filter(f"!({alone})")
    marks = base.mark_point(filled=True, opacity=0.9).encode(size=alt.condition(alone, alt.value(60), alt.value(14)))
    if target is None:
        return (lines + marks).properties(title=panel.title, **_PANEL)
    rule = alt.Chart(data.named([{"accuracy": target}])).mark_rule(strokeDash=[4, 4], color="#777777").encode(y=height)
    return (rule + lines + marks).properties(title=panel.title, **_PANEL)


def _difficulty_panel(panel: Binning, percent: bool, data: "_Data") -> alt.Chart:
    values = [
        {"loop": loop, "value": value, "difficulty": level}
        for level, row in zip(panel.table.levels, panel.table.values, strict=True)
        for loop, value in enumerate(row, start=1)
        if loop >= panel.first and value is not None
    ]
    axis = alt.Axis(format="%") if percent else alt.Axis()
    return (
        alt.Chart(data.named(values))
        .mark_line(point=alt.OverlayMarkDef(filled=True, size=25), strokeWidth=1.5)
        .encode(
            x=alt.X("loop:O", title="loop", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("value:Q", title=panel.quantity, axis=axis, scale=alt.Scale(zero=False)),
            color=alt.Color(
                "difficulty:O", title="difficulty", scale=alt.Scale(scheme="viridis", reverse=True), sort="ascending"
            ),
        )
        .properties(title=panel.title, **_PANEL)
    )


def _natural(name: str) -> tuple[str, float]:
    """Sorts names that end in a number by that number."""
    words, _, last = name.rpartition(" ")
    try:
        return words, float(last)
    except ValueError:
        return name, 0.0


def _grid(rows: Sequence[Sequence[Chart]], heights: Literal["shared", "independent"]) -> alt.VConcatChart:
    joined = [alt.hconcat(*row).resolve_scale(y=heights) for row in rows]
    return alt.vconcat(*joined).resolve_scale(color="shared", shape="shared", y=heights)


class _Data:
    """The numbers of a figure, kept apart from its charts: Altair copies whatever is in them, again and again."""

    def __init__(self) -> None:
        self._sets: dict[str, list[dict[str, Any]]] = {}

    def named(self, values: list[dict[str, Any]]) -> alt.NamedData:
        name = f"panel-{len(self._sets)}"
        self._sets[name] = values
        return alt.NamedData(name=name)

    def specification(self, chart: alt.VConcatChart) -> Specification:
        styled = (
            chart.configure(font="Helvetica, Arial, sans-serif", background="white")
            .configure_title(fontSize=12, anchor="start", fontWeight="normal")
            .configure_axis(labelFontSize=10, titleFontSize=11, grid=True, gridOpacity=0.4, titleFontWeight="normal")
            .configure_legend(labelFontSize=10, titleFontSize=11, titleFontWeight="normal")
            .configure_view(stroke="#dddddd")
        )
        return {**styled.to_dict(), "datasets": self._sets}
