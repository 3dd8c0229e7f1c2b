"""One HTML file in which a report can be explored: offline, without a server, without a request to anywhere.

Python computes every number and writes it into the page, compressed; the scripts in `assets` only look numbers up, sort
them and hand them to Vega-Lite. Texts reach the page escaped, or inside compressed JSON, never as markup; were one to
get through, the page's policy would not let it run.
"""

import base64
import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from itertools import cycle
from typing import Any

import msgspec
import numpy as np
import vl_convert
from jinja2 import Environment

from loopscope.analysis.diagnosis import NO_VERDICT, Diagnosis
from loopscope.analysis.formatting import percent_text
from loopscope.analysis.results import recorded_run
from loopscope.analysis.schema import Binned, ModelResult, Results, rounded
from loopscope.analysis.targets import Target
from loopscope.analysis.threshold_details import OUTCOMES, ModelDetails, SampledExamples, ThresholdDetails
from loopscope.errors import visible
from loopscope.report import tables
from loopscope.report.figure_style import DARK, GLYPHS, MODELS, STYLES, looks_of
from loopscope.report.products import Product
from loopscope.report.verdicts import (
    needed_loops,
    short_title,
    short_verdict,
    summary,
    target_phrase,
    title,
    verdict_lines,
    without_count,
)

MAX_PAGE_BYTES = 8_000_000
"""The largest page; data of single models are left out above it."""
_STEPS = ((200, 2000, 50), (100, 1000, 50), (50, 500, 50), (50, 500, 10), (20, 200, 10), (10, 200, 5))
"""Examples a model, characters of each, and difficulties, in the order in which they are tried."""
_SCRIPTS = (
    *("data", "specifications", "charts", "tables", "hero", "models"),
    *("frontiers", "model", "examples", "folds", "main"),
)

_CELLS = ("label", "best_loop", "fixed", "gate", "best", "blamed")
"""The columns of the first table that a card shows."""


_TERMS = {
    "D@X": "The least average number of loops with which a rule gets X % of the test examples right. Fewer is better.",
    "trajectory": "The answers of all loops, as training made them. No readout can exit before the right "
    "answer is there. It is to blame where the reference needs fewer loops with the same kinds of readout.",
    "readout": "The rule that decides which loop answers: the model's own gate, or a threshold on a signal.",
    "best readout": "The readout that needs the fewest loops on validation data, among the model's own gate and rules "
    "that need no fitting, such as a threshold on the entropy.",
    "own gate": "The readout that the model has learned itself: at every loop it says whether to stop. It is to blame "
    "where another readout on the same trajectory needs fewer loops.",
    "fixed depth": "All examples take the same number of loops.",
    "best loop": "The highest accuracy of any single loop, on the test examples of this report.",
    "No verdict": "Where a model is not above chance, or has a single loop, there is nothing to compare.",
    "readout gap": "Loops of the model's own gate minus those of its best readout, at the same accuracy. Above zero: "
    "the gate exits late.",
    "trajectory gap": "Loops of the model's best readout minus those of the reference's, at the same accuracy, both "
    "among the readouts that the two have, without gates. Above zero: right answers come late.",
    "room left": "Loops of the best readout minus those of the cheapest rule that knows the right answers.",
    "reachable room": "The part of the room left that the better of two rules saves, learned from validation "
    "data on all signals together. A lower bound: more data, or other signals, may save more.",
    "interval": "Where the number would lie with other test examples, in 95 % of the cases (bootstrap).",
    "threshold": "The rule exits as soon as its signal passes this number.",
    "oracle": "A rule that knows the right answers, and exits at the first loop that has one.",
    "forced exits": "Every example exits at the same loop: the trajectory itself, without any rule.",
}
"""The meanings of terms, which the page shows when a reader points at them."""


class Marker(msgspec.Struct, frozen=True):
    """A published number on the page's chart, for the models that match it."""

    names: list[str]  # of the models that it belongs to
    readout: str
    loops: float
    accuracy: float
    text: str


def render(
    results: Results,
    details: Iterable[ThresholdDetails],
    products: Sequence[Product],
    command: str,
    again: str,
    markers: Sequence[Marker] = (),
) -> str:
    """Render the HTML page; `command` made it, and `again` (with `--product NAME`) makes its products.

    `markers` are published numbers that its frontiers show beside the models' own.
    """
    everything, lines = list(details), verdict_lines(results)
    style, script = _asset("page.css"), "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    environment = Environment(autoescape=True, finalize=_visible_on_page, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(as_json=_as_json, seed=seed_of, read_at=_depths_note, guarantee=tables.guarantee_cell)
    environment.filters["short"] = short_verdict
    template = environment.from_string(_asset("page.html"))
    content = {
        "results": results,
        "places": {model.name: place for place, model in enumerate(results.models)},
        "target": results.targets[0],
        "scope": scope_sentence(results),
        "title": title(results),
        "short_title": short_title(results),
        "summary": summary(results),
        "lines": lines,
        "glyphs": [glyph for _, glyph in zip(lines, cycle(GLYPHS.values()))],
        "colours": {line.verdict: line.short for line in lines},
        "goal": target_phrase(results.targets[0]),
        "terms": _TERMS,
        "cards": cards(results),
        "products": products,
        "command": _Verbatim(command),
        "again": _Verbatim(again),
        "head": _pack_json(page_head(results, everything, markers)),
        "figures": {each.name: _pack_json(each.figure(STYLES["page"])) for each in products if each.figure is not None},
        "policy": _content_security_policy([_vega_bundle(), script], style),
        "style": style,
        "libraries": _vega_bundle(),
        "script": script,
    }
    bare = len(template.render(**content, deep=[], thinned="").encode())
    deep, note = thinned(results, everything, MAX_PAGE_BYTES - bare - 100 * len(everything) - 1000)
    return template.render(**content, deep=deep, thinned=note)


@cache
def _vega_bundle() -> str:
    """The bundle of Vega and Vega-Lite, cached because it takes seconds."""
    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub is wrong
    return bundle


def _asset(name: str) -> str:
    """Read a script, style or template of the page."""
    return (files("loopscope.report") / "assets" / name).read_text(encoding="utf-8")


class _Verbatim(str):
    """A text of the page that readers may copy, so its spaces stay unchanged."""


def _as_json(value: Any) -> _Verbatim:
    """JSON for readers of the page."""
    return _Verbatim(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _visible_on_page(value: Any) -> Any:
    """Make a text visible on the page: escape marks that reorder a line, which would change its numbers.

    A number stays with its percent sign.
    """
    if type(value) is _Verbatim:
        return visible(str(value))
    if type(value) is str:
        return visible(value).replace(" %", "\N{NO-BREAK SPACE}%")
    return value  # markup that is marked as safe comes from the page


def _content_security_policy(scripts: Iterable[str], style: str) -> str:
    """The page's content security policy: only its own scripts and style, known by their hashes.

    Whatever else finds its way into the file, the browser refuses to run: no other inline script, no handler in an
    attribute, no `eval`, no style but the page's, no request.
    """
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (*scripts, style)]
    *of_scripts, of_style = (f"'sha256-{each}'" for each in hashes)
    rules = f"default-src 'none'; script-src {' '.join(of_scripts)}; style-src {of_style}"
    return f"{rules}; base-uri 'none'; form-action 'none'"


def cards(results: Results) -> list[dict[str, Any]]:
    """The cards of the page: one for every group of runs that differ only in their seed."""
    made = []
    for (_, members), row in zip(results.grouped, tables.headline(results).rows, strict=True):
        single = gaps = _gaps_on_card(members[0], tables.has_reference(results))
        if len(members) > 1:
            over = {name: tables.gap_over_seeds([model.diagnosis.gaps[name] for model in members]) for name in gaps}
            gaps = {name: without_count(over[name], len(members)) or absent for name, absent in gaps.items()}
        card = dict(zip(_CELLS, [without_count(cell, len(members)) for cell in row], strict=True))
        verdicts, target = Counter(model.verdict for model in members), _target_on_card(members, results.targets[0])
        made.append({**card, "target": target, "verdicts": verdicts, "gaps": gaps, "single": single, "runs": members})
    return made


def _target_on_card(models: list[ModelResult], target: Target) -> str:
    """The accuracy that a relative target means on a card, over seeds from the lowest to the highest."""
    if target.accuracy is not None or tables.without_depths(models):
        return ""
    accuracies = sorted(model.targets[target.key].accuracy for model in models)
    return " to ".join(dict.fromkeys(map(percent_text, (accuracies[0], accuracies[-1]))))


def _gaps_on_card(model: ModelResult, referenced: bool) -> dict[str, str]:
    """The gaps of one run on its card."""
    cells = tables.gap_cells(model, referenced, shares=False)
    same = {name for name, gap in model.diagnosis.gaps.items() if gap is not None and gap.first == gap.second}
    return {name: "its gate is the best readout" if name in same else cell for name, cell in cells.items()}


def _depths_note(diagnosis: Diagnosis) -> str:
    """The sentence about the accuracy of a card's depths, if its gaps use another one, or it is not the target."""
    level = diagnosis.target
    lower = any(gap is not None and gap.accuracy != level.reached for gap in diagnosis.gaps.values())
    if diagnosis.verdict == NO_VERDICT or (level.reached == level.accuracy and not lower):
        return ""
    text = f"Best readout, own gate and fixed depth are read at {percent_text(level.reached)}"
    if level.reached < level.accuracy:
        text += ", the highest whole percent that test data reach at that loop"
    return text + ("; a gap, and the depths that it subtracts, at the accuracy beside it (@)." if lower else ".")


def scope_sentence(results: Results) -> str:
    """The sentence on the scope of a report: its models, seeds and test examples."""
    runs, counts = len(results.models), sorted({model.test_examples for model in results.models})
    seeds = sorted({seed for model in results.models if (seed := seed_of(model))}, key=int)
    tested = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
    unseen = ", none of which training had" if all(model.unseen_only for model in results.models) else ""
    trained = f", training seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}" if seeds else ""
    each = f"{tested} test examples{' each' * (runs > 1)}"
    units = "/".join(dict.fromkeys(model.unit for model in results.models if model.sequences is not None))
    over = ""
    if units:
        tests, most = list(dict.fromkeys(model.tested for model in results.models)), tables.MAX_LISTED_MODELS
        each = f"{', '.join(tests[:most])}{' and so on' * (len(tests) > most)}"
        over = f" Of sequences, means are over {units}, and intervals draw whole sequences."
    return f"{runs} {'run' if runs == 1 else 'runs'}{trained}; {each}{unseen}.{over}"


def seed_of(model: ModelResult) -> str:
    """The training seed of a model, as text; empty if it is unknown."""
    run = recorded_run(model.provenance)
    return "" if run is None else str(run["training"]["seed"])


def page_head(results: Results, details: Sequence[ThresholdDetails], markers: Sequence[Marker]) -> dict[str, Any]:
    """The data of the page for charts of many models."""
    groups = {name: number for number, group in enumerate(results.groups) for name in group.names}
    verdicts = {model.name: model.verdict for model in results.models}
    models = [
        {
            "name": model.name,
            "label": model.label,
            "group": groups[model.name],
            "seed": seed_of(model),
            "loops": len(model.forced_accuracy),
            "examples": model.test_examples,
            "tested": model.tested,  # the number of test examples, in words
            "target": None if model.diagnosis.verdict == NO_VERDICT else model.diagnosis.target.accuracy,
            "chance": model.diagnosis.chance,
            "best": model.diagnosis.compared_readouts,  # where the model is compared, first that of the gate
            "gaps": _gap_data(model, tables.has_reference(results)),
            "curves": own.curves,
            "needed": needed_loops(model, results.targets),
        }
        for model, own in zip(results.models, details, strict=True)
    ]
    return {
        "label": results.targets[0].label,  # of the depth at the report's first target
        "verdicts": [[verdicts[name] for name in group.names] for group in results.groups],
        "short": {verdict: short_verdict(verdict) for verdict in verdicts.values()},
        "slider_targets": details[0].slider_targets,
        "groups": [group.label for group in results.groups],
        "marks": [
            {"colour": line.colour, "shape": shape, "short": line.short, "name": line.label}
            for line, shape in zip(verdict_lines(results), cycle(GLYPHS))
        ],
        "models": models,
        "paper": markers,
        "styles": looks_of({curve.readout for own in details for curve in own.curves}),  # colour and shape
        "colours": MODELS,
        "dark": DARK,  # each colour on a dark ground
        "outcomes": OUTCOMES,
    }


def _gap_data(model: ModelResult, referenced: bool) -> dict[str, dict[str, Any]]:
    """The gaps of one model as data for the page's charts."""
    cells = tables.gap_cells(model, referenced, shares=False)
    return {
        name: {"text": cells[name], "blamed": name.removesuffix(" gap") in model.diagnosis.blamed}
        | {bound: getattr(gap, bound, None) for bound in ("value", "low", "high")}
        for name, gap in model.diagnosis.gaps.items()
    }


def thinned(results: Results, details: Sequence[ThresholdDetails], room: int) -> tuple[list[str], str]:
    """The page's data of every model, packed into `room` characters if possible, and a note on omissions."""
    for most, longest, levels in _STEPS:
        pairs = zip(results.models, details, strict=True)
        parts = [_pack_json(_model_data(model, own.deep, most, longest, levels)) for model, own in pairs]
        if sum(map(len, parts)) <= room:
            break
    coarse = " Histograms join neighbouring difficulties: the page would be too large." if levels < 50 else ""
    note = (
        f"Of each model at most {most} test examples are listed, drawn so that every pattern of right and wrong loops "
        f"has its share, rare ones too, with at most {longest:,} characters of each. All counts, curves, histograms "
        "and intervals are of all test examples. Of the 402 thresholds of a sweep about 51 are shown; D@X is of all."
        + coarse
    )
    return parts, note


def _model_data(model: ModelResult, details: ModelDetails, most: int, longest: int, levels: int) -> dict[str, Any]:
    """The page's data of one model."""
    deep = _with_fewer_difficulties(details, levels)
    return {
        "forced": _without_intervals(model.forced_accuracy_by_difficulty),
        "exit_distribution": None if model.exit_distribution is None else _without_intervals(model.exit_distribution),
        "signals": {name: _without_intervals(table) for name, table in model.signals.items()},
        "answers": "number" if model.benchmark is None else "letter",  # how an answer is written
        "deep": msgspec.structs.replace(deep, examples=_with_fewer_examples(deep.examples, most, longest)),
    }


def _with_fewer_difficulties(deep: ModelDetails, most: int) -> ModelDetails:
    """Join neighbouring difficulties until at most `most` are left."""
    size = len(deep.levels)
    if size <= most:
        return deep
    starts = [place * size // most for place in range(most)]

    def joined(values: Any) -> Any:
        return np.add.reduceat(np.asarray(values), starts, axis=1).tolist()

    middles = [deep.levels[(a + b) // 2] for a, b in zip(starts, [*starts[1:], size], strict=True)]
    lines = {
        name: msgspec.structs.replace(line, exits=joined(line.exits), right=joined(line.right))
        for name, line in deep.lines.items()
    }
    return msgspec.structs.replace(deep, binned=True, levels=middles, counts=joined([deep.counts])[0], lines=lines)


def _with_fewer_examples(sheet: SampledExamples, most: int, longest: int) -> SampledExamples:
    """Keep the first `most` sampled examples, and cut their texts to `longest` characters."""
    kept = sorted(range(min(most, len(sheet.rows))), key=sheet.rows.__getitem__)

    def take(values: Any) -> Any:
        if isinstance(values, dict):
            return {name: take(each) for name, each in values.items()}
        return None if values is None else [_cut_text(values[place], longest) for place in kept]

    return SampledExamples(*(take(getattr(sheet, field)) for field in SampledExamples.__struct_fields__))


def _cut_text(value: Any, longest: int) -> Any:
    """Cut a text to at most `longest` characters."""
    if not isinstance(value, str) or len(value) <= longest:
        return value
    return f"{value[:longest]} … [{len(value) - longest:,} more characters]"


def _without_intervals(table: Binned) -> Binned:
    """A table by difficulty without its intervals, which the page's charts do not show."""
    return Binned(rounded(table.levels), table.counts, [rounded(row) for row in table.values], [], [])


def _pack_json(value: Any) -> str:
    """Compress JSON to text; equal values give equal text."""
    return base64.b64encode(gzip.compress(msgspec.json.encode(value), mtime=0)).decode()
