"""Train a looped Transformer.

loopscope train demo --out runs/mine
loopscope train demo --out runs/gate --set objective.name=learned_gate --set model.gate=linear
loopscope train paper --out runs/paper --set training.seed=1  # on a GPU
loopscope train my.toml --out runs/other --device cuda
loopscope train demo --out runs/own --set objective=my_losses:improving  # a function in my_losses.py
torchrun --nproc-per-node 4 -m loopscope.cli train paper --out runs/paper --device cuda

A killed or interrupted run continues with the same command and ends bit-identical.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.cli.devices import device_of, working
from loopscope.cli.options import COMPUTE, PRESETS, add_shared, add_verb, check_folder
from loopscope.cli.output import print_trained
from loopscope.cli.workers import with_workers

if TYPE_CHECKING:
    from loopscope.training.parallel import Workers


def define(subparsers: Any) -> None:
    parser = add_verb(subparsers, "train", __doc__, execute, resumes=True)
    parser.add_argument("settings", help=f"a preset ({PRESETS}) or a TOML file")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the run")
    add_shared(parser, "--set", "--force", *COMPUTE)


def execute(options: argparse.Namespace) -> None:
    from loopscope.training.run_place import check_run_place
    from loopscope.training.settings import read_settings

    check_folder(options.out)
    check_run_place(options.out, read_settings(options.settings, options.set))
    with_workers(options, _train)


def _train(options: argparse.Namespace, workers: "Workers") -> None:
    from loopscope.progress import clock, silent
    from loopscope.training import check_memory, estimate_time, read_settings, train
    from loopscope.training.run_folder import steps_done
    from loopscope.training.settings import presets

    notes: list[str] = []
    with workers.together():
        settings = read_settings(options.settings, options.set)
        device = device_of(options)
        start, steps = steps_done(options.out), settings.training.steps
        if workers.is_main and start < steps and not options.force:
            check_memory(settings, device, workers)
            expected = estimate_time(settings, device, start, workers)
            left_out = f"; keys that {options.settings} leaves out have the paper's values, which are large"
            expected.check("" if options.settings in presets() else left_out)
            notes.append(f"{steps - start:,} steps to go, about {clock(expected.seconds)} on a quiet machine.")
    with working(options, "training", *notes) if workers.is_main else nullcontext(silent) as advance:
        result = train(settings, options.out, device, advance, workers)
    if workers.is_main:
        state = "was finished already" if start == steps else f"went on from step {start:,}" if start else "is finished"
        print_trained(result, f"{result.folder} {state}. Validation sample, forced exits:", options.json)
