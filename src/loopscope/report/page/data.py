"""Which numbers does the page carry, and how? Compressed JSON: what charts of many models need, then a part a model."""

import base64
import gzip
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from loopscope.analysis.diagnosis import NO_VERDICT
from loopscope.analysis.outcomes import OUTCOMES
from loopscope.analysis.schema import Binned, ModelResult, Results
from loopscope.analysis.threshold_details import (
    ExitsByThreshold,
    ModelDetails,
    ReadoutCurve,
    SampledExamples,
    ThresholdDetails,
    rounded,
)
from loopscope.report.colours import DARK, MODELS, Look, looks_of
from loopscope.report.layout import Specification
from loopscope.report.page.charts import page_charts
from loopscope.report.page.content import seed_of
from loopscope.report.tables import gap_cells, has_reference

_STEPS = ((200, 2000, 50), (100, 1000, 50), (50, 500, 50), (50, 500, 10), (20, 200, 10), (10, 200, 5))
"""Examples a model, characters of each, and difficulties, in the order in which they are tried."""


class Marker(msgspec.Struct, frozen=True):
    """A published number, beside the models that match it."""

    names: list[str]  # of the models that it belongs to
    readout: str
    loops: float
    accuracy: float
    text: str


class PageGap(msgspec.Struct, frozen=True):
    text: str
    blamed: bool
    value: float | None
    low: float | None
    high: float | None


class PageModel(msgspec.Struct, frozen=True):
    """What charts of many models need of one."""

    name: str
    label: str
    group: int
    seed: str
    loops: int
    examples: int
    tested: str  # how many test examples there are, and of what
    target: float | None  # the accuracy of the report's first target; null where there is no verdict
    chance: float
    best: list[str]  # the readouts that validation chooses where the model is compared, first that of the gate
    gaps: dict[str, PageGap]
    curves: list[ReadoutCurve]


class PageHead(msgspec.Struct, frozen=True):
    label: str  # of the depth at the report's first target
    verdicts: list[list[str]]  # of the runs of each group
    slider_targets: list[float]
    groups: list[str]
    models: list[PageModel]
    paper: list[Marker]
    styles: dict[str, Look]  # readout -> colour and shape
    colours: tuple[str, ...]  # of models
    dark: dict[str, str]  # what a colour is on a dark ground
    outcomes: tuple[str, ...]
    charts: dict[str, Specification]


class PageModelDetails(msgspec.Struct, frozen=True):
    """What is looked at one model at a time."""

    forced: Binned
    exit_distribution: Binned | None
    signals: dict[str, Binned]
    answers: str  # how an answer is written: as a number, or as a letter
    deep: ModelDetails


def page_head(results: Results, details: Sequence[ThresholdDetails], markers: Sequence[Marker]) -> PageHead:
    groups = {name: number for number, group in enumerate(results.groups) for name in group.names}
    models = [
        PageModel(
            name=model.name,
            label=model.label,
            group=groups[model.name],
            seed=seed_of(model),
            loops=len(model.forced_accuracy),
            examples=model.test_examples,
            tested=model.tested,
            target=None if model.diagnosis.verdict == NO_VERDICT else model.diagnosis.target.accuracy,
            chance=model.diagnosis.chance,
            best=list(model.diagnosis.compared_readouts),
            gaps=_gaps(model, has_reference(results)),
            curves=own.curves,
        )
        for model, own in zip(results.models, details, strict=True)
    ]
    verdicts = {model.name: model.verdict for model in results.models}
    return PageHead(
        label=results.targets[0].label,
        verdicts=[[verdicts[name] for name in group.names] for group in results.groups],
        slider_targets=details[0].slider_targets,
        groups=[group.label for group in results.groups],
        models=models,
        paper=list(markers),
        styles=looks_of({curve.readout for model in models for curve in model.curves}),
        colours=MODELS,
        dark=DARK,
        outcomes=OUTCOMES,
        charts=page_charts(),
    )


def _gaps(model: ModelResult, referenced: bool) -> dict[str, PageGap]:
    blamed = [f"{part} gap" for part in model.diagnosis.blamed]
    return {
        name: PageGap(text, name in blamed, *((gap.value, gap.low, gap.high) if gap else (None, None, None)))
        for (name, gap), text in zip(model.diagnosis.gaps.items(), gap_cells(model, referenced, False), strict=True)
    }


def thinned(results: Results, details: Sequence[ThresholdDetails], room: int) -> tuple[list[str], str]:
    """The part of every model, packed into `room` characters if they can be, and what was left out of them."""
    for most, longest, levels in _STEPS:
        parts = [packed(_part(*each, most, longest, levels)) for each in zip(results.models, details, strict=True)]
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


def _part(model: ModelResult, details: ThresholdDetails, most: int, longest: int, levels: int) -> PageModelDetails:
    deep = _coarser(details.deep, levels)
    return PageModelDetails(
        forced=_brief(model.forced_accuracy_by_difficulty),
        exit_distribution=None if model.exit_distribution is None else _brief(model.exit_distribution),
        signals={name: _brief(table) for name, table in model.signals.items()},
        answers="number" if model.benchmark is None else "letter",
        deep=msgspec.structs.replace(deep, examples=_shorter(deep.examples, most, longest)),
    )


def _coarser(deep: ModelDetails, most: int) -> ModelDetails:
    """Neighbouring difficulties joined until there are at most so many."""
    size = len(deep.levels)
    if size <= most:
        return deep
    starts = [place * size // most for place in range(most)]

    def joined(values: Any) -> Any:
        return np.add.reduceat(np.asarray(values), starts, axis=1).tolist()

    middles = [deep.levels[(a + b) // 2] for a, b in zip(starts, [*starts[1:], size], strict=True)]
    lines = {
        name: ExitsByThreshold(joined(line.exits), joined(line.right), line.outcomes)
        for name, line in deep.lines.items()
    }
    counts = np.add.reduceat(np.asarray(deep.counts), starts).tolist()
    return msgspec.structs.replace(deep, binned=True, levels=middles, counts=counts, lines=lines)


def _shorter(sheet: SampledExamples, most: int, longest: int) -> SampledExamples:
    """The first `most` of the examples that were drawn, in the order of the recording, cut at `longest` characters."""
    kept = sorted(range(min(most, len(sheet.rows))), key=sheet.rows.__getitem__)

    def take(values: Any) -> Any:
        return None if values is None else [values[place] for place in kept]

    texts: list[str] | None = take(sheet.texts)
    return SampledExamples(
        rows=take(sheet.rows),
        texts=None if texts is None else [_cut(text, longest) for text in texts],
        labels=take(sheet.labels),
        difficulty=take(sheet.difficulty),
        answers=take(sheet.answers),
        label_probability=take(sheet.label_probability),
        signals={name: take(values) for name, values in sheet.signals.items()},
        crossed={name: take(values) for name, values in sheet.crossed.items()},
    )


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]} … [{len(text) - longest:,} more characters]"


def _brief(table: Binned) -> Binned:
    """Without its intervals, which figures have and the page's own charts do not show."""
    return Binned(rounded(table.levels), table.counts, [rounded(row) for row in table.values], [], [])


def packed(value: Any) -> str:
    """Compressed JSON as text; the same value gives the same text."""
    return base64.b64encode(gzip.compress(msgspec.json.encode(value), mtime=0)).decode()
