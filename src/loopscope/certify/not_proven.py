"""Why can no guarantee be given? The error with its reason, and how many examples a guarantee would take."""

from itertools import count
from math import ceil

from loopscope.certify.bounds import min_units, min_units_by_bets
from loopscope.certify.losses import Counted, RiskGroup, risk_groups, unit_count
from loopscope.certify.risk_target import AUTO, RiskTarget
from loopscope.errors import UserError

GRID_SHARE = 0.2


class NotProven(UserError):  # noqa: N818 - a refusal, not a mistake
    """No threshold that exits early is proven safe; about `needed` examples would prove one (None: no number)."""

    def __init__(self, message: str, needed: int | None) -> None:
        super().__init__(message)
        self.needed = needed


def too_few(tested: int, difficulty: float | None, counted: Counted, target: RiskTarget, split: bool) -> NotProven:
    """The error for too few tested units: even without any loss they could not prove a threshold."""
    needed = min_units(target.max_drop, target.delta)
    assert needed is not None
    record = _number_to_record(needed, difficulty, counted, target, split)
    return NotProven(
        f"Even if exiting early lost nothing, {target} takes {needed:,} tested {_unit_words(difficulty, counted)}, and "
        f"there are {tested:,}; record {record:,} in all{_population_words(target)}, or ask for less.",
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
    """The error if even the safest threshold is not proven; this group loses the most with it.

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
    tested = f"{group.units:,} tested {_unit_words(group.difficulty, counted)}"
    observed = f"Even {safest} loses {100 * rate:.2f} % {of} the {tested}"
    others = f"on other {_unit_word(counted)}: a second test on these would guarantee nothing"
    if target.delta is not None:
        others += f", and every attempt adds its own {100 * target.delta:.3g} % to the chance of a broken guarantee"
    if needed is None:
        return NotProven(f"{observed}, so no number of them would prove it; {remedy}, {others}.", None)
    record = _number_to_record(needed, group.difficulty, counted, target, split)
    return NotProven(
        f"{observed}; at that rate {target} takes about {needed:,}: record {record:,} others"
        f"{_population_words(target)}, or {remedy}, {others}.",
        record,
    )


def _unit_word(counted: Counted) -> str:
    """The word for the units of a recording: examples or sequences."""
    return "examples" if counted.sequences is None else "sequences"


def _unit_words(difficulty: float | None, counted: Counted) -> str:
    """The units that a guarantee tests, in words, with their difficulty."""
    return _unit_word(counted) if difficulty is None else f"{_unit_word(counted)} of difficulty {difficulty:g}"


def _population_words(target: RiskTarget) -> str:
    """The words for the examples that a guarantee is for, such as "that training did not have"."""
    once = ", each input once" * target.distinct + ", of which so many inputs occur once" * target.new_inputs
    return " that training did not have" * target.unseen + once


def _number_to_record(needed: int, difficulty: float | None, counted: Counted, target: RiskTarget, split: bool) -> int:
    """The number of examples to record for `needed` tested units of a difficulty, if its share stays."""
    units = {group.difficulty: group.units for group in risk_groups(counted, target.per_difficulty)}
    tested = ceil(needed * unit_count(counted) / units.get(difficulty, unit_count(counted)) - 1e-9)
    return next(total for total in count(tested) if total - (proposing_unit_count(total) if split else 0) >= tested)


def proposing_unit_count(units: int) -> int:
    """The number of units of a recording that propose thresholds, if no other recording proposes them."""
    return max(1, round(GRID_SHARE * units))
