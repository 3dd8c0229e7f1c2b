"""What does a report say about a model? Everything, as data, from the model's recordings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from loopscope.analysis import schema
from loopscope.analysis.benchmark_results import benchmark_result
from loopscope.analysis.bootstrap import interval, intervals, resampled_means
from loopscope.analysis.comparison import Paired, Side, exits_of, paired
from loopscope.analysis.diagnosis import NO_VERDICT, Diagnosis, Rooms, diagnose_subject, rooms, subject_with_stoppers
from loopscope.analysis.difficulty import ORDERED_SIGNALS, by_difficulty, difficulty_ordering, exit_distribution
from loopscope.analysis.gaps import Gap, Subject, depth_gap
from loopscope.analysis.held_out import check_policy
from loopscope.analysis.results import assemble_results, depth_words, model_label, recorded_run
from loopscope.analysis.targets import Target, TargetLevel, as_targets, target_level
from loopscope.analysis.threshold_details import (
    DetailedFrontier,
    ThresholdDetails,
    detailed_frontier,
    threshold_details,
    whole_frontier,
)
from loopscope.analysis.transfer import transfer
from loopscope.certify.losses import unit_count
from loopscope.config import digest
from loopscope.errors import UserError
from loopscope.frontier import Frontier, Grid, sweep
from loopscope.learned.attach import Fitted, attach, by_readout
from loopscope.learned.stopper import STOPPER_KINDS
from loopscope.policy import ExitPolicy
from loopscope.progress import ProgressCallback, silent
from loopscope.readouts.readout import POST_HOC, has_threshold, needs_labels
from loopscope.readouts.replay import available_readouts, signal
from loopscope.readouts.signals import FITTED, STOPPER, own_gate, own_name
from loopscope.recording_paths import find_recordings, recorded_name
from loopscope.trajectory import Trajectory


@dataclass(frozen=True)
class ModelRecordings:
    """The recordings of one model for a report, with its fitted gates and its policies."""

    name: str
    validation: Trajectory
    test: Trajectory
    extrapolation: Trajectory | None = None
    gates: Mapping[str, Fitted] = field(default_factory=dict)
    unseen_only: bool = False  # whether examples that training had are left out of the first two
    whole_test: Trajectory | None = None  # the test recording before any were left out: a guarantee says whom it counts
    policies: Sequence[ExitPolicy] = ()  # calibrated ones
    refused: Sequence[str] = ()  # guarantees that could not be made

    @property
    def all_gates(self) -> dict[str, Fitted]:
        """The model's fitted gates and stoppers, with those of its policies."""
        own = {own_name(policy.readout): policy.gate for policy in self.policies if policy.gate is not None}
        return {**own, **self.gates}

    @cached_property
    def measure(self) -> Subject:
        """The model as a reference for others, without learned stoppers."""
        return Subject(self.validation, self.test)

    def subject_at(self, target: float | Target | None) -> Subject:
        return subject_with_stoppers(self.validation, self.test, target)


def read_recordings(run: Path, unseen_only: bool = False) -> ModelRecordings:
    """Read the recordings `validation` and `test` of a run, given by its folder or by its recordings folder."""
    folder = find_recordings(run)
    return load_recordings(recorded_name(folder), folder / "validation", folder / "test", unseen_only)


def load_recordings(name: str, validation: Path, test: Path, unseen_only: bool) -> ModelRecordings:
    """Load a model's recordings from two folders, or only their examples that training did not have."""
    whole = {folder: Trajectory.load(folder) for folder in (validation, test)}
    counted = dict(whole)
    for folder in whole if unseen_only else ():
        try:
            counted[folder] = whole[folder].unseen()
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None
    return ModelRecordings(name, counted[validation], counted[test], unseen_only=unseen_only, whole_test=whole[test])


def analyse_models(
    sources: Sequence[ModelRecordings],
    reference: str | None,
    targets: Sequence[float | Target] | None = None,
    progress: ProgressCallback = silent,
    transferred: bool = False,
) -> tuple[schema.Results, list[ThresholdDetails]]:
    """Analyse every model for a report, the others against the reference.

    `transferred`: whether the rules of every model are replayed on all of them, too.
    """
    names = [source.name for source in sources]
    if len(set(names)) != len(names):
        raise UserError("Two of the runs have the same name; give their folders different names.")
    if reference is not None and reference not in names:
        raise UserError(f"The reference '{reference}' is not among the runs: {', '.join(names)}.")
    against = None if reference is None else sources[names.index(reference)]
    analysed = []
    for done, source in enumerate(sources):
        progress(done, len(sources), source.name)
        analysed.append(analyse_model(source, against, targets))
    progress(len(sources), len(sources), "")
    found = []
    if transferred:
        both = {source.name: (source.validation, source.test) for source in sources}
        found = transfer(both, {source.name: source.all_gates for source in sources}, as_targets(targets)[0], progress)
    results = assemble_results([result for result, _ in analysed], as_targets(targets), transfer=found)
    return results, [details for _, details in analysed]


def analyse_model(
    source: ModelRecordings, reference: ModelRecordings | None, targets: Sequence[float | Target] | None = None
) -> tuple[schema.ModelResult, ThresholdDetails]:
    """Analyse one model for a report, partly against a reference (which may be the model itself).

    And what its page can look up beside it.
    """
    test, sought = source.test, as_targets(targets)
    levels = [target_level(target, source.validation, test) for target in sought]
    gates = source.all_gates
    if taken := sorted({*by_readout(gates)} & {STOPPER + kind for kind in STOPPER_KINDS}):
        raise UserError(
            f"A report learns a '{taken[0]}' of its own from validation data; give the folder of yours another name "
            f"than '{own_name(taken[0])}', and calibrate its policy again."
        )
    subject = source.subject_at(sought[0])
    validation, evaluation = (attach(recording, gates) for recording in (subject.validation, subject.test))
    against = None if reference is None else subject if reference is source else reference.measure
    provenance = dict(test.provenance)
    certified = [
        schema.Certified(
            policy.readout, policy.threshold, policy.guarantee, check_policy(policy, source.whole_test or test)
        )
        for policy in source.policies
    ]
    signals = _signals_to_order(test)
    entropy = test.logits is not None or test.label_log_probs is not None
    readouts = available_readouts(validation, evaluation)
    details = [
        detailed_frontier(sweep(name, validation, evaluation), source.policies, evaluation, levels[0].reached)
        for name in readouts
    ]
    frontiers = {each.frontier.readout: each.frontier for each in details}
    diagnosis = diagnose_subject(subject, against, sought[0])
    paper = {name: sweep(name, validation, evaluation, grid="paper") for name in readouts}
    result = schema.ModelResult(
        name=source.name,
        label=model_label(provenance, source.name),
        group=_seed_group_key(provenance, source.name),
        is_reference=reference is source,
        unseen_only=source.unseen_only,
        provenance=provenance,
        validation_examples=source.validation.num_examples,
        test_examples=test.num_examples,
        forced_accuracy=test.correct.mean(axis=0).tolist(),
        forced_cross_entropy=test.cross_entropy.mean(axis=0).tolist() if entropy else None,
        forced_accuracy_by_difficulty=by_difficulty(test.correct, test),
        forced_cross_entropy_by_difficulty=by_difficulty(test.cross_entropy, test) if entropy else None,
        exit_distribution=exit_distribution(test) if own_gate(signals) else None,
        signals={name: by_difficulty(signal(name, test), test) for name in signals},
        ordering={
            name: difficulty_ordering(name, test)
            for name in ORDERED_SIGNALS
            if name in signals and test.difficulty is not None
        },
        targets={level.target.key: level for level in levels},
        frontiers=[frontier_result(each, levels, evaluation) for each in details],
        paper_grid=schema.PaperGrid(
            [frontier_result(whole_frontier(each, evaluation), levels, evaluation) for each in paper.values()],
            _paired_with_own_gate(paper, source, evaluation, reference, "paper"),
        ),
        diagnosis=diagnosis,
        rooms=_rooms_by_target(subject, diagnosis, levels),
        paired=_paired_with_own_gate(frontiers, source, evaluation, reference, "fine"),
        fitted_gaps=_fitted_gate_gaps(validation, evaluation, source.gates, sought[0]),
        extrapolation=None if source.extrapolation is None else _extrapolation(source.extrapolation),
        certified=certified,
        refused=list(source.refused),
        benchmark=benchmark_result(source.name, test),
        sequences=None if test.sequences is None else unit_count(test),
    )
    return result, threshold_details(details, certified, evaluation, sought)


def _rooms_by_target(subject: Subject, diagnosis: Diagnosis, levels: Sequence[TargetLevel]) -> dict[str, Rooms]:
    """The room left at every target of a report; the diagnosis already has it at its own target."""
    if diagnosis.verdict == NO_VERDICT:
        return {}
    first, *others = levels
    found = Rooms(diagnosis.room_left, diagnosis.reachable_room)
    return {first.target.key: found, **{level.target.key: rooms(subject, level) for level in others}}


def frontier_result(
    detail: DetailedFrontier, levels: Sequence[TargetLevel], evaluation: Trajectory
) -> schema.FrontierResult:
    """A frontier for `results.json`: points to draw, and depths from every threshold of its grid."""
    frontier, point = detail.frontier, detail.frontier.select()
    drawn = detail.resampled.at(detail.on_grid)
    low, high, _ = intervals(drawn.accuracy)
    means = resampled_means(exits_of(point.policy, evaluation), units=evaluation.units)
    return schema.FrontierResult(
        readout=frontier.readout,
        thresholds=[] if needs_labels(frontier.readout) else detail.thresholds[detail.on_grid].tolist(),
        accuracy=drawn.accuracy[0].tolist(),
        average_loops=drawn.average_loops[0].tolist(),
        accuracy_low=schema.rounded(low),
        accuracy_high=schema.rounded(high),
        depth_at={level.target.key: frontier.depth_at(level.reached) for level in levels},
        depth_interval={level.target.key: interval(detail.depths.depth_at(level.reached)) for level in levels},
        calibration_depth_at={level.target.key: frontier.calibration_depth_at(level.accuracy) for level in levels},
        selected=schema.Selected(
            point.policy.threshold,
            point.accuracy,
            point.average_loops,
            point.calibration_accuracy,
            point.calibration_average_loops,
            interval(means[:, 0]),
            interval(means[:, 1]),
        ),
    )


def _paired_with_own_gate(
    frontiers: dict[str, Frontier],
    source: ModelRecordings,
    evaluation: Trajectory,
    reference: ModelRecordings | None,
    grid: Grid,
) -> list[Paired]:
    """Compare the model's own gate with the most accurate readout without a gate, and with the reference's margin."""
    own = own_gate(frontiers)
    if own is None:
        return []
    others = [name for name in POST_HOC if name in frontiers]
    points = {name: frontiers[name].select() for name in (own, *others)}
    gate = Side(own, points[own].policy, evaluation)
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


def _fitted_gate_gaps(
    validation: Trajectory, evaluation: Trajectory, gates: Mapping[str, Fitted], target: Target
) -> list[Gap]:
    """The gaps in depth between each gate that was fitted to the model and the model's own gate or margin."""
    if not gates:
        return []
    subject = Subject(validation, evaluation)
    other = subject.gate or "margin"
    gaps = (depth_gap(target, (subject, [name]), (subject, [other])) for name in by_readout(gates))
    return [gap for gap in gaps if gap is not None]


def _extrapolation(recording: Trajectory) -> schema.Extrapolation:
    """Analyse a recording of examples that are harder than those of training."""
    return schema.Extrapolation(
        recording.num_examples,
        by_difficulty(recording.correct, recording),
        {name: by_difficulty(signal(name, recording), recording) for name in _signals_to_order(recording)},
    )


def _signals_to_order(recording: Trajectory) -> list[str]:
    """The recorded signals that a report orders by difficulty, without those of fitted gates."""
    names = available_readouts(recording)
    return [name for name in names if has_threshold(name) and not name.startswith(FITTED)]


def _seed_group_key(provenance: dict[str, Any], name: str) -> str:
    """The key that models share if only their seed differs, from the settings of their run."""
    if recorded_run(provenance) is None:
        return name
    run = provenance["run"]
    training = {key: value for key, value in run["training"].items() if key != "seed"}
    depth = {"depth": words} if (words := depth_words(provenance)) else {}
    return digest({**run, "training": training, **depth})[:16]
