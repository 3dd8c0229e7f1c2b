"""Sweep the readouts of a recording.

loopscope evaluate runs/demo/fixed-geometric
loopscope evaluate VALIDATION TEST --readout margin --readout entropy \\
    --at 0.95 --json
loopscope evaluate runs/demo/fixed-geometric --policy policy.json
loopscope evaluate runs/demo/fixed-geometric --policy policy.json \\
    --monitor --audit 0.1

A run stands for its recordings: thresholds are chosen on validation and evaluated on test.

With --policy: is the policy's promise kept on these held-out examples? The exit code is 1 if it is broken. A promise
for text with the cache `propagate` or `latest` is checked on a live run (loopscope record live --policy).

With --monitor: do exits, or the losses of those that are audited, still look like calibration? The examples are played
in random order; with --stream in their own, and then an alarm says since when. The exit code is 1 if there is an alarm.
(Exits alone are watched if the promise is one in expectation.)
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.certify.monitor import Monitor, MonitorResult
from loopscope.certify.tested_data import counted_in, decision_unit, load_recorded
from loopscope.cli import inputs
from loopscope.cli.options import add_shared, add_verb, given, option, share_or_zero, target_accuracies
from loopscope.cli.output import percent, print_json, print_note, print_sentences, print_table, show
from loopscope.errors import UserError
from loopscope.frontier import Frontier, sweep
from loopscope.learned.attach import attach
from loopscope.policy import ExitPolicy
from loopscope.readouts.readout import needs_labels
from loopscope.recording_paths import find_recording, find_recordings
from loopscope.scope import Unit, counted
from loopscope.threshold_grids import available_readouts
from loopscope.trajectory import Trajectory

if TYPE_CHECKING:
    from loopscope.analysis.held_out import HeldOut
    from loopscope.analysis.targets import TargetLevel


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope evaluate` to the parser."""
    parser = add_verb(subparsers, "evaluate", __doc__, execute)
    two = "a run, a folder of recordings, or example:demo; or two recordings, for choosing thresholds and for evaluating them; with "
    two += "--policy, one of held-out examples"
    option(parser, "recordings", two, type=inputs.recorded_run, nargs="+", metavar="RUN|RECORDING")
    option(parser, "--policy FILE", "check this policy on one held-out recording")
    inputs.add_policy_options(parser)
    option(parser, "--monitor", "watch the recording under the policy")
    option(parser, "--stream", "the rows stand in the order in which they arrived: --monitor plays them so")
    option(parser, "--alpha X", "share of streams that may give --monitor a false alarm (default: 0.01)")
    audits = "share of the examples, drawn at random, whose losses --monitor sees (default: all; 0: exits alone)"
    option(parser, "--audit X", audits, type=share_or_zero)
    swept = f"sweep only this readout: {inputs.READOUT_NAMES} (repeatable; default: all)"
    option(parser, "--readout NAME", swept, type=inputs.readout_name, action="append")
    add_shared(parser, "--gate DIR", "--at X", action="append")
    add_shared(parser, "--json")
    parser.needs(monitor="policy", alpha="monitor", audit="monitor", stream="monitor")
    parser.excludes("policy", "readout", "gate", "at")


def execute(options: argparse.Namespace) -> int:
    """Do what `loopscope evaluate` was asked."""
    if len(options.recordings) > (2 if options.policy is None else 1):
        two = "two recordings (for choosing thresholds, and for evaluating them)"
        raise UserError(f"Give a run, or {two}; with --policy, give one run or recording, of held-out examples.")
    return _evaluate_readouts(options) if options.policy is None else _evaluate_policy(options)


def _evaluate_readouts(options: argparse.Namespace) -> int:
    folders = _two_recordings(options.recordings)
    inputs.check_readouts(*options.readout, oracle=True)
    calibration, evaluation = (Trajectory.load(path) for path in folders)
    gates = inputs.load_gates(options.gate, calibration)
    calibration, evaluation = attach(calibration, gates), attach(evaluation, gates)
    names = options.readout or available_readouts(calibration, evaluation)
    frontiers = [sweep(name, calibration, evaluation) for name in names]
    from loopscope.analysis import diagnosis, model_analysis, targets, threshold_details

    requested = targets.as_targets(target_accuracies(options.at))
    levels = [targets.target_level(target, calibration, evaluation) for target in requested]
    silent = {level.target: diagnosis.without_verdict(calibration, evaluation, level) for level in levels}
    if options.json:
        reached = levels[0].reached
        details = (threshold_details.detailed_frontier(each, (), evaluation, reached) for each in frontiers)
        found = [model_analysis.frontier_result(each, levels, evaluation) for each in details]
        print_json({"targets": {level.target.key: level for level in levels}, "readouts": found})
    for sentence in filter(None, dict.fromkeys(silent.values())):  # first, and in place of its depths
        (print_note if options.json else print_sentences)(sentence)
    if not options.json:
        _print_frontiers(frontiers, evaluation, [level for level in levels if not silent[level.target]])
    inputs.note_unknown_model(*(each.provenance.get("weights_sha256") for each in (calibration, evaluation)))
    return 0


def _two_recordings(given: list[Path]) -> tuple[Path, Path]:
    """The calibration and the evaluation recording, of a run or one by one."""
    if len(given) == 1:
        folder = find_recordings(given[0])
        return folder / "validation", folder / "test"
    first, second = find_recording(given[0], "validation"), find_recording(given[1], "test")
    if first != given[0] and second != given[1] and first.parent.resolve() != second.parent.resolve():
        both = f"{given[0]} and {given[1]} each hold recordings of a model"
        raise UserError(f"{both}; give one of them, or the two recordings themselves: {first} {second}.")
    return first, second


def _print_frontiers(frontiers: list[Frontier], evaluation: Trajectory, levels: "list[TargetLevel]") -> None:
    rows = []
    for frontier in frontiers:
        one_point = needs_labels(frontier.readout)
        loops = [frontier.depth_at(level.reached) for level in levels]
        depths = ["-" if one_point else "N/A" if each is None else f"{each:.2f}" for each in loops]
        point = frontier.select()
        selected = str(point.policy).removeprefix(frontier.readout).removeprefix(" at ") or "-"
        rows.append([frontier.readout, *depths, selected, percent(point.accuracy), f"{point.average_loops:.2f}"])
    means = "" if evaluation.sequences is None else f"; means over {decision_unit(evaluation)}"
    title = f"{counted_in(evaluation, evaluation.split or 'evaluation')}{means}."
    title += " D@X: least average loops on the evaluation curve that reach X." if levels else ""
    title += " Selected: the most accurate threshold on calibration data, evaluated."
    for level in levels:
        title += f" In {level.target.label}, X is {level.words}. {level.depths_sentence}" if level.words else ""
    columns = ["readout", *(level.target.label for level in levels), "selected", "accuracy", "loops"]
    print_table(title, columns, rows)


def _evaluate_policy(options: argparse.Namespace) -> int:
    folder = find_recording(options.recordings[0], "test")
    policy = inputs.load_policy(options.policy, options.any_model)
    recording = load_recorded(folder)
    models = [] if options.any_model else [policy.model, recording.provenance.get("weights_sha256")]
    if options.monitor:
        result = Monitor(policy, **given(options, "alpha")).replay(recording, options.audit, stream=options.stream)
        inputs.note_unknown_model(*models)
        show(result, options.json, lambda: _print_monitored(result, policy, options.policy, options.stream))
        return 1 if result.alarm else 0
    from loopscope.analysis.held_out import hold_out  # with scipy.stats, which takes a second

    held = hold_out(policy, recording)
    inputs.note_unknown_model(*models)
    unit = decision_unit(recording)
    show(held, options.json, lambda: _print_held_out(held, policy, options.policy, unit))
    return 1 if held.guarantee is not None and held.guarantee.verdict == "broken" else 0


def _print_held_out(held: "HeldOut", policy: ExitPolicy, path: Path, unit: Unit | None) -> None:
    """How a policy did, and whether its promise was kept."""
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
    tested = counted("held-out", held.examples, held.sequences, unit)
    print_table(f"{path}: {policy} on {tested}; {means}[ ]: 95 % intervals", ["held out", ""], rows)
    if check is None:
        print("The policy promises nothing here.")
        return
    print_sentences(check.sentence)
    for warning in check.warnings:
        print_note(warning)


def _print_monitored(result: MonitorResult, policy: ExitPolicy, path: Path, stream: bool) -> None:
    spoke = {str(alarm.test): f"{alarm.example:,}" for alarm in result.alarms}
    rows = [["exits", f"{result.examples:,}", f"{result.e_exits:.3g}", f"{result.p_exits:.2g}"]]
    if result.e_risk is not None:
        rows.append(["risk", f"{result.audited:,}", f"{result.e_risk:.3g}", f"{result.p_risk:.2g}"])
    rows = [[*row, spoke.get(row[0], "none")] for row in rows]
    assert policy.guarantee is not None  # a monitor refuses others
    confidence = policy.guarantee.confidence
    if confidence is None:
        where = "by their exits, which alone are watched: the promise is one on average over calibrations"
    else:
        where = f"where the promise is true (which it is with {100 * confidence:g} % confidence)"
    share = f"without a change at most {100 * result.alpha:g} % of monitors would ever give an alarm"
    order = "as they arrived" if stream else "in random order"
    columns = ["test", result.unit, "e-value at the end", "p-value", "alarm at"]
    print_table(f"{path}: {policy} on examples {order}; {share}, {where}", columns, rows)
    print_sentences(result.sentence)
