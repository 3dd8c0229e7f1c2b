"""Is a stream still like a policy's calibration data? Two tests that are valid whenever you look at them.

The tests bet on the order of a stream. The rows of a recording have an order of their own (sorted, grouped, each input
where it came first), which says nothing about time. So a recording is played in an order that is drawn at random,
unless its caller says that it is a stream.

Exits: the rank of every exit among those of the calibration data and of the stream before it, with ties broken by lot,
is uniform and independent of earlier ranks as long as the stream is like the calibration data, however few these are;
that is why bets may depend on earlier ranks alone. It would be exact if the threshold came from other data, which it
does not; what that costs is measured (`benchmarks/drift.py`, docs/explanation/guarantees.md).
Risk: the losses of units that were audited (labelled, or run at full depth) are at most the guaranteed risk on average,
where the guarantee is true, which it is with the policy's confidence. A guarantee on average over calibrations says
nothing of this one: there exits alone are watched.

Each test may err with half of alpha, or exits alone with all of it. Their average wealth would be a little sharper, and
is not used: ranks are uniform given earlier ranks, not given losses.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import exp, log
from operator import mul
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from loopscope.artifacts import is_intact, sealed
from loopscope.certify.live_runs import Recorded
from loopscope.certify.losses import risk_groups
from loopscope.certify.tested_data import check_held_out, guaranteed_part, outcome_of
from loopscope.config import Count, Seed, Settings, Tally, digest, read_json, write_json
from loopscope.errors import UserError, reject
from loopscope.policy import Certificate, ExitPolicy, Share
from loopscope.trajectory_checks import as_array

_NOT_STAKED = 0.5
"""The share of the wealth that stays out of the bets."""
_HALF_SPREAD_STEPS = 300
"""After this many steps, each step redistributes half as much wealth as at first."""
_MAX_LOG_E = 700.0
"""The logarithm of the largest e-value that is reported as a number."""
_RANK_CUTS = (0.03, 0.2, 0.5, 0.8, 0.97)
"""Of ranks. They must not come from the calibration data, given which ranks are no longer uniform."""
_FEWER_OR_MORE = (0.5, 0.75, 4 / 3, 2.0)
_MORE = (1.5, 2.0, 3.0, 6.0, 20.0)
"""The factors by which a bet assumes that the odds change."""


class Wealth(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The wealth of a monitor's bets on a stream, and since when it grows."""

    shares: list[Annotated[float, msgspec.Meta(ge=0, le=1)]]  # of the wealth, on each bet; the first is to keep it
    steps: Tally = 0
    log_e: float = 0.0  # the logarithm of the wealth, which is the e-value
    highest: float = 0.0  # that it ever had
    lowest: float = 0.0
    since: Tally = 0  # the example after which it was lowest: about where a change began
    count: Tally = 0  # of units since then
    total: float = 0.0  # the sum of the observations since then

    def grow(self, payoffs: Sequence[float], observed: float, example: int) -> None:
        """Update the wealth by the payoffs of all bets (the first is 1) on the observation at `example`."""
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
        """The mean of the observations since the change."""
        return self.total / self.count if self.count else None


def starting_wealth(bets: int) -> Wealth:
    """The wealth of a monitor before its first bet."""
    return Wealth(shares=[_NOT_STAKED, *[(1 - _NOT_STAKED) / bets] * bets])


class Bets:
    """A monitor's bets that an event is more probable than calibration allows, by each of some factors."""

    def __init__(self, probability: float, factors: Sequence[float]) -> None:
        odds = [factor * probability / (1 - probability) for factor in factors]
        self._if = [each / (1 + each) / probability for each in odds]
        self._if_not = [1 / (1 + each) / (1 - probability) for each in odds]

    def payoffs(self, event: float) -> list[float]:
        """For 1 on each bet, the first of which is to keep it: of an event (1), or none (0), or anything between."""
        return [1.0, *(event * high + (1 - event) * low for high, low in zip(self._if, self._if_not, strict=True))]


class RankBets:
    """A monitor's bets that ranks are not uniform: too many, or too few, lie above a cut."""

    def __init__(self) -> None:
        cuts = [Bets(1 - cut, _FEWER_OR_MORE) for cut in _RANK_CUTS]
        self._payoffs = [
            [1.0, *(paid for number, bets in enumerate(cuts) for paid in bets.payoffs(float(number < place))[1:])]
            for place in range(len(_RANK_CUTS) + 1)
        ]

    def payoffs(self, rank: float) -> list[float]:
        """The payoffs of all bets on a rank between 0 and 1; each is 1 on average if ranks are uniform."""
        return self._payoffs[bisect_right(_RANK_CUTS, rank)]


class MeanBets(Bets):
    """A monitor's bets that losses between 0 and 1 exceed `limit` on average."""

    def __init__(self, limit: float) -> None:
        super().__init__(limit, _MORE)


RANK_BETS = len(_RANK_CUTS) * len(_FEWER_OR_MORE)
MEAN_BETS = len(_MORE)


Values = NDArray[np.float64]

_ROUNDING = 1e-9
"""Averages of loops are exact to this."""
_LOTS_FOR_AUDITS, _LOTS_FOR_ORDER = 1, 2
"""Beside the seed, so that ties, audits and the order of a recording are drawn from different numbers."""


class Alarm(Settings, frozen=True, kw_only=True):
    """One alarm of a monitor: its test, when it came, and the observed and expected values."""

    test: Literal["exits", "risk"]
    direction: Literal["earlier", "later", "higher"]
    example: Count  # the first at which the evidence sufficed, counted from 1
    since: Tally  # the example after which the evidence began to grow: about where the change is
    observed: float  # the average loop, or loss, since then
    expected: float  # the average loop on calibration data, or the guaranteed risk


class MonitorResult(Settings, frozen=True, kw_only=True):
    """The result of a monitor so far: the alarms, and the size of the stream."""

    alarm: bool
    alarms: list[Alarm]  # the first of each test
    sentence: str
    alpha: float  # the probability of an alarm, ever, if nothing changes, where the guarantee is true (see `Monitor`)
    unit: Literal["examples", "sequences"]
    examples: int  # or sequences
    audited: int
    e_exits: float  # evidence now: at most 1 on average if nothing has changed
    e_risk: float | None  # None: exits alone are watched
    p_exits: float  # of all the stream; an alarm is one at most half of alpha, or all of it if exits alone are watched
    p_risk: float | None


class MonitorFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The state of a monitor in its file, with which another process continues."""

    schema_version: Literal[2] = 2
    policy: str  # the hash of the policy
    alpha: Share
    seed: Seed
    counts: list[Tally]  # of exits, the calibration data's and the stream's
    examples: Tally = 0
    in_order: bool = True  # False: some of the stream was a recording, played in random order
    exits: Wealth
    risk: Wealth
    alarms: Annotated[list[Alarm], msgspec.Meta(max_length=2)]
    digest: str = ""  # of all of the above


class Monitor:
    """Watch a stream of examples for drift from the data on which a policy was calibrated.

    If the stream does not change and the guarantee is true, the probability that an alarm ever occurs is at most
    `alpha`. For a guarantee in expectation, the monitor watches only the exits.

    Parameters
    ----------
    policy
        A calibrated policy.
    alpha
        The largest share of streams that may raise a false alarm (default: 0.01).
    seed
        The random seed for ties between exits, for audits and for the order of recordings.

    Raises
    ------
    UserError
        If the policy has no guarantee, or if alpha or the seed is out of range.

    Examples
    --------
    >>> policy = ls.calibrate(validation, max_drop=0.1)
    >>> monitor = ls.Monitor(policy)
    >>> monitor.update(policy.exit_loops(test)).alarm
    False
    """

    def __init__(self, policy: ExitPolicy, alpha: float = 0.01, seed: int = 0) -> None:
        if not 0 < alpha < 1 or not 0 <= seed < 2**31:
            raise UserError(
                f"The share of false alarms lies between 0 and 1, such as 0.01, and a seed from 0 to 2**31 - 1; got "
                f"{alpha:g} and {seed}."
            )
        certificate = _certificate_of(policy)
        self.policy, self.guarantee, self.calibration = policy, certificate.guarantee, certificate.exits
        self.watches_risk = self.guarantee.confidence is not None
        self._enough = log(2 if self.watches_risk else 1) - log(alpha)
        self._rank_bets, self._mean_bets = RankBets(), MeanBets(self.guarantee.max_drop)
        self._state = MonitorFile(
            policy=_policy_digest(policy),
            alpha=alpha,
            seed=seed,
            counts=list(self.calibration.counts),
            exits=starting_wealth(RANK_BETS),
            risk=starting_wealth(MEAN_BETS),
            alarms=[],
        )

    def update(self, exit_loops: ArrayLike, losses: ArrayLike | None = None) -> MonitorResult:
        """Read the next units of the stream, in the order in which they arrived.

        A unit is an example, or a sequence if the guarantee counts sequences.

        Parameters
        ----------
        exit_loops
            [n] the loop at which each unit exits; for a sequence, the average over its decisions.
        losses
            [n] the losses of audited units: 1 if the early answer loses against full depth, else 0. NaN marks a unit
            without an audit (default: no audits). Choose at random which units to audit.

        Returns
        -------
        MonitorResult
            The results so far, and whether the monitor raised an alarm.

        Raises
        ------
        UserError
            If the arrays do not fit the policy, or if you pass losses for a guarantee in expectation.
        """
        depths, lost = self._checked(exit_loops, losses)
        levels = self.calibration.levels(depths).tolist()
        lots = self._lots().random(len(depths)).tolist()
        for depth, level, lot, loss in zip(depths.tolist(), levels, lots, lost.tolist(), strict=True):
            self._state.examples += 1
            self._see_exit(depth, level, lot)
            if loss == loss:  # not NaN
                self._see_loss(loss)
        return self.result

    def replay(self, recording: Recorded, audit: float | None = None, *, stream: bool = False) -> MonitorResult:
        """Read a whole recording or live run.

        Parameters
        ----------
        recording
            Examples that calibration did not use.
        audit
            The share of the units to audit, chosen at random (default: all, or none for a guarantee in expectation).
        stream
            Whether to read the rows in their recorded order, because the rows arrived in this order (default: in random
            order).

        Returns
        -------
        MonitorResult
            The results so far, and whether the monitor raised an alarm.

        Raises
        ------
        UserError
            If the guarantee rests on the given data, or if audits need labels that the recording does not have.
        """
        share = float(self.watches_risk) if audit is None else audit
        if not 0 <= share <= 1:
            raise UserError(f"The share that is audited lies between 0 and 1, got {share}.")
        if share:
            self._check_audited()
        check_held_out(self.policy, recording)
        if share and self.guarantee.loss == "gap" and recording.labels is None:
            raise UserError(
                "The guarantee is about right answers, and this recording has no labels to audit; watch its exits "
                "alone (--audit 0), or calibrate with the loss 'disagreement', which needs none."
            )
        recording = guaranteed_part(self.guarantee, recording, ordered=stream)
        outcome = outcome_of(self.policy, recording)
        (units,) = risk_groups(recording, per_difficulty=False)
        depths = units.means(outcome.loops)
        lost = units.means(outcome.lost(self.guarantee.loss)) if share else np.zeros_like(depths)
        if not stream:
            order = np.lexsort((lost, depths))  # the same for the same units, however they stand in the recording
            order = self._lots(_LOTS_FOR_ORDER).permutation(order)
            self._state.in_order = False
        elif recording.sequences is not None:
            order = np.argsort(np.unique(recording.sequences, return_index=True)[1])  # as they come
        else:
            order = np.arange(units.units)
        if not share:
            return self.update(depths[order])
        audited = self._lots(_LOTS_FOR_AUDITS).random(units.units) < share
        return self.update(depths[order], np.where(audited, lost[order], np.nan))

    @property
    def result(self) -> MonitorResult:
        """Return the results so far, and whether the monitor raised an alarm."""
        state = self._state
        return MonitorResult(
            alarm=bool(state.alarms),
            alarms=list(state.alarms),
            sentence=self._sentence(),
            alpha=state.alpha,
            unit="examples" if self.calibration.per_loop == 1 else "sequences",
            examples=state.examples,
            audited=state.risk.steps,
            e_exits=state.exits.e_value,
            e_risk=state.risk.e_value if self.watches_risk else None,
            p_exits=state.exits.p_value,
            p_risk=state.risk.p_value if self.watches_risk else None,
        )

    def save(self, path: str | Path) -> None:
        """Write the monitor as JSON, so that another process can continue the stream.

        Parameters
        ----------
        path
            The file; LoopScope replaces an existing file.
        """
        write_json(Path(path), sealed(self._state))

    @classmethod
    def load(cls, path: str | Path, policy: ExitPolicy) -> Self:
        """Read a monitor from a file.

        Parameters
        ----------
        path
            The file that `save` wrote.
        policy
            The policy that the monitor watches.

        Returns
        -------
        Monitor
            The monitor, which continues from the saved state.

        Raises
        ------
        UserError
            If the file was altered, or if the monitor watches a different policy.
        """
        _certificate_of(policy)
        state = read_json(MonitorFile, Path(path), "monitor")
        if state.policy != _policy_digest(policy):
            raise UserError(f"{path} watches the stream of another policy; begin a new monitor for this one.")
        monitor = cls(policy, state.alpha, state.seed)
        if not is_intact(state) or _state_sizes(state) != _state_sizes(monitor._state):
            raise UserError(f"{path} was altered since it was written; begin a new monitor.")
        monitor._state = state
        return monitor

    def _check_audited(self) -> None:
        if not self.watches_risk:
            raise UserError(
                "This policy's guarantee holds on average over calibrations, not for each one. Losses cannot show a "
                "change then; watch the exits alone (--audit 0, or no losses)."
            )

    def _checked(self, exit_loops: ArrayLike, losses: ArrayLike | None) -> tuple[Values, Values]:
        depths = _stream_vector(exit_loops, "Exit loops")
        lost = np.full(len(depths), np.nan)
        if losses is not None:
            self._check_audited()
            lost = _stream_vector(losses, "Losses", flags=True)
        reject(self._problems(depths, lost))
        return depths, np.clip(lost, 0, 1)

    def _problems(self, depths: Values, lost: Values) -> Iterator[str]:
        last = self.guarantee.loops
        if not (np.isfinite(depths) & (depths >= 1 - _ROUNDING) & (depths <= last + _ROUNDING)).all():
            yield f"Exit loops lie between 1 and {last}, the full depth of the policy."
        if self.calibration.per_loop == 1 and (depths != np.rint(depths)).any():
            yield "An example exits at a whole loop; averages are for a guarantee that counts sequences."
        if len(lost) != len(depths):
            yield f"Got {len(lost):,} losses for {len(depths):,} exits; give one per exit, NaN without an audit."
        if not (np.isnan(lost) | ((lost >= -_ROUNDING) & (lost <= 1 + _ROUNDING))).all():
            yield "A loss lies between 0 and 1, or is NaN where there was no audit."

    def _lots(self, what: int = 0) -> np.random.Generator:
        """For the units to come, each of which has its own random number."""
        return np.random.Generator(np.random.PCG64([self._state.seed, what]).advance(self._state.examples))

    def _see_exit(self, depth: float, level: int, lot: float) -> None:
        """The unit is one of those among which it is ranked."""
        state = self._state
        counts = state.counts
        counts[level] += 1
        rank = (sum(counts[:level]) + lot * counts[level]) / sum(counts)
        state.exits.grow(self._rank_bets.payoffs(rank), depth, state.examples)
        if self._speaks(state.exits, "exits"):
            mean, before = state.exits.mean, self.calibration.mean
            later = mean is not None and mean > before
            self._raise("exits", "later" if later else "earlier", state.exits, before)

    def _see_loss(self, loss: float) -> None:
        state = self._state
        state.risk.grow(self._mean_bets.payoffs(loss), loss, state.examples)
        if self._speaks(state.risk, "risk"):
            self._raise("risk", "higher", state.risk, self.guarantee.max_drop)

    def _speaks(self, wealth: Wealth, test: str) -> bool:
        return wealth.log_e >= self._enough and all(alarm.test != test for alarm in self._state.alarms)

    def _raise(self, test: Any, direction: Any, wealth: Wealth, expected: float) -> None:
        assert wealth.mean is not None  # wealth that is above 1 has grown
        alarm = Alarm(
            test=test,
            direction=direction,
            example=self._state.examples,
            since=wealth.since,
            observed=wealth.mean,
            expected=expected,
        )
        self._state.alarms.append(alarm)

    def _sentence(self) -> str:
        state = self._state
        unit = "example" if self.calibration.per_loop == 1 else "sequence"
        if not state.alarms:
            what = f"{state.examples:,} {unit}{'' if state.examples == 1 else 's'}"
            how = f"{state.risk.steps:,} audited" if self.watches_risk else "exits alone are watched"
            return f"No alarm in {what} ({how}), which is no proof that nothing has changed."
        return " ".join(_alarm_sentence(alarm, unit, state.in_order) for alarm in state.alarms)


def _alarm_sentence(alarm: Alarm, unit: str, in_order: bool) -> str:
    """The sentence of one alarm."""
    began = f"Alarm at {unit} {alarm.example:,}: since about {unit} {alarm.since + 1:,}"
    if not in_order:
        began = f"Alarm after {alarm.example:,} {unit}{'' if alarm.example == 1 else 's'} in random order:"
    if alarm.test == "exits":
        return (
            f"{began} exits come {alarm.direction}, or spread otherwise, than on calibration data (loop "
            f"{alarm.observed:.2f} on average, there {alarm.expected:.2f})."
        )
    return (
        f"{began} audited answers lose {100 * alarm.observed:.2f} % on average, and at most "
        f"{100 * alarm.expected:g} % was guaranteed."
    )


def _certificate_of(policy: ExitPolicy) -> Certificate:
    """The certificate of a policy; reject a policy that a monitor cannot watch."""
    if policy.certificate is None:
        raise UserError("This policy guarantees nothing, so there is nothing to monitor; calibrate one.")
    counts, loops = policy.certificate.exits, policy.certificate.guarantee.loops
    if len(counts.counts) != (loops - 1) * counts.per_loop + 1 or not sum(counts.counts):
        raise UserError("The exit counts of this policy do not fit its loops; calibrate again.")
    return policy.certificate


def _policy_digest(policy: ExitPolicy) -> str:
    """The hash of a policy, by which a monitor's file recognises it."""
    threshold = None if policy.threshold is None else float(policy.threshold)
    return digest([policy.readout, threshold, policy.model, policy.certificate])


def _state_sizes(state: MonitorFile) -> list[int]:
    """The lengths of the lists in a monitor's file, to check it."""
    return [len(each) for each in (state.counts, state.exits.shares, state.risk.shares)]


def _stream_vector(values: ArrayLike, name: str, flags: bool = False) -> Values:
    """Convert exits or losses of a stream to a vector of numbers."""
    found = as_array(values, name)
    if found.ndim != 1 or (found.dtype.kind == "b" and not flags):
        raise UserError(f"{name} must be a vector of numbers, one for each unit of the stream.")
    return found.astype(np.float64)
