"""From the recordings of some models to everything that a report says, as data."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loopscope.analysis import (
    ORDERED_SIGNALS,
    ByDifficulty,
    Gap,
    Paired,
    Side,
    Subject,
    Target,
    TargetLevel,
    as_target,
    as_targets,
    depth_gap,
    diagnose_subject,
    difficulty_ordering,
    exit_distribution,
    exits_of,
    forced_accuracy,
    forced_cross_entropy,
    hold_out,
    interval,
    paired,
    resampled_means,
    signal_by_difficulty,
    target_level,
)
from loopscope.analysis.benchmarks import benchmark_result
from loopscope.analysis.bootstrap import Curves, intervals, resampled_curves
from loopscope.analysis.diagnosis import NO_VERDICT, Diagnosis, Rooms, rooms, without_verdict
from loopscope.analysis.labels import model_label, recorded_run
from loopscope.analysis.results import assemble_results
from loopscope.analysis.schema import (
    Binned,
    Certified,
    Extrapolation,
    FrontierResult,
    ModelResult,
    PaperGrid,
    Results,
    Selected,
)
from loopscope.analysis.stoppers import with_stoppers
from loopscope.analysis.threshold_details import (
    DetailedFrontier,
    ThresholdDetails,
    detailed_frontier,
    rounded,
    threshold_details,
)
from loopscope.config import digest
from loopscope.errors import UserError, visible
from loopscope.exits import ExitPolicy, Frontier, attach, sweep
from loopscope.exits.fitted import Fitted, by_readout
from loopscope.exits.losses import unit_count
from loopscope.exits.readouts import POST_HOC, readout_kind
from loopscope.exits.signals import FITTED, STOPPER, own_name
from loopscope.exits.stopper import KINDS
from loopscope.exits.sweep import Grid
from loopscope.exits.thresholds import available_readouts
from loopscope.progress import ProgressCallback, silent
from loopscope.recording_places import ANALYSED, find_recordings, recorded_name
from loopscope.trajectory import Trajectory


@dataclass(frozen=True)
class ModelRecordings:
    """The recordings of a model, and what was fitted to it."""

    name: str
    validation: Trajectory
    test: Trajectory
    extrapolation: Trajectory | None = None
    gates: Mapping[str, Fitted] = field(default_factory=dict)
    unseen_only: bool = False  # whether examples that training had are left out of the first two
    whole_test: Trajectory | None = None  # the test recording before any were left out: a promise says whom it counts
    policies: Sequence[ExitPolicy] = ()  # calibrated ones
    refused: Sequence[str] = ()  # promises that could not be made

    @cached_property
    def subject(self) -> Subject:
        """With learned stoppers beside its readouts."""
        return Subject(*with_stoppers(self.validation, self.test))

    @cached_property
    def measure(self) -> Subject:
        """As the reference of others, for which stoppers do not matter."""
        return Subject(self.validation, self.test)

    def subject_at(self, target: float | Target | None) -> Subject:
        """As it is diagnosed: without a verdict nothing is learned, which would take longest of all."""
        level = target_level(as_target(target), self.validation, self.test)
        return self.measure if without_verdict(self.validation, self.test, level) else self.subject


def read_recordings(run: Path, unseen_only: bool = False) -> ModelRecordings:
    """The recordings `validation` and `test` of a run, which may be given by its folder or by theirs."""
    folder = find_recordings(run)
    whole = {split: Trajectory.load(folder / split) for split in ANALYSED}
    validation, test = (only_unseen(each, unseen_only, folder / split) for split, each in whole.items())
    return ModelRecordings(recorded_name(folder), validation, test, unseen_only=unseen_only, whole_test=whole["test"])


def only_unseen(trajectory: Trajectory, unseen_only: bool, folder: Path) -> Trajectory:
    """The recording in `folder`, or only those of its examples that training did not have."""
    try:
        return trajectory.unseen() if unseen_only else trajectory
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None


def analyse_models(
    sources: Sequence[ModelRecordings],
    reference: str | None,
    targets: Sequence[float | Target] | None = None,
    progress: ProgressCallback = silent,
) -> tuple[Results, list[ThresholdDetails]]:
    """Analyses every model, the others against the reference; without targets at 1 point below full depth."""
    names = [source.name for source in sources]
    if len(set(names)) != len(names):
        raise UserError("Two of the runs have the same name; give their folders different names.")
    if halves := [name for name in names if re.search("[\ud800-\udfff]", name)]:
        raise UserError(f"The name '{visible(halves[0])}' is no UTF-8; give the folder of that run another one.")
    if reference is not None and reference not in names:
        raise UserError(f"The reference '{reference}' is not among the runs: {', '.join(names)}.")
    against = None if reference is None else sources[names.index(reference)]
    analysed = []
    for done, source in enumerate(sources):
        progress(done, len(sources), source.name)
        analysed.append(analyse_model(source, against, targets))
    progress(len(sources), len(sources), "")
    return assemble_results([each.result for each in analysed], as_targets(targets)), [
        each.details for each in analysed
    ]


class ModelAnalysis(NamedTuple):
    """What is said of a model, and what its page can look up beside it."""

    result: ModelResult
    details: ThresholdDetails


def analyse_model(
    source: ModelRecordings, reference: ModelRecordings | None, targets: Sequence[float | Target] | None = None
) -> ModelAnalysis:
    """Everything that is said of one model, some of it against a reference (which it may be itself)."""
    test, sought = source.test, as_targets(targets)
    levels = [target_level(target, source.validation, test) for target in sought]
    own = {own_name(policy.readout): policy.gate for policy in source.policies if policy.gate is not None}
    gates = {**own, **source.gates}
    if taken := sorted({*by_readout(gates)} & {STOPPER + kind for kind in KINDS}):
        raise UserError(
            f"A report learns a '{taken[0]}' of its own from validation data; give the folder of yours another name "
            f"than '{own_name(taken[0])}', and calibrate its policy again."
        )
    subject = source.subject_at(sought[0])
    validation, evaluation = (attach(recording, gates) for recording in (subject.validation, subject.test))
    against = None if reference is None else subject if reference is source else reference.measure
    provenance = dict(test.provenance)
    certified = [
        Certified(policy.readout, policy.threshold, policy.guarantee, hold_out(policy, source.whole_test or test))
        for policy in source.policies
    ]
    signals = _signals(test)
    entropy = test.logits is not None or test.label_log_probs is not None
    readouts = available_readouts(validation, evaluation)
    details = [
        detailed_frontier(sweep(name, validation, evaluation), source.policies, evaluation, levels[0].reached)
        for name in readouts
    ]
    frontiers = {each.frontier.readout: each.frontier for each in details}
    diagnosis = diagnose_subject(subject, against, sought[0])
    paper = {name: sweep(name, validation, evaluation, grid="paper") for name in readouts}
    result = ModelResult(
        name=source.name,
        label=model_label(provenance, source.name),
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
        targets={level.target.key: level for level in levels},
        frontiers=[frontier_result(each, levels, evaluation) for each in details],
        paper_grid=PaperGrid(
            [_paper_result(frontier, levels, evaluation) for frontier in paper.values()],
            _paired(paper, source, evaluation, reference, "paper"),
        ),
        diagnosis=diagnosis,
        rooms=_rooms(subject, diagnosis, levels),
        paired=_paired(frontiers, source, evaluation, reference, "fine"),
        fitted_gaps=_fitted_gaps(validation, evaluation, source.gates, sought[0]),
        extrapolation=None if source.extrapolation is None else _extrapolation(source.extrapolation),
        certified=certified,
        refused=list(source.refused),
        benchmark=benchmark_result(source.name, test),
        sequences=None if test.sequences is None else unit_count(test),
    )
    return ModelAnalysis(result, threshold_details(details, certified, evaluation, sought))


def _rooms(subject: Subject, diagnosis: Diagnosis, levels: Sequence[TargetLevel]) -> dict[str, Rooms]:
    if diagnosis.verdict == NO_VERDICT:
        return {}
    first, *others = levels
    found = Rooms(diagnosis.room_left, diagnosis.reachable_room)
    return {first.target.key: found, **{level.target.key: rooms(subject, level) for level in others}}


def frontier_result(detail: DetailedFrontier, levels: Sequence[TargetLevel], evaluation: Trajectory) -> FrontierResult:
    """A frontier whose curve has the points that are drawn, and whose depths are of all of its grid."""
    shown = detail.on_grid
    thresholds = [] if detail.frontier.readout == "oracle" else detail.thresholds[shown].tolist()
    return _frontier_result(
        detail.frontier, detail.depths, (thresholds, detail.resampled.at(shown)), levels, evaluation
    )


def _paper_result(frontier: Frontier, levels: Sequence[TargetLevel], evaluation: Trajectory) -> FrontierResult:
    thresholds = [] if frontier.readout == "oracle" else frontier.thresholds.tolist()
    curves = resampled_curves(frontier.readout, frontier.thresholds, evaluation)
    return _frontier_result(frontier, curves, (thresholds, curves), levels, evaluation)


def _frontier_result(
    frontier: Frontier,
    depths: Curves,
    points: tuple[list[float], Curves],
    levels: Sequence[TargetLevel],
    evaluation: Trajectory,
) -> FrontierResult:
    point, (thresholds, drawn) = frontier.select(), points
    bounds = intervals(drawn.accuracy)
    means = resampled_means(exits_of(point.policy, evaluation), units=evaluation.units)
    return FrontierResult(
        frontier.readout,
        thresholds,
        drawn.accuracy[0].tolist(),
        drawn.average_loops[0].tolist(),
        rounded(bounds.low.tolist()),
        rounded(bounds.high.tolist()),
        {level.target.key: frontier.depth_at(level.reached) for level in levels},
        {level.target.key: interval(depths.depth_at(level.reached)) for level in levels},
        {level.target.key: frontier.calibration_depth_at(level.accuracy) for level in levels},
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
    frontiers: dict[str, Frontier],
    source: ModelRecordings,
    evaluation: Trajectory,
    reference: ModelRecordings | None,
    grid: Grid,
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
        margin = sweep("margin", reference.validation, reference.test, grid=grid).select().policy
        found.append(paired(gate, Side("margin on the reference", margin, reference.test)))
    return found


def _fitted_gaps(
    validation: Trajectory, evaluation: Trajectory, gates: Mapping[str, Fitted], target: Target
) -> list[Gap]:
    if not gates:
        return []
    subject = Subject(validation, evaluation)
    other = "gate" if subject.has_gate else "margin"
    gaps = (depth_gap(target, (subject, name), (subject, other)) for name in by_readout(gates))
    return [gap for gap in gaps if gap is not None]


def _extrapolation(recording: Trajectory) -> Extrapolation:
    return Extrapolation(
        recording.num_examples,
        _binned(forced_accuracy(recording)),
        {name: _binned(signal_by_difficulty(name, recording)) for name in _signals(recording)},
    )


def _signals(recording: Trajectory) -> list[str]:
    """Those of the model itself, without its fitted gates."""
    names = available_readouts(recording)
    return [name for name in names if readout_kind(name) in ("above", "below") and not name.startswith(FITTED)]


def _group(provenance: dict[str, Any], name: str) -> str:
    run = recorded_run(provenance)
    if run is None:
        return name
    training = {key: value for key, value in run["training"].items() if key != "seed"}
    return digest({**run, "training": training})[:16]


def _binned(table: ByDifficulty) -> Binned:
    values = [[None if np.isnan(value) else value for value in row] for row in table.values.tolist()]
    bounds = (rounded(each.tolist()) for each in (table.low, table.high))
    return Binned([float(level) for level in table.levels], table.counts, values, *bounds)
