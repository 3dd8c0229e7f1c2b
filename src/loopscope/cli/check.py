"""Check a policy on held-out examples, or monitor them under it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.certify.live_runs import Recorded
from loopscope.certify.monitor import Monitor, MonitorResult
from loopscope.certify.tested_data import decision_unit, load_recorded
from loopscope.cli import inputs
from loopscope.cli.options import Parser, add_shared, add_verb, given, option, share_or_zero
from loopscope.cli.output import percent, print_note, print_sentences, print_table, show
from loopscope.policy import ExitPolicy
from loopscope.recording_paths import find_recording
from loopscope.scope import Unit, example_count_text

if TYPE_CHECKING:
    from loopscope.analysis.held_out import HeldOut


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope check` to the parser."""
    _add_policy_and_recording(add_verb(subparsers, "check", execute.__doc__, execute))


def define_monitor(subparsers: Any) -> None:
    """Add the arguments of `loopscope monitor` to the parser."""
    parser = add_verb(subparsers, "monitor", _monitor.__doc__, _monitor)
    _add_policy_and_recording(parser)
    option(parser, "--stream", "read the examples in their recorded order, which is their order of arrival")
    option(parser, "--alpha X", "largest share of streams that may raise a false alarm (default: 0.01)")
    audits = "share of the examples to audit, chosen at random (default: all examples; 0: watch only exits)"
    option(parser, "--audit X", audits, type=share_or_zero)


def _add_policy_and_recording(parser: Parser) -> None:
    """Add the policy and the recording to the arguments of `check` and `monitor`."""
    held_out = "held-out examples: a run, a folder of recordings, a recording or a live run"
    option(parser, "recording", held_out, type=inputs.recording_argument, metavar="RUN|RECORDING")
    option(parser, "--policy FILE", "policy file from `loopscope calibrate`", required=True)
    inputs.add_policy_options(parser)
    add_shared(parser, "--json")


def execute(options: argparse.Namespace) -> int:
    """Check a policy and its guarantee on held-out examples.

    loopscope check runs/demo/fixed-geometric --policy policy.json
    loopscope check runs/demo/fixed-geometric/recordings/test \\
        --policy policy.json --json

    If you give a run, LoopScope reads the test recording of the run. The exit code is 1 if the guarantee is broken. To
    check a guarantee for text with the cache `propagate` or `latest`, give a live run (loopscope record live --policy).
    """
    policy, recording = _policy_and_recording(options)
    from loopscope.analysis.held_out import check_policy  # with scipy.stats, which takes a second

    held = check_policy(policy, recording)
    _note_models(options, policy, recording)
    unit = decision_unit(recording)
    show(held, options.json, lambda: _print_held_out(held, policy, options.policy, unit))
    return 1 if held.guarantee is not None and held.guarantee.verdict == "broken" else 0


def _monitor(options: argparse.Namespace) -> int:
    """Check a recording for drift from the data on which a policy was calibrated.

    loopscope monitor runs/demo/fixed-geometric --policy policy.json \\
        --audit 0.1
    loopscope monitor runs/demo/fixed-geometric --policy policy.json --stream

    The monitor runs two tests. The first test checks whether exits are still distributed as in the calibration data.
    The second test checks whether the losses of the audited examples stay within the guarantee. The monitor reads the
    examples in random order. With --stream, the monitor reads the examples in their recorded order, and an alarm names
    the example where the change began. If the monitor raises an alarm, the exit code is 1. For a guarantee in
    expectation, the monitor watches only the exits.
    """
    policy, recording = _policy_and_recording(options)
    result = Monitor(policy, **given(options, "alpha")).replay(recording, options.audit, stream=options.stream)
    _note_models(options, policy, recording)
    show(result, options.json, lambda: _print_monitored(result, policy, options.policy, options.stream))
    return 1 if result.alarm else 0


def _policy_and_recording(options: argparse.Namespace) -> tuple[ExitPolicy, Recorded]:
    """Read the policy and the recording that `check` and `monitor` name."""
    folder = find_recording(options.recording, "test")
    return inputs.load_policy(options.policy, options.any_model), load_recorded(folder)


def _note_models(options: argparse.Namespace, policy: ExitPolicy, recording: Recorded) -> None:
    """Note if the policy or the recording does not name its model."""
    if not options.any_model:
        inputs.note_unknown_model(policy.model, recording.provenance.get("weights_sha256"))


def _print_held_out(held: "HeldOut", policy: ExitPolicy, path: Path, unit: Unit | None) -> None:
    """Print how a policy did on held-out examples, and whether its guarantee was kept."""
    loops, drop, check = held.average_loops, held.drop, held.guarantee
    rows = [["loops", f"{loops.value:.3f} [{loops.low:.3f}, {loops.high:.3f}]"]]
    if held.accuracy is not None and drop is not None and held.full_depth_accuracy is not None:
        rows.append(["accuracy", percent(held.accuracy.value, 2)])
        rows.append(["accuracy at full depth", percent(held.full_depth_accuracy, 2)])
        rows.append(["drop", f"{percent(drop.value, 2)} [{100 * drop.low:z.2f}, {100 * drop.high:z.2f}]"])
    if check is not None and len(check.risks) > 1:
        for risk in check.risks:
            bounds = f"[{100 * risk.low:.2f}, {100 * risk.high:.2f}]"
            outcome = f"{percent(risk.loss, 2)} {bounds} of {risk.units:,}: {risk.verdict}"
            rows.append([f"loss at difficulty {risk.difficulty:g}", outcome])
    means = "" if held.sequences is None else "all means are over sequences; "
    tested = example_count_text("held-out", held.examples, held.sequences, unit)
    print_table(f"{path}: {policy} on {tested}; {means}[ ]: 95 % intervals", ["held out", ""], rows)
    if check is None:
        print("The policy guarantees nothing here.")
        return
    print_sentences(check.sentence)
    for warning in check.warnings:
        print_note(warning)


def _print_monitored(result: MonitorResult, policy: ExitPolicy, path: Path, stream: bool) -> None:
    """Print the alarms of a monitor, or that there are none."""
    spoke = {str(alarm.test): f"{alarm.example:,}" for alarm in result.alarms}
    rows = [["exits", f"{result.examples:,}", f"{result.e_exits:.3g}", f"{result.p_exits:.2g}"]]
    if result.e_risk is not None:
        rows.append(["risk", f"{result.audited:,}", f"{result.e_risk:.3g}", f"{result.p_risk:.2g}"])
    rows = [[*row, spoke.get(row[0], "none")] for row in rows]
    assert policy.guarantee is not None  # a monitor refuses others
    confidence = policy.guarantee.confidence
    if confidence is None:
        where = "by their exits, which alone are watched: the guarantee is one on average over calibrations"
    else:
        where = f"where the guarantee is true (which it is with {100 * confidence:g} % confidence)"
    share = f"without a change at most {100 * result.alpha:g} % of monitors would ever give an alarm"
    order = "as they arrived" if stream else "in random order"
    columns = ["test", result.unit, "e-value at the end", "p-value", "alarm at"]
    print_table(f"{path}: {policy} on examples {order}; {share}, {where}", columns, rows)
    print_sentences(result.sentence)
