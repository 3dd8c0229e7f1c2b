"""Which data may choose, and which may only evaluate? What would make a result look better than it is, is refused."""

from collections.abc import Sequence

from loopscope.errors import UserError
from loopscope.exits.guarantee import Guarantee
from loopscope.exits.live_runs import LiveRuns, Recorded
from loopscope.exits.scope import scope_of
from loopscope.model_identity import same_model
from loopscope.trajectory import Trajectory, check_trajectory

EVALUATION_SPLITS = ("test", "extrapolation")
_SHARED = 0.05
"""The share of examples from which on two splits overlap by mistake, not by chance."""


def check_calibration(calibration: Trajectory, evaluation: Trajectory) -> None:
    """Refuses what would make a result look better than it is."""
    check_trajectory(evaluation, "The evaluation recording")
    check_split(calibration, "calibration")
    if calibration.same_data(evaluation):
        raise UserError("Calibration and evaluation are the same data; calibrate on another split.")
    check_same_model(calibration, evaluation, "The calibration and the evaluation recording")
    _check_apart(calibration, evaluation)


def _check_apart(calibration: Trajectory, evaluation: Trajectory) -> None:
    """Refuses two splits that share examples, of which one cannot tell that the same inputs were drawn twice."""
    if calibration.examples is not None and evaluation.examples is not None:
        return
    shared = calibration.num_shared(evaluation)
    if shared > _SHARED * evaluation.num_examples:
        raise UserError(
            f"At least {shared:,} of the {evaluation.num_examples:,} examples of the evaluation recording have the "
            "logits of one in the calibration recording: the splits overlap; keep them apart, or, if the same inputs "
            "were drawn twice, give the inputs of both: Trajectory(examples=...)."
        )


def check_split(recording: Recorded, role: str) -> None:
    """Refuses to choose anything on data that is for evaluation."""
    if not isinstance(recording, LiveRuns):
        check_trajectory(recording, f"The {role} recording")
    if (recording.split or "").strip().lower().startswith(EVALUATION_SPLITS):
        raise UserError(
            f"The {role} recording is of the {recording.split} split; thresholds must not be chosen on data "
            "that is for evaluation: record the validation split and calibrate on that."
        )


def check_fitting(recording: Trajectory, what: str) -> None:
    """Refuses to fit a gate or a stopper to data that is for evaluation."""
    if (recording.split or "").strip().lower().startswith(EVALUATION_SPLITS):
        raise UserError(
            f"A {what} must not be fitted on the {recording.split} split, which is for evaluation; record the train "
            "split."
        )


def check_gate_data(recording: Trajectory) -> None:
    """Refuses a recording that no gate can be fitted on."""
    check_fitting(recording, "gate")
    if recording.hidden is None:
        raise UserError(
            "A gate is fitted on hidden states, and this recording keeps none; record it with --hidden, or give those "
            "of your own: Trajectory(hidden=...)."
        )
    if recording.num_loops < 2:
        raise UserError("With one loop there is no exit to choose, so no gate to fit.")


def check_held_out(guarantee: Guarantee, model: str | None, trajectory: Recorded) -> None:
    """Refuses the data that the promise of a policy for `model` rests on."""
    if (guarantee.tested.sequences is None) != (trajectory.sequences is None):
        made, here = ("single answers", "texts") if guarantee.tested.sequences is None else ("texts", "single answers")
        raise UserError(
            f"The promise is about {made}, and this recording is of {here}; give one of {made}, or calibrate a policy "
            f"on a recording of {here}."
        )
    known = {guarantee.recording, guarantee.tested.sha256, guarantee.grid.sha256}
    own = model is not None and same_model(model, trajectory.provenance.get("weights_sha256"))
    splits = {guarantee.tested.split, guarantee.grid.split} - {None}
    if trajectory.sha256 in known or (own and trajectory.split in splits):
        raise UserError(
            "The promise rests on this data, or on the same split of the same model, which cannot say whether it is "
            "kept; give another split."
        )


def check_same_model(first: Trajectory, second: Trajectory, both: str) -> None:
    for what, ours, theirs in (
        ("loops", first.num_loops, second.num_loops),
        ("classes", first.num_classes, second.num_classes),
        ("weights", first.provenance.get("weights_sha256"), second.provenance.get("weights_sha256")),
    ):
        if None in (ours, theirs) or (same_model(ours, theirs) if what == "weights" else ours == theirs):
            continue
        raise UserError(f"{both} differ in their {what} ({ours} and {theirs}); both must come from the same model.")
    if (found := scope_of(first).difference(scope_of(second))) is not None:
        raise UserError(f"{both} are of different kinds ({found[1]}, and {found[2]}); record both alike.")


def is_pair(given: object) -> bool:
    """Whether these are two recordings, validation and test; one alone is easily given instead."""
    return isinstance(given, Sequence) and [isinstance(each, Trajectory) for each in given] == [True, True]
