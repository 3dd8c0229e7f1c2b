"""The figures of a report: Vega-Lite charts, written as PNG and PDF for a paper and as SVG for the page.

Colours are safe for colour-blind readers (Okabe-Ito for readouts, viridis for difficulty); every readout has its own
mark too.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import altair as alt
import vl_convert

from loopscope.artifacts import write_bytes
from loopscope.exits.signals import CONVERGENCE
from loopscope.report.results import Binned, ModelResult, Results

_OKABE_ITO = {
    "fixed": "#000000",
    "gate": "#D55E00",
    "entropy": "#0072B2",
    "top1": "#56B4E9",
    "margin": "#009E73",
    "kl": "#CC79A7",
    "logit_change": "#E69F00",
    "hidden_change": "#999999",
    "hidden_cosine": "#8C564B",
    "oracle": "#7F3C8D",
}
_SHAPES = {
    "fixed": "square",
    "gate": "diamond",
    "entropy": "circle",
    "top1": "triangle-up",
    "margin": "triangle-down",
    "kl": "cross",
    "logit_change": "triangle-right",
    "hidden_change": "triangle-left",
    "hidden_cosine": "M-.7,-.7L.7,.7M.7,-.7L-.7,.7",  # an x
    "oracle": "M0,.5L.6,.8L.5,.1L1,-.3L.3,-.4L0,-1L-.3,-.4L-1,-.3L-.5,.1L-.6,.8L0,.5Z",  # a star
}
_SHOWN_SIGNALS = {
    "entropy": "entropy",
    "margin": "logit margin",
    "kl": "predictive KL",
    "hidden_change": "hidden-state displacement",
}
_PANEL = {"width": 230, "height": 170}
_PER_ROW = 2


def figures(results: Results) -> dict[str, dict[str, Any]]:
    """Every figure by its name, as a Vega-Lite specification."""
    made = {
        "frontiers": _grid(_frontiers(model, results) for model in results.models),
        "forced_exits": _grid(
            _by_difficulty(model.forced_accuracy_by_difficulty, model.label, "accuracy", percent=True)
            for model in results.models
        ),
        "exit_distributions": _grid(
            _by_difficulty(model.exit_distribution, model.label, "exit probability", percent=True)
            for model in results.models
            if model.exit_distribution is not None
        ),
        "signals": _rows(_signals(model) for model in results.models),
    }
    return {name: chart.to_dict() for name, chart in made.items() if chart is not None}


def write_figures(specifications: dict[str, dict[str, Any]], folder: Path) -> dict[str, str]:
    """Writes every figure as PNG and PDF; returns them as SVG."""
    drawn = {}
    for name, specification in specifications.items():
        write_bytes(folder / f"{name}.png", vl_convert.vegalite_to_png(specification, scale=3))
        write_bytes(folder / f"{name}.pdf", vl_convert.vegalite_to_pdf(specification))
        drawn[name] = vl_convert.vegalite_to_svg(specification)
    return drawn


def _frontiers(model: ModelResult, results: Results) -> alt.LayerChart:
    points = [
        {"loops": loops, "accuracy": accuracy, "readout": frontier.readout, "order": index}
        for frontier in model.frontiers
        for index, (loops, accuracy) in enumerate(sorted(zip(frontier.average_loops, frontier.accuracy, strict=True)))
    ]
    readouts = [name for name in _OKABE_ITO if any(frontier.readout == name for frontier in _all(results))]
    colour = alt.Color(
        "readout:N",
        scale=alt.Scale(domain=readouts, range=[_OKABE_ITO[name] for name in readouts]),
        legend=alt.Legend(title="readout", symbolType="circle", symbolOpacity=1),
    )
    shape = alt.Shape("readout:N", scale=alt.Scale(domain=readouts, range=[_SHAPES[name] for name in readouts]))
    floor = min(accuracy for frontier in _all(results) for accuracy in frontier.accuracy)
    height = alt.Y(
        "accuracy:Q",
        title="accuracy",
        axis=alt.Axis(format="%"),
        scale=alt.Scale(domain=[max(0.0, floor - 0.01), 1.0]),
    )
    base = alt.Chart(_data(points)).encode(
        x=alt.X("loops:Q", title="average loops", scale=alt.Scale(domain=[1, len(model.forced_accuracy)])),
        y=height,
        color=colour,
        shape=shape,
    )
    lines = (
        base.mark_line(strokeWidth=1.2, opacity=0.8)
        .encode(order="order:Q")
        .transform_filter("datum.readout != 'fixed'")  # between two depths there is no fixed depth
    )
    marks = base.mark_point(filled=True, opacity=0.9).encode(
        size=alt.condition("datum.readout == 'fixed' || datum.readout == 'oracle'", alt.value(60), alt.value(14))
    )
    target = alt.Chart(_data([{"accuracy": results.targets[0]}])).mark_rule(strokeDash=[4, 4], color="#777777")
    return (target.encode(y=height) + lines + marks).properties(title=model.label, **_PANEL)


def _all(results: Results) -> Iterable[Any]:
    return (frontier for model in results.models for frontier in model.frontiers)


def _by_difficulty(table: Binned, title: str, quantity: str, percent: bool = False, first: int = 1) -> alt.Chart:
    values = [
        {"loop": loop, "value": value, "difficulty": level}
        for level, row in zip(table.levels, table.values, strict=True)
        for loop, value in enumerate(row, start=1)
        if loop >= first and value is not None
    ]
    return (
        alt.Chart(_data(values))
        .mark_line(point=alt.OverlayMarkDef(filled=True, size=25), strokeWidth=1.5)
        .encode(
            x=alt.X("loop:O", title="loop", axis=alt.Axis(labelAngle=0)),
            y=alt.Y(
                "value:Q",
                title=quantity,
                axis=alt.Axis(format="%") if percent else alt.Axis(),
                scale=alt.Scale(zero=False),
            ),
            color=alt.Color(
                "difficulty:O", title="difficulty", scale=alt.Scale(scheme="viridis", reverse=True), sort="ascending"
            ),
        )
        .properties(title=title, **_PANEL)
    )


def _data(values: list[dict[str, Any]]) -> Any:
    return alt.Data(values=values)  # type: ignore[no-untyped-call]


def _signals(model: ModelResult) -> alt.HConcatChart | None:
    panels = [
        _by_difficulty(model.signals[name], f"{model.label}: {title}", title, first=2 if name in CONVERGENCE else 1)
        for name, title in _SHOWN_SIGNALS.items()
        if name in model.signals
    ]
    return alt.hconcat(*panels) if panels else None


def _grid(panels: Iterable[alt.Chart | alt.LayerChart]) -> alt.VConcatChart | None:
    """Panels that show the same quantity of different models, on the same scale."""
    charts = list(panels)
    rows = [charts[start : start + _PER_ROW] for start in range(0, len(charts), _PER_ROW)]
    return _rows((alt.hconcat(*row).resolve_scale(y="shared") for row in rows), shared="shared")


def _rows(
    rows: Iterable[alt.HConcatChart | None], shared: Literal["shared", "independent"] = "independent"
) -> alt.VConcatChart | None:
    charts = [row for row in rows if row is not None]
    if not charts:
        return None
    return (
        alt.vconcat(*charts)
        .resolve_scale(color="shared", y=shared)
        .configure(font="Helvetica, Arial, sans-serif", background="white")
        .configure_title(fontSize=12, anchor="start", fontWeight="normal")
        .configure_axis(labelFontSize=10, titleFontSize=11, grid=True, gridOpacity=0.4, titleFontWeight="normal")
        .configure_legend(labelFontSize=10, titleFontSize=11, titleFontWeight="normal")
        .configure_view(stroke="#dddddd")
    )
