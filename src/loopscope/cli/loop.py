"""Loop the middle layers of an ordinary language model.

loopscope loop HuggingFaceTB/SmolLM2-135M --prelude 10 --core 10 --loops 4 \\
    --out looped
loopscope loop SmolLM2-135M-Instruct.Q4_1.gguf --prelude 10 --core 10 \\
    --loops 4 --gate linear --out looped
loopscope loop Llama-3.2-1B --drop 13-14 --prelude 4 --core 8 --loops 4 \\
    --injection --out looped

The model must be a Llama, SmolLM, Mistral, Qwen 2 or Qwen 3, in the layout of the Hub or as a GGUF file. The first
layers (--prelude) run once, and the next layers (--core) run in every loop. The remaining layers and the head run at
every exit. --drop counts layers from 0; --prelude and --core count only layers that are kept. If no layer is dropped
and the damping is 1, loop 1 is the original model. The command `loopscope loop` trains nothing.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import loopscope as ls
from loopscope.cli.inputs import find_model
from loopscope.cli.options import add_shared, add_verb, count, given, number_range, option, whole
from loopscope.cli.output import print_text, show
from loopscope.files import new_path

if TYPE_CHECKING:
    from loopscope.models.looping import LoopedCheckpoint


def define(subparsers: Any) -> None:
    """Add the arguments of `loopscope loop` to the parser."""
    parser = add_verb(subparsers, "loop", __doc__, execute)
    option(parser, "checkpoint", "a folder, a name on the Hub, or a GGUF file")
    prelude = "number of layers at the beginning of the model, which run once"
    option(parser, "--prelude A", prelude, type=whole, required=True)
    option(parser, "--core B", "number of layers after the prelude, which run in every loop", type=count, required=True)
    option(parser, "--loops T", "number of loops at full depth", type=count, required=True)
    option(parser, "--out DIR", "folder of the looped checkpoint", type=new_path, required=True)
    dropped = "leave out a layer or a range of layers, such as 12 or 12-15 (repeatable)"
    option(parser, "--drop N-M", dropped, type=number_range, action="append")
    option(parser, "--damping X", "factor X of a loop's update: h becomes h + X (core(h) - h)", default=1.0)
    option(parser, "--injection", "add a linear map of the prelude's output to the state before every loop")
    option(parser, "--gate", "untrained gate to add", choices=("none", "linear"), default="none")
    add_shared(parser, "--json")


def execute(options: argparse.Namespace) -> None:
    """Execute `loopscope loop` with its parsed arguments."""
    path = Path(options.checkpoint)
    if path.suffix != ".gguf" and not any(path.glob("*.gguf")):  # a folder may hold such a file alone
        find_model(options.checkpoint)
    dropped = [layer for layers in options.drop for layer in layers]
    chosen = given(options, "prelude", "core", "loops", "damping", "injection", "gate")
    made = ls.loop(options.checkpoint, options.out, drop=dropped, **chosen)
    show(made, options.json, lambda: print_text("\n".join(_looped_checkpoint_lines(made))))


def _looped_checkpoint_lines(made: "LoopedCheckpoint") -> list[str]:
    """The lines that describe a looped checkpoint."""
    looping = made.looping
    parts = f"{looping.prelude} once, {looping.core} in each of {looping.loops} loops, {made.coda} at every exit"
    kept = made.original_layers - len(looping.dropped)
    layers = f"{kept} of {made.original_layers} layers" if looping.dropped else f"all {kept} layers"
    exact = not looping.dropped and looping.damping == 1
    first = f"Loop 1 is {'' if exact else 'not '}the original model"
    return [
        f"{made.folder}: {layers} ({looping.source}): {parts}.",
        f"{made.parameters:,} parameters (the original: {made.original_parameters:,}).",
        f"At full depth a token costs {made.cost:.2f} times the original's multiplications (head included).",
        f"Untrained: nothing was learned here. {first}; deeper loops are nothing that it was trained for.",
    ]
