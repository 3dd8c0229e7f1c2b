"""When is a threshold proven safe? P-values for losses of examples and of sequences, and conformal risk control.

Losses lie between 0 and 1, one a unit (an example, or a sequence of decisions); the risk of a threshold is its expected
loss, alpha the risk that is allowed, delta the probability with which a guarantee may be broken. Thresholds are tested
in an order that other data gave, and no monotonicity of the risk is needed: the walk ends at the first threshold that
is not proven, so that all errors together have the probability delta.

Losses of sequences are tested by bets. Whoever holds that the risk is above alpha must offer fair bets on losses below
it: a stake of `bet` on a unit whose loss is x pays 1 + bet (alpha - x) for 1. Wealth that began at 1 is then at most 1
on average, whatever is bet, and ever reaches 1 / level with a probability of at most `level` (Ville's inequality). So
wealth that does proves the risk to be within alpha, and one over the highest wealth is a p-value. Such bets see that
losses vary little; a bound on the mean alone (Hoeffding-Bentkus) does not. They are those of somebody who wants just
1 / level at the end: they replicate the digital option that pays it, for losses that are normal with the variance seen
so far, and are never less than what a rest without any loss would need. The wealth depends on the order of the units,
which must not depend on their losses: callers draw it by lot.

References: Learn-then-Test (Angelopoulos et al., 2021), with its fixed-sequence testing and Hoeffding-Bentkus p-values;
conformal risk control (Angelopoulos et al., 2022); betting on bounded means (Waudby-Smith and Ramdas, 2024); bets that
look at what is still missing (STaR-Bets, Voráček and Orabona, 2025).

Shapes: n units, G thresholds.
"""

from collections.abc import Iterable
from math import ceil, e, log, log1p, pi, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri, rel_entr
from scipy.stats import binom, binomtest, norm

Values = NDArray[np.float64]

_ROUNDING = 1e-9
"""Sums of fractions are exact to this."""
_MAX_UNITS = 10**9
"""Nobody has so many examples."""
_LUCK = 0.5
"""Standard errors by which a loss may come out above its rate, and still be proven."""
_INTERVAL_GRID = 10_001
"""Among which the ends of an interval are sought."""
_UNSEEN = 0.5
"""Squared deviation that is added to what was seen, as if half a loss of 1 were still to come: a first stretch without
losses must not stake all wealth."""
_MIN_SHARE = 1e-300
_ENOUGH = 1 - 1e-12
"""Of the wealth that is wanted: the rest is rounding."""


def p_values(total_loss: ArrayLike, units: int, alpha: float | Values, binary: bool) -> Values:
    """P-values of "the risk is above alpha", from the sum of the losses of independent units.

    Exact (binomial) for losses that are 0 or 1; Hoeffding-Bentkus for all others, of which bets see more.
    """
    total = np.clip(np.asarray(total_loss, dtype=np.float64), 0, units)  # sums of fractions may miss an end
    if binary:
        return np.asarray(binom.cdf(np.rint(total), units, alpha))
    mean = np.minimum(total / units, alpha)
    hoeffding = np.exp(-units * (rel_entr(mean, alpha) + rel_entr(1 - mean, 1 - alpha)))
    bentkus = e * binom.cdf(np.ceil(total - _ROUNDING), units, alpha)
    return np.minimum(np.minimum(hoeffding, bentkus), 1.0)


def fixed_sequence(p: ArrayLike, delta: float) -> int:
    """The number of thresholds that fixed-sequence testing proves: all before the first failure."""
    return count_leading(np.asarray(p) <= delta)


def count_leading(holds: NDArray[np.bool_]) -> int:
    """The number of true values before the first false one."""
    return len(holds) if holds.all() else int(holds.argmin())


def conformal(total_loss: ArrayLike, units: int, alpha: float) -> int:
    """How many thresholds, strictest first, conformal risk control allows: n / (n + 1) R + 1 / (n + 1) <= alpha.

    The losses of every unit must not fall from a threshold to a laxer one; take their running maximum first.
    """
    return count_leading((np.asarray(total_loss) + 1) / (units + 1) <= alpha + _ROUNDING)


def min_units(alpha: float, delta: float | None, rate: float = 0.0, binary: bool = True) -> int | None:
    """About the fewest units that prove a threshold with the observed loss `rate`; None if `rate` is too near to alpha.

    Without a delta: those that conformal risk control needs.
    """
    if rate >= alpha * (1 - 1e-6):
        return None
    if delta is None:
        return ceil((1 - alpha) / (alpha - rate) - _ROUNDING)
    units = max(1, ceil(log(delta) / log1p(-alpha) - _ROUNDING))
    while p_values(ceil(rate * units) if binary else rate * units, units, alpha, binary) > delta:
        units = ceil(1.01 * units)
        if units > _MAX_UNITS:
            return None
    return units


def min_units_by_bets(alpha: float, delta: float, rate: float, variance: float) -> int | None:
    """About the fewest units that the betting bound needs, for losses of this mean and variance."""
    fewest, margin = min_units(alpha, delta), alpha - rate
    if fewest is None or margin <= alpha * 1e-6:
        return None
    needed = fewest * alpha / margin + (norm.isf(delta) + _LUCK) ** 2 * variance / margin**2
    return ceil(needed) if needed <= _MAX_UNITS else None


def max_losses(units: int, alpha: float, delta: float | None) -> int:
    """The largest number of losses among `units` units that still proves a threshold; -1 if none does."""
    if delta is None:
        return int(np.floor((units + 1) * alpha - 1 + _ROUNDING))
    number = int(binom.ppf(delta, units, alpha))
    return number if binom.cdf(number, units, alpha) <= delta else number - 1


def risk_interval(total_loss: float, units: int, binary: bool, level: float) -> tuple[float, float]:
    """A confidence interval for the risk: Clopper-Pearson for losses of 0 and 1, else by Hoeffding-Bentkus."""
    tail = (1 - level) / 2
    total_loss = min(max(total_loss, 0.0), float(units))
    if binary:
        exact = binomtest(round(total_loss), units).proportion_ci(level, "exact")
        return float(exact.low), float(exact.high)

    def highest(total: float) -> float:
        """The largest risk that these losses do not reject."""
        risks = np.linspace(total / units, 1, _INTERVAL_GRID)[1:-1]
        kept = risks[p_values(total, units, risks, False) > tail]
        return float(kept.max(initial=total / units)) + 1 / _INTERVAL_GRID

    return max(0.0, 1 - highest(units - total_loss)), min(1.0, highest(total_loss))


def betting_p_values(losses: Iterable[Values], units: int, alpha: float, level: float) -> Values:
    """[G] p-values of "the risk is above alpha", by bets that aim at `level`; `losses` are blocks [b, G] in order.

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
            bet = _stakes(wealth * level, squares / (before + seen), units - seen, alpha)
            bet = np.where(highest * level < _ENOUGH, np.minimum(bet, largest), 0.0)  # no more bets on enough wealth
            wealth = np.maximum(wealth * (1 + bet * (alpha - loss)), 0.0)
            highest = np.maximum(highest, wealth)
            mean = total / (before + seen)
            seen, total = seen + 1, total + loss
            squares += (loss - mean) * (loss - total / (before + seen))
    assert seen == units
    return 1 / highest * (_ENOUGH)  # wealth that is just enough must not fail by its last digit


def _stakes(reached: Values, variance: Values, left: int, alpha: float) -> Values:
    """[G] the stake of each bet: by the share of the wanted wealth that is reached, and the units that are left."""
    share = np.clip(reached, _MIN_SHARE, _ENOUGH)
    distance = ndtri(share)
    option = np.exp(-(distance**2) / 2) / sqrt(2 * pi) / share / np.sqrt(variance * left)
    needed = np.expm1(-np.log(share) / left) / alpha
    return np.asarray(np.maximum(option, needed))
