"""`loopscope gate`: fit an exit gate to a frozen trajectory, and put it into a checkpoint."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.options import count, verb
from loopscope.cli.show import print_json, say
from loopscope.errors import UserError

if TYPE_CHECKING:
    from loopscope.exits import FittedGate
    from loopscope.trajectory import Trajectory


def define(subparsers: Any) -> None:
    gate = subparsers.add_parser(
        "gate", help="fit an exit gate to a recording", description="Fit an exit gate to a frozen trajectory."
    )
    kinds = gate.add_subparsers(title="what", metavar="WHAT", required=True)
    fit_parser = verb(
        kinds,
        "fit",
        "fit a gate to a recording of the train split",
        """\
  loopscope record runs/mine --split train --hidden --examples 20000
  loopscope gate fit runs/mine/recordings/train --out gates/linear
  loopscope gate fit runs/mine/recordings/train --kind mlp --objective utility --out gates/mlp-utility
  loopscope evaluate VALIDATION TEST --gate gates/linear            (both recorded with --hidden)
  loopscope run runs/mine examples.txt --gate gates/linear

ponder: the expected cross-entropy over exits plus beta KL to the prior, as gates are trained jointly. utility: whether
another loop lowers the cross-entropy by more than 0.005. Prior and beta are the model's own unless they are given.""",
        fit,
    )
    fit_parser.add_argument("recording", type=Path, help="a recording with hidden states, not of the test split")
    fit_parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the gate's folder")
    fit_parser.add_argument("--kind", choices=("linear", "mlp"), default="linear", help="default: linear")
    fit_parser.add_argument("--objective", choices=("ponder", "utility"), default="ponder", help="default: ponder")
    fit_parser.add_argument("--pairing", choices=("next", "ouro"), default="next", help="of utility: see docs/gates.md")
    fit_parser.add_argument("--prior", choices=("uniform", "geometric"), help="of ponder (default: the model's)")
    fit_parser.add_argument("--lambda", type=float, dest="geometric_lambda", metavar="X", help="of a geometric prior")
    fit_parser.add_argument("--beta", type=float, metavar="X", help="of ponder (default: the model's, or 0.1)")
    fit_parser.add_argument("--steps", type=count, metavar="N", help="default: 2000")
    fit_parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    fit_parser.add_argument("--json", action="store_true", help="print JSON")

    write_parser = verb(
        kinds,
        "write",
        "write a fitted gate into a copy of a checkpoint",
        """\
  loopscope gate write gates/linear Ouro-1.4B --out Ouro-1.4B-refitted

The checkpoint's own gate must have the same form: Ouro's is linear.""",
        write,
    )
    write_parser.add_argument("gate", type=Path, help="the folder of a fitted gate")
    write_parser.add_argument("checkpoint", type=Path, help="the folder of the checkpoint")
    write_parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the new checkpoint's folder")


def fit(options: argparse.Namespace) -> int:
    from loopscope.progress import track
    from loopscope.training.posthoc import fit_gate, gate_settings
    from loopscope.trajectory import Trajectory

    if options.out.exists():
        raise UserError(f"{options.out} is there already; choose another --out, or remove it.")
    recording = Trajectory.load(options.recording)
    names = ("kind", "objective", "pairing", "prior", "geometric_lambda", "beta", "steps", "seed")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    settings = gate_settings(recording, given)
    with track("fitting") as advance:
        gate = fit_gate(recording, settings, advance)
    gate.save(options.out)
    if options.json:
        print_json({"gate": str(options.out), "settings": settings})
    else:
        print(f"{options.out}: a {gate.kind} gate, fitted to {recording.num_examples:,} examples.")
    return 0


def write(options: argparse.Namespace) -> int:
    from loopscope.exits import FittedGate
    from loopscope.training.posthoc import write_back

    write_back(FittedGate.load(options.gate), options.checkpoint, options.out)
    say(f"{options.out} is {options.checkpoint} with the fitted gate.")
    return 0


def gates_of(folders: list[Path], calibration: "Trajectory") -> dict[str, "FittedGate"]:
    """Fitted gates by the names of their folders; their thresholds are chosen on `calibration`."""
    from loopscope.exits import FittedGate

    gates: dict[str, FittedGate] = {}
    for folder in folders:
        name = folder.absolute().name
        if name in gates:
            raise UserError(f"Two of the gates are named '{name}'; give their folders different names.")
        gates[name] = FittedGate.load(folder)
        gates[name].check_calibration(calibration.split)
    return gates
