"""What does the page say in words? The diagnosis of every model, and how everything was made."""

import json
from collections import Counter
from typing import NamedTuple

from loopscope.analysis import Gap, over_seeds
from loopscope.report.results import run_of
from loopscope.report.schema import ModelResult, Results
from loopscope.report.tables import gap_cells, headline, promised


class Card(NamedTuple):
    """Runs that differ in their seed only."""

    label: str
    blamed: str
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


class Made(NamedTuple):
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
        whole = f" ({len(group.names)} of {len(group.names)})"  # goes without saying
        label, *cells = row
        best_loop, fixed, gate, best, blamed = (cell.replace(whole, "") for cell in cells)
        best = "N/A" if best.startswith("N/A") else best  # then the readout says nothing
        members = [models[name] for name in group.names]
        verdicts = Counter(each.verdict for _, each in members)
        runs = [_run(*each) for each in members]
        gaps = _over([each for _, each in members]) if len(members) > 1 else _first(runs[0])
        made.append(Card(label, blamed, dict(verdicts), best_loop, fixed, gate, best, gaps, runs))
    return made


def _run(place: int, model: ModelResult) -> RunCard:
    gaps = {
        name: ("its gate is the best readout", "") if gap and gap.first == gap.second else (said, _subtracted(gap))
        for (name, gap), said in zip(gaps_of(model).items(), gap_cells(model, shares=False), strict=True)
    }
    certified = [
        f"{each.readout} at {each.threshold:.4g} ({promised(each.promise)}): "
        f"{each.held_out.average_loops.value:.2f} loops on its test examples"
        + (f"; the promise was {kept.verdict}." if (kept := each.held_out.promise) else ".")
        for each in model.certified
        if each.promise is not None
    ]
    told = (seed_of(model), model.diagnosis.sentence, gaps, certified, model.refused)
    return RunCard(model.name, place, _weights(model), *told)


def gaps_of(model: ModelResult) -> dict[str, Gap | None]:
    diagnosis = model.diagnosis
    gaps = (diagnosis.readout_gap, diagnosis.trajectory_gap, diagnosis.room_left)
    return dict(zip(("readout gap", "trajectory gap", "room left"), gaps, strict=True))


def _subtracted(gap: Gap | None) -> str:
    return "" if gap is None else f"{gap.first_depth:.2f} - {gap.second_depth:.2f}"


def _first(run: RunCard) -> dict[str, str]:
    return {name: said for name, (said, _) in run.gaps.items()}


def _over(models: list[ModelResult]) -> dict[str, str]:
    """The gaps over seeds; where they are not all at the target, it says from which accuracy on."""
    told = {}
    for name in gaps_of(models[0]):
        gaps = [gaps_of(model)[name] for model in models]
        known = [gap for gap in gaps if gap is not None]
        if not known:
            told[name] = _first(_run(0, models[0]))[name]
            continue
        values = over_seeds([None if gap is None else gap.value for gap in gaps])
        lowest = min(gap.accuracy for gap in known)
        below = f" (from @{100 * lowest:g}% on)" if lowest < models[0].diagnosis.target else ""
        told[name] = str(values).replace(f" ({len(gaps)} of {len(gaps)})", "") + below
    return told


def scope(results: Results) -> str:
    """Of what the report is, in a sentence."""
    runs, counts = len(results.models), sorted({model.test_examples for model in results.models})
    seeds = sorted({seed for model in results.models if (seed := seed_of(model))}, key=int)
    tested = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
    unseen = ", none of which training had" if all(model.unseen_only for model in results.models) else ""
    trained = f", training seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}" if seeds else ""
    return f"{runs} {'run' if runs == 1 else 'runs'}{trained}; {tested} test examples each{unseen}."


def made_of(results: Results) -> list[Made]:
    return [
        Made(
            model.name,
            model.label,
            seed_of(model),
            _weights(model),
            f"{model.validation_examples:,} validation, {model.test_examples:,} test"
            + (" (those that training had left out)" if model.unseen_only else ""),
            json.dumps(model.provenance, indent=2, ensure_ascii=False, default=str),
        )
        for model in results.models
    ]


def _weights(model: ModelResult) -> str:
    return str(model.provenance.get("weights_sha256") or "not recorded")


def seed_of(model: ModelResult) -> str:
    """The training seed; nothing where it is not known."""
    run = run_of(model.provenance)
    return "" if run is None else str(run["training"]["seed"])
