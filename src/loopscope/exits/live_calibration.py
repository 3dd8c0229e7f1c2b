"""How does text that is run live get a promise? A replay proposes candidates; each is tested as it ran.

A fifth of the documents of a recording proposes: the readout that takes the fewest loops, and a few of its thresholds,
from cautious to bold by the loops that they save in a replay. The order is fixed before any is run, so the walk along
it (`exits.risk_control`) may end with the first candidate that is not proven, and nobody need run those behind it.

Shapes: C candidates, N decisions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.stats import sem

from loopscope.arguments import as_count, check_kind
from loopscope.errors import UserError
from loopscope.exits.betting_bound import betting_p_values
from loopscope.exits.calibration import candidate_readouts, proposals, split_rows
from loopscope.exits.calibration_exits import CalibrationExits
from loopscope.exits.fitted import Fitted, attach, by_readout, check_gates
from loopscope.exits.guarantee import Bound, DataSummary, Evidence, Guarantee
from loopscope.exits.live_runs import LiveRuns
from loopscope.exits.losses import risk_groups, summarise_data
from loopscope.exits.policy import ExitPolicy
from loopscope.exits.readouts import readout_definition
from loopscope.exits.refusals import NotProven, not_safe, too_few
from loopscope.exits.risk_control import fixed_sequence, min_units, p_values
from loopscope.exits.risk_target import AUTO, RiskTarget
from loopscope.exits.scope import CacheMode, Scope, scope_of
from loopscope.exits.splits import check_split
from loopscope.exits.threshold_walk import Proof, walk_thresholds
from loopscope.trajectory import Trajectory

CANDIDATES = 12
_BOLDEST = 1.2
"""What a candidate may lose in a replay, by what is allowed: live runs mostly lose more."""
_ROUNDING = 1e-9
"""Averages of loops are exact to this."""
_NORMAL_95 = 1.959964

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Candidates:
    """What is to be run, and on which documents."""

    rule: ExitPolicy  # the first
    thresholds: Values  # [C] the most cautious first
    readouts: list[str]  # among which the proposing documents chose
    proposing: DataSummary | None  # None: they were given, and nothing was set aside
    tested: Trajectory  # the recording of the documents that are to be run


def propose_candidates(
    recording: Trajectory,
    target: RiskTarget,
    cache: CacheMode,
    *,
    count: int = CANDIDATES,
    gates: Mapping[str, Fitted] | None = None,
    seed: int = 0,
) -> Candidates:
    """Thresholds that a recording of a text, made at full depth, proposes to be run live with this cache."""
    gates = {} if gates is None else gates
    check_live_target(target)
    check_gates(gates)
    for gate in gates.values():
        gate.check_calibration(recording)
    check_split(recording, "calibration")
    if scope_of(recording).unit != "tokens" or recording.sequences is None:
        raise UserError("Live runs are for text: give a recording that `loopscope record text` made.")
    if recording.num_loops == 1:
        raise UserError("The recording has one loop only, so there is no earlier exit to calibrate.")
    proposing, tested = split_rows(recording, target, seed)
    found, attached = summarise_data(proposing), attach(proposing, gates)
    readouts = candidate_readouts(target, attached)
    best = proposals(readouts, attached, tested, target)[0]
    walk = walk_thresholds(best.readout, best.thresholds, attached, target)
    allowed = np.flatnonzero((walk.worst(target.max_drop) <= _BOLDEST) & (walk.loops < recording.num_loops))
    saved = recording.num_loops - walk.loops[allowed]
    count = min(as_count(count, "The number of candidates"), len(walk.thresholds))
    chosen: list[int] = []
    for level in saved.max(initial=0.0) * np.arange(1, count + 1) / count:
        within = np.flatnonzero(saved <= level + _ROUNDING)
        if len(within) and (place := int(allowed[within[saved[within].argmax()]])) not in chosen:
            chosen.append(place)
    if not chosen:
        raise NotProven(
            f"No threshold of '{best.readout}' that lets anybody exit early loses so little, not even where it is "
            "replayed; try another readout, or ask for less.",
            None,
        )
    rule = ExitPolicy(
        best.readout,
        float(walk.thresholds[chosen[0]]),
        by_readout(gates).get(best.readout),
        model=recording.provenance.get("weights_sha256"),
        scope=Scope(unit="tokens", cache=cache, precision=recording.provenance.get("precision")),
        definition_sha256=readout_definition(best.readout),
    )
    return Candidates(rule, walk.thresholds[chosen], readouts, found, tested)


def check_live_target(target: RiskTarget) -> None:
    """Refuses what cannot be asked of text that is run."""
    check_kind(target, RiskTarget, "The promise that is asked for", "a RiskTarget")
    for name in ("in_expectation", "per_difficulty", "unseen", "distinct"):
        if getattr(target, name):
            raise UserError(
                f"A promise for text that was run live is not made with --{name.replace('_', '-')}; leave that out."
            )


def candidate_p_values(runs: LiveRuns, target: RiskTarget, proof: Proof) -> Values:
    """[C] of "the risk of a candidate is above the limit"."""
    assert target.delta is not None
    (documents,) = risk_groups(runs, per_difficulty=False)
    lost = document_losses(runs, target)
    if documents.binary or proof.bound == "hoeffding_bentkus":
        return p_values(lost.sum(axis=0), documents.units, target.max_drop, documents.binary)
    return betting_p_values([lost[proof.order(documents.units)]], documents.units, target.max_drop, target.delta)


def document_losses(runs: LiveRuns, target: RiskTarget) -> Values:
    """[documents, C] the share of its tokens that every document loses with every candidate."""
    (documents,) = risk_groups(runs, per_difficulty=False)
    columns = [documents.means(runs.outcome(place).lost(target.loss)) for place in range(len(runs.thresholds))]
    return np.clip(np.stack(columns, axis=1), 0.0, 1.0)


def certify_live(runs: LiveRuns, target: RiskTarget, seed: int = 0, bound: Bound = "betting") -> ExitPolicy:
    """The candidate with the fewest loops of those that are proven, with its promise; or `NotProven`."""
    check_kind(runs, LiveRuns, "What is calibrated", "a live run")
    check_live_target(target)
    proof, contents = Proof(bound, as_count(seed, "seed", 0)), runs.contents
    check_split(runs, "calibration")
    if runs.rule.gate is not None:
        runs.rule.gate.check_calibration(runs)
    if contents.proposing is None:
        raise UserError(
            "This live run is of a policy that was given, so it can check a promise (loopscope evaluate) but not make "
            "one; run candidates, without --policy."
        )
    if target.readout not in (AUTO, runs.rule.readout):
        raise UserError(f"The live run is of '{runs.rule.readout}', not of '{target.readout}'; run that one.")
    target = msgspec.structs.replace(target, readout=runs.rule.readout)
    (documents,) = risk_groups(runs, per_difficulty=False)
    needed = min_units(target.max_drop, target.delta)
    if needed is not None and documents.units < needed:
        raise too_few(documents.units, None, runs, target, split=True)
    assert target.delta is not None
    p = candidate_p_values(runs, target, proof)
    lost = document_losses(runs, target)
    passed = fixed_sequence(p, target.delta)
    if not passed:
        rate, spread = float(lost[:, 0].mean()), float(lost[:, 0].var()) if bound == "betting" else None
        safest = f"the most cautious candidate ({runs.policy(0)}, {documents.mean(runs.loops[0]):.2f} loops)"
        remedy = "run more --candidates, which begin more cautiously, try another readout, or ask for less"
        raise not_safe(safest, documents, rate, spread, runs, target, True, remedy)
    depths = np.stack([documents.means(each) for each in runs.loops], axis=1)
    loops = depths.mean(axis=0)
    place = int(loops[:passed].argmin())
    average, half = float(loops[place]), _NORMAL_95 * float(sem(depths[:, place]))
    guarantee = Guarantee(
        sentence=target.sentence(True, runs.scope),
        loss=target.loss,
        max_drop=target.max_drop,
        confidence=target.confidence,
        per_difficulty=False,
        unseen=False,
        distinct=False,
        loops=contents.num_loops,
        candidates=contents.readouts,
        finalists=[runs.rule.readout],
        recording=contents.recording,
        tested=DataSummary(
            sha256=runs.run_sha256,
            split=contents.split,
            examples=runs.num_examples,
            sequences=documents.units,
            seen=None,
            difficulty=None,
        ),
        grid=contents.proposing,
        thresholds=passed,
        grid_size=contents.planned,
        level=target.delta,
        evidence=[
            Evidence(difficulty=None, units=documents.units, loss=float(lost[:, place].mean()), p_value=float(p[place]))
        ],
        full_depth_accuracy=documents.mean(runs.full_depth == runs.labels),
        average_loops=average,
        average_loops_interval=(max(1.0, average - half), min(float(contents.num_loops), average + half)),
        average_loops_at_limit=float(loops[lost.mean(axis=0) <= target.max_drop].min(initial=average)),
        bound=None if documents.binary else bound,
        order_seed=seed if bound == "betting" and not documents.binary else None,
    )
    exits = CalibrationExits.of(depths[:, place], contents.num_loops, sequences=True)
    weights = runs.provenance.get("weights_sha256")
    return replace(runs.policy(place), model=weights, scope=runs.scope, guarantee=guarantee, calibration_exits=exits)
