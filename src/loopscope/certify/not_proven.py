"""What is said where a guarantee cannot be made? Why, and how many examples it would take."""

from itertools import count
from math import ceil

from loopscope.certify.bounds import min_units, min_units_by_bets
from loopscope.certify.losses import Counted, RiskGroup, risk_groups, unit_count
from loopscope.certify.risk_target import AUTO, RiskTarget
from loopscope.errors import UserError

GRID_SHARE = 0.2


class NotProven(UserError):  # noqa: N818 - a refusal, not a mistake
    """No threshold that saves anything could be proven; `needed` is about how many examples would do, if any would."""

    def __init__(self, message: str, needed: int | None) -> None:
        super().__init__(message)
        self.needed = needed


def too_few(tested: int, difficulty: float | None, counted: Counted, target: RiskTarget, split: bool) -> NotProven:
    """Even without any loss so many tested units would be too few; `split`: a part of the recording is not tested."""
    needed = min_units(target.max_drop, target.delta)
    assert needed is not None
    record = _to_record(needed, difficulty, counted, target, split)
    return NotProven(
        f"Even if exiting early lost nothing, {target} takes {needed:,} tested {_what(difficulty, counted)}, and there "
        f"are {tested:,}; record {record:,} in all{_population(target)}, or ask for less.",
        record,
    )


def not_safe(
    safest: str,
    group: RiskGroup,
    rate: float,
    spread: float | None,
    counted: Counted,
    target: RiskTarget,
    split: bool,
    remedy: str = "try another readout, or ask for less",
) -> NotProven:
    """Not even the safest is proven; this group loses the most by it.

    `spread` is the variance of the losses of its units, where bets on them were the test. What was tested is used up:
    a second test on it has two chances at a guarantee that allows for one. Attempts on fresh data add up, too: each may
    err with delta, and whoever stops at the first policy stops at the first error.
    """
    level = None if target.delta is None else target.delta / (2 if target.readout == AUTO else 1)
    if level is not None and spread is not None and not group.binary:
        needed = min_units_by_bets(target.max_drop, level, rate, spread)
    else:
        needed = min_units(target.max_drop, level, rate, group.binary)
    of = "of" if counted.sequences is None else "of the answers, on average over"
    tested = f"{group.units:,} tested {_what(group.difficulty, counted)}"
    observed = f"Even {safest} loses {100 * rate:.2f} % {of} the {tested}"
    others = f"on other {_units(counted)}: a second test on these would guarantee nothing"
    if target.delta is not None:
        others += f", and every attempt adds its own {100 * target.delta:.3g} % to the chance of a broken guarantee"
    if needed is None:
        return NotProven(f"{observed}, so no number of them would prove it; {remedy}, {others}.", None)
    record = _to_record(needed, group.difficulty, counted, target, split)
    return NotProven(
        f"{observed}; at that rate {target} takes about {needed:,}: record {record:,} others{_population(target)}, or "
        f"{remedy}, {others}.",
        record,
    )


def _units(counted: Counted) -> str:
    return "examples" if counted.sequences is None else "sequences"


def _what(difficulty: float | None, counted: Counted) -> str:
    return _units(counted) if difficulty is None else f"{_units(counted)} of difficulty {difficulty:g}"


def _population(target: RiskTarget) -> str:
    once = ", each input once" * target.distinct + ", of which so many inputs occur once" * target.new_inputs
    return " that training did not have" * target.unseen + once


def _to_record(needed: int, difficulty: float | None, counted: Counted, target: RiskTarget, split: bool) -> int:
    """How many must be recorded to have so many tested ones of a difficulty, if that keeps its share."""
    units = {group.difficulty: group.units for group in risk_groups(counted, target.per_difficulty)}
    tested = ceil(needed * unit_count(counted) / units.get(difficulty, unit_count(counted)) - 1e-9)
    return next(total for total in count(tested) if total - (set_aside(total) if split else 0) >= tested)


def set_aside(units: int) -> int:
    """How many of the units of a recording propose, where no other recording does."""
    return max(1, round(GRID_SHARE * units))
