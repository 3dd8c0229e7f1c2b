"""What does a reader see first? The title of a report, and one line per model: its verdict, loops and reasons.

Words and figures are those of the analysis (`Diagnosis.against_reference`, `Diagnosis.own_gate`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loopscope.analysis.bootstrap import Interval
from loopscope.analysis.diagnosis import NO_VERDICT
from loopscope.analysis.formatting import percent_text
from loopscope.analysis.results import recorded_run
from loopscope.analysis.schema import ModelResult, Results
from loopscope.analysis.targets import Target
from loopscope.analysis.verdict_text import GapWords
from loopscope.report import tables
from loopscope.report.figure_style import GREY, VERDICTS

_MAX_NAMES = 2
"""A title names at most this many models or tasks; of more it gives their number."""
_SHORT = {
    "readout": "its readout (the gate) is to blame",
    "trajectory": "its trajectory is to blame",
    "readout and trajectory": "both its parts are to blame",
    "neither": "neither part is to blame",
    "cannot tell": "open with these data",
    "readout (the reference)": "the reference; its readout is to blame",
    "the reference, no verdict": "the reference, without a verdict",
    "mixed": "its seeds disagree",
}
_COUNTED = {
    "readout": "the readout is to blame in {}",
    "trajectory": "the trajectory is to blame in {}",
    "readout and trajectory": "both parts are to blame in {}",
    "neither": "neither part is to blame in {}",
    "cannot tell": "whether a part is to blame cannot be told in {}",
    NO_VERDICT: "{} get no verdict",
    "the reference": "{} is the reference",
    "readout (the reference)": "the readout is to blame in {} that is the reference",
    "the reference, no verdict": "{} is the reference, which gets no verdict either",
    "mixed": "the seeds of {} disagree",
}


@dataclass(frozen=True)
class NeededLoops:
    """The loops that a model needs: D@X of the readout that validation data choose."""

    readout: str
    accuracy: float  # at which it is read
    loops: float
    low: float | None  # of the 95 % interval
    high: float | None


@dataclass(frozen=True)
class PartVerdict:
    """The verdict on one part of a model, its trajectory or its readout; or the reason for no verdict."""

    name: str
    words: str
    figures: str
    blamed: bool


@dataclass(frozen=True)
class VerdictLine:
    """The verdict line of a model, or of runs that differ only in their seed."""

    label: str
    verdict: str  # 'mixed' where its seeds disagree
    short: str  # the verdict in a few words
    loops: str
    exits_by: str
    parts: list[PartVerdict]

    @property
    def colour(self) -> str:
        return VERDICTS.get(self.verdict.removesuffix(" (the reference)"), GREY)


def title(results: Results) -> str:
    """The title of a report: the question it answers, with task, models and accuracy."""
    names = _labels(results)
    who = f"{len(names)} models" if len(names) > _MAX_NAMES else " and ".join(names)
    question = f"ow many loops {'does' if len(names) == 1 else 'do'} {who} need to {target_phrase(results.targets[0])}?"
    on = _task_names(results)
    return f"{', '.join(on)}: h{question}" if 0 < len(on) <= _MAX_NAMES else f"H{question}"


def short_title(results: Results) -> str:
    """The title of a report in the browser's tab."""
    names, on = _labels(results), _task_names(results)
    parts = on if 0 < len(on) <= _MAX_NAMES else []
    return ", ".join([*parts, f"{len(names)} models" if len(names) > 1 else names[0]])


def _labels(results: Results) -> list[str]:
    """The labels of all models or groups of seeds in a report."""
    return [group.label if len(members) > 1 else members[0].label for group, members in results.grouped]


def _task_names(results: Results) -> list[str]:
    """The tasks and benchmarks of a report, each once."""
    known = []
    for model in results.models:
        run = recorded_run(model.provenance)
        known.append(model.benchmark.title if model.benchmark else run["task"]["name"] if run else "")
    return [name for name in dict.fromkeys(known) if name]


def target_phrase(target: Target) -> str:
    """A target as a verb phrase, as in "how many loops does it need to ..."."""
    if target.accuracy is not None:
        return f"reach {percent_text(target.accuracy)} accuracy"
    points = f"{100 * (target.below_full_depth or 0):g}"
    if points == "0":
        return "be as accurate as at full depth"
    return f"come within {points} point{'s' * (points != '1')} of full depth"


def summary(results: Results) -> str:
    """The sentence that sums up the verdicts of several models; seeds that disagree count as mixed."""
    if len(results.groups) < 2:
        return ""
    counts = Counter(_group_verdict(members) for _, members in results.grouped)
    parts = [text.format(counts[verdict]) for verdict, text in _COUNTED.items() if counts[verdict]]
    parts = [text.replace("1 get ", "1 gets ") for text in parts]
    return f"Of {len(results.groups)} models, {', '.join(parts[:-1])}{', and ' * (len(parts) > 1)}{parts[-1]}."


def _group_verdict(members: Sequence[ModelResult]) -> str:
    """The verdict of runs that differ only in their seed; with a reference among them, the reference's."""
    verdicts = {model.verdict for model in [each for each in members if each.is_reference] or members}
    return verdicts.pop() if len(verdicts) == 1 else "mixed"


def verdict_lines(results: Results) -> list[VerdictLine]:
    """The verdict lines of a report, one per model or group of seeds."""
    referenced, lines = tables.has_reference(results), []
    for (_, members), row in zip(results.grouped, tables.headline(results).rows, strict=True):
        verdict, needed = _group_verdict(members), [needed_loops(model, results.targets) for model in members]
        label, best = row[0], row[4]
        loops, _, exits_by = without_count(best, len(members)).partition(", ")
        if len(members) == 1 and needed[0] is not None:
            loops = _needed_text(needed[0], results.targets[0])
        parts = [
            _part("Trajectory", members, lambda model: _trajectory_words(model, referenced), "trajectory"),
            _part("Own gate", members, _own_gate_words, "readout"),
        ]
        if verdict in (NO_VERDICT, "the reference, no verdict"):
            why = members[0].diagnosis.sentence.removeprefix("No verdict: ")
            loops, exits_by, parts = "", "", [PartVerdict("No verdict", why, "", blamed=False)]
        lines.append(VerdictLine(label, verdict, short_verdict(verdict), loops, exits_by, parts))
    return lines


def short_verdict(verdict: str) -> str:
    """A verdict in a few words."""
    return _SHORT.get(verdict, verdict)


def needed_loops(model: ModelResult, targets: Sequence[Target]) -> NeededLoops | None:
    """The loops that a model needs at the first target, or else at a relative target."""
    if model.diagnosis.verdict == NO_VERDICT:
        return None
    relative = next((each for each in targets if each.accuracy is None), targets[0])
    for target in dict.fromkeys((targets[0], relative)):
        frontier = model.frontier(tables.best_readout_at(model, target))
        if frontier is not None and (loops := frontier.depth_at[target.key]) is not None:
            bounds: Interval | None = frontier.depth_interval[target.key]
            low, high = (bounds.low, bounds.high) if bounds else (None, None)
            return NeededLoops(frontier.readout, model.targets[target.key].reached, loops, low, high)
    return None


def _needed_text(needed: NeededLoops, target: Target) -> str:
    """The needed loops as text."""
    bounds = "" if needed.low is None else f" [{needed.low:.2f}, {needed.high:.2f}]"
    at = "" if needed.accuracy == target.accuracy else f" at {percent_text(needed.accuracy)}"
    return f"{needed.loops:.2f}{bounds}{at}"


def _part(name: str, members: Sequence[ModelResult], read: Callable[[ModelResult], GapWords], gap: str) -> PartVerdict:
    """The verdict on one part of a model; words of several seeds are counted, and their gaps averaged."""
    blamed = any(gap in model.diagnosis.blamed for model in members)
    every = [read(model) for model in members]
    if len(members) == 1:
        return PartVerdict(name, every[0].words, every[0].figures, blamed)
    counts = Counter(each.words for each in every)
    words = [text if len(counts) == 1 else f"{text} ({count} of {len(every)} seeds)" for text, count in counts.items()]
    size = without_count(tables.gap_over_seeds([model.diagnosis.gaps[f"{gap} gap"] for model in members]), len(members))
    return PartVerdict(name, "; ".join(words), size and f"over seeds: {size} loops", blamed)


def without_count(text: str, seeds: int) -> str:
    """Remove "(3 of 3)" from a text over seeds: all seeds agree."""
    return text.replace(f" ({seeds} of {seeds})", "")


def _trajectory_words(model: ModelResult, referenced: bool) -> GapWords:
    """The gap of a model's trajectory in words."""
    if model.is_reference:
        return GapWords("the reference", "that the others are compared with")
    if not referenced:
        return GapWords("not judged", "without a reference")
    return model.diagnosis.against_reference or GapWords("not judged", "(nothing above chance is reached by both)")


def _own_gate_words(model: ModelResult) -> GapWords:
    """The gap of a model's own gate in words."""
    if tables.gap_cells(model, referenced=False)["readout gap"] == "no gate":
        return GapWords("none", "")
    return model.diagnosis.own_gate or GapWords("not judged", "(nothing above chance is reached)")
