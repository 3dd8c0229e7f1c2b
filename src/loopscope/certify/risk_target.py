"""Which guarantee is asked for, and in which words is it made?"""

from typing import Annotated, TypedDict

import msgspec

from loopscope.config import Settings
from loopscope.policy import Loss, Method, Share
from loopscope.scope import Scope

AUTO = "auto"

_WORDS: dict[Loss, str] = {
    "gap": "costs at most {limit} accuracy{where}: no larger share of answers is wrong where full depth is right",
    "disagreement": "changes at most {limit} of the answers{where}",
}
_WORDS_OF_SEQUENCES: dict[Loss, str] = {
    "gap": "makes at most {limit} of a sequence's answers wrong where full depth is right, on average over "
    "sequences{where}",
    "disagreement": "changes at most {limit} of a sequence's answers, on average over sequences{where}",
}
"""Long sequences may lose more than short ones, and then a larger share of all answers is lost."""


class RiskOptions(TypedDict, total=False):
    """The options of a guarantee besides its limit and its confidence."""

    loss: Loss
    readout: str
    per_difficulty: bool
    unseen: bool
    distinct: bool
    new_inputs: bool
    method: Method


class RiskTarget(Settings, frozen=True, kw_only=True):
    """State a guarantee: exiting early with `readout` loses at most `max_drop` against full depth.

    Parameters
    ----------
    max_drop
        The largest allowed loss against full depth.
    confidence
        The probability with which the guarantee holds, over the draw of the calibration data.
    in_expectation
        Whether the guarantee holds on average over calibration draws, instead of with a confidence.
    loss
        The loss to limit: "gap" counts answers that are wrong while full depth is right; "disagreement" counts answers
        that differ from full depth.
    readout
        The name of the readout; "auto" chooses the readout with the fewest loops.
    per_difficulty
        Whether the guarantee holds at every difficulty.
    unseen
        Whether the guarantee is for inputs that are not in the training data.
    distinct
        Whether every input counts once, because copies of an input were not drawn independently.
    new_inputs
        Whether the guarantee is for inputs that are not in the calibration data; if so, only inputs that occur once
        count.
    method
        The method: "walk" sets data aside to propose thresholds; "tolerance" sets no data aside and needs a named
        readout.
    """

    max_drop: Annotated[float, msgspec.Meta(ge=1e-6, lt=1)] = 0.01
    confidence: Share = 0.95
    in_expectation: bool = False
    loss: Loss = "gap"
    readout: str = AUTO
    per_difficulty: bool = False
    unseen: bool = False
    distinct: bool = False
    new_inputs: bool = False
    method: Method = "walk"

    def __post_init__(self) -> None:
        if self.method == "tolerance" and self.readout == AUTO:
            raise ValueError("the method 'tolerance' proves one readout; name the readout, such as --readout margin")
        if self.method == "tolerance" and self.in_expectation:
            raise ValueError("the method 'tolerance' proves at a confidence; leave out --in-expectation")
        if self.distinct and self.new_inputs:
            raise ValueError(
                "an input is counted once (distinct), or only if it occurs once (new_inputs); leave out one of them"
            )

    @property
    def delta(self) -> float | None:
        """The probability with which the guarantee may be broken; None for one in expectation."""
        return None if self.in_expectation else round(1 - self.confidence, 15) or 1 - self.confidence

    def sentence(self, sequences: bool, scope: Scope) -> str:
        how = f"With probability {100 * self.confidence:.12g} % over the calibration draw"
        if self.in_expectation:
            how = "On average over calibration draws"
        where = " at every difficulty" if self.per_difficulty else ""
        words = (_WORDS_OF_SEQUENCES if sequences else _WORDS)[self.loss]
        words = words.format(limit=f"{100 * self.max_drop:g} %", where=where)
        had = " nor ".join(["training"] * self.unseen + ["calibration"] * self.new_inputs)
        which = f", for inputs that neither {had} had" if " nor " in had else f", for inputs that {had} did not have"
        which = (which if had else "") + (", every input counted once" if self.distinct else "")
        text = "" if scope.cache is None else f", for next tokens along given documents, with the cache '{scope.cache}'"
        return f"{how}, exiting early {words}{which}{text}."

    def __str__(self) -> str:
        sure = "on average" if self.in_expectation else f"with {100 * self.confidence:.12g} % confidence"
        return f"a guarantee of at most {100 * self.max_drop:g} % {sure}"
