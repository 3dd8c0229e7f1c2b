"""`loopscope calibrate`: a threshold with a promise; and how policy files are read and shown."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.options import verb
from loopscope.cli.show import percent, print_table, say
from loopscope.errors import UserError

if TYPE_CHECKING:
    from loopscope.analysis import HeldOut
    from loopscope.exits import ExitPolicy
    from loopscope.trajectory import Trajectory


def define(subparsers: Any) -> None:
    parser = verb(
        subparsers,
        "calibrate",
        "choose a threshold that comes with a promise",
        """\
  loopscope calibrate runs/mine/recordings/validation --max-drop 0.01 --confidence 0.95
  loopscope calibrate VALIDATION --loss disagreement --readout margin --out strict.json     (needs no labels)
  loopscope calibrate VALIDATION --per-difficulty --unseen --distinct
  loopscope evaluate TEST --policy policy.json
  loopscope run runs/mine examples.txt --policy policy.json

With probability --confidence over the draw of the recording, exiting early loses at most --max-drop against full depth.
A fifth of the recording gives the thresholds and chooses the readouts, the rest tests them; --grid gives them from
another recording. Refused, with the number of examples that it takes, where that cannot be proven.
docs/guarantees.md says what the promise assumes.""",
        calibrate,
    )
    parser.add_argument("recording", type=Path, help="a recording that is not for evaluation: validation")
    parser.add_argument("--max-drop", type=float, default=0.01, metavar="X", help="the loss allowed (default: 0.01)")
    sure = parser.add_mutually_exclusive_group()
    sure.add_argument("--confidence", type=float, default=0.95, metavar="X", help="of the promise (default: 0.95)")
    sure.add_argument("--in-expectation", action="store_true", help="a promise on average instead (conformal)")
    parser.add_argument(
        "--loss",
        choices=("gap", "disagreement"),
        default="gap",
        help="gap (default): wrong where full depth is right; disagreement: unlike full depth, which needs no labels",
    )
    parser.add_argument("--readout", default="auto", metavar="NAME", help="default: auto, the one with fewest loops")
    parser.add_argument("--gate", action="append", type=Path, default=[], metavar="DIR", help="a fitted gate, too")
    parser.add_argument("--grid", type=Path, metavar="RECORDING", help="another recording that gives the thresholds")
    parser.add_argument("--per-difficulty", action="store_true", help="promise it at every difficulty")
    parser.add_argument("--unseen", action="store_true", help="for inputs that training did not have")
    parser.add_argument("--distinct", action="store_true", help="count every input once, for inputs that are new")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws the fifth (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("policy.json"), metavar="FILE", help="default: policy.json")
    parser.add_argument("--json", action="store_true", help="print the policy as JSON")


def calibrate(options: argparse.Namespace) -> int:
    from loopscope.cli.gating import gates_of
    from loopscope.exits.calibration import certify
    from loopscope.exits.wanted import Wanted
    from loopscope.trajectory import Trajectory

    if options.out.exists():
        raise UserError(f"{options.out} is there already; choose another --out, or remove it.")
    recording = Trajectory.load(options.recording)
    names = ("max_drop", "confidence", "in_expectation", "loss", "readout", "per_difficulty", "unseen", "distinct")
    wanted = Wanted(**{name: getattr(options, name) for name in names})
    grid = None if options.grid is None else Trajectory.load(options.grid)
    policy = certify(recording, wanted, grid, gates_of(options.gate, recording), options.seed)
    policy.save(options.out)
    _caution(recording, options.unseen, options.distinct)
    if options.json:
        print(options.out.read_text(encoding="utf-8"), end="")
        return 0
    _show(policy, options.out)
    return 0


def _caution(recording: "Trajectory", unseen: bool, distinct: bool) -> None:
    """Says where the recording is not what a promise for new inputs should rest on."""
    if recording.seen is not None and recording.seen.any() and not unseen:
        say(
            f"{recording.seen.sum():,} of the {recording.num_examples:,} examples occur in the training data; if the "
            "inputs to come do not, add --unseen."
        )
    if recording.examples is not None and recording.sequences is None and not distinct:
        copies = recording.num_examples - len(set(recording.examples))
        if copies:
            say(f"{copies:,} examples are copies of others; if the inputs to come are new ones, add --distinct.")


def _show(policy: "ExitPolicy", path: Path) -> None:
    promise = policy.promise
    assert promise is not None
    low, high = promise.average_loops_interval
    rows = [
        ["exits by", str(policy)],
        ["chosen among", ", ".join(promise.candidates)],
        ["loops to expect", f"{promise.average_loops:.3f} [{low:.3f}, {high:.3f}] of {promise.loops}"],
        ["loops where the observed loss meets the limit", f"{promise.average_loops_at_limit:.3f}"],
    ]
    if promise.full_depth_accuracy is not None:
        rows.append(["accuracy at full depth", percent(promise.full_depth_accuracy)])
    what = "examples" if promise.tested.sequences is None else "sequences"
    for each in promise.evidence:
        where = "" if each.difficulty is None else f", difficulty {each.difficulty:g}"
        p = "" if each.p_value is None else f", p = {each.p_value:.2g} (at most {promise.level:.2g})"
        rows.append([f"observed loss{where}", f"{percent(each.loss, 2)} of {each.units:,} {what}{p}"])
    if promise.full_depth_accuracy == 0 and promise.loss == "gap":
        say("Full depth is right on none of the tested examples, so that nothing can be lost; try --loss disagreement.")
    print_table(f"{path}: {promise.sentence}", ["calibration", ""], rows)


def check_any_model(options: argparse.Namespace) -> None:
    if options.any_model and not options.policy:
        raise UserError("--any-model is for a policy file; give it with --policy.")


def load_policy(path: Path, any_model: bool) -> "ExitPolicy":
    from loopscope.exits import ExitPolicy

    policy = ExitPolicy.load(path)
    return policy.for_any_model() if any_model else policy


def promises_answers(policy: "ExitPolicy") -> bool:
    """Whether what it promises is about whole answers, which says nothing about the tokens of a text."""
    return policy.promise is not None and policy.promise.tested.sequences is None


def policies_by_model(
    paths: Sequence[Path], models: Sequence[str | None], any_model: bool = False
) -> list[list["ExitPolicy"]]:
    """For each of these models (None: unknown) its own policies; one that names no model is everybody's."""
    loaded = [load_policy(path, any_model) for path in paths]
    for path, policy in zip(paths, loaded, strict=True):
        if policy.model is not None and policy.model not in models and None not in models:
            raise UserError(
                f"{path} was calibrated for another model than these; add that run, or use it without its "
                "promise (--any-model)."
            )
    return [[policy for policy in loaded if None in (policy.model, model) or policy.model == model] for model in models]


def show_held_out(held: "HeldOut", policy: "ExitPolicy", path: Path) -> None:
    """Prints how a policy did, and whether its promise was kept."""
    loops, check = held.average_loops, held.promise
    rows = [["loops", f"{loops.value:.3f} [{loops.low:.3f}, {loops.high:.3f}]"]]
    if held.accuracy is not None and held.drop is not None and held.full_depth_accuracy is not None:
        rows.append(["accuracy", percent(held.accuracy.value, 2)])
        rows.append(["accuracy at full depth", percent(held.full_depth_accuracy, 2)])
        drop = held.drop
        rows.append(["drop", f"{percent(drop.value, 2)} [{100 * drop.low:.2f}, {100 * drop.high:.2f}]"])
    if check is not None and len(check.risks) > 1:
        for risk in check.risks:
            bounds = f"[{100 * risk.low:.2f}, {100 * risk.high:.2f}]"
            told = f"{percent(risk.loss, 2)} {bounds} of {risk.units:,}: {risk.verdict}"
            rows.append([f"loss at difficulty {risk.difficulty:g}", told])
    what = "examples" if held.sequences is None else f"decisions of {held.sequences:,} sequences"
    title = f"{path}: {policy} on {held.examples:,} held-out {what}; [ ]: 95 % intervals"
    print_table(title, ["held out", ""], rows)
    if check is None:
        print("The policy promises nothing here.")
        return
    print(check.sentence)
    for warning in check.warnings:
        say(warning)
