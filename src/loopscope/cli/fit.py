"""Fit a gate or a stopper to a frozen trajectory, or insert a gate into a checkpoint."""

import argparse
from pathlib import Path
from typing import Any, get_args

from loopscope.certify.tested_data import counted_in_words
from loopscope.cli.inputs import find_model
from loopscope.cli.options import add_shared, add_verb, given, option
from loopscope.cli.output import print_note, print_text, show
from loopscope.errors import UserError
from loopscope.files import new_path
from loopscope.leaks import check_gate_data
from loopscope.learned.fitted_gate import FittedGate
from loopscope.learned.stopper import StopperKind
from loopscope.learned.stopper_fitting import fit_stopper
from loopscope.progress import track
from loopscope.recording_paths import find_recording
from loopscope.trajectory import Trajectory

_GATES, _STOPPERS = ("linear", "mlp"), get_args(StopperKind)
_OF_GATES, _OF_STOPPERS = ("objective", "pairing", "prior", "geometric_lambda", "beta", "steps"), ("gain",)


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope fit` to the parser."""
    parser = add_verb(subparsers, "fit", execute.__doc__, execute)
    from_where = "a run whose train split is recorded, or a recording that is not of the test split"
    option(parser, "recording", from_where, type=Path, metavar="RUN|RECORDING")
    option(parser, "--out DIR", "folder of the gate or the stopper", type=new_path, required=True)
    option(parser, "--kind", "kind of gate or stopper to fit", choices=(*_GATES, *_STOPPERS), default="linear")
    option(parser, "--objective", "objective of a gate (default: ponder)", choices=("ponder", "utility"))
    pairings = "step that the objective utility judges; see docs/explanation/exits.md (default: next)"
    option(parser, "--pairing", pairings, choices=("next", "ouro"))
    priors = "prior over exits for the objective ponder (default: the model's)"
    option(parser, "--prior", priors, choices=("uniform", "geometric"))
    option(parser, "--lambda X", "lambda of a geometric prior", dest="geometric_lambda")
    option(parser, "--beta X", "weight of the KL term in ponder (default: the model's, or 0.1)")
    option(parser, "--steps N", "number of training steps of a gate (default: 2000)")
    gains = "gain that a loop can bring: correct answers (default), or agreement with full depth, which needs no labels"
    option(parser, "--gain", gains, choices=("correct", "agreement"))
    add_shared(parser, "--seed N", "--json")


def define_insert(subparsers: Any) -> None:
    """Add the arguments of `loopscope insert` to the parser."""
    parser = add_verb(subparsers, "insert", _insert.__doc__, _insert)
    option(parser, "gate", "the folder of a fitted gate", type=Path)
    option(parser, "checkpoint", "the folder of the checkpoint", type=Path)
    option(parser, "--out DIR", "folder of the new checkpoint", type=new_path, required=True)


def execute(options: argparse.Namespace) -> None:
    """Fit a gate or a stopper to a recording of the train split.

    loopscope record task runs/mine --split train --hidden --examples 20000
    loopscope fit runs/mine --out gates/linear
    loopscope fit runs/mine --kind mlp --objective utility \\
        --out gates/mlp-utility
    loopscope fit runs/mine --kind induction --out gates/price
    # its splits recorded with --hidden
    loopscope sweep runs/mine --fitted gates/linear
    loopscope calibrate runs/mine --fitted gates/price --readout stopper:price \\
        --out policy.json
    loopscope answer runs/mine examples.txt --fitted gates/linear

    With the objective `ponder`, LoopScope minimises the expected cross-entropy over exits plus beta times the KL to the
    prior, as in joint training. With `utility`, the gate predicts whether another loop lowers the cross-entropy by more
    than 0.005 nats. By default, the prior and beta are those with which the model was trained.

    The gates `linear` and `mlp` read hidden states, so make the recording with --hidden. The stoppers `induction` and
    `classifier` read all recorded signals of the current and the previous loop. An `induction` stopper estimates the
    gain of further loops, by backward induction. A `classifier` stopper predicts whether an exit loses the answer.
    """
    is_stopper = options.kind in _STOPPERS
    theirs, others = (_OF_STOPPERS, _OF_GATES) if is_stopper else (_OF_GATES, _OF_STOPPERS)
    if wrong := list(given(options, *others)):
        name = wrong[0].removeprefix("geometric_")
        raise UserError(f"--{name} is not for --kind {options.kind}; leave it out.")
    recording = Trajectory.load(find_recording(options.recording, "train"))
    counted = counted_in_words(recording, recording.split or "recorded")
    chosen = given(options, "kind", "seed", *theirs)
    if is_stopper:
        stopper = fit_stopper(recording, **chosen)
        stopper.save(options.out)
        settings = stopper.provenance["stopper"]
        sentence = f"a stopper ({stopper.kind}), fitted to {counted}.\nIt reads {', '.join(stopper.signals)}."
    else:
        check_gate_data(recording)
        from loopscope.training.gate_fitting import fit_gate, gate_settings

        settings = gate_settings(recording, chosen)
        with track("fitting") as advance:
            gate = fit_gate(recording, settings, advance)
        gate.save(options.out)
        sentence = f"a {gate.kind} gate, fitted to {counted}."
    summary = {"gate": str(options.out), "settings": settings}
    show(summary, options.json, lambda: print_text(f"{options.out}: {sentence}"))


def _insert(options: argparse.Namespace) -> None:
    """Insert a fitted gate into a copy of a checkpoint.

    loopscope insert gates/ouro runs/ouro --out runs/ouro-refitted

    Give a gate that was fitted to a recording of this checkpoint. The fitted gate must have the same form as the
    checkpoint's own gate; Ouro's gate is linear.
    """
    find_model(options.checkpoint)
    gate = FittedGate.load(options.gate)
    from loopscope.training.gate_fitting import write_gate

    write_gate(gate, options.checkpoint, options.out)
    print_note(f"{options.out} is {options.checkpoint} with the fitted gate.")
