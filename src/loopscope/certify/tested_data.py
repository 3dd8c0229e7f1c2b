"""What can a policy be tested on? A recording, on which it is replayed, or a live run of it: both give outcomes.

Shapes: N examples.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from loopscope.artifacts import MANIFEST, Manifest
from loopscope.certify.live_runs import LIVE, LiveRuns, Recorded
from loopscope.certify.losses import drawn_for, population, unit_count
from loopscope.config import read_json
from loopscope.errors import UserError, reject
from loopscope.leaks import check_apart
from loopscope.model_identity import same_model
from loopscope.policy import ExitPolicy, Guarantee, Loss
from loopscope.scope import Scope, Unit, example_count_text, scope_of
from loopscope.trajectory import Trajectory, require_labels

Array = NDArray[Any]

_MIN_DRAWN = 0.9
"""Of as many examples as calibration drew, which inputs occur once is about the same."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """Where each example exited and what it answered, beside full depth."""

    loops: NDArray[np.int64]  # [N]
    predicted: Array  # [N]
    full_depth: Array  # [N] the answers at full depth
    labels: Array | None  # [N]

    @classmethod
    def replayed(cls, policy: ExitPolicy, trajectory: Trajectory) -> Self:
        loops = policy.exit_loops(trajectory)
        predicted = trajectory.predicted[np.arange(len(loops)), loops - 1]
        return cls(loops, predicted, trajectory.predicted[:, -1], trajectory.labels)

    def lost(self, loss: Loss) -> NDArray[np.bool_]:
        """[N] whether each loses against full depth."""
        if loss == "disagreement":
            return np.asarray(self.predicted != self.full_depth)
        labels = require_labels(self.labels)
        return np.asarray((self.full_depth == labels) & (self.predicted != labels))


def outcome_of(policy: ExitPolicy, recorded: Recorded) -> Outcome:
    """The outcome of a policy: replayed on a recording, or looked up in a live run."""
    if isinstance(recorded, LiveRuns):
        place = recorded.find(policy)
        return Outcome(recorded.loops[place], recorded.predictions[place], recorded.full_depth, recorded.labels)
    return Outcome.replayed(policy, recorded)


def counted_in_words(recorded: Recorded, which: str) -> str:
    """How many examples a recording or a live run has, in words."""
    sequences = None if recorded.sequences is None else unit_count(recorded)
    return example_count_text(which, recorded.num_examples, sequences, decision_unit(recorded))


def decision_unit(recorded: Recorded) -> Unit | None:
    """The unit of the decisions in a recording or a live run: questions, tokens or answers."""
    return decision_scope(recorded).unit


def decision_scope(recorded: Recorded) -> Scope:
    """The scope of the decisions in a recording or a live run."""
    return recorded.scope if isinstance(recorded, LiveRuns) else scope_of(recorded)


def load_recorded(path: Path) -> Recorded:
    """Load a folder: a recording or a live run."""
    try:
        live = read_json(Manifest, path / MANIFEST, "manifest").kind == LIVE
    except (OSError, UserError):  # which a recording says better
        live = False
    return LiveRuns.load(path) if live else Trajectory.load(path)


def guaranteed_part(guarantee: Guarantee, recorded: Recorded, *, ordered: bool = False) -> Recorded:
    """The examples that a guarantee was made for; with `ordered` in the order of the recording."""
    if isinstance(recorded, LiveRuns):
        if guarantee.unseen or guarantee.distinct or guarantee.new_inputs:
            raise UserError(
                "The guarantee is for some inputs only, which a live run cannot tell; check it on a recording."
            )
        return recorded
    here = drawn_for(recorded, guarantee)
    if here is not None and guarantee.drawn is not None and here < _MIN_DRAWN * guarantee.drawn:
        made = f"is for inputs that {guarantee.drawn:,} examples do not hold"
        other = "other inputs occur once"
        if guarantee.distinct:
            made, other = f"counts every input of {guarantee.drawn:,} examples once", "rare inputs are a smaller share"
        raise UserError(
            f"The guarantee {made}; of the {here:,} examples here {other}: give a recording with as many examples, or "
            "calibrate on fewer."
        )
    return population(recorded, guarantee, guarantee.drawn, ordered=ordered)


def check_held_out(policy: ExitPolicy, recorded: Recorded) -> None:
    """Reject data that a policy's guarantee rests on, or that its gate was fitted to."""
    assert policy.certificate is not None
    if policy.gate is not None:
        policy.gate.check_calibration(recorded)
    reject(_not_held_out(policy.certificate.guarantee, policy.model, recorded))
    if isinstance(recorded, Trajectory):
        where, remedy = "the data that the guarantee rests on", "give examples that calibration did not have"
        for rows in policy.certificate.rows:
            check_apart(recorded, "this recording", rows, where, remedy)


def _not_held_out(guarantee: Guarantee, model: str | None, recorded: Recorded) -> Iterator[str]:
    """Why data are not held out from a guarantee, if they are not."""
    if (guarantee.tested.sequences is None) != (recorded.sequences is None):
        made, here = ("single answers", "texts") if guarantee.tested.sequences is None else ("texts", "single answers")
        yield (
            f"The guarantee is about {made}, and this recording is of {here}; give one of {made}, or calibrate a "
            f"policy on a recording of {here}."
        )
    known = {guarantee.recording, guarantee.tested.sha256, guarantee.grid.sha256}
    own = model is not None and same_model(model, recorded.provenance.get("weights_sha256"))
    splits = {guarantee.tested.split, guarantee.grid.split} - {None}
    if recorded.sha256 in known or (own and recorded.split in splits):
        yield (
            "The guarantee rests on this data, or on the same split of the same model, which cannot say whether it is "
            "kept; give another split."
        )
