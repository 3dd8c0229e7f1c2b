"""From the recordings of some models to everything that a report says, as data."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from loopscope.analysis import (
    ORDERED_SIGNALS,
    ByDifficulty,
    Gap,
    OverSeeds,
    Paired,
    Side,
    Subject,
    depth_gap,
    diagnose,
    difficulty_ordering,
    exit_distribution,
    exits,
    forced_accuracy,
    forced_cross_entropy,
    hold_out,
    interval,
    over_seeds,
    paired,
    resampled_sums,
    signal_by_difficulty,
)
from loopscope.analysis.bootstrap import Curves
from loopscope.artifacts import loopscope_version
from loopscope.bench.timings import QuestionBench
from loopscope.config import digest
from loopscope.errors import UserError
from loopscope.exits import SIGNALS, ExitPolicy, FittedGate, Frontier, attach, sweep
from loopscope.exits.readouts import POST_HOC
from loopscope.exits.signals import FITTED
from loopscope.exits.sweep import available_readouts
from loopscope.report.benchmarks import benchmark_result
from loopscope.report.explored import Explored, detail, explore
from loopscope.report.schema import (
    SCHEMA_VERSION,
    Binned,
    Certified,
    Extrapolation,
    FrontierResult,
    GroupResult,
    ModelResult,
    Results,
    Selected,
)
from loopscope.trajectory import Trajectory


@dataclass(frozen=True)
class Source:
    """The recordings of a model, and what was fitted to it."""

    name: str
    validation: Trajectory
    test: Trajectory
    extrapolation: Trajectory | None = None
    gates: Mapping[str, FittedGate] = field(default_factory=dict)
    unseen_only: bool = False  # whether examples that training had are left out of the first two
    everybody: Trajectory | None = None  # the test recording before any were left out: a promise says whom it counts
    policies: Sequence[ExitPolicy] = ()  # calibrated ones
    refused: Sequence[str] = ()  # promises that could not be made

    @cached_property
    def subject(self) -> Subject:
        return Subject(self.validation, self.test)


def read_source(run: Path, unseen_only: bool = False) -> Source:
    """The recordings in `run/recordings` (or in `run` itself): `validation` and `test`."""
    folder = run / "recordings" if (run / "recordings").is_dir() else run
    if not folder.is_dir():
        raise UserError(f"There is no folder {run}; give a run whose validation and test splits are recorded.")
    for split in ("validation", "test"):
        if not (folder / split).is_dir():
            raise UserError(
                f"{folder} has no recording '{split}'; make it with: loopscope record {run} --split {split}."
            )
    whole = {split: Trajectory.load(folder / split) for split in ("validation", "test")}
    validation, test = (narrowed(each, unseen_only, folder / split) for split, each in whole.items())
    return Source(run.resolve().name, validation, test, unseen_only=unseen_only, everybody=whole["test"])


def narrowed(trajectory: Trajectory, unseen_only: bool, folder: Path) -> Trajectory:
    """The recording in `folder`, or only those of its examples that training did not have."""
    try:
        return trajectory.unseen() if unseen_only else trajectory
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None


def collect(
    sources: Sequence[Source], reference: str | None, targets: Sequence[float]
) -> tuple[Results, list[Explored]]:
    """Analyses every model, the others against the reference."""
    names = [source.name for source in sources]
    if len(set(names)) != len(names):
        raise UserError("Two of the runs have the same name; give their folders different names.")
    if reference is not None and reference not in names:
        raise UserError(f"The reference '{reference}' is not among the runs: {', '.join(names)}.")
    against = None if reference is None else sources[names.index(reference)]
    analysed = [analyse(source, against, targets) for source in sources]
    return assemble([each.result for each in analysed], targets), [each.explored for each in analysed]


class Analysed(NamedTuple):
    """What is said of a model, and what its page can look up beside it."""

    result: ModelResult
    explored: Explored


def analyse(source: Source, reference: Source | None, targets: Sequence[float]) -> Analysed:
    """Everything that is said of one model, some of it against a reference (which it may be itself)."""
    test = source.test
    own = {policy.readout.removeprefix(FITTED): policy.gate for policy in source.policies if policy.gate is not None}
    gates = {**own, **source.gates}
    validation, evaluation = (attach(recording, gates) for recording in (source.validation, test))
    provenance = dict(test.provenance)
    certified = [
        Certified(policy.readout, policy.threshold, policy.promise, hold_out(policy, source.everybody or test))
        for policy in source.policies
    ]
    signals = [name for name in SIGNALS if name in available_readouts(test)]
    entropy = test.logits is not None or test.label_log_probs is not None
    frontiers = [sweep(name, validation, evaluation) for name in available_readouts(validation, evaluation)]
    details = [detail(frontier, source.policies, evaluation) for frontier in frontiers]
    result = ModelResult(
        name=source.name,
        label=label_of(provenance, source.name),
        group=_group(provenance, source.name),
        is_reference=reference is source,
        unseen_only=source.unseen_only,
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
        frontiers=[frontier_result(each.frontier, each.grid, targets, evaluation) for each in details],
        diagnosis=diagnose(source.subject, None if reference is None else reference.subject, targets[0]),
        paired=_paired({frontier.readout: frontier for frontier in frontiers}, source, evaluation, reference),
        fitted_gaps=_fitted_gaps(validation, evaluation, source.gates, targets[0]),
        extrapolation=None if source.extrapolation is None else _extrapolation(source.extrapolation),
        certified=certified,
        refused=list(source.refused),
        benchmark=benchmark_result(source.name, test),
    )
    return Analysed(result, explore(details, certified, evaluation, targets))


def assemble(models: list[ModelResult], targets: Sequence[float], latency: Sequence[QuestionBench] = ()) -> Results:
    """The results of several models together, under labels that tell them apart."""
    labels = _labels(models)
    models = [msgspec.structs.replace(model, label=label) for model, label in zip(models, labels, strict=True)]
    return Results(SCHEMA_VERSION, loopscope_version(), list(targets), models, _groups(models, targets), list(latency))


def _labels(models: list[ModelResult]) -> list[str]:
    """A label says the task where there are several, the seed where there are several, and else the folder's name."""
    runs = [run_of(model.provenance) for model in models]
    members = Counter(model.group for model in models)
    labels = _group_labels(models)
    for place, (model, run) in enumerate(zip(models, runs, strict=True)):
        if run is not None and members[model.group] > 1:
            labels[place] += f", seed {run['training']['seed']}"
    return _apart(labels, models)


def _apart(labels: list[str], models: list[ModelResult]) -> list[str]:
    """The labels, with the folder's name where two are the same."""
    shared = Counter(labels)
    return [
        _tidy(f"{label} [{model.name}]") if shared[label] > 1 else label
        for label, model in zip(labels, models, strict=True)
    ]


def _group_labels(models: list[ModelResult]) -> list[str]:
    tasks = [run["task"]["name"] if (run := run_of(model.provenance)) else "" for model in models]
    several = len(set(tasks)) > 1
    return [
        _tidy(f"{task}: {label}") if several and task else label
        for task, label in zip(tasks, (_words(model) for model in models), strict=True)
    ]


def _words(model: ModelResult) -> str:
    if model.benchmark is None:
        return label_of(model.provenance, model.name)
    return label_of({}, f"{model.benchmark.model}, {model.benchmark.title}")


def label_of(provenance: dict[str, Any], name: str) -> str:
    """A model in the paper's words, from the settings that it was trained with."""
    run = run_of(provenance)
    if run is None:
        return _tidy(name)
    objective, gate = run["objective"], run["model"]["gate"]
    if objective["name"] == "final":
        return "final loop only"
    prior = "uniform" if objective["prior"] == "uniform" else f"geometric {objective['geometric_lambda']:g}"
    if gate == "none":
        return f"fixed prior, {prior}"
    return f"{'linear' if gate == 'linear' else 'MLP'} gate, {prior}, β {objective['beta']:g}"


def _tidy(text: str) -> str:
    """As a figure can show it: without control characters, and not endless."""
    shown = "".join(letter for letter in text if letter.isprintable())
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 9]}…{digest(text)[:8]}"


_LONGEST = 100
_PARTS = ("task", "model", "objective", "training")


def run_of(provenance: dict[str, Any]) -> dict[str, Any] | None:
    """The settings of the run that made a recording, if it was one of ours."""
    run = provenance.get("run")
    ours = isinstance(run, dict) and all(isinstance(run.get(part), dict) for part in _PARTS)
    return run if ours else None


def frontier_result(
    frontier: Frontier, curves: Curves, targets: Sequence[float], evaluation: Trajectory
) -> FrontierResult:
    """`curves` are the frontier's own, resampled."""
    point = frontier.select()
    means = resampled_sums(exits(point.policy, evaluation)) / evaluation.num_examples
    return FrontierResult(
        frontier.readout,
        [] if frontier.readout == "oracle" else frontier.thresholds.tolist(),
        frontier.accuracy.tolist(),
        frontier.average_loops.tolist(),
        {f"{target:g}": frontier.depth_at(target) for target in targets},
        {f"{target:g}": interval(curves.depth_at(target)) for target in targets},
        {f"{target:g}": frontier.calibration_depth_at(target) for target in targets},
        Selected(
            point.policy.threshold,
            point.accuracy,
            point.average_loops,
            point.calibration_accuracy,
            point.calibration_average_loops,
            interval(means[:, 0]),
            interval(means[:, 1]),
        ),
    )


def _paired(
    frontiers: dict[str, Frontier], source: Source, evaluation: Trajectory, reference: Source | None
) -> list[Paired]:
    """The model's own gate against the most accurate readout that needs no gate, and against the reference's margin."""
    if "gate" not in frontiers:
        return []
    others = [name for name in POST_HOC if name in frontiers]
    points = {name: frontiers[name].select() for name in ("gate", *others)}
    gate = Side("gate", points["gate"].policy, evaluation)
    found = []
    if others:
        best = min(others, key=lambda name: points[name].rank)
        found.append(paired(gate, Side(best, points[best].policy, evaluation)))
    if (
        reference is not None
        and reference is not source
        and np.array_equal(reference.test.required_labels, source.test.required_labels)
    ):
        margin = sweep("margin", reference.validation, reference.test).select().policy
        found.append(paired(gate, Side("margin on the reference", margin, reference.test)))
    return found


def _fitted_gaps(
    validation: Trajectory, evaluation: Trajectory, gates: Mapping[str, FittedGate], target: float
) -> list[Gap]:
    if not gates:
        return []
    subject = Subject(validation, evaluation)
    other = "gate" if subject.has_gate else "margin"
    gaps = (depth_gap(target, (subject, FITTED + name), (subject, other)) for name in gates)
    return [gap for gap in gaps if gap is not None]


def _extrapolation(recording: Trajectory) -> Extrapolation:
    names = [name for name in SIGNALS if name in available_readouts(recording)]
    return Extrapolation(
        recording.num_examples,
        _binned(forced_accuracy(recording)),
        {name: _binned(signal_by_difficulty(name, recording)) for name in names},
    )


def _groups(models: list[ModelResult], targets: Sequence[float]) -> list[GroupResult]:
    groups: dict[str, list[ModelResult]] = {}
    for model in models:
        groups.setdefault(model.group, []).append(model)
    firsts = [members[0] for members in groups.values()]
    labels = _apart(_group_labels(firsts), firsts)
    return [_group_result(members, label, targets) for members, label in zip(groups.values(), labels, strict=True)]


def _group_result(members: list[ModelResult], label: str, targets: Sequence[float]) -> GroupResult:
    """Every summary is over all members; one that lacks a readout or a signal counts as not reaching it."""
    frontiers = [{frontier.readout: frontier for frontier in model.frontiers} for model in members]
    readouts = list(dict.fromkeys(name for known in frontiers for name in known))

    def over(readout: str, value: Callable[[FrontierResult], float | None]) -> OverSeeds:
        return over_seeds([value(known[readout]) if readout in known else None for known in frontiers])

    def depth(target: float) -> Callable[[FrontierResult], float | None]:
        return lambda frontier: frontier.depth_at[f"{target:g}"]

    orderings = [model.ordering for model in members]
    return GroupResult(
        label=label,
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
    run = run_of(provenance)
    if run is None:
        return name
    training = {key: value for key, value in run["training"].items() if key != "seed"}
    return digest({**run, "training": training})[:16]


def _binned(table: ByDifficulty) -> Binned:
    values = [[None if np.isnan(value) else value for value in row] for row in table.values.tolist()]
    return Binned([float(level) for level in table.levels], table.counts, values)
