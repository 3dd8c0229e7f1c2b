"""How does a frontier look? A chart that a notebook draws by itself: a Vega-Lite specification, without a library.

The figures of a report are `loopscope.report.charts`, which this room does not see.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

_MIME = "application/vnd.vegalite.v5+json"
_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
_POINTS = ("fixed", "oracle")
"""Between two fixed depths there is no fixed depth, and the oracle is one point: marks without a line."""


@dataclass(frozen=True, repr=False, eq=False)
class FrontierPlot:
    """Curves of accuracy against average loops; `specification` is Vega-Lite, for whatever draws that."""

    curves: Mapping[str, tuple[NDArray[Any], NDArray[Any]]]  # readout -> average loops, accuracy

    @property
    def specification(self) -> dict[str, Any]:
        rows = [
            {"readout": name, "average loops": float(loops), "accuracy": float(accuracy)}
            for name, points in self.curves.items()
            for loops, accuracy in sorted(set(zip(*points, strict=True)))
        ]
        x = {"field": "average loops", "type": "quantitative", "scale": {"zero": False}}
        y = {"field": "accuracy", "type": "quantitative", "scale": {"zero": False}, "axis": {"format": "%"}}
        colour = {"field": "readout", "type": "nominal", "sort": None}
        alone = {"field": "readout", "oneOf": [name for name in self.curves if name in _POINTS]}
        return {
            "$schema": _SCHEMA,
            "data": {"values": rows},
            "width": 420,
            "height": 280,
            "encoding": {"x": x, "y": y, "color": colour, "shape": {"field": "readout", "type": "nominal"}},
            "layer": [
                {"mark": "line", "transform": [{"filter": {"not": alone}}]},
                {"mark": {"type": "point", "filled": True, "tooltip": True}},
            ],
        }

    def __repr__(self) -> str:
        return f"FrontierPlot({', '.join(self.curves)}: accuracy against average loops; a notebook draws it)"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {_MIME: self.specification, "text/plain": repr(self)}
