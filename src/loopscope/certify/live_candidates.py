"""Which thresholds are worth running live on a text? A replay proposes candidates, from cautious to bold.

A fifth of the documents of a recording proposes: the readout that takes the fewest loops, and a few of its thresholds,
by the loops that they save in a replay. The order is fixed before any is run, so the walk along it (`calibration`) may
end with the first candidate that is not proven, and nobody need run those behind it.

Shapes: C candidates.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.certify.calibration import candidate_readouts, check_live_target, check_recording, proposals, split_rows
from loopscope.certify.live_runs import LiveRuns
from loopscope.certify.losses import summarise_data
from loopscope.certify.not_proven import NotProven
from loopscope.certify.risk_target import RiskTarget
from loopscope.certify.threshold_walk import Proof, walk_live_runs, walk_thresholds
from loopscope.errors import UserError
from loopscope.leaks import check_split
from loopscope.learned.attach import Fitted, attach, by_readout
from loopscope.policy import DataSummary, ExitPolicy, chosen_scope
from loopscope.scope import CacheMode, scope_of
from loopscope.trajectory import Trajectory

CANDIDATES = 12
_MAX_REPLAYED_LOSS = 1.2
"""The loss that a candidate may have in a replay, as a multiple of the limit: live runs mostly lose more."""
_ROUNDING = 1e-9
"""Averages of loops are exact to this."""

Values = NDArray[np.float64]


@dataclass(frozen=True)
class LiveCandidates:
    """The candidate policies of a live run, and the documents to run them on."""

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
) -> LiveCandidates:
    """Propose candidate policies for a live run with this cache, from a full-depth recording of the text."""
    gates = {} if gates is None else gates
    check_live_target(target)
    check_recording(recording, gates, target.readout)
    check_split(recording)
    if scope_of(recording).unit != "tokens" or recording.sequences is None:
        raise UserError("Live runs are for text: give a recording that `loopscope record text` made.")
    proposing, tested = split_rows(recording, target, seed)
    found, attached = summarise_data(proposing), attach(proposing, gates)
    readouts = candidate_readouts(target, attached)
    best = proposals(readouts, attached, tested, target)[0]
    walk = walk_thresholds(best.readout, best.thresholds, attached, target)
    allowed = np.flatnonzero((walk.worst(target.max_drop) <= _MAX_REPLAYED_LOSS) & (walk.loops < recording.num_loops))
    saved = recording.num_loops - walk.loops[allowed]
    count = min(count, len(walk.thresholds))
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
        scope=msgspec.structs.replace(chosen_scope(best.readout, recording), cache=cache),
    )
    return LiveCandidates(rule, walk.thresholds[chosen], readouts, found, tested)


def candidate_p_values(runs: LiveRuns, target: RiskTarget, proof: Proof) -> Values:
    """[C] p-values of "the risk of a candidate is above the limit", from a live run."""
    assert target.delta is not None
    return np.asarray(walk_live_runs(runs, target).p_values(target.max_drop, target.delta, proof)[0])
