"""What does the page say in words? The diagnosis of every model, and how everything was made."""

import json
from collections import Counter
from typing import NamedTuple

from loopscope.analysis import Diagnosis, Gap, Target
from loopscope.analysis.diagnosis import NO_VERDICT
from loopscope.analysis.labels import recorded_run
from loopscope.analysis.schema import ModelResult, Results
from loopscope.analysis.targets import percent_text
from loopscope.report.tables import (
    LISTED,
    gap_cells,
    gap_over_seeds,
    guarantee_cell,
    has_reference,
    headline,
    without_depths,
)


class Card(NamedTuple):
    """Runs that differ in their seed only."""

    label: str
    blamed: str
    target: str  # the accuracy, where it is the model's own
    verdicts: dict[str, int]  # how many of the runs have each
    best_loop: str
    fixed: str
    gate: str
    best: str
    gaps: dict[str, str]  # over the runs
    runs: list["RunCard"]


class RunCard(NamedTuple):
    name: str
    place: int  # among all runs
    weights: str
    seed: str
    sentence: str
    gaps: dict[str, tuple[str, str]]  # with the depths that are subtracted
    certified: list[str]
    refused: list[str]


class RunProvenance(NamedTuple):
    """Where the numbers of a model come from."""

    name: str
    label: str
    seed: str
    weights: str
    examples: str
    provenance: str


def cards(results: Results) -> list[Card]:
    models = {model.name: (place, model) for place, model in enumerate(results.models)}
    made = []
    for group, row in zip(results.groups, headline(results).rows, strict=True):
        label, *cells = row
        best_loop, fixed, gate, best, blamed = (_uncounted(cell, len(group.names)) for cell in cells)
        members = [models[name] for name in group.names]
        verdicts = Counter(each.verdict for _, each in members)
        runs = [_run(*each, has_reference(results)) for each in members]
        first = {name: cell for name, (cell, _) in runs[0].gaps.items()}
        gaps = _over([each for _, each in members], first) if len(members) > 1 else first
        target = _own_target([each for _, each in members], results.targets[0])
        made.append(Card(label, blamed, target, dict(verdicts), best_loop, fixed, gate, best, gaps, runs))
    return made


def _own_target(models: list[ModelResult], target: Target) -> str:
    """Of a relative target the accuracy, over seeds from the lowest to the highest."""
    if target.accuracy is not None or without_depths(models):
        return ""
    accuracies = sorted(model.targets[target.key].accuracy for model in models)
    return " to ".join(dict.fromkeys(map(percent_text, (accuracies[0], accuracies[-1]))))


def _run(place: int, model: ModelResult, referenced: bool) -> RunCard:
    gaps = {
        name: ("its gate is the best readout", "") if gap and gap.first == gap.second else (cell, _subtracted(gap))
        for (name, gap), cell in zip(model.diagnosis.gaps.items(), gap_cells(model, referenced, False), strict=True)
    }
    certified = [
        f"{each.readout} at {each.threshold:.4g} ({guarantee_cell(each.guarantee)}): "
        f"{each.held_out.average_loops.value:.2f} loops on its test "
        + ("examples" if each.held_out.sequences is None else "sequences, on average over them")
        + (f"; the promise was {kept.verdict}." if (kept := each.held_out.guarantee) else ".")
        for each in model.certified
        if each.guarantee is not None
    ]
    diagnosis = model.diagnosis
    sentence = " ".join(
        filter(None, (diagnosis.sentence, diagnosis.target_sentence, _read_at(diagnosis), diagnosis.room_sentence))
    )
    summary = (seed_of(model), sentence, gaps, certified, model.refused)
    return RunCard(model.name, place, _weights(model), *summary)


def _read_at(diagnosis: Diagnosis) -> str:
    """Of which accuracy the card's depths are, where its gaps are at another, or where it is not the target."""
    level = diagnosis.target
    lower = any(gap is not None and gap.accuracy != level.reached for gap in diagnosis.gaps.values())
    if diagnosis.verdict == NO_VERDICT or (level.reached == level.accuracy and not lower):
        return ""
    text = f"Best readout, own gate and fixed depth are read at {percent_text(level.reached)}"
    if level.reached < level.accuracy:
        text += ", the highest whole percent that test data reach at that loop"
    return text + ("; a gap, and the depths that it subtracts, at the accuracy beside it (@)." if lower else ".")


def _subtracted(gap: Gap | None) -> str:
    return "" if gap is None else f"{gap.first_depth:.2f} - {gap.second_depth:.2f}"


def _over(models: list[ModelResult], first: dict[str, str]) -> dict[str, str]:
    """The gaps over seeds; where they are not all at the target, it says from which accuracy on."""
    cells = {}
    for name, absent in first.items():
        gaps = [model.diagnosis.gaps[name] for model in models]
        cells[name] = _uncounted(gap_over_seeds(gaps), len(gaps)) or absent
    return cells


def _uncounted(text: str, seeds: int) -> str:
    """Without "(3 of 3)": that all of them are there goes without saying."""
    return text.replace(f" ({seeds} of {seeds})", "")


_PARTS = {
    "readout": "the readout is to blame in {}",
    "trajectory": "the trajectory is to blame in {}",
    "readout and trajectory": "both parts are to blame in {}",
    "neither": "neither part is to blame in {}",
    "cannot tell": "whether a part is to blame cannot be told in {}",
    NO_VERDICT: "{} get no verdict",
    "the reference": "{} is the reference",
    "readout (the reference)": "the readout is to blame in {} that is the reference",
    "the reference, no verdict": "{} is the reference, which gets no verdict either",
}


def summary(results: Results) -> str:
    """What is found of several models, in a sentence; seeds of a model that disagree are counted apart.

    That of which one seed is the reference is the reference: its seeds are measured by each other.
    """
    if len(results.groups) < 2:
        return ""
    models = {model.name: model for model in results.models}
    verdicts = [_verdicts([models[name] for name in group.names]) for group in results.groups]
    counts = Counter(next(iter(each)) for each in verdicts if len(each) == 1)
    parts = [text.format(counts[verdict]) for verdict, text in _PARTS.items() if counts[verdict]]
    parts = [text.replace("1 get ", "1 gets ") for text in parts]
    if mixed := sum(len(each) > 1 for each in verdicts):
        parts.append(f"the seeds of {mixed} disagree")
    return f"Of {len(results.groups)} models, {', '.join(parts[:-1])}{', and ' * (len(parts) > 1)}{parts[-1]}."


def _verdicts(members: list[ModelResult]) -> set[str]:
    """Of runs that differ in their seed only."""
    return {each.verdict for each in members if each.is_reference} or {each.verdict for each in members}


def scope(results: Results) -> str:
    """Of what the report is, in a sentence."""
    runs, counts = len(results.models), sorted({model.test_examples for model in results.models})
    tests = dict.fromkeys(model.tested for model in results.models)
    seeds = sorted({seed for model in results.models if (seed := seed_of(model))}, key=int)
    tested = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
    unseen = ", none of which training had" if all(model.unseen_only for model in results.models) else ""
    trained = f", training seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}" if seeds else ""
    each = f"{tested} test examples{' each' * (runs > 1)}"
    if any(model.sequences is not None for model in results.models):
        each = f"{', '.join(list(tests)[:LISTED])}{' and so on' * (len(tests) > LISTED)}"
    return f"{runs} {'run' if runs == 1 else 'runs'}{trained}; {each}{unseen}.{over_sequences(results)}"


def over_sequences(results: Results) -> str:
    """What means and intervals are over, where examples belong to sequences."""
    units = "/".join(dict.fromkeys(model.unit for model in results.models if model.sequences is not None))
    return f" Of sequences, means are over {units}, and intervals draw whole sequences." if units else ""


def made_of(results: Results) -> list[RunProvenance]:
    return [
        RunProvenance(
            model.name,
            model.label,
            seed_of(model),
            _weights(model),
            f"{model.validation_examples:,} validation, {model.tested}"
            + (" (those that training had left out)" if model.unseen_only else ""),
            json.dumps(model.provenance, indent=2, ensure_ascii=False, default=str),
        )
        for model in results.models
    ]


def _weights(model: ModelResult) -> str:
    return str(model.provenance.get("weights_sha256") or "not recorded")


def seed_of(model: ModelResult) -> str:
    """The training seed; nothing where it is not known."""
    run = recorded_run(model.provenance)
    return "" if run is None else str(run["training"]["seed"])
