"""Choose a threshold that comes with a promise.

loopscope calibrate runs/mine --max-drop 0.01 --confidence 0.95
loopscope calibrate RUN --loss disagreement --readout margin --out strict.json  # needs no labels
loopscope calibrate RUN --per-difficulty --unseen --distinct
loopscope calibrate LIVE --loss disagreement --cache propagate  # text: a live run, by loopscope record live
loopscope evaluate runs/mine --policy policy.json
loopscope run runs/mine examples.txt --policy policy.json

A run stands for its validation recording. With probability --confidence over the draw of the recording, exiting early
loses at most --max-drop against full depth.

A fifth of the recording (the selection split) gives the thresholds and chooses the readouts, the rest tests them;
--grid gives them from another recording. Refused where that cannot be proven, with the number of examples it takes.

A promise for text holds for one cache: that of a recording is `full`, another takes a live run.
docs/guarantees.md says what the promise assumes.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.inputs import check_readouts
from loopscope.cli.options import BOUNDS, CONFIDENCE, MAX_DROP, READOUTS, add_shared, add_verb, check_new, values
from loopscope.cli.output import percent, print_note, print_table, print_text
from loopscope.cli.policies import load_gates
from loopscope.errors import UserError
from loopscope.recording_places import find_recording

if TYPE_CHECKING:
    from loopscope.exits import ExitPolicy
    from loopscope.exits.live_runs import LiveRuns, Recorded
    from loopscope.exits.risk_target import RiskTarget
    from loopscope.trajectory import Trajectory


def define(subparsers: Any) -> None:
    parser = add_verb(subparsers, "calibrate", __doc__, execute)
    parser.add_argument(
        "recording",
        type=Path,
        metavar="RUN|RECORDING",
        help="a run, a folder of recordings, a recording that is not for evaluation, or a live run",
    )
    parser.add_argument("--max-drop", type=float, default=0.01, metavar="X", help=MAX_DROP)
    sure = parser.add_mutually_exclusive_group()
    sure.add_argument("--confidence", type=float, default=0.95, metavar="X", help=CONFIDENCE)
    sure.add_argument(
        "--in-expectation", action="store_true", help="promise it on average over calibrations instead (conformal)"
    )
    losses = (
        "what counts as lost: an answer that is wrong where full depth is right (gap, the default), or one that "
        "differs from full depth (disagreement, which needs no labels)"
    )
    parser.add_argument("--loss", choices=("gap", "disagreement"), default="gap", help=losses)
    parser.add_argument(
        "--readout",
        default="auto",
        metavar="NAME",
        help=f"readout of the exit rule: auto (default: the one with the fewest loops), {READOUTS}",
    )
    add_shared(parser, "--gate")
    parser.add_argument("--cache", metavar="MODE", help="KV cache that a promise for text is to hold for")
    bounds = "test of sequences: betting (default), or hoeffding_bentkus, which sees the mean of their losses only"
    parser.add_argument("--bound", choices=BOUNDS, help=bounds)
    parser.add_argument("--grid", type=Path, metavar="RECORDING", help="take the thresholds from this other recording")
    parser.add_argument("--per-difficulty", action="store_true", help="promise it at every difficulty")
    parser.add_argument("--unseen", action="store_true", help="promise it for inputs that training did not have")
    parser.add_argument(
        "--distinct", action="store_true", help="count every input once: a promise for inputs that are new"
    )
    drawn = "random seed of the selection split and of the order in which sequences are tested (default: 0)"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=drawn)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("policy.json"),
        metavar="FILE",
        help="policy file to write (default: policy.json)",
    )
    parser.add_argument("--json", action="store_true", help="print the policy as JSON")


def execute(options: argparse.Namespace) -> None:
    folder = find_recording(options.recording, "validation")
    check_readouts(options, auto=True)
    from loopscope.exits.live_runs import LiveRuns
    from loopscope.exits.recorded import load_recorded
    from loopscope.exits.risk_target import RiskTarget
    from loopscope.exits.splits import check_split

    names = ("max_drop", "confidence", "in_expectation", "loss", "readout", "per_difficulty", "unseen", "distinct")
    target = RiskTarget(**values(options, *names))
    recording = load_recorded(folder)
    check_split(recording, "calibration")
    check_cache(recording, options.cache)
    if options.bound is not None and recording.sequences is None:
        raise UserError("--bound is for the losses of sequences, such as documents, and here are none; leave it out.")
    check_new(options.out)
    if isinstance(recording, LiveRuns):
        policy = _certify_live(recording, target, options)
    else:
        policy = _certify(recording, target, options)
    policy.save(options.out)
    if options.json:
        print_text(options.out.read_text(encoding="utf-8").rstrip("\n"))
    else:
        _print(policy, options.out, live=isinstance(recording, LiveRuns))


def _certify(recording: "Trajectory", target: "RiskTarget", options: argparse.Namespace) -> "ExitPolicy":
    from loopscope.exits.calibration import certify
    from loopscope.trajectory import Trajectory

    grid = None if options.grid is None else Trajectory.load(options.grid)
    gates = load_gates(options.gate, recording)
    policy = certify(recording, target, grid, gates, options.seed, options.bound or BOUNDS[0])
    _caution(recording, options.unseen, options.distinct)
    if policy.model is None:
        print_note(
            "The recording does not name its model, so the policy can be used on any: make sure that it is used on the "
            "same one (provenance={'weights_sha256': ...} ties them together: docs/recordings.md)."
        )
    if recording.split is None:
        what = "not the data of your evaluation" + (", nor what the gate was fitted to" if options.gate else "")
        print_note(f"The recording does not say which split it is of; make sure that it is {what}.")
    return policy


def _certify_live(runs: "LiveRuns", target: "RiskTarget", options: argparse.Namespace) -> "ExitPolicy":
    from loopscope.exits.live_calibration import certify_live

    if options.grid is not None or options.gate:
        raise UserError("A live run has its thresholds and its gate already; leave out --grid and --gate.")
    return certify_live(runs, target, options.seed, options.bound or BOUNDS[0])


def check_cache(recording: "Recorded", cache: str | None) -> None:
    """Refuses to promise for one cache what another has shown."""
    from loopscope.exits.live_runs import LiveRuns
    from loopscope.exits.scope import scope_of

    here = (recording.scope if isinstance(recording, LiveRuns) else scope_of(recording)).cache
    if cache is None or cache == here:
        return
    if here is None:
        raise UserError("A cache is for text, and this recording is of answers; leave out --cache.")
    raise UserError(
        f"This is text with the cache '{here}', which says nothing of the cache '{cache}', where later tokens see "
        f"other keys; run candidates with `loopscope record live MODEL FILE --recording DIR --cache {cache}`."
    )


def _caution(recording: "Trajectory", unseen: bool, distinct: bool) -> None:
    """Says where the recording is not what a promise for new inputs should rest on."""
    from loopscope.exits.recorded import counted_in

    if recording.seen is not None and recording.seen.any() and not unseen:
        print_note(
            f"{recording.seen.sum():,} of the {counted_in(recording, 'recorded')} occur in the training data; if the "
            "inputs to come do not, add --unseen."
        )
    if recording.examples is not None and recording.sequences is None and not distinct:
        copies = recording.num_examples - len(set(recording.examples))
        if copies:
            print_note(f"{copies:,} examples are copies of others; if the inputs to come are new ones, add --distinct.")
    if recording.examples is None and recording.sequences is None and recording.row_hashes is not None:
        different = len(set(recording.row_hashes.tolist()))
        if 2 * different < recording.num_examples:
            print_note(
                f"Only {different:,} of the {recording.num_examples:,} examples differ in their logits; if they are "
                "copies and not draws of their own, the promise counts far more than there is: give every example once."
            )


def _print(policy: "ExitPolicy", path: Path, live: bool) -> None:
    guarantee = policy.guarantee
    assert guarantee is not None
    low, high = guarantee.average_loops_interval
    rows = [
        ["exits by", str(policy)],
        ["decides about", str(policy.scope)],
        ["chosen among", ", ".join(guarantee.candidates)],
        ["loops to expect", f"{guarantee.average_loops:.3f} [{low:.3f}, {high:.3f}] of {guarantee.loops}"],
    ]
    if live:  # what bolder ones would lose was not run
        limit = "loops of the boldest candidate that was run within the limit"
    else:
        limit = "loops where the observed loss meets the limit"
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
    right = guarantee.full_depth_accuracy
    if guarantee.loss == "gap" and right is not None and right <= guarantee.max_drop:
        print_note(
            f"This promise says nothing: full depth is right in {percent(right)} of the tested examples, so no exit "
            f"could lose more than {percent(guarantee.max_drop)}; ask for less, or try --loss disagreement."
        )
    means = "" if counts else " All means are over sequences."
    print_table(f"{path}: {guarantee.sentence}{means}", ["calibration", ""], rows)
