"""Compare quantised weights with the weights of the checkpoint: memory, answers, speed of text.

python -m benchmarks.quantised runs/small-ouro text/validation.txt
python -m benchmarks.quantised MODEL text.txt --kind Int8WeightOnlyConfig --limit 2000
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torchao.quantization
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig

import loopscope as ls
import loopscope.integrations.transformers  # registers the looped models
from benchmarks.command import print_measured, run_benchmark
from loopscope.analysis.schema import Machine, Spread
from loopscope.bench.measure import interleaved, spread
from loopscope.cli.inputs import device_of
from loopscope.cli.options import Parser, add_shared, option
from loopscope.models.checkpoint import INT8
from loopscope.models.linear import Int8Linear
from loopscope.models.looped_model import LoopedModel, plain_tensors
from loopscope.progress import ProgressCallback, track
from loopscope.recording.text_recording import record_text

PROMPT, NEW = 32, 32
"""Tokens of a text, and tokens written after them, where speed is measured."""
BATCHES = (1, 8)


class QuantisedBench(msgspec.Struct, frozen=True):
    model: str
    kind: str
    tokens: int
    megabytes: tuple[float, float]  # of the linear layers: as loaded, quantised
    agreement: list[float]  # by loop: how many next tokens are those of the checkpoint's weights
    right: tuple[float, float]  # next tokens at full depth that are those of the text: as loaded, quantised
    speed_ups: dict[int, Spread]  # by batch size, of text at full depth
    machine: Machine


def linear_megabytes(model: LoopedModel) -> float:
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, Int8Linear))]
    tensors = [tensor for layer in layers for tensor in layer.state_dict().values()]
    return sum(part.nbytes for tensor in tensors for _, part in plain_tensors("", tensor)) / 1e6


def load_quantised(folder: Path, kind: str) -> LoopedModel:
    """The model by LoopScope's own int8, or in transformers by a configuration of torchao."""
    if kind == INT8:
        return ls.load_model(folder, dtype=INT8)
    config = TorchAoConfig(getattr(torchao.quantization, kind)())
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).eval().looped


def bench_quantised(
    folder: Path, text: Path, kind: str, limit: int, rounds: int, progress: ProgressCallback
) -> QuantisedBench:
    loaded, quantised = ls.load_model(folder, pack=False), load_quantised(folder, kind)
    sizes = linear_megabytes(loaded), linear_megabytes(quantised)
    with tempfile.TemporaryDirectory() as out:
        recordings = [
            record_text(folder, [text], "test", Path(out) / str(number), limit=limit, model=model)
            for number, model in enumerate((loaded, quantised))
        ]
    plain, other = (recording.predictions for recording in recordings)
    loaded = ls.load_model(folder)  # with weights packed for few tokens, as texts are written
    rng = np.random.default_rng(0)
    prompts = [ls.Prompt(number, rng.integers(1, loaded.vocab_size, PROMPT)) for number in range(max(BATCHES))]

    def write(model: LoopedModel, batch: int) -> Any:
        return list(ls.generate(model, prompts[:batch], max_new_tokens=NEW, batch_size=batch))

    ways = {
        f"{name} {batch}": partial(write, model, batch)
        for batch in BATCHES
        for name, model in (("loaded", loaded), ("quantised", quantised))
    }
    seconds, machine = interleaved(ways, rounds, 512, progress)
    return QuantisedBench(
        model=folder.name,
        kind=kind,
        tokens=len(plain),
        megabytes=sizes,
        agreement=(plain == other).mean(axis=0).tolist(),
        right=(float(recordings[0].correct[:, -1].mean()), float(recordings[1].correct[:, -1].mean())),
        speed_ups={batch: spread(seconds[f"loaded {batch}"] / seconds[f"quantised {batch}"]) for batch in BATCHES},
        machine=machine,
    )


def define(parser: Parser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a checkpoint")
    parser.add_argument("text", type=Path, metavar="TEXT", help="text whose next tokens are compared")
    option(parser, "--kind NAME", "int8, or a configuration of torchao", default=INT8)
    option(parser, "--limit N", "next tokens to compare", default=5000)
    add_shared(parser, "--rounds N", "--threads N", "--json")


def execute(options: argparse.Namespace) -> None:
    device_of(options)
    with track("measuring quantised weights") as advance:
        result = bench_quantised(options.model, options.text, options.kind, options.limit, options.rounds, advance)
    before, after = result.megabytes
    rows = [["linear layers, MB", f"{before:.1f} to {after:.1f} ({after / before:.2f})"]]
    rows += [
        [f"same next token after loop {loop}", f"{100 * share:.2f} %"]
        for loop, share in enumerate(result.agreement, start=1)
    ]
    rows += [["next token right at full depth", f"{100 * result.right[0]:.2f} % to {100 * result.right[1]:.2f} %"]]
    rows += [[f"speed-up, batch {batch}", str(ratio)] for batch, ratio in result.speed_ups.items()]
    title = f"{result.model}, {result.kind}, {result.tokens:,} next tokens."
    print_measured(result, title, ["", "median [quartiles]"], rows, options.json)


def main(words: Sequence[str] | None = None) -> int:
    return run_benchmark("quantised", __doc__, define, execute, words)


if __name__ == "__main__":
    sys.exit(main())
