"""What does the page say in words? The diagnosis of every model, and how everything was made."""

import json
from collections import Counter
from typing import Any

from loopscope.analysis.diagnosis import NO_VERDICT, Diagnosis
from loopscope.analysis.results import recorded_run
from loopscope.analysis.schema import ModelResult, Results
from loopscope.analysis.targets import Target, percent_text
from loopscope.report.tables import (
    MAX_LISTED_MODELS,
    gap_cells,
    gap_over_seeds,
    guarantee_cell,
    has_reference,
    headline,
    without_depths,
)

_CELLS = ("label", "best_loop", "fixed", "gate", "best", "blamed")
"""What a card has of the headline's table."""


def cards(results: Results) -> list[dict[str, Any]]:
    """What the page says of every group of runs that differ in their seed only."""
    places = {model.name: place for place, model in enumerate(results.models)}
    made = []
    for (_, members), row in zip(results.grouped, headline(results).rows, strict=True):
        runs = [{"place": places[model.name], **_run(model, has_reference(results))} for model in members]
        gaps = {name: cell for name, (cell, _) in runs[0]["gaps"].items()}
        if len(members) > 1:
            over = {name: gap_over_seeds([model.diagnosis.gaps[name] for model in members]) for name in gaps}
            gaps = {name: _uncounted(over[name], len(members)) or absent for name, absent in gaps.items()}
        card = dict(zip(_CELLS, [_uncounted(cell, len(members)) for cell in row], strict=True))
        verdicts, target = Counter(model.verdict for model in members), _own_target(members, results.targets[0])
        made.append({**card, "target": target, "verdicts": verdicts, "gaps": gaps, "runs": runs})
    return made


def _own_target(models: list[ModelResult], target: Target) -> str:
    """Of a relative target the accuracy, over seeds from the lowest to the highest."""
    if target.accuracy is not None or without_depths(models):
        return ""
    accuracies = sorted(model.targets[target.key].accuracy for model in models)
    return " to ".join(dict.fromkeys(map(percent_text, (accuracies[0], accuracies[-1]))))


def _run(model: ModelResult, referenced: bool) -> dict[str, Any]:
    """What a card says of one run; beside each gap, the depths that are subtracted."""
    diagnosis = model.diagnosis
    gaps = {name: (cell, "") for name, cell in gap_cells(model, referenced, shares=False).items()}
    for name, gap in diagnosis.gaps.items():
        if gap is not None and gap.first == gap.second:
            gaps[name] = ("its gate is the best readout", "")
        elif gap is not None:
            gaps[name] = (gaps[name][0], f"{gap.first_depth:.2f} - {gap.second_depth:.2f}")
    certified = [
        f"{each.readout} at {each.threshold:.4g} ({guarantee_cell(each.guarantee)}): "
        f"{each.held_out.average_loops.value:.2f} loops on its test "
        + ("examples" if each.held_out.sequences is None else "sequences, on average over them")
        + (f"; the promise was {kept.verdict}." if (kept := each.held_out.guarantee) else ".")
        for each in model.certified
        if each.guarantee is not None
    ]
    sentences = (diagnosis.sentence, diagnosis.target_sentence, _read_at(diagnosis), diagnosis.room_sentence)
    words = {"sentence": " ".join(filter(None, sentences)), "certified": certified, "refused": model.refused}
    return {"name": model.name, "weights": weights_text(model), "seed": seed_of(model), "gaps": gaps, **words}


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
    counts: Counter[str] = Counter()
    for _, members in results.grouped:
        references = [model for model in members if model.is_reference]
        verdicts = {model.verdict for model in references or members}
        counts["mixed" if len(verdicts) > 1 else verdicts.pop()] += 1
    parts = [text.format(counts[verdict]) for verdict, text in _PARTS.items() if counts[verdict]]
    parts = [text.replace("1 get ", "1 gets ") for text in parts]
    if counts["mixed"]:
        parts.append(f"the seeds of {counts['mixed']} disagree")
    return f"Of {len(results.groups)} models, {', '.join(parts[:-1])}{', and ' * (len(parts) > 1)}{parts[-1]}."


def scope(results: Results) -> str:
    """Of what the report is, in a sentence; and of sequences, what means and intervals are over."""
    runs, counts = len(results.models), sorted({model.test_examples for model in results.models})
    seeds = sorted({seed for model in results.models if (seed := seed_of(model))}, key=int)
    tested = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
    unseen = ", none of which training had" if all(model.unseen_only for model in results.models) else ""
    trained = f", training seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}" if seeds else ""
    each = f"{tested} test examples{' each' * (runs > 1)}"
    units = "/".join(dict.fromkeys(model.unit for model in results.models if model.sequences is not None))
    over = ""
    if units:
        tests, most = list(dict.fromkeys(model.tested for model in results.models)), MAX_LISTED_MODELS
        each = f"{', '.join(tests[:most])}{' and so on' * (len(tests) > most)}"
        over = f" Of sequences, means are over {units}, and intervals draw whole sequences."
    return f"{runs} {'run' if runs == 1 else 'runs'}{trained}; {each}{unseen}.{over}"


def provenances(results: Results) -> list[dict[str, str]]:
    """Where the numbers of every run come from."""
    return [
        {
            "name": model.name,
            "label": model.label,
            "seed": seed_of(model),
            "weights": weights_text(model),
            "examples": f"{model.validation_examples:,} validation, {model.tested}"
            + (" (those that training had left out)" if model.unseen_only else ""),
            "provenance": json.dumps(model.provenance, indent=2, ensure_ascii=False, default=str),
        }
        for model in results.models
    ]


def weights_text(model: ModelResult) -> str:
    return str(model.provenance.get("weights_sha256") or "not recorded")


def seed_of(model: ModelResult) -> str:
    """The training seed; nothing where it is not known."""
    run = recorded_run(model.provenance)
    return "" if run is None else str(run["training"]["seed"])
