"""One HTML file in which a report can be explored: offline, without a server, without a request to anywhere.

Python computes every number and writes it into the page, compressed; the scripts beside this file only look numbers
up, sort them and hand them to Vega-Lite. Texts reach the page escaped, or inside compressed JSON, never as markup; were
one to get through, the page's policy would not let it run.
"""

from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

import vl_convert
from jinja2 import Environment

from loopscope.analysis.schema import Results
from loopscope.analysis.threshold_details import ThresholdDetails
from loopscope.errors import visible
from loopscope.report.layout import STYLES
from loopscope.report.page.content import cards, made_of, scope, summary
from loopscope.report.page.data import Marker, packed, page_head, thinned
from loopscope.report.page.policy import content_security_policy
from loopscope.report.products import Product

LARGEST = 8_000_000
"""Bytes that the page may have; what is too much is left out of the parts of single models."""
_SCRIPTS = ("data.js", "charts.js", "tables.js", "models.js", "frontiers.js", "model.js", "examples.js", "main.js")


def render(
    results: Results,
    details: Iterable[ThresholdDetails],
    products: Sequence[Product],
    command: str,
    again: str,
    markers: Sequence[Marker] = (),
) -> str:
    """The page, which says by what command it was made, and its products `again` (and `--product NAME`), if by one.

    `markers` are published numbers that its frontiers show beside the models' own.
    """
    everything = list(details)
    style = _file("page.css")
    libraries: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub is wrong
    script = "\n".join(map(_file, _SCRIPTS))
    environment = Environment(autoescape=True, finalize=_shown, trim_blocks=True, lstrip_blocks=True)
    environment.filters["verbatim"] = _Verbatim
    template = environment.from_string(_file("page.html"))
    content = {
        "version": results.loopscope,
        "target": results.targets[0],
        "scope": scope(results),
        "summary": summary(results),
        "cards": cards(results),
        "products": products,
        "made": made_of(results),
        "command": _Verbatim(command),
        "again": _Verbatim(again),
        "head": packed(page_head(results, everything, markers)),
        "figures": {each.name: packed(each.figure(STYLES["page"])) for each in products if each.figure is not None},
        "policy": content_security_policy([libraries, script], [style]),
        "style": style,
        "libraries": libraries,
        "script": script,
    }
    bare = len(template.render(**content, deep=[], thinned="").encode())
    deep, note = thinned(results, everything, LARGEST - bare - 100 * len(everything) - 1000)
    return template.render(**content, deep=deep, thinned=note)


class _Verbatim(str):
    """A text that a reader may copy: no blank of it is changed."""


def _shown(value: Any) -> Any:
    """Of texts, what a reader can see: a mark that reorders a line would turn the numbers around that follow it.

    A number stays with its percent sign.
    """
    if type(value) is _Verbatim:
        return visible(str(value))
    if type(value) is str:
        return visible(value).replace(" %", "\N{NO-BREAK SPACE}%")
    return value  # what is marked as safe is the page's own


def _file(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")
