"""What can a policy be checked on? A recording, on which it is replayed, or a live run of it."""

from pathlib import Path

from loopscope.artifacts import MANIFEST, Manifest
from loopscope.config import read_json
from loopscope.errors import UserError
from loopscope.exits.guarantee import Guarantee
from loopscope.exits.live_runs import LIVE, LiveRuns, Recorded
from loopscope.exits.losses import population, unit_count
from loopscope.exits.outcome import Outcome
from loopscope.exits.policy import ExitPolicy
from loopscope.exits.scope import Unit, counted, scope_of
from loopscope.trajectory import Trajectory


def counted_in(recorded: Recorded, which: str) -> str:
    """How many there are, and of what, in words."""
    sequences = None if recorded.sequences is None else unit_count(recorded)
    return counted(which, recorded.num_examples, sequences, decision_unit(recorded))


def decision_unit(recorded: Recorded) -> Unit | None:
    return (recorded.scope if isinstance(recorded, LiveRuns) else scope_of(recorded)).unit


def load_recorded(path: Path) -> Recorded:
    """The recording or the live run in a folder."""
    try:
        live = read_json(Manifest, path / MANIFEST, "manifest").kind == LIVE
    except (OSError, UserError):  # which a recording says better
        live = False
    return LiveRuns.load(path) if live else Trajectory.load(path)


def outcome_of(policy: ExitPolicy, recorded: Recorded) -> Outcome:
    """What the policy did there, or would do."""
    if isinstance(recorded, LiveRuns):
        return recorded.outcome(recorded.find(policy))
    return Outcome.replayed(policy, recorded)


def promised_part(guarantee: Guarantee, recorded: Recorded) -> Recorded:
    """The examples for which a promise was made."""
    if not isinstance(recorded, LiveRuns):
        return population(recorded, guarantee.unseen, guarantee.distinct)
    if guarantee.unseen or guarantee.distinct:
        raise UserError(
            "The promise is for inputs that are new, which a live run cannot tell; check it on a recording."
        )
    return recorded
