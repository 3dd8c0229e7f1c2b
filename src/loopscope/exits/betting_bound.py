"""How sure do bets make us that a bounded mean is below a limit? A test for the losses of sequences.

Whoever holds that the risk is above alpha must offer fair bets on losses below it: a stake of `bet` on a unit whose
loss is x pays 1 + bet (alpha - x) for 1. Wealth that began at 1 is then at most 1 on average, whatever is bet, and ever
reaches 1 / level with a probability of at most `level` (Ville's inequality). So wealth that does proves the risk to be
within alpha, and one over the highest wealth is a p-value. Such bets see that losses vary little; a bound on the mean
alone (Hoeffding-Bentkus) does not.

The bets are those of somebody who wants just 1 / level at the end: they replicate the digital option that pays it, for
losses that are normal with the variance seen so far, and are never less than what a rest without any loss would need.
The wealth depends on the order of the units, which must not depend on their losses: callers draw it by lot.

References: betting on bounded means (Waudby-Smith and Ramdas, 2024); bets that look at what is still missing
(STaR-Bets, Voráček and Orabona, 2025).

Shapes: n units, G thresholds.
"""

from collections.abc import Iterable
from math import pi, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

Values = NDArray[np.float64]

_UNSEEN = 0.5
"""Squared deviation that is added to what was seen, as if half a loss of 1 were still to come: a first stretch without
losses must not stake all wealth."""
_TINY = 1e-300
_ROUNDING = 1e-12


def betting_p_values(losses: Iterable[Values], units: int, alpha: float, level: float) -> Values:
    """[G] of "the risk is above alpha", by bets that aim at `level`; `losses` are blocks [b, G] of all units in order.

    Valid at any level, and sharp at this one.
    """
    wealth = highest = total = squares = np.ones(0)
    largest = 1 / (1 - alpha)  # a stake that a loss of 1 takes away
    before = _UNSEEN / (alpha * (1 - alpha))  # units with the variance of losses that are 0 or 1
    seen = 0
    for block in losses:
        for loss in block:
            if not seen:
                wealth, total = np.ones_like(loss), np.full_like(loss, before * alpha)
                highest, squares = wealth.copy(), np.full_like(loss, _UNSEEN)
            bet = _bets(wealth * level, squares / (before + seen), units - seen, alpha)
            bet = np.where(highest * level < 1 - _ROUNDING, np.minimum(bet, largest), 0.0)  # who has enough stops
            wealth = np.maximum(wealth * (1 + bet * (alpha - loss)), 0.0)
            highest = np.maximum(highest, wealth)
            mean = total / (before + seen)
            seen, total = seen + 1, total + loss
            squares += (loss - mean) * (loss - total / (before + seen))
    assert seen == units
    return 1 / highest * (1 - _ROUNDING)  # what is just enough must not fail by its last digit


def _bets(reached: Values, variance: Values, left: int, alpha: float) -> Values:
    """[G] what to stake of a wealth that is this share of what is wanted, with so many units to come."""
    share = np.clip(reached, _TINY, 1 - _ROUNDING)
    distance = ndtri(share)
    option = np.exp(-(distance**2) / 2) / sqrt(2 * pi) / share / np.sqrt(variance * left)
    needed = np.expm1(-np.log(share) / left) / alpha
    return np.asarray(np.maximum(option, needed))
