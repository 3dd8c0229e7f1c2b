"""Does a rule that was fitted to one model stop another? Gates, stoppers and thresholds, replayed across trajectories.

A rule is fitted on one model's own data, its threshold on that model's validation recording. It is then replayed,
unchanged, on the test recording of another model and compared with the best readout there, which that model's own
validation data choose. Twice: in D@X, with thresholds as they lie in the other model's validation data, so that only
what the rule says is carried over; and at the rule's own threshold, which is carried over, too. Test data choose
nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from loopscope.analysis.bootstrap import Curves, resampled_curves
from loopscope.analysis.comparison import Paired, Side, exits_of, paired
from loopscope.analysis.diagnosis import no_verdict_sentence
from loopscope.analysis.gaps import Gap, Subject, Way, gap_between
from loopscope.analysis.targets import Target, as_target, target_level
from loopscope.errors import UserError
from loopscope.frontier import curve, swept_thresholds
from loopscope.leaks import check_apart, check_attached, check_split
from loopscope.learned.attach import Fitted, attach, by_readout
from loopscope.learned.stopper import STOPPER_KINDS
from loopscope.learned.stopper_fitting import fit_out_of_bag, stopper_signals, why_not_learned
from loopscope.policy import NEVER, ExitPolicy, chosen_scope
from loopscope.progress import ProgressCallback, silent
from loopscope.readouts.readout import required_readout
from loopscope.readouts.replay import available_readouts
from loopscope.readouts.signals import FITTED, OWN_GATES, STOPPER, is_gate, own_name
from loopscope.threshold_grids import fine_grid
from loopscope.trajectory import Trajectory


@dataclass(frozen=True, repr=False)
class TransferResult:
    """Hold the results of one model's exit rule on the test data of another model.

    Each difference is the result of the transferred rule minus the result of the other model's best readout.

    Parameters
    ----------
    fitted_on
        The model to which the rule and its threshold were fitted.
    stops
        The model on whose test data the rule is replayed.
    readout, threshold
        The readout and the threshold of the rule.
    gap
        The difference in D@X, for thresholds over the range of the signal in the other model's validation data.
    accuracy, average_loops
        The results at the threshold of the rule.
    selected
        The difference at the threshold of the rule.
    refused
        The reason why the rule cannot be replayed on the other model; empty if the replay succeeds.

    Examples
    --------
    >>> result = ls.transfer({"mine": (validation, test)})[0]
    >>> result.fitted_on, result.stops
    ('mine', 'mine')
    """

    fitted_on: str  # the model whose data the rule and its threshold are fitted to
    stops: str  # the model on whose test data it is replayed
    readout: str
    threshold: float
    gap: Gap | None  # in D@X, thresholds as in the validation data of the model that it stops; None: nothing in common
    accuracy: float | None  # at its own threshold
    average_loops: float | None
    selected: Paired | None  # at its own threshold, against the best readout at the threshold that validation chose
    refused: str = ""  # why it cannot be replayed there

    def __str__(self) -> str:
        rule = f"{self.readout} of {self.fitted_on} on {self.stops}"
        if self.refused or self.selected is None:
            return f"{rule}: {self.refused}"
        loops, right, gap = self.selected.loops, self.selected.accuracy, self.gap
        own = (
            f"at its own threshold {100 * right.value:+z.2f} points [{100 * right.low:+z.2f}, {100 * right.high:+z.2f}]"
        )
        own += f" and {loops.value:+z.2f} loops [{loops.low:+z.2f}, {loops.high:+z.2f}]"
        if gap is None:
            return f"{rule}: {own} against {self.selected.second}"
        at = f"{gap.value:+z.2f} loops [{gap.low:+z.2f}, {gap.high:+z.2f}] at {100 * gap.accuracy:g} %"
        return f"{rule}: {at} against {gap.second}; {own}"

    __repr__ = __str__


def transfer(
    models: Mapping[str, tuple[Trajectory, Trajectory]],
    gates: Mapping[str, Mapping[str, Fitted]] | None = None,
    target: float | Target | None = None,
    progress: ProgressCallback = silent,
) -> list[TransferResult]:
    """Replay every model's exit rules on the test data of every model, including its own test data.

    The rules of a model are its best readout that is not a gate, its own gate, and its fitted gates and stoppers.
    LoopScope also fits stoppers to the validation recording of each model.

    Parameters
    ----------
    models
        Validation and test recordings of every model, by name.
    gates
        Gates and stoppers that were fitted to the models, by model and by name (default: none).
    target
        The accuracy at which depths are compared (default: 1 percentage point below each model's full-depth accuracy).
    progress
        A function that LoopScope calls with the number of finished steps, the number of all steps, and a note.

    Returns
    -------
    list[TransferResult]
        One result for each rule on the test data of each model.

    Raises
    ------
    UserError
        If the validation data of one model share examples with the test data of another model.

    Examples
    --------
    >>> results = ls.transfer({"mine": (validation, test)})
    >>> sorted({each.readout for each in results})[:2]
    ['entropy', 'gate']
    """
    own, sought = gates or {}, as_target(target)
    if unknown := [name for name in own if name not in models]:
        raise UserError(f"There are gates of '{unknown[0]}', which is not among the models: {', '.join(models)}.")
    subjects = {name: Subject(*both) for name, both in models.items()}
    found: list[TransferResult] = []
    for done, (name, subject) in enumerate(subjects.items()):
        progress(done, len(subjects), name)
        rules = fitted_rules(subject.validation, own.get(name, {}), sought)
        for other in (name, *(each for each in subjects if each != name)):
            found += replayed_rules(rules, (name, subject.validation), (other, subjects[other]), sought)
    progress(len(subjects), len(subjects), "")
    return found


def fitted_rules(validation: Trajectory, gates: Mapping[str, Fitted], target: Target) -> list[ExitPolicy]:
    """The rules of one model: readouts with the thresholds that reach the target on its validation data."""
    check_split(validation, "validation")
    level = target_level(target, validation, validation)
    recording, fitted = attach(validation, gates), by_readout(gates)
    signals = [name for name in available_readouts(validation) if _is_transferable(name)]
    names = [_best_readout(signals, level.accuracy, validation)] if signals else []
    names += [name for name in (*OWN_GATES, *fitted) if name in available_readouts(recording)]
    read = [name for name in stopper_signals(validation) if not is_gate(name)]
    if validation.labels is not None and read and not why_not_learned(validation):
        learned = dict(recording.signals)
        for kind in (kind for kind in STOPPER_KINDS if STOPPER + kind not in fitted):
            names.append(STOPPER + kind)
            fitted[names[-1]], learned[names[-1]] = fit_out_of_bag(validation, signals=read, kind=kind)
        recording = replace(recording, signals=learned)
    thresholds = {name: _threshold_reaching(name, level.accuracy, recording) for name in names}
    return [
        ExitPolicy(name, at, fitted.get(name), chosen_scope(name, validation)).for_any_model()
        for name, at in thresholds.items()
    ]


def replayed_rules(
    rules: Sequence[ExitPolicy], fitted_on: tuple[str, Trajectory], stops: tuple[str, Subject], target: Target
) -> Iterator[TransferResult]:
    """Replay the rules of one model on the test data of another; `fitted_on` has the validation recording."""
    (source, chosen_on), (name, subject) = fitted_on, stops
    if chosen_on is not subject.validation:
        what, where = f"the test recording of '{name}'", f"the validation recording of '{source}'"
        check_apart(subject.test, what, chosen_on, where, "replay rules on examples that chose none of them")
    level = subject.level(target)
    silent_about = no_verdict_sentence(subject.validation, subject.test, level)
    best = subject.best(level.accuracy)
    own = ExitPolicy(best, _threshold_reaching(best, level.accuracy, subject.validation))
    for rule in rules:
        assert rule.threshold is not None
        nothing = TransferResult(source, name, rule.readout, rule.threshold, None, None, None, None, silent_about)
        if silent_about:
            yield nothing
            continue
        try:
            validation, test = (_with_rule_signal(rule, recording) for recording in (subject.validation, subject.test))
            check_attached(test, rule.readout)
            selected = paired(Side(rule.readout, rule, test), Side(best, own, test))
        except UserError as error:
            yield replace(nothing, refused=str(error))
            continue
        curves = resampled_curves(rule.readout, fine_grid(rule.readout, validation), test)
        gap = gap_between(level.accuracy, _exit_way(rule.readout, curves), subject.exit_by(), test, subject.chance)
        right, loops = exits_of(rule, test).mean(axis=0, dtype=np.float64).tolist()
        yield replace(nothing, gap=gap, accuracy=right, average_loops=loops, selected=selected)


def _is_transferable(readout: str) -> bool:
    """Whether every trajectory has the signal of a readout: it reads no gate, no depth and no label."""
    return not readout.startswith(FITTED) and not is_gate(readout) and required_readout(readout).takes == "threshold"


def _exit_way(name: str, curves: Curves) -> Way:
    """The way to exit by one readout, from its resampled frontier."""
    return lambda accuracy: (name, curves.depth_at(accuracy))


def _with_rule_signal(rule: ExitPolicy, recording: Trajectory) -> Trajectory:
    """Attach the signal of a transferred rule to a recording, in the place of a signal of the same name."""
    if rule.gate is None:
        return recording
    signals = {name: values for name, values in recording.signals.items() if name != rule.readout}
    return attach(replace(recording, signals=signals), {own_name(rule.readout): rule.gate})


def _best_readout(readouts: Sequence[str], accuracy: float, validation: Trajectory) -> str:
    """The readout that reaches an accuracy in the fewest loops on validation data; else the most accurate one."""
    return min(readouts, key=lambda name: _rank_and_threshold(name, accuracy, validation)[0])


def _threshold_reaching(readout: str, accuracy: float, validation: Trajectory) -> float:
    """The threshold at which a readout reaches an accuracy in the fewest loops on validation data."""
    return _rank_and_threshold(readout, accuracy, validation)[1]


def _rank_and_threshold(readout: str, accuracy: float, validation: Trajectory) -> tuple[tuple[float, float], float]:
    """Rank a readout on validation data (smaller is better), and give its threshold."""
    thresholds = np.clip(swept_thresholds(readout, validation), -NEVER, NEVER)
    right, loops = curve(readout, thresholds, validation)
    missing = np.maximum(accuracy - 1e-9 - right, 0.0)
    place = int(np.lexsort((loops, missing))[0])
    return (float(missing[place]), float(loops[place])), float(thresholds[place])
