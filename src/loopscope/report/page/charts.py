"""The charts that a reader moves: Vega-Lite specifications whose numbers the page's script fills in.

Every one names its data sets; colours and shapes come with the data, so that they are the legend's. Where `usermeta`
names a set of rows, the chart is as high as there are different values of one of its fields.
"""

from typing import Any

import altair as alt

from loopscope.report.layout import Specification

_SHARE = alt.Axis(format="%")
_LOOP = alt.X("loop:O", title="loop", axis=alt.Axis(labelAngle=0))
_GRADED = {"level": "difficulty"}
_LEVEL = alt.Y("level:O", title="difficulty", sort="descending")
_VIRIDIS = alt.Scale(scheme=alt.SchemeParams("viridis", extent=[0.75, 0.0]))  # charts.js has another for dark ground

_SEEDS = alt.YOffset("offset:Q", scale=alt.Scale(domain=[-1, 1]))
_DIFFICULTY = alt.Color("level:Q", title="difficulty", scale=_VIRIDIS, legend=alt.Legend(tickMinStep=1))


def page_charts() -> dict[str, Specification]:
    """By name; the width of all of them is their container's."""
    charts = {
        "gap": _gap(),
        "gap_narrow": _gap(narrow=True),
        "frontiers": _frontiers(),
        "frontiers_touch": _frontiers(drag=False),
        "exits": _exits().encode(color=_DIFFICULTY, order="level:Q"),
        "exits_of_all": _exits(),
        "map": _map(_LEVEL),
        "map_of_all": _map(alt.Y("level:O", title=None, axis=None)),
        "accuracy": _accuracy(),
        "signal": _signal(),
        "signal_of_all": _signal(graded=False),
        "example": _example(),
    }
    return {name: chart.to_dict() for name, chart in charts.items()}


def _gap(narrow: bool = False) -> alt.LayerChart:
    """A row a model that has the gap, its seeds beside each other.

    The script breaks long names into lines; on a narrow page a name has a line for each of its parts.
    """
    parts = r"replace(replace(datum.label, /\n/g, ' '), ': ', ', ')"
    lines = f"split({parts}, ', ')" if narrow else r"split(datum.label, '\n')"
    axis = alt.Axis(
        labelLimit=130 if narrow else 240, labelExpr=lines, labelLineHeight=12, ticks=False, domain=False, grid=True
    )
    y = alt.Y("model:N", title=None, sort=None, axis=axis)
    rows = alt.Chart(alt.NamedData("every")).encode(y=y, yOffset=_SEEDS)
    zero = rows.mark_point(opacity=0).encode(x=alt.X("value:Q", title="average loops", axis=alt.Axis(tickCount=5)))
    line = alt.Chart(alt.NamedData("every")).mark_rule(strokeDash=[3, 3], color="#888888").encode(x="max(value):Q")
    base = alt.Chart(alt.NamedData("gaps")).encode(
        y=y,
        yOffset=_SEEDS,
        color=alt.Color("colour:N", scale=None),
        tooltip=_tooltips(model="model", seed="seed", gap="gap", text="verdict"),
    )
    bars = base.mark_rule(strokeWidth=2.5).encode(x="low:Q", x2="high:Q")
    points = base.mark_point(filled=True, size=70, opacity=1).encode(
        x="value:Q", shape=alt.Shape("shape:N", scale=None)
    )
    usermeta = {"set": "every", "rows": "model", "step": 50 if narrow else 22}
    return (zero + line + bars + points).properties(width="container", usermeta=usermeta)


def _frontiers(drag: bool = True) -> alt.LayerChart:
    """One set of rows: the points of all lines, and marks beside them (the paper's numbers, D@X), each its own line.

    Where a finger would drag, it moves the page and not the chart.
    """
    x = alt.X(
        "loops:Q",
        title="average loops",
        axis=alt.Axis(tickCount=8),
        scale=alt.Scale(zero=False, nice=False, padding=12),
    )
    y = alt.Y("accuracy:Q", title="accuracy", axis=_SHARE, scale=alt.Scale(zero=False, nice=False, padding=12))
    rows = alt.Chart(alt.NamedData("points")).encode(x=x, y=y)
    lines = rows.mark_line(strokeWidth=1.6).encode(
        detail="line:N",
        order="order:Q",
        color=alt.Color("colour:N", scale=None),
        strokeDash=alt.StrokeDash("dash:N", scale=None),
    )
    points = rows.mark_point(opacity=0.9, strokeWidth=2, tooltip=alt.ExprRef("datum.tip")).encode(
        fill=alt.Fill("fill:N", scale=None),
        stroke=alt.Stroke("colour:N", scale=None),
        shape=alt.Shape("shape:N", scale=None),
        size=alt.Size("size:Q", scale=None),
    )
    sought = alt.condition("datum.sought", alt.value(1), alt.value(0))
    rule = alt.Chart(alt.NamedData("target")).mark_rule(strokeDash=[4, 4], color="#888888")
    target = rule.encode(y="accuracy:Q", opacity=sought)
    zoom = alt.selection_interval(
        name="zoom", bind="scales", translate=drag, zoom="wheel![event.ctrlKey || event.metaKey || event.shiftKey]"
    )
    return (target + lines + points.add_params(zoom)).properties(width="container", height=420)


def _exits() -> alt.Chart:
    return (
        alt.Chart(alt.NamedData("exits"))
        .mark_bar()
        .encode(
            x=_LOOP,
            y=alt.Y("share:Q", title="share of examples", axis=_SHARE, scale=alt.Scale(domain=[0, 1])),
            tooltip=_tooltips(loop="exit loop", level="difficulty", text="examples"),
        )
        .properties(width="container", height=230)
    )


def _map(level: alt.Y) -> alt.LayerChart:
    """Difficulty by loop; the shade is a share, and so is the number."""
    base = alt.Chart(alt.NamedData("cells")).encode(x=_LOOP, y=level)
    rects = base.mark_rect().encode(
        color=alt.Color("value:Q", title=None, scale=alt.Scale(scheme="viridis", domain=[0, 1]), legend=None),
        tooltip=_tooltips(loop="loop", **_GRADED if level is _LEVEL else {}, text="share"),
    )
    ink = alt.condition("datum.value > 0.5", alt.value("#010101"), alt.value("#ffffff"))  # on dark ground, too
    numbers = base.mark_text(fontSize=10).encode(text=alt.Text("value:Q", format=".0%"), color=ink)
    return (rects + numbers).properties(width="container", usermeta={"set": "cells", "rows": "level"})


def _accuracy() -> alt.LayerChart:
    """The range is that of all thresholds, so that the scale stays while one drags."""
    x = alt.X("level:Q", title="difficulty", axis=alt.Axis(tickMinStep=1), scale=alt.Scale(zero=False))
    y = alt.Y("value:Q", title="accuracy", axis=_SHARE, scale=alt.Scale(zero=False))
    scale = alt.Scale(domain=["at full depth", "at this threshold"], range=["#999999", "#D55E00"])
    full = "datum.what == 'at full depth'"
    lines = (
        alt.Chart(alt.NamedData("accuracy"))
        .mark_line(point=alt.OverlayMarkDef(filled=True, size=40))
        .encode(
            x=x,
            y=y,
            color=alt.Color("what:N", title=None, scale=scale, legend=alt.Legend(orient="bottom")),
            strokeWidth=alt.condition(full, alt.value(8), alt.value(2)),
            tooltip=_tooltips(what="", level="difficulty", text="accuracy"),
        )
    )
    frame = alt.Chart(alt.NamedData("range")).mark_point(opacity=0).encode(x=x, y=y)
    return (frame + lines).properties(width="container", height=230)


def _signal(graded: bool = True) -> alt.Chart:
    return (
        alt.Chart(alt.NamedData("signal"))
        .mark_line(point=alt.OverlayMarkDef(filled=True, size=25), strokeWidth=1.5)
        .encode(
            x=_LOOP,
            y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False)),
            color=alt.Color("level:Q", title="difficulty", scale=_VIRIDIS, legend=None),
            detail="level:N",
            tooltip=_tooltips(loop="loop", **_GRADED if graded else {}, value="mean"),
        )
        .properties(width="container", height=150)
    )


def _example() -> alt.LayerChart:
    base = alt.Chart(alt.NamedData("loops")).encode(
        x=_LOOP,
        y=alt.Y("value:Q", title="probability", axis=_SHARE, scale=alt.Scale(domain=[0, 1])),
        color=alt.Color(
            "what:N",
            title=None,
            sort=None,
            scale=alt.Scale(range=["#0072B2", "#E69F00"]),
            legend=alt.Legend(orient="bottom", direction="vertical", labelLimit=0),
        ),
    )
    exit_rule = (
        alt.Chart(alt.NamedData("exit")).mark_rule(strokeDash=[4, 4], strokeWidth=2, color="#D55E00").encode(x=_LOOP)
    )
    marks = base.mark_point(filled=True, size=90, opacity=1).encode(
        shape=alt.Shape(
            "right:N",
            title=None,
            scale=alt.Scale(domain=["right", "wrong"], range=["circle", "cross"]),
            legend=alt.Legend(orient="bottom"),
        ),
        tooltip=_tooltips(what="", loop="loop", answer="answer", right="it is", text="probability"),
    )
    return (exit_rule + base.mark_line(strokeWidth=1.5) + marks).properties(width="container", height=220)


def _tooltips(**titles: str) -> list[Any]:
    return [alt.Tooltip(f"{field}:N", title=title or field) for field, title in titles.items()]
