"""Compare exit rules: sweep the thresholds of every readout of a recording.

loopscope sweep example:demo
loopscope sweep runs/demo/fixed-geometric
loopscope sweep VALIDATION TEST --readout margin --readout entropy \\
    --at 0.95 --json

If you give a run, LoopScope reads the validation and test recordings of the run. LoopScope chooses thresholds on
validation data and evaluates these thresholds on test data.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.certify.tested_data import counted_in_words, decision_unit
from loopscope.cli import inputs
from loopscope.cli.options import add_shared, add_verb, option, target_accuracies
from loopscope.cli.output import percent, print_json, print_note, print_sentences, print_table
from loopscope.errors import UserError
from loopscope.frontier import Frontier, sweep
from loopscope.learned.attach import attach
from loopscope.readouts.readout import needs_labels
from loopscope.readouts.replay import available_readouts
from loopscope.recording_paths import find_recording, find_recordings
from loopscope.trajectory import Trajectory

if TYPE_CHECKING:
    from loopscope.analysis.targets import TargetLevel


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope sweep` to the parser."""
    parser = add_verb(subparsers, "sweep", __doc__, execute)
    two = "a run or a folder of recordings; or two recordings: one to choose thresholds, one to evaluate these"
    option(parser, "recordings", two, type=inputs.recording_argument, nargs="+", metavar="RUN|RECORDING")
    swept = f"sweep only this readout: {inputs.READOUT_NAMES} (repeatable; default: all)"
    option(parser, "--readout NAME", swept, type=inputs.readout_name, action="append")
    inputs.add_custom_readouts(parser)
    add_shared(parser, "--fitted DIR", "--at X", action="append")
    add_shared(parser, "--json")


def execute(options: argparse.Namespace) -> None:
    """Execute `loopscope sweep` with its parsed arguments."""
    if len(options.recordings) > 2:
        raise UserError("Give a run, or two recordings: one for choosing thresholds, and one for evaluating them.")
    folders = _two_recordings(options.recordings)
    inputs.check_readouts(*options.readout, oracle=True)
    calibration, evaluation = (Trajectory.load(path) for path in folders)
    gates = inputs.load_gates(options.fitted, calibration)
    calibration, evaluation = attach(calibration, gates), attach(evaluation, gates)
    names = options.readout or available_readouts(calibration, evaluation)
    frontiers = [sweep(name, calibration, evaluation) for name in names]
    from loopscope.analysis import diagnosis, model_analysis, targets, threshold_details

    requested = targets.as_targets(target_accuracies(options.at))
    levels = [targets.target_level(target, calibration, evaluation) for target in requested]
    silent = {level.target: diagnosis.no_verdict_sentence(calibration, evaluation, level) for level in levels}
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


def _two_recordings(given: list[Path]) -> tuple[Path, Path]:
    """The calibration and the evaluation recording of a sweep: from a run, or given one by one."""
    if len(given) == 1:
        folder = find_recordings(given[0])
        return folder / "validation", folder / "test"
    first, second = find_recording(given[0], "validation"), find_recording(given[1], "test")
    if first != given[0] and second != given[1] and first.parent.resolve() != second.parent.resolve():
        both = f"{given[0]} and {given[1]} each hold recordings of a model"
        raise UserError(f"{both}; give one of them, or the two recordings themselves: {first} {second}.")
    return first, second


def _print_frontiers(frontiers: list[Frontier], evaluation: Trajectory, levels: "list[TargetLevel]") -> None:
    """Print the frontiers of a sweep: D@X and the chosen operating point of every readout."""
    rows = []
    for frontier in frontiers:
        one_point = needs_labels(frontier.readout)
        loops = [frontier.depth_at(level.reached) for level in levels]
        depths = ["-" if one_point else "N/A" if each is None else f"{each:.2f}" for each in loops]
        point = frontier.select()
        selected = str(point.policy).removeprefix(frontier.readout).removeprefix(" at ") or "-"
        rows.append([frontier.readout, *depths, selected, percent(point.accuracy), f"{point.average_loops:.2f}"])
    means = "" if evaluation.sequences is None else f"; means over {decision_unit(evaluation)}"
    title = f"{counted_in_words(evaluation, evaluation.split or 'evaluation')}{means}."
    title += " D@X: least average loops on the evaluation curve that reach X." if levels else ""
    title += " Selected: the most accurate threshold on calibration data, evaluated."
    for level in levels:
        title += f" In {level.target.label}, X is {level.words}. {level.depths_sentence}" if level.words else ""
    columns = ["readout", *(level.target.label for level in levels), "selected", "accuracy", "loops"]
    print_table(title, columns, rows)
