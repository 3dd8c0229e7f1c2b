"""What is said where a promise cannot be made? Why, and how many examples it would take."""

from itertools import count
from math import ceil

from loopscope.errors import UserError
from loopscope.exits.losses import Group, groups, unit_count
from loopscope.exits.risk import fewest
from loopscope.exits.wanted import AUTO, Wanted
from loopscope.trajectory import Trajectory

GRID_SHARE = 0.2


class NotProven(UserError):  # noqa: N818 - a refusal, not a mistake
    """No threshold that saves anything could be proven; `needed` is about how many examples would do, if any would."""

    def __init__(self, message: str, needed: int | None) -> None:
        super().__init__(message)
        self.needed = needed


def too_few(tested: int, difficulty: float | None, counted: Trajectory, wanted: Wanted, split: bool) -> NotProven:
    """Even without any loss so many tested units would be too few; `split`: a part of the recording is not tested."""
    needed = fewest(wanted.max_drop, wanted.delta)
    assert needed is not None
    record = _to_record(needed, difficulty, counted, wanted, split)
    return NotProven(
        f"Even if none of them loses, {wanted} takes {needed:,} tested {_what(difficulty, counted)}, and there are "
        f"{tested:,}; record {record:,} in all{_whom(wanted)}, or ask for less.",
        record,
    )


def not_safe(readout: str, group: Group, rate: float, counted: Trajectory, wanted: Wanted, split: bool) -> NotProven:
    """Not even the safest threshold that lets anybody exit early is proven; this group loses the most by it."""
    level = None if wanted.delta is None else wanted.delta / (2 if wanted.readout == AUTO else 1)
    needed = fewest(wanted.max_drop, level, rate, group.binary)
    told = (
        f"Even the safest threshold of '{readout}' that lets anybody exit early loses {100 * rate:.2f} % of the "
        f"{group.units:,} tested {_what(group.difficulty, counted)}"
    )
    if needed is None:
        return NotProven(f"{told}, so no number of them would prove it; try another readout, or ask for less.", None)
    record = _to_record(needed, group.difficulty, counted, wanted, split)
    return NotProven(
        f"{told}; at that rate {wanted} takes about {needed:,}: record {record:,} in all{_whom(wanted)}, try another "
        "readout, or ask for less.",
        record,
    )


def _what(difficulty: float | None, counted: Trajectory) -> str:
    units = "examples" if counted.sequences is None else "sequences"
    return units if difficulty is None else f"{units} of difficulty {difficulty:g}"


def _whom(wanted: Wanted) -> str:
    return " that training did not have" * wanted.unseen + ", each input once" * wanted.distinct


def _to_record(needed: int, difficulty: float | None, counted: Trajectory, wanted: Wanted, split: bool) -> int:
    """How many must be recorded to have so many tested ones of a difficulty, if that keeps its share."""
    units = {group.difficulty: group.units for group in groups(counted, wanted.per_difficulty)}
    tested = ceil(needed * unit_count(counted) / units[difficulty] - 1e-9)
    return next(total for total in count(tested) if total - (set_aside(total) if split else 0) >= tested)


def set_aside(units: int) -> int:
    """How many of the units of a recording propose, where no other recording does."""
    return max(1, round(GRID_SHARE * units))
