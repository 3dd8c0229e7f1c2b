"""Fit an exit gate or a stopper to a frozen trajectory, or put a gate into a checkpoint.

loopscope gate fit runs/mine/recordings/train --out gates/linear
loopscope gate fit runs/mine/recordings/train --kind induction --out gates/price
loopscope gate write gates/linear runs/ouro --out runs/ouro-refitted
"""

import argparse
from pathlib import Path
from typing import Any

from loopscope.cli.inputs import find_model
from loopscope.cli.options import add_group, add_shared, add_verb, check_new, count, values
from loopscope.cli.output import print_json, print_note, print_text
from loopscope.errors import UserError
from loopscope.recording_places import find_recording

_GATES, _STOPPERS = ("linear", "mlp"), ("induction", "classifier")


def define(subparsers: Any) -> None:
    kinds = add_group(subparsers, "gate", __doc__)
    _define_fit(kinds)
    _define_write(kinds)


def _define_fit(kinds: Any) -> None:
    text = """Fit a gate or a stopper to a recording of the train split.

loopscope record task runs/mine --split train --hidden --examples 20000
loopscope gate fit runs/mine --out gates/linear
loopscope gate fit runs/mine --kind mlp --objective utility --out gates/mlp-utility
loopscope gate fit runs/mine --kind induction --out gates/price
loopscope evaluate runs/mine --gate gates/linear  # its splits recorded with --hidden
loopscope calibrate runs/mine --gate gates/price --readout stopper:price --out policy.json
loopscope run runs/mine examples.txt --gate gates/linear

ponder: the expected cross-entropy over exits plus beta KL to the prior, as gates are trained jointly. utility: whether
another loop lowers the cross-entropy by more than 0.005. Prior and beta are the model's own unless they are given.

linear and mlp read states, so the recording keeps them (--hidden). A stopper reads all recorded signals of a loop and
of the one before: induction, by backward induction, how much going on is worth; classifier, whether exiting loses.
"""
    parser = add_verb(kinds, "fit", text, _fit)
    parser.add_argument(
        "recording",
        type=Path,
        metavar="RUN|RECORDING",
        help="a run whose train split is recorded, or a recording that is not of the test split",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the gate or the stopper")
    parser.add_argument("--kind", choices=(*_GATES, *_STOPPERS), default="linear", help="what to fit (default: linear)")
    parser.add_argument("--objective", choices=("ponder", "utility"), help="what a gate is fitted to (default: ponder)")
    parser.add_argument(
        "--pairing", choices=("next", "ouro"), help="step that utility judges, as docs/gates.md says (default: next)"
    )
    parser.add_argument(
        "--prior", choices=("uniform", "geometric"), help="prior over exits of ponder (default: the model's)"
    )
    parser.add_argument(
        "--lambda", type=float, dest="geometric_lambda", metavar="X", help="lambda of a geometric prior"
    )
    parser.add_argument(
        "--beta", type=float, metavar="X", help="weight of ponder's KL to the prior (default: the model's, or 0.1)"
    )
    parser.add_argument("--steps", type=count, metavar="N", help="training steps of a gate (default: 2000)")
    parser.add_argument(
        "--gain",
        choices=("correct", "agreement"),
        help="gain of a stopper: being right (default), or answering as full depth does, which needs no labels",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    add_shared(parser, "--json")


def _define_write(kinds: Any) -> None:
    text = """Write a fitted gate into a copy of a checkpoint.

loopscope gate write gates/linear runs/ouro --out runs/ouro-refitted

The checkpoint's own gate must have the same form: Ouro's is linear.
"""
    parser = add_verb(kinds, "write", text, _write)
    parser.add_argument("gate", type=Path, help="the folder of a fitted gate")
    parser.add_argument("checkpoint", type=Path, help="the folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the new checkpoint")


def _fit(options: argparse.Namespace) -> None:
    check_new(options.out)
    of_gates, of_stoppers = ("objective", "pairing", "prior", "geometric_lambda", "beta", "steps"), ("gain",)
    theirs, others = (of_stoppers, of_gates) if options.kind in _STOPPERS else (of_gates, of_stoppers)
    if wrong := [name for name in others if getattr(options, name) is not None]:
        flag = "--lambda" if wrong[0] == "geometric_lambda" else f"--{wrong[0]}"
        raise UserError(f"{flag} is not for --kind {options.kind}; leave it out.")
    from loopscope.exits.recorded import counted_in
    from loopscope.trajectory import Trajectory

    recording = Trajectory.load(find_recording(options.recording, "train"))
    counted = counted_in(recording, recording.split or "recorded")
    names = ("kind", "seed", *theirs)
    if options.kind in _STOPPERS:
        from loopscope.exits import fit_stopper

        stopper = fit_stopper(recording, **values(options, *names))
        stopper.save(options.out)
        if options.json:
            print_json({"gate": str(options.out), "settings": stopper.provenance["stopper"]})
        else:
            read = ", ".join(stopper.signals)
            print_text(f"{options.out}: a stopper ({stopper.kind}), fitted to {counted}.")
            print_text(f"It reads {read}.")
        return
    from loopscope.exits.splits import check_gate_data

    check_gate_data(recording)
    from loopscope.progress import track
    from loopscope.training.gate_fitting import fit_gate, gate_settings

    settings = gate_settings(recording, values(options, *names))
    with track("fitting") as advance:
        gate = fit_gate(recording, settings, advance)
    gate.save(options.out)
    if options.json:
        print_json({"gate": str(options.out), "settings": settings})
    else:
        print_text(f"{options.out}: a {gate.kind} gate, fitted to {counted}.")


def _write(options: argparse.Namespace) -> None:
    check_new(options.out)
    find_model(options.checkpoint)
    from loopscope.exits import FittedGate

    gate = FittedGate.load(options.gate)
    from loopscope.training.gate_fitting import write_back

    write_back(gate, options.checkpoint, options.out)
    print_note(f"{options.out} is {options.checkpoint} with the fitted gate.")
