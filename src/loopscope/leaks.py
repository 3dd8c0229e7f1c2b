"""Does evaluation data leak into what is chosen, fitted or calibrated? Shared rows and fitted signals are rejected."""

from collections.abc import Mapping
from typing import Any, Protocol

from loopscope.config import build, plain
from loopscope.errors import UserError
from loopscope.model_identity import same_model
from loopscope.readouts.signals import STOPPER
from loopscope.row_overlap import KeySketch, common_kind
from loopscope.scope import scope_of
from loopscope.trajectory import Trajectory

EVALUATION_SPLITS = ("test", "extrapolation")
_MAX_SHARED = 0.05
"""The share of examples from which on two splits overlap by mistake, not by chance."""


def check_calibration(calibration: Trajectory, evaluation: Trajectory, readout: str | None = None) -> None:
    """Reject recordings whose shared data would make a readout (default: all) look better than it is."""
    check_split(calibration)
    check_attached(calibration, readout)
    check_attached(evaluation, readout)
    if calibration.same_data(evaluation):
        raise UserError("Calibration and evaluation are the same data; calibrate on another split.")
    check_same_model(calibration, evaluation, "The calibration and the evaluation recording")
    what, where = "the evaluation recording", "the calibration recording"
    check_apart(evaluation, what, calibration, where, "evaluate on examples that calibration did not have")


def check_apart(
    recording: Trajectory, what: str, other: Trajectory | Mapping[str, KeySketch], where: str, remedy: str
) -> None:
    """Reject a recording that shares more examples with another recording (or its sketch) than chance explains."""
    shared = num_shared(recording, other)
    if not shared:
        return
    kind = common_kind(recording.row_keys, other.row_keys if isinstance(other, Trajectory) else other)
    raise UserError(
        f"About {shared:,} of the {recording.num_examples:,} examples of {what} have the same {kind} as examples of "
        f"{where}, more than the repeats within each explain (split one draw, or draw with repeats); {remedy}"
        + (", or, if the texts are not the inputs, leave them out." if kind == "texts" else ".")
    )


def num_shared(recording: Trajectory, other: Trajectory | Mapping[str, KeySketch]) -> int:
    """The number of examples that two recordings share; 0 if there are few, or if chance explains them."""
    shared = recording.num_shared(other)
    return shared if shared > _MAX_SHARED * recording.num_examples else 0


class OfSplit(Protocol):
    """A recording or a live run: its split and its provenance."""

    @property
    def split(self) -> str | None: ...

    @property
    def sha256(self) -> str: ...


def check_split(recording: OfSplit, choice: str = "Thresholds must not be chosen", split: str = "validation") -> None:
    """Reject evaluation data where LoopScope chooses, fits or calibrates."""
    if recording.split in EVALUATION_SPLITS:
        raise UserError(
            f"{choice} on the {recording.split} split, which is for evaluation; record the {split} split and give that."
        )


FITTED_ON = "fitted_on"
"""The key in a recording's provenance for the data that its attached signals were fitted to, by name."""


def fitting_data(recording: Trajectory) -> dict[str, Any]:
    """The note about its fitting recording that a gate or a stopper keeps, to detect leaks later."""
    return {
        "weights_sha256": recording.provenance.get("weights_sha256"),
        "split": recording.split,
        "recording": recording.sha256,
        "examples": recording.num_examples,
        "rows": plain(recording.row_sketch),
    }


def check_attached(recording: Trajectory, readout: str | None = None) -> None:
    """Reject attached signals of gates or stoppers that were fitted to (a part of) this recording."""
    attached = recording.provenance.get(FITTED_ON)
    for name, data in attached.items() if isinstance(attached, dict) else ():
        if readout in (None, name) and name in recording.signals and isinstance(data, dict):
            check_other_data(data, recording, f"{'stopper' if name.startswith(STOPPER) else 'gate'} of '{name}'")


def check_other_data(fitted_to: Mapping[str, Any], recording: OfSplit, what: str) -> None:
    """Reject the data that a gate or a stopper was fitted to, if they choose a threshold or evaluate."""
    which = None
    if recording.split is not None and recording.split == fitted_to.get("split"):
        which = f"the {recording.split} split"
    elif recording.sha256 == fitted_to.get("recording"):
        which = "this very recording"
    elif isinstance(recording, Trajectory):
        rows = build(dict[str, KeySketch], fitted_to.get("rows", {}), f"the provenance of the {what}")
        shared = num_shared(recording, rows)
        which = f"about {shared:,} of these {recording.num_examples:,} examples" if shared else None
    if which is not None:
        raise UserError(f"The {what} was fitted to {which}; choose its threshold, and evaluate it, on other data.")


def check_gate_data(recording: Trajectory) -> None:
    """Reject a recording to which no gate can be fitted."""
    check_split(recording, "A gate must not be fitted", "train")
    if recording.hidden is None or recording.num_loops < 2:
        raise UserError(
            "A gate is fitted on hidden states of two loops or more, which this recording does not keep; record it "
            "with --hidden, or give them: Trajectory(hidden=...)."
        )


def check_same_model(first: Trajectory, second: Trajectory, both: str) -> None:
    """Reject two recordings of different models."""
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
