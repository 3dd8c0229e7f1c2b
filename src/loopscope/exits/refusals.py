"""What is said where a promise cannot be made? Why, and how many examples it would take."""

from math import ceil

from loopscope.errors import UserError
from loopscope.exits.losses import Group, unit_count
from loopscope.exits.risk import fewest
from loopscope.exits.wanted import Wanted
from loopscope.trajectory import Trajectory

GRID_SHARE = 0.2
"""Of a recording: for the grid, where no other recording gives it."""


class NotProven(UserError):  # noqa: N818 - a refusal, not a mistake
    """No threshold that saves anything could be proven; `needed` is about how many examples would do, if any would."""

    def __init__(self, message: str, needed: int | None) -> None:
        super().__init__(message)
        self.needed = needed


def too_few(group: Group, recording: Trajectory, wanted: Wanted) -> NotProven:
    """Even without any loss they would be too few."""
    needed = fewest(wanted.max_drop, wanted.delta)
    assert needed is not None
    record = _to_record(needed, group, recording)
    return NotProven(
        f"Even if none of them loses, {wanted} takes {needed:,} tested {_what(group, recording)}, and there "
        f"are {group.units:,}; record {record:,} in all, or ask for less.",
        record,
    )


def not_safe(readout: str, group: Group, rate: float, recording: Trajectory, wanted: Wanted) -> NotProven:
    """Not even the safest threshold that lets anybody exit early is proven; this group loses the most by it."""
    needed = fewest(wanted.max_drop, wanted.delta, rate)
    told = (
        f"Even the safest threshold of '{readout}' that lets anybody exit early loses {100 * rate:.2f} % of the "
        f"{group.units:,} tested {_what(group, recording)}"
    )
    if needed is None:
        return NotProven(f"{told}, so no number of them would prove it; try another readout, or ask for less.", None)
    record = _to_record(needed, group, recording)
    return NotProven(
        f"{told}; at that rate {wanted} takes about {needed:,}: record {record:,} in all, try another readout, or ask "
        "for less.",
        record,
    )


def _what(group: Group, recording: Trajectory) -> str:
    units = "examples" if recording.sequences is None else "sequences"
    return units if group.difficulty is None else f"{units} of difficulty {group.difficulty:g}"


def _to_record(needed: int, group: Group, recording: Trajectory) -> int:
    """How large a recording has so many tested units in a group, if that keeps its share."""
    share = group.units / unit_count(recording) if group.units else 1 - GRID_SHARE
    return ceil(needed / share - 1e-9)
