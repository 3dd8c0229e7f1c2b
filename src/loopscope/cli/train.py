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
from typing import TYPE_CHECKING, Any

import loopscope as ls
from loopscope.cli.compute import device_of, with_workers, working
from loopscope.cli.options import COMPUTE, add_shared, option, out_folder
from loopscope.cli.output import print_trained
from loopscope.cli.parser import add_verb
from loopscope.progress import clock, silent
from loopscope.training.run_folder import check_run_place
from loopscope.training.settings import presets, read_settings

if TYPE_CHECKING:
    from loopscope.training.parallel import Workers


def define(subparsers: Any) -> None:
    parser = add_verb(subparsers, "train", __doc__, execute, resumes=True)
    option(parser, "settings", f"a preset ({', '.join(presets())}) or a TOML file")
    option(parser, "--out DIR", "folder of the run", type=out_folder, required=True)
    add_shared(parser, "--set A.B=C", "--force", *COMPUTE)


def execute(options: argparse.Namespace) -> None:
    check_run_place(options.out, read_settings(options.settings, options.set))
    with_workers(options, _train)


def _train(options: argparse.Namespace, workers: "Workers") -> None:
    from loopscope.training.estimate import check_memory, estimate_time
    from loopscope.training.run_state import steps_done

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
        result = ls.train(settings, options.out, device, advance, workers)
    if workers.is_main:
        state = "was finished already" if start == steps else f"went on from step {start:,}" if start else "is finished"
        print_trained(result, f"{result.folder} {state}. Validation sample, forced exits:", options.json)
