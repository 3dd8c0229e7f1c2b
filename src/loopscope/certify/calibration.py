"""How does a threshold come with a guarantee? Tested on data that had no part in proposing it.

One part of the data proposes: it gives the grid of thresholds, their order from the safest on (the strictest first,
unless a laxer one looks safer) and, with `auto`, two readouts. The other part tests: thresholds are proven in that
order up to the first that is not (`bounds`), and the one of them that takes the fewest loops is the policy's; with two
readouts, each at half of delta. A live run of text was proposed before it ran (`live_candidates`); it is tested alike.

The unit that is counted is the example, or, where one request yields many decisions, the sequence, whose loss is the
share of its decisions that lose. The guarantee can be made for every difficulty: then a threshold is proven if it is at
each of them. No correction is due for that, because for a bad threshold to be proven, the test must err at the very
difficulty where it is bad (an intersection-union test).

The method `tolerance` sets nothing aside, for one named readout (a tolerance limit after Wilks). An example counts as
lost from the strictest threshold on that loses it; call that threshold s. Take any threshold t with at most K examples
whose s is as strict as t or stricter, where K is the largest number with BinomCDF(K; N, max_drop) <= delta. Then t is
stricter than the (K + 1)-th strictest s. Let q be the least strict value such that at most max_drop of the population
has an s stricter than q. If t were too lax, the (K + 1)-th strictest s would be laxer than q, so at most K of N
examples would have an s that is q or stricter, which at least max_drop of the population has: that happens with
probability delta at most. The data may choose t, and ties change nothing. Of several difficulties the strictest t is
taken; it can only be too lax if it is at the difficulty that needs the strictest one.

Shapes: N examples, T loops, G thresholds.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Unpack

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.stats import sem

from loopscope.certify.bounds import count_leading, max_losses, min_units
from loopscope.certify.cautions import cautions
from loopscope.certify.live_runs import LiveRuns, Recorded
from loopscope.certify.losses import RiskGroup, drawn_for, population, risk_groups, summarise_data, unit_count
from loopscope.certify.not_proven import NotProven, not_safe, proposing_unit_count, too_few
from loopscope.certify.risk_target import AUTO, RiskOptions, RiskTarget
from loopscope.certify.tested_data import decision_scope, outcome_of
from loopscope.certify.threshold_walk import Proof, Walk, walk_live_runs, walk_thresholds
from loopscope.config import build
from loopscope.errors import UserError
from loopscope.frontier import Curve
from loopscope.leaks import check_attached, check_same_model, check_split, num_shared
from loopscope.learned.attach import Fitted, attach, by_readout
from loopscope.policy import (
    Bound,
    CalibrationExits,
    Certificate,
    DataSummary,
    Evidence,
    ExitPolicy,
    Guarantee,
    chosen_scope,
)
from loopscope.readouts.readout import needs_labels
from loopscope.readouts.replay import available_readouts
from loopscope.threshold_grids import gap_grid
from loopscope.trajectory import Trajectory

_NORMAL_95 = 1.959964
_ROUNDING = 1e-9
"""Averages of loops are exact to this."""


def calibrate(
    recording: Trajectory,
    max_drop: float = 0.01,
    confidence: float = 0.95,
    *,
    grid: Trajectory | None = None,
    gates: Mapping[str, Fitted] | None = None,
    seed: int = 0,
    bound: Bound = "betting",
    **options: Unpack[RiskOptions],
) -> ExitPolicy:
    """Choose an exit threshold with a guarantee on the loss against full depth.

    With probability `confidence` over the draw of the recording, exiting early loses at most `max_drop` against full
    depth. LoopScope warns you if the guarantee is weaker than it looks, for instance because inputs are repeated.

    Parameters
    ----------
    recording
        Examples that no evaluation uses. A fifth of these examples proposes thresholds, unless you pass a `grid`.
    max_drop
        The largest allowed loss against full depth (default: 0.01).
    confidence
        The probability with which the guarantee holds (default: 0.95).
    grid
        Another recording of the model, which proposes the thresholds (default: none).
    gates
        Fitted gates and stoppers, by name, which LoopScope may choose as readouts, too (default: none).
    seed
        The random seed that selects the examples for the thresholds.
    bound
        The test for losses of sequences: "betting" (the default) or "hoeffding_bentkus".
    **options
        `readout`: the name of a readout (default: the readout with the fewest loops). `loss`: "gap" (the default)
        counts answers that are wrong while full depth is right; "disagreement" counts answers that differ from full
        depth. `per_difficulty`, `unseen`, `distinct`, `new_inputs`: the examples for which the guarantee holds.
        `method`: "walk" (the default) or "tolerance".

    Returns
    -------
    ExitPolicy
        The policy with its certificate; `policy.guarantee.sentence` states the guarantee.

    Raises
    ------
    UserError
        If the guarantee cannot be proven; the message says how many examples a proof needs.

    Examples
    --------
    >>> policy = ls.calibrate(validation, max_drop=0.1)
    >>> policy.guarantee.max_drop, policy.guarantee.confidence
    (0.1, 0.95)
    """
    target = _risk_target(max_drop=float(max_drop), confidence=float(confidence), **options)
    return _with_cautions(recording, certify(recording, target, grid, gates, seed, bound))


def conformal_risk_control(
    recording: Trajectory,
    max_drop: float = 0.01,
    *,
    grid: Trajectory | None = None,
    gates: Mapping[str, Fitted] | None = None,
    seed: int = 0,
    **options: Unpack[RiskOptions],
) -> ExitPolicy:
    """Choose a threshold that loses at most `max_drop` on average over calibration draws.

    The guarantee is weaker than that of `calibrate`, but usually costs fewer loops.

    Parameters
    ----------
    recording
        Examples that no evaluation uses. A fifth of these examples proposes thresholds, unless you pass a `grid`.
    max_drop
        The largest allowed expected loss against full depth (default: 0.01). If an early exit loses an answer at one
        threshold, the answer counts as lost at all looser thresholds.
    grid, gates, seed
        The parameters of `calibrate` with the same names.
    **options
        The options of `calibrate`.

    Returns
    -------
    ExitPolicy
        The policy with its certificate.

    Raises
    ------
    UserError
        If the guarantee cannot be proven; the message says how many examples a proof needs.

    Examples
    --------
    >>> policy = ls.conformal_risk_control(validation, max_drop=0.1)
    >>> policy.guarantee.confidence is None
    True
    """
    target = _risk_target(max_drop=float(max_drop), in_expectation=True, **options)
    return _with_cautions(recording, certify(recording, target, grid, gates, seed))


def _risk_target(**values: Any) -> RiskTarget:
    """The risk target of `calibrate`, from its parameters."""
    return build(RiskTarget, values, "the guarantee that is asked for")


def _with_cautions(recording: Trajectory, policy: ExitPolicy) -> ExitPolicy:
    """Warn about the cautions of a calibrated policy, and return the policy."""
    for caution in cautions(recording, policy):
        warnings.warn(caution, stacklevel=3)
    return policy


def certify(
    recorded: Recorded,
    target: RiskTarget,
    grid: Trajectory | None = None,
    gates: Mapping[str, Fitted] | None = None,
    seed: int = 0,
    bound: Bound = "betting",
) -> ExitPolicy:
    """Calibrate on a recording or a live run: the policy that keeps the guarantee, or raise `NotProven`."""
    check_split(recorded)
    proof = build(Proof, {"bound": bound, "seed": index(seed)}, "the guarantee that is asked for")
    if isinstance(recorded, LiveRuns):
        return _test_candidates(_candidates_of_run(recorded, target), target, proof)
    policy = _test_candidates(_candidates_of_recording(recorded, target, grid, gates or {}, seed), target, proof)
    assert policy.certificate is not None
    rows = tuple(data.row_sketch for data in (recorded, grid) if data is not None)
    return replace(policy, certificate=msgspec.structs.replace(policy.certificate, rows=rows))


@dataclass(frozen=True)
class Candidates:
    """The candidate thresholds of a calibration, and the data that proposed them."""

    walks: list[Walk]
    policy: Callable[[str, float], ExitPolicy]  # that exits by this readout at this threshold
    counted: Recorded  # the examples for which the guarantee is made; those of the walks may be a part of them
    readouts: list[str]  # among which the proposing data chose
    recording: str  # the hash of all that was recorded
    tested: DataSummary
    grid: DataSummary  # where the thresholds come from
    grid_size: int | None  # None: as long as the walk
    split: bool  # whether a part of the data proposes and is not tested
    drawn: int | None = None  # examples, where only those count that are distinct or occur once


def _candidates_of_recording(
    recording: Trajectory, target: RiskTarget, grid: Trajectory | None, gates: Mapping[str, Fitted], seed: int
) -> Candidates:
    """Propose candidate thresholds for a calibration on a recording."""
    _check_with_grid(recording, grid, gates, target.readout)
    counted = population(recording, target)
    if target.method == "tolerance":
        _check_tolerance(recording, grid)
        _check_enough_units(counted, counted, target, split=False)
        proposing = tested = counted
    elif grid is None:
        proposing, tested = split_rows(counted, target, seed)
    else:
        _check_enough_units(counted, counted, target, split=False)
        proposing, tested = grid, counted
    proposing, tested = attach(proposing, gates), attach(tested, gates)
    readouts = candidate_readouts(target, proposing, tested)
    if target.method == "tolerance":
        thresholds = gap_grid(target.readout, tested, points=tested.num_examples * tested.num_loops)
        walks = [walk_thresholds(target.readout, thresholds, tested, target)]
    else:
        walks = _finalists(readouts, proposing, tested, target)
    named = by_readout(gates)

    def policy(readout: str, threshold: float) -> ExitPolicy:
        return ExitPolicy(readout, threshold, named.get(readout), chosen_scope(readout, recording))

    summaries = (summarise_data(tested), summarise_data(proposing))
    drawn, split = drawn_for(recording, target), grid is None and target.method == "walk"
    return Candidates(walks, policy, counted, readouts, recording.sha256, *summaries, None, split, drawn)


def _check_tolerance(recording: Trajectory, grid: Trajectory | None) -> None:
    """Reject a grid or sequences for the method `tolerance`."""
    if grid is not None:
        raise UserError("The method 'tolerance' takes its thresholds from the data that it tests; leave out --grid.")
    if recording.sequences is not None:
        raise UserError(
            "The method 'tolerance' is for single answers, which are lost or not, and this recording is of sequences; "
            "leave out --method."
        )


def _candidates_of_run(runs: LiveRuns, target: RiskTarget) -> Candidates:
    """The candidate thresholds of a calibration on a live run, which ran all of them."""
    check_live_target(target)
    contents, gate = runs.contents, runs.rule.gate
    if gate is not None:
        gate.check_calibration(runs)
    readout = runs.rule.readout
    if contents.proposing is None or target.readout not in (AUTO, readout):
        what = "a policy that was given" if contents.proposing is None else f"candidates of '{readout}'"
        raise UserError(
            f"This live run is of {what}, so it can check a guarantee (loopscope check) but not make this one; run "
            "candidates of the readout, without --policy."
        )
    _check_enough_units(runs, runs, target, split=True)
    walk = walk_live_runs(runs, target)
    tested = DataSummary(
        sha256=runs.run_sha256,
        split=contents.split,
        examples=runs.num_examples,
        sequences=unit_count(runs),
        seen=None,
        difficulty=None,
    )

    def policy(readout: str, threshold: float) -> ExitPolicy:
        return replace(runs.rule, threshold=threshold, scope=runs.scope, certificate=None)

    names, where = contents.readouts, contents.recording
    return Candidates([walk], policy, runs, names, where, tested, contents.proposing, contents.planned, split=True)


def check_live_target(target: RiskTarget) -> None:
    """Reject options of a guarantee that a live run of text cannot have."""
    names = ("in_expectation", "per_difficulty", "unseen", "distinct", "new_inputs")
    wrong = [name for name in names if getattr(target, name)] + ["method"] * (target.method == "tolerance")
    if wrong:
        raise UserError(
            f"A guarantee for text that was run live is not made with --{wrong[0].replace('_', '-')}; leave that out."
        )


def _test_candidates(candidates: Candidates, target: RiskTarget, proof: Proof) -> ExitPolicy:
    """Test the candidates: the proven one with the fewest loops and its certificate, or raise `NotProven`."""
    walks = candidates.walks
    level = None if target.delta is None else target.delta / len(walks)
    passed = [walk.proven(target.max_drop, level, proof) for walk in walks]
    best = min(range(len(walks)), key=lambda number: walks[number].fewest_loops(passed[number]))
    walk = walks[best]
    if walk.fewest_loops(passed[best]) > walk.num_loops - _ROUNDING:
        raise _not_proven(candidates, target, proof)
    place = int(walk.loops[: passed[best]].argmin())
    policy = candidates.policy(walk.readout, float(walk.thresholds[place]))
    return replace(
        policy, certificate=_certificate(policy, candidates, walk, place, passed[best], level, target, proof)
    )


def candidate_readouts(target: RiskTarget, *recordings: Trajectory) -> list[str]:
    """The readouts among which a calibration chooses: the named one, or all that the recordings allow."""
    if target.readout != AUTO:
        return [target.readout]
    return [name for name in available_readouts(*recordings) if not needs_labels(name)]


def check_recording(recording: Trajectory, gates: Mapping[str, Fitted], readout: str) -> None:
    """Reject a recording of one loop for calibration, and gates that were fitted to it."""
    if recording.num_loops == 1:
        raise UserError("The recording has one loop only, so there is no earlier exit to calibrate.")
    check_attached(recording, None if readout == AUTO else readout)
    for gate in gates.values():
        gate.check_calibration(recording)


def _check_with_grid(recording: Trajectory, grid: Trajectory | None, gates: Mapping[str, Fitted], readout: str) -> None:
    """Check the recording of a calibration and the recording that proposes its thresholds."""
    check_recording(recording, gates, readout)
    if grid is not None:
        check_split(grid)
        check_same_model(recording, grid, "The recording and that of the grid")
        if recording.same_data(grid) or num_shared(grid, recording):
            raise UserError(
                "The thresholds come from the data that is tested, or from data that shares examples with it; give a "
                "recording of another split, or none: then a fifth of the recording is set aside."
            )


def proposing_rows(counted: Trajectory, seed: int) -> NDArray[np.bool_]:
    """[N] whether an example is in the random fifth of the units that proposes thresholds."""
    (all_units,) = risk_groups(counted, per_difficulty=False)
    proposing = np.zeros(all_units.units, dtype=bool)
    proposing[np.random.default_rng(seed).permutation(all_units.units)[: proposing_unit_count(all_units.units)]] = True
    return np.asarray(proposing[all_units.unit])


def split_rows(recording: Trajectory, target: RiskTarget, seed: int) -> tuple[Trajectory, Trajectory]:
    """Split a recording into examples that propose thresholds and examples that test them."""
    if unit_count(recording) < 2:
        raise too_few(0, None, recording, target, split=True)
    proposing = proposing_rows(recording, seed)
    tested = recording.take(~proposing)
    _check_enough_units(recording, tested, target, split=True)
    return recording.take(proposing), tested


def _check_enough_units(counted: Recorded, tested: Recorded, target: RiskTarget, split: bool) -> None:
    """Reject a calibration in which a difficulty has too few tested units."""
    units = {group.difficulty: 0 for group in risk_groups(counted, target.per_difficulty)}
    units |= {group.difficulty: group.units for group in risk_groups(tested, target.per_difficulty)}
    smallest = min(units, key=units.__getitem__)
    needed = min_units(target.max_drop, target.delta)
    if needed is not None and units[smallest] < needed:
        raise too_few(units[smallest], smallest, counted, target, split)


def _finalists(candidates: list[str], proposing: Trajectory, tested: Trajectory, target: RiskTarget) -> list[Walk]:
    """Walk the tested data with the readouts that need the fewest loops on the proposing data.

    Of many candidates two are tested, at half of delta each; one, where the guarantee is on average (a choice by the
    tested data would bias it) or the data are too few for more.
    """
    parts, delta = risk_groups(tested, target.per_difficulty), target.delta
    halved = delta is not None and all(max_losses(part.units, target.max_drop, delta / 2) >= 0 for part in parts)
    best = proposals(candidates, proposing, tested, target)[: 2 if halved else 1]
    return [walk_thresholds(each.readout, each.thresholds, tested, target, each.order) for each in best]


def proposals(candidates: list[str], proposing: Trajectory, tested: Trajectory, target: RiskTarget) -> list["Proposal"]:
    """Propose thresholds of these readouts; the readout with the fewest loops on the proposing data comes first."""
    rooms = {group.difficulty: _allowed_loss(group, target) for group in risk_groups(tested, target.per_difficulty)}
    return sorted((_propose(name, proposing, rooms, target) for name in candidates), key=lambda each: each.loops)


@dataclass(frozen=True)
class Proposal:
    """The thresholds of a readout that a calibration may test, in their order, and the expected loops."""

    readout: str
    thresholds: Curve  # laxest first
    order: NDArray[np.int64] | None
    loops: float  # where the walk ends if the tested data have the rates of the proposing data


def _propose(readout: str, proposing: Trajectory, rooms: Mapping[float | None, float], target: RiskTarget) -> Proposal:
    """Propose thresholds of a readout, ordered by their loss on the proposing data."""
    thresholds = gap_grid(readout, proposing)
    walk = walk_thresholds(readout, thresholds, proposing, target)
    loss = walk.worst(np.array([[rooms.get(group.difficulty, 1.0)] for group in walk.risk_groups]))
    loops = float(walk.loops[loss <= 1].min(initial=proposing.num_loops))
    safest_first = len(thresholds) - 1 - np.argsort(loss, kind="stable")  # conformal risk control must walk laxer
    return Proposal(readout, thresholds, None if target.delta is None else safest_first, loops)


def _allowed_loss(group: RiskGroup, target: RiskTarget) -> float:
    """The largest observed loss that still proves a threshold for a group (at least a hundredth of one loss)."""
    return max(max_losses(group.units, target.max_drop, target.delta), 0.01) / group.units


def _certificate(
    policy: ExitPolicy,
    candidates: Candidates,
    walk: Walk,
    place: int,
    passed: int,
    level: float | None,
    target: RiskTarget,
    proof: Proof,
) -> Certificate:
    """The certificate of a calibrated policy: its guarantee with the evidence, and its exits."""
    outcome, sequences = outcome_of(policy, walk.data), walk.data.sequences is not None
    lost = outcome.lost(target.loss)
    p: list[float | None] = [None] * len(walk.risk_groups)
    if level is not None:
        p = walk.p_values(target.max_drop, level, proof, slice(place, place + 1))[:, 0].tolist()
    bound = None if level is None or all(group.binary for group in walk.risk_groups) else proof.bound
    (all_units,) = risk_groups(walk.data, per_difficulty=False)
    depths = all_units.means(outcome.loops)
    average, half = min(float(depths.mean()), float(walk.num_loops)), _NORMAL_95 * float(sem(depths))
    guarantee = Guarantee(
        sentence=target.sentence(sequences, decision_scope(walk.data)),
        loss=target.loss,
        max_drop=target.max_drop,
        confidence=None if target.in_expectation else target.confidence,
        per_difficulty=target.per_difficulty,
        unseen=target.unseen,
        distinct=target.distinct,
        new_inputs=target.new_inputs,
        drawn=candidates.drawn,
        tolerance=target.method == "tolerance",
        loops=walk.num_loops,
        candidates=candidates.readouts,
        finalists=[each.readout for each in candidates.walks],
        recording=candidates.recording,
        tested=candidates.tested,
        grid=candidates.grid,
        thresholds=passed,
        grid_size=candidates.grid_size or len(walk.thresholds),
        level=level,
        evidence=[
            Evidence(difficulty=group.difficulty, units=group.units, loss=group.mean(lost), p_value=each)
            for group, each in zip(walk.risk_groups, p, strict=True)
        ],
        full_depth_accuracy=None if outcome.labels is None else all_units.mean(outcome.full_depth == outcome.labels),
        average_loops=average,
        average_loops_interval=(max(1.0, average - half), min(float(walk.num_loops), average + half)),
        average_loops_at_limit=float(walk.loops[walk.worst(target.max_drop) <= 1].min(initial=average)),
        bound=bound,
        order_seed=proof.seed if bound == "betting" else None,
    )
    return Certificate(guarantee=guarantee, exits=CalibrationExits.of(depths, walk.num_loops, sequences))


def _not_proven(candidates: Candidates, target: RiskTarget, proof: Proof) -> NotProven:
    """The error `NotProven` after a failed calibration: the loss of the safest threshold, and what to do."""
    walk, live = candidates.walks[0], isinstance(candidates.counted, LiveRuns)
    first = count_leading(walk.loops > walk.num_loops - _ROUNDING)
    if first == len(walk.thresholds):
        return NotProven(f"No threshold of '{walk.readout}' lets an example exit early; try another readout.", None)
    rates = (walk.loss / walk.units)[:, first]
    worst = int(rates.argmax())
    spread = walk.variance(worst, first) if proof.bound == "betting" else None
    safest, remedy = f"the safest threshold of '{walk.readout}' that lets anybody exit early", "try another readout"
    if live:
        rule = candidates.policy(walk.readout, float(walk.thresholds[first]))
        safest = f"the most cautious candidate ({rule}, {walk.loops[first]:.2f} loops)"
        remedy = "run more --candidates, which begin more cautiously, try another readout"
        target = msgspec.structs.replace(target, readout=walk.readout)  # one was tested, at all of delta
    group, split = walk.risk_groups[worst], candidates.split
    return not_safe(
        safest, group, float(rates[worst]), spread, candidates.counted, target, split, f"{remedy}, or ask for less"
    )
