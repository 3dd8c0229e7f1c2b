"""Choose an exit threshold with a guarantee.

loopscope calibrate runs/mine --max-drop 0.01 --confidence 0.95
# needs no labels
loopscope calibrate RUN --loss disagreement --readout margin \\
    --out strict.json
loopscope calibrate RUN --per-difficulty --unseen --new-inputs
# text: a live run, by loopscope record live
loopscope calibrate LIVE --loss disagreement --cache propagate
loopscope check runs/mine --policy policy.json
loopscope answer runs/mine examples.txt --policy policy.json

If you give a run, LoopScope reads the validation recording of the run. The policy carries this guarantee: with
probability --confidence over the draw of the recording, exiting early loses at most --max-drop against full depth.

LoopScope uses a fifth of the recording (the selection split) to propose thresholds and choose the readout. LoopScope
tests the thresholds on the rest of the recording. With --grid, another recording proposes the thresholds. If the
guarantee cannot be proven, `calibrate` reports how many examples a proof needs.

A guarantee for text holds for one KV cache. If you calibrate on a recording, the guarantee holds for the cache `full`.
For the cache `propagate` or `latest`, give a live run. For the assumptions of a guarantee, see
docs/explanation/guarantees.md.
"""

import argparse
from pathlib import Path
from typing import Any, get_args

from loopscope.certify.live_runs import LiveRuns, Recorded
from loopscope.certify.risk_target import RiskTarget
from loopscope.certify.tested_data import counted_in_words, decision_scope, load_recorded
from loopscope.cli import inputs
from loopscope.cli.options import add_shared, add_verb, given, option
from loopscope.cli.output import percent, print_note, print_table, print_text
from loopscope.config import build
from loopscope.errors import UserError
from loopscope.files import new_path
from loopscope.leaks import check_split
from loopscope.policy import BOUNDS, ExitPolicy, Loss, Method
from loopscope.recording_paths import find_recording
from loopscope.scope import CacheMode
from loopscope.trajectory import Trajectory


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope calibrate` to the parser."""
    parser = add_verb(subparsers, "calibrate", __doc__, execute)
    from_where = "a run, a folder of recordings, a recording that is not for evaluation, or a live run"
    option(parser, "recording", from_where, type=inputs.recording_argument, metavar="RUN|RECORDING")
    add_shared(parser, "--max-drop X", default=0.01)
    sure = parser.add_mutually_exclusive_group()
    add_shared(sure, "--confidence X", default=0.95)
    option(sure, "--in-expectation", "guarantee the average loss over calibration draws, without a --confidence")
    losses = "answers that count as lost: wrong answers where full depth is right (gap, the default), or all answers "
    losses += "that differ from full depth (disagreement, which needs no labels)"
    option(parser, "--loss", losses, choices=get_args(Loss), default="gap")
    readouts = f"readout of the exit rule: auto (default: the readout with the fewest loops), {inputs.READOUT_NAMES}"
    option(parser, "--readout NAME", readouts, type=inputs.readout_name, default="auto")
    add_shared(parser, "--fitted DIR")
    option(parser, "--cache MODE", "KV cache for which a guarantee for text must hold", choices=get_args(CacheMode))
    methods = "walk (default): a fifth of the recording proposes thresholds; tolerance: the whole recording tests one "
    methods += "named readout, and an answer that one threshold loses counts as lost at all looser thresholds"
    option(parser, "--method", methods, choices=get_args(Method), default="walk")
    bounds = "statistical test for sequences: betting (default), or hoeffding_bentkus, which uses only the mean loss"
    option(parser, "--bound", bounds, choices=BOUNDS)
    option(
        parser,
        "--grid RECORDING",
        "recording that proposes the thresholds, instead of a fifth of the calibration recording",
        type=inputs.recording_argument,
    )
    option(parser, "--per-difficulty", "make the guarantee hold at every difficulty")
    option(parser, "--unseen", "make the guarantee hold for inputs that are not in the training data")
    once = parser.add_mutually_exclusive_group()
    option(once, "--distinct", "count every input once, because copies of an input were not drawn independently")
    new = "make the guarantee hold for inputs that are not in the recording; count only inputs that occur once"
    option(once, "--new-inputs", new)
    add_shared(parser, "--seed N")
    option(parser, "--out FILE", "policy file to write", type=new_path, default="policy.json")
    option(parser, "--json", "print the policy as JSON")


def execute(options: argparse.Namespace) -> None:
    """Execute `loopscope calibrate` with its parsed arguments."""
    folder = find_recording(options.recording, "validation")
    inputs.check_readouts(options.readout, auto=True)
    target = build(RiskTarget, given(options, *RiskTarget.__struct_fields__), "calibrate")
    recording = load_recorded(folder)
    check_split(recording)
    _check_cache(recording, options.cache)
    if options.bound is not None and recording.sequences is None:
        raise UserError("--bound is for the losses of sequences, such as documents, and here are none; leave it out.")
    from loopscope.certify.calibration import certify  # with scipy.stats, which takes a second
    from loopscope.certify.cautions import cautions

    bound = options.bound or BOUNDS[0]
    if isinstance(recording, LiveRuns):
        if options.grid is not None or options.fitted:
            raise UserError("A live run has its thresholds and its gate already; leave out --grid and --fitted.")
        policy = certify(recording, target, None, None, options.seed, bound)
    else:
        grid = None if options.grid is None else Trajectory.load(options.grid)
        gates = inputs.load_gates(options.fitted, recording)
        policy = certify(recording, target, grid, gates, options.seed, bound)
        _note_weak_recording(recording, policy, options)
    for caution in cautions(recording, policy):
        print_note(caution)
    policy.save(options.out)
    if options.json:
        print_text(options.out.read_text(encoding="utf-8").rstrip("\n"))
    else:
        _print_calibrated(policy, options.out, live=isinstance(recording, LiveRuns))


def _check_cache(recording: Recorded, cache: str | None) -> None:
    """Reject a recording whose cache is not the one that the guarantee is for."""
    here = decision_scope(recording).cache
    if cache not in (None, here):
        kind = "a recording of answers" if here is None else f"text with the cache '{here}'"
        make = f"run candidates with `loopscope record live MODEL FILE --recording DIR --cache {cache}`"
        raise UserError(f"This is {kind}, which says nothing of the cache '{cache}'; {make}.")


def _note_weak_recording(recording: Trajectory, policy: ExitPolicy, options: argparse.Namespace) -> None:
    """Warn about a recording that a guarantee for new inputs should not rest on, or of unknown origin."""
    if recording.seen is not None and recording.seen.any() and not options.unseen:
        seen = f"{recording.seen.sum():,} of the {counted_in_words(recording, 'recorded')} occur in the training data"
        print_note(f"{seen}; if the inputs to come do not, add --unseen.")
    if policy.model is None:
        tied = "(provenance={'weights_sha256': ...} ties them together: docs/how-to/recordings.md)"
        print_note(f"The recording does not name its model; make sure that the policy is used on the same one {tied}.")
    if recording.split is None:
        what = "not the data of your evaluation" + (", nor what the gate was fitted to" if options.fitted else "")
        print_note(f"The recording does not say which split it is of; make sure that it is {what}.")


def _print_calibrated(policy: ExitPolicy, path: Path, live: bool) -> None:
    """Print a calibrated policy: its guarantee, its loops, and the next command."""
    guarantee = policy.guarantee
    assert guarantee is not None
    low, high = guarantee.average_loops_interval
    rows = [
        ["exits by", str(policy)],
        ["decides about", str(policy.scope)],
        ["chosen among", ", ".join(guarantee.candidates)],
        ["loops to expect", f"{guarantee.average_loops:.3f} [{low:.3f}, {high:.3f}] of {guarantee.loops}"],
    ]
    boldest = "loops of the boldest candidate that was run within the limit"  # bolder ones were not run
    limit = boldest if live else "loops where the observed loss meets the limit"
    rows.append([limit, f"{guarantee.average_loops_at_limit:.3f}"])
    if guarantee.full_depth_accuracy is not None:
        rows.append(["accuracy at full depth", percent(guarantee.full_depth_accuracy)])
    by_bets, counts = guarantee.bound == "betting", guarantee.tested.sequences is None
    of = "of {:,} examples" if counts else "of the answers, on average over {:,} sequences"
    for each in guarantee.evidence:
        where = "" if each.difficulty is None else f", difficulty {each.difficulty:g}"
        p = "" if each.p_value is None else f", p = {each.p_value:.2g} (at most {guarantee.level:.2g})"
        p = f", p ≤ {guarantee.level:.2g}" if by_bets else p
        rows.append([f"observed loss{where}", f"{percent(each.loss, 2)} {of.format(each.units)}{p}"])
    if guarantee.bound is not None:
        stops = f"betting, which ends where p is small enough: {guarantee.level:.2g}"
        rows.append(["tested by", stops if by_bets else "Hoeffding-Bentkus"])
    means = "" if counts else " All means are over sequences."
    print_table(f"{path}: {guarantee.sentence}{means}", ["calibration", ""], rows)
