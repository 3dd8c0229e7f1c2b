"""The figure of `benchmarks.guarantees`: are guarantees kept, and what do they cost?"""

from functools import partial
from pathlib import Path
from typing import Any

import altair as alt

from benchmarks.guarantees import GuaranteeBench
from loopscope.report.charts import Specification, write_figure
from loopscope.report.figure_style import COLOURS, SHAPES, FigureStyle


def write_guarantee_figure(bench: GuaranteeBench, file: Path) -> None:
    """Writes the panels as PNG, PDF and SVG."""
    write_figure(partial(guarantee_panels, bench), file.parent, file.stem)


def guarantee_panels(bench: GuaranteeBench, style: FigureStyle) -> Specification:
    """How often guarantees are broken, and what they cost against hindsight, by the number of examples."""
    sets: dict[str, list[dict[str, Any]]] = {}

    def named(values: list[dict[str, Any]]) -> alt.NamedData:
        name = f"panel-{len(sets)}"
        sets[name] = values
        return alt.NamedData(name=name)

    methods = {"guarantee": "with a guarantee", "usual": "laxest within the limit"}
    broken = [
        {"population": each.population, "method": methods[each.method], "broken": each.broken}
        for each in bench.coverage
        if each.method in methods
    ]
    share = alt.X("broken:Q", title="share of calibrations that break the limit", axis=alt.Axis(format="%"))
    names = list(dict.fromkeys(each.population for each in bench.coverage))
    bars = (
        alt.Chart(named(broken))
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
    allowed = alt.Chart(named([{"broken": 1 - bench.confidence}])).mark_rule(strokeDash=[4, 4]).encode(x=share)
    price = [
        {"examples": each.examples, "ratio": each.loops / each.hindsight_loops, "population": each.population}
        for each in bench.price
    ]
    priced = list(dict.fromkeys(each.population for each in bench.price))
    lines = (
        alt.Chart(named(price))
        .mark_line(point=alt.OverlayMarkDef(filled=True, size=30), strokeWidth=1.5)
        .encode(
            x=alt.X(
                "examples:Q",
                title="calibration examples",
                axis=alt.Axis(values=sorted({each.examples for each in bench.price}), format=","),
                scale=alt.Scale(type="log", nice=False),
            ),
            y=alt.Y("ratio:Q", title="average loops / hindsight's", scale=alt.Scale(zero=False)),
            color=alt.Color("population:N", sort=priced, scale=alt.Scale(domain=priced, range=list(COLOURS))),
            shape=alt.Shape("population:N", sort=priced, scale=alt.Scale(domain=priced, range=list(SHAPES))),
        )
    )
    size = {"width": 1.3 * style.width, "height": 1.3 * style.height}
    panels = alt.hconcat(
        (bars + allowed).properties(title="Is the guarantee kept? (dashed: allowed)", **size),
        lines.properties(title="What does it cost?", **size),
    ).resolve_scale(color="independent", shape="independent")
    return {**panels.to_dict(), "config": style.config, "usermeta": {"columns": 2}, "datasets": sets}
