"""Everything a report says, as data: recordings of some models -> `results.json`.

The schema is versioned and described in docs/results.md. It holds no times and no host names: the same recordings give
the same bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loopscope.analysis import (
    ORDERED_SIGNALS,
    ByDifficulty,
    Diagnosis,
    Ordering,
    OverSeeds,
    Subject,
    diagnose,
    difficulty_ordering,
    exit_distribution,
    forced_accuracy,
    forced_cross_entropy,
    over_seeds,
    signal_by_difficulty,
)
from loopscope.artifacts import loopscope_version
from loopscope.config import digest
from loopscope.errors import UserError
from loopscope.exits import READOUTS, SIGNALS, Frontier, sweep
from loopscope.exits.sweep import available_readouts
from loopscope.trajectory import Trajectory

SCHEMA_VERSION = 1


class Binned(msgspec.Struct, frozen=True):
    levels: list[float]
    counts: list[int]
    values: list[list[float | None]]  # [levels][loops]; null where there is no value


class Selected(msgspec.Struct, frozen=True):
    """The operating point that validation chose."""

    threshold: float | None
    accuracy: float
    average_loops: float
    calibration_accuracy: float
    calibration_average_loops: float


class FrontierResult(msgspec.Struct, frozen=True):
    readout: str
    thresholds: list[float]
    accuracy: list[float]
    average_loops: list[float]
    depth_at: dict[str, float | None]  # on the evaluation curve, as in the paper
    selected: Selected


class ModelResult(msgspec.Struct, frozen=True):
    name: str
    label: str
    group: str  # the same for runs that differ in their seed only
    is_reference: bool
    provenance: dict[str, Any]
    validation_examples: int
    test_examples: int
    forced_accuracy: list[float]
    forced_cross_entropy: list[float] | None
    forced_accuracy_by_difficulty: Binned
    forced_cross_entropy_by_difficulty: Binned | None
    exit_distribution: Binned | None
    signals: dict[str, Binned]
    ordering: dict[str, Ordering]
    frontiers: list[FrontierResult]
    diagnosis: Diagnosis


class GroupResult(msgspec.Struct, frozen=True):
    """Runs that differ in their seed only, together."""

    label: str
    names: list[str]
    depth_at: dict[str, dict[str, OverSeeds]]  # readout -> target -> over the runs
    selected_accuracy: dict[str, OverSeeds]  # readout -> of the operating points chosen on validation
    selected_loops: dict[str, OverSeeds]
    ordering: dict[str, OverSeeds]  # signal -> the bin-mean correlation over the runs


class Results(msgspec.Struct, frozen=True):
    schema_version: int
    loopscope: str
    targets: list[float]
    unseen_only: bool
    models: list[ModelResult]
    groups: list[GroupResult]


@dataclass(frozen=True)
class Source:
    """The two recordings of a model."""

    name: str
    validation: Trajectory
    test: Trajectory


def read_source(run: Path, unseen_only: bool = False) -> Source:
    """The recordings in `run/recordings` (or in `run` itself): `validation` and `test`."""
    folder = run / "recordings" if (run / "recordings").is_dir() else run
    if not folder.is_dir():
        raise UserError(f"There is no folder {run}; give a run whose validation and test splits are recorded.")
    pair = []
    for split in ("validation", "test"):
        if not (folder / split).is_dir():
            raise UserError(
                f"{folder} has no recording '{split}'; make it with: loopscope record {run} --split {split}."
            )
        trajectory = Trajectory.load(folder / split)
        pair.append(_unseen(trajectory, folder / split) if unseen_only else trajectory)
    return Source(run.resolve().name, *pair)


def collect(sources: Sequence[Source], reference: str | None, targets: Sequence[float], unseen_only: bool) -> Results:
    """Analyses every model, the others against the reference."""
    names = [source.name for source in sources]
    if len(set(names)) != len(names):
        raise UserError("Two of the runs have the same name; give their folders different names.")
    if reference is not None and reference not in names:
        raise UserError(f"The reference '{reference}' is not among the runs: {', '.join(names)}.")
    subjects = {source.name: Subject(source.validation, source.test) for source in sources}
    models = []
    for source in sources:
        against = None if reference is None else subjects[reference]
        diagnosis = diagnose(subjects[source.name], against, targets[0])
        models.append(_model(source, diagnosis, source.name == reference, targets))
    shared = {model.label for model in models if sum(model.label == other.label for other in models) > 1}
    models = [
        msgspec.structs.replace(model, label=f"{model.label} [{model.name}]") if model.label in shared else model
        for model in models
    ]
    return Results(SCHEMA_VERSION, loopscope_version(), list(targets), unseen_only, models, _groups(models, targets))


def label_of(provenance: dict[str, Any], name: str) -> str:
    """A model in the paper's words, from the settings that it was trained with."""
    run = _run(provenance)
    if run is None:
        return "".join(letter for letter in name if letter.isprintable())  # a control character breaks a figure
    objective, gate = run["objective"], run["model"]["gate"]
    if objective["name"] == "final":
        return "final loop only"
    prior = "uniform" if objective["prior"] == "uniform" else f"geometric {objective['geometric_lambda']:g}"
    if gate == "none":
        return f"fixed prior, {prior}"
    return f"{'linear' if gate == 'linear' else 'MLP'} gate, {prior}, β {objective['beta']:g}"


def _run(provenance: dict[str, Any]) -> dict[str, Any] | None:
    """The settings of the run that made a recording, if it was one of ours."""
    run = provenance.get("run")
    ours = isinstance(run, dict) and all(isinstance(run.get(part), dict) for part in ("model", "objective", "training"))
    return run if ours else None


def _model(source: Source, diagnosis: Diagnosis, is_reference: bool, targets: Sequence[float]) -> ModelResult:
    test = source.test
    provenance = dict(test.provenance)
    readouts = available_readouts(source.validation, test)
    signals = [name for name in SIGNALS if name in available_readouts(test)]
    entropy = test.logits is not None or test.label_log_probs is not None
    return ModelResult(
        name=source.name,
        label=label_of(provenance, source.name),
        group=_group(provenance, source.name),
        is_reference=is_reference,
        provenance=provenance,
        validation_examples=source.validation.num_examples,
        test_examples=test.num_examples,
        forced_accuracy=test.correct.mean(axis=0).tolist(),
        forced_cross_entropy=test.cross_entropy.mean(axis=0).tolist() if entropy else None,
        forced_accuracy_by_difficulty=_binned(forced_accuracy(test)),
        forced_cross_entropy_by_difficulty=_binned(forced_cross_entropy(test)) if entropy else None,
        exit_distribution=_binned(exit_distribution(test)) if "gate" in signals else None,
        signals={name: _binned(signal_by_difficulty(name, test)) for name in signals},
        ordering={
            name: difficulty_ordering(name, test)
            for name in ORDERED_SIGNALS
            if name in signals and test.difficulty is not None
        },
        frontiers=[frontier_result(sweep(name, source.validation, test), targets) for name in readouts],
        diagnosis=diagnosis,
    )


def frontier_result(frontier: Frontier, targets: Sequence[float]) -> FrontierResult:
    point = frontier.select()
    return FrontierResult(
        frontier.readout,
        [] if frontier.readout == "oracle" else frontier.thresholds.tolist(),
        frontier.accuracy.tolist(),
        frontier.average_loops.tolist(),
        {f"{target:g}": frontier.depth_at(target) for target in targets},
        Selected(
            point.policy.threshold,
            point.accuracy,
            point.average_loops,
            point.calibration_accuracy,
            point.calibration_average_loops,
        ),
    )


def _groups(models: list[ModelResult], targets: Sequence[float]) -> list[GroupResult]:
    groups: dict[str, list[ModelResult]] = {}
    for model in models:
        groups.setdefault(model.group, []).append(model)
    return [_group_result(members, targets) for members in groups.values()]


def _group_result(members: list[ModelResult], targets: Sequence[float]) -> GroupResult:
    """Every summary is over all members; one that lacks a readout or a signal counts as not reaching it."""
    frontiers = [{frontier.readout: frontier for frontier in model.frontiers} for model in members]
    readouts = [name for name in READOUTS if any(name in known for known in frontiers)]

    def over(readout: str, value: Callable[[FrontierResult], float | None]) -> OverSeeds:
        return over_seeds([value(known[readout]) if readout in known else None for known in frontiers])

    def depth(target: float) -> Callable[[FrontierResult], float | None]:
        return lambda frontier: frontier.depth_at[f"{target:g}"]

    orderings = [model.ordering for model in members]
    return GroupResult(
        label=label_of(members[0].provenance, members[0].name),
        names=[model.name for model in members],
        depth_at={name: {f"{target:g}": over(name, depth(target)) for target in targets} for name in readouts},
        selected_accuracy={name: over(name, lambda frontier: frontier.selected.accuracy) for name in readouts},
        selected_loops={name: over(name, lambda frontier: frontier.selected.average_loops) for name in readouts},
        ordering={
            name: over_seeds([known[name].bin_mean if name in known else None for known in orderings])
            for name in ORDERED_SIGNALS
            if any(name in known for known in orderings)
        },
    )


def _group(provenance: dict[str, Any], name: str) -> str:
    run = _run(provenance)
    if run is None:
        return name
    training = {key: value for key, value in run["training"].items() if key != "seed"}
    return digest({**run, "training": training})[:16]


def _binned(table: ByDifficulty) -> Binned:
    values = [[None if np.isnan(value) else value for value in row] for row in table.values.tolist()]
    return Binned(table.levels, table.counts, values)


def _unseen(trajectory: Trajectory, folder: Path) -> Trajectory:
    if trajectory.seen is None:
        raise UserError(f"{folder} does not say which examples training had; leave out --unseen.")
    if trajectory.seen.all():
        raise UserError(f"Every example of {folder} occurs in the training data; leave out --unseen.")
    return trajectory.take(~np.asarray(trajectory.seen))
