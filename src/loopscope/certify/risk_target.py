"""What guarantee is asked for, in which words is it made, and what is said where it cannot be?"""

from itertools import count
from math import ceil
from typing import Annotated, TypedDict

import msgspec

from loopscope.certify.bounds import min_units, min_units_by_bets
from loopscope.certify.losses import Counted, RiskGroup, risk_groups, unit_count
from loopscope.config import Settings
from loopscope.errors import UserError
from loopscope.policy import Loss, Share
from loopscope.scope import Scope

AUTO = "auto"

_WORDS: dict[Loss, str] = {
    "gap": "costs at most {limit} accuracy{where}: no larger share of answers is wrong where full depth is right",
    "disagreement": "changes at most {limit} of the answers{where}",
}


class RiskOptions(TypedDict, total=False):
    """What a target says beside its limit and its confidence."""

    loss: Loss
    readout: str
    per_difficulty: bool
    unseen: bool
    distinct: bool


class RiskTarget(Settings, frozen=True, kw_only=True):
    """Exiting early with `readout` loses at most `max_drop` against full depth."""

    max_drop: Annotated[float, msgspec.Meta(ge=1e-6, lt=1)] = 0.01
    confidence: Share = 0.95  # the probability of that, over the draw of the calibration data
    in_expectation: bool = False  # on average over calibration draws, in place of a confidence
    loss: Loss = "gap"
    readout: str = AUTO
    per_difficulty: bool = False  # at every difficulty
    unseen: bool = False  # for inputs that training did not have
    distinct: bool = False  # every input counts once

    @property
    def delta(self) -> float | None:
        """The probability with which the promise may be broken; None for one in expectation."""
        return None if self.in_expectation else round(1 - self.confidence, 15) or 1 - self.confidence

    def sentence(self, sequences: bool, scope: Scope) -> str:
        how = f"With probability {100 * self.confidence:.12g} % over the calibration draw"
        if self.in_expectation:
            how = "On average over calibration draws"
        where = " at every difficulty" if self.per_difficulty else ""
        where += ", on average over sequences" if sequences else ""
        words = _WORDS[self.loss].format(limit=f"{100 * self.max_drop:g} %", where=where)
        new = ", for inputs that training did not have" if self.unseen else ""
        once = ", every input counted once" if self.distinct else ""
        text = "" if scope.cache is None else f", for next tokens along given documents, with the cache '{scope.cache}'"
        return f"{how}, exiting early {words}{new}{once}{text}."

    def __str__(self) -> str:
        sure = "on average" if self.in_expectation else f"with {100 * self.confidence:.12g} % confidence"
        return f"a promise of at most {100 * self.max_drop:g} % {sure}"


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
    whoever tries something else on it has two chances at a promise that allows for one.
    """
    level = None if target.delta is None else target.delta / (2 if target.readout == AUTO else 1)
    if level is not None and spread is not None and not group.binary:
        needed = min_units_by_bets(target.max_drop, level, rate, spread)
    else:
        needed = min_units(target.max_drop, level, rate, group.binary)
    of = "of" if counted.sequences is None else "of the answers, on average over"
    tested = f"{group.units:,} tested {_what(group.difficulty, counted)}"
    observed = f"Even {safest} loses {100 * rate:.2f} % {of} the {tested}"
    others = f"on other {_units(counted)}, since a second test on these would promise nothing"
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
    return " that training did not have" * target.unseen + ", each input once" * target.distinct


def _to_record(needed: int, difficulty: float | None, counted: Counted, target: RiskTarget, split: bool) -> int:
    """How many must be recorded to have so many tested ones of a difficulty, if that keeps its share."""
    units = {group.difficulty: group.units for group in risk_groups(counted, target.per_difficulty)}
    tested = ceil(needed * unit_count(counted) / units.get(difficulty, unit_count(counted)) - 1e-9)
    return next(total for total in count(tested) if total - (set_aside(total) if split else 0) >= tested)


def set_aside(units: int) -> int:
    """How many of the units of a recording propose, where no other recording does."""
    return max(1, round(GRID_SHARE * units))
