"""How does evidence add up that may be looked at any time? Wealth that grows by bets only if the hypothesis is wrong.

Where a hypothesis holds, no bet on what comes next pays more than its stake on average. So wealth that began at 1 is at
most 1 on average, and ever reaches 1/a with a probability of at most a (Ville's inequality). It is spread over a few
bets, one of which is to keep it; at every step a share of it, 1 / (300 + steps), is spread anew, so that what begins
late is found, too. (A constant share would make it fall exponentially on a long quiet stream.)

References: conformal test martingales and their Simple Jumper (Vovk, Gammerman and Shafer, 2022), betting on bounded
means (Waudby-Smith and Ramdas, 2024), fixed share (Herbster and Warmuth, 1998).
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, log
from operator import mul
from typing import Annotated

import msgspec

from loopscope.config import Tally

_NOT_STAKED = 0.5
"""Of the wealth that is spread: what is not staked."""
_HALF_SPREAD_STEPS = 300
"""After so many steps half as much is spread anew in a step as at first."""
_MAX_LOG_E = 700.0
"""The logarithm of the largest e-value that is told as a number."""
_RANK_CUTS = (0.03, 0.2, 0.5, 0.8, 0.97)
"""Of ranks. They must not come from the calibration data, given which ranks are no longer uniform."""
_FEWER_OR_MORE = (0.5, 0.75, 4 / 3, 2.0)
_MORE = (1.5, 2.0, 3.0, 6.0, 20.0)
"""By which the odds change that a bet is on."""


class Wealth(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What bets on a stream have earned so far, and where it began to grow."""

    shares: list[Annotated[float, msgspec.Meta(ge=0, le=1)]]  # of the wealth, on each bet; the first is to keep it
    steps: Tally = 0
    log_e: float = 0.0  # the logarithm of the wealth, which is the e-value
    highest: float = 0.0  # that it ever had
    lowest: float = 0.0
    since: Tally = 0  # the example after which it was lowest: about where a change began
    count: Tally = 0  # of units since then
    total: float = 0.0  # of what was observed on them

    def grow(self, payoffs: Sequence[float], observed: float, example: int) -> None:
        """By bets that pay so much for 1, the first of them 1, on what was observed at `example` of the stream."""
        won = list(map(mul, self.shares, payoffs))
        wealth = sum(won)
        anew = 1 / (_HALF_SPREAD_STEPS + self.steps)
        kept = (1 - anew) / wealth
        first, rest = anew * _NOT_STAKED, anew * (1 - _NOT_STAKED) / (len(won) - 1)
        self.shares = [share * kept + rest for share in won]
        self.shares[0] += first - rest
        self.steps += 1
        self.log_e += log(wealth)
        self.count += 1
        self.total += observed
        if self.log_e < self.lowest:
            self.lowest, self.since, self.count, self.total = self.log_e, example, 0, 0.0
        self.highest = max(self.highest, self.log_e)

    @property
    def e_value(self) -> float:
        return exp(min(self.log_e, _MAX_LOG_E))

    @property
    def p_value(self) -> float:
        """Valid whenever it is looked at: the chance that it is ever so small is no larger."""
        return exp(-self.highest)

    @property
    def mean(self) -> float | None:
        """Of what was observed since about the change."""
        return self.total / self.count if self.count else None


def start(bets: int) -> Wealth:
    return Wealth(shares=[_NOT_STAKED, *[(1 - _NOT_STAKED) / bets] * bets])


class Bets:
    """On events whose probability is at most (or just) so much: that their odds are other ones by a factor."""

    def __init__(self, probability: float, factors: Sequence[float]) -> None:
        odds = [factor * probability / (1 - probability) for factor in factors]
        self._if = [each / (1 + each) / probability for each in odds]
        self._if_not = [1 / (1 + each) / (1 - probability) for each in odds]

    def payoffs(self, event: float) -> list[float]:
        """For 1 on each bet, the first of which is to keep it: of an event (1), or none (0), or anything between."""
        return [1.0, *(event * high + (1 - event) * low for high, low in zip(self._if, self._if_not, strict=True))]


class RankBets:
    """Bets that ranks are not uniform: that more of them, or fewer, than there should be lie above a cut."""

    def __init__(self) -> None:
        cuts = [Bets(1 - cut, _FEWER_OR_MORE) for cut in _RANK_CUTS]
        self._payoffs = [
            [1.0, *(paid for number, bets in enumerate(cuts) for paid in bets.payoffs(float(number < place))[1:])]
            for place in range(len(_RANK_CUTS) + 1)
        ]

    def payoffs(self, rank: float) -> list[float]:
        """The same of a rank between 0 and 1; each is 1 on average if it is uniform."""
        return self._payoffs[bisect_right(_RANK_CUTS, rank)]


class MeanBets(Bets):
    """Bets that losses between 0 and 1 are more than `limit` on average."""

    def __init__(self, limit: float) -> None:
        super().__init__(limit, _MORE)


RANK_BETS = len(_RANK_CUTS) * len(_FEWER_OR_MORE)
MEAN_BETS = len(_MORE)
