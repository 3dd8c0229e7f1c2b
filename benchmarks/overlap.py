"""How often are chance repeats taken for shared examples, and how often are shared examples found?

python -m benchmarks.overlap
python -m benchmarks.overlap --pairs 50 --examples 300 --json

Two recordings are drawn from inputs that are alike likely, from inputs of which few are frequent (Zipf), or from
difficulties of four inputs each. Then a share of the second is taken from the first. Each pair is compared in whole and
by the sketch that a policy carries.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import product

import msgspec
import numpy as np

from benchmarks.command import run_benchmark, simulate
from loopscope.cli.options import Parser, add_shared, option
from loopscope.cli.output import percent
from loopscope.row_overlap import KEY_BITS, Keys, RowKeys

Draw = Callable[[np.random.Generator, int], Keys]
SHARES = (0.0, 0.1, 0.3, 1.0)
"""Of the second recording, that are taken from the first; all but one row at 1."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


def _hashed(numbers: Keys) -> Keys:
    return (numbers.astype(np.uint64) * _SPREAD) >> np.uint64(64 - KEY_BITS)


def alike(inputs: int) -> Draw:
    return lambda rng, size: _hashed(rng.integers(0, inputs, size))


POPULATIONS: dict[str, Draw] = {
    **{f"{inputs:,} inputs": alike(inputs) for inputs in (10, 100, 1_000, 10_000, 10**9)},
    "Zipf, 1.2": lambda rng, size: _hashed(rng.zipf(1.2, size) % 10**9),
    "Zipf, 2": lambda rng, size: _hashed(rng.zipf(2.0, size) % 10**9),
    "8 difficulties": lambda rng, size: _hashed(4 * (np.arange(size) % 8) + rng.integers(0, 4, size)),
}


class Found(msgspec.Struct, frozen=True):
    """How often an overlap was found, as shares of all pairs."""

    population: str
    share: float
    examples: int
    pairs: int
    in_whole: float
    by_sketch: float


def found(examples: int, population: str, share: float, pairs: int, seed: int = 0) -> Found:
    """Of pairs that share so much."""
    rng, draw = np.random.default_rng(seed), POPULATIONS[population]
    whole, sketched = 0, 0
    for _ in range(pairs):
        first, second = draw(rng, examples), draw(rng, examples)
        taken = round(share * examples)
        second[:taken] = first[:taken]
        ours, theirs = RowKeys.of(first), RowKeys.of(second[1:])
        whole += ours.num_shared(theirs) > 0
        sketched += RowKeys.of_sketch(ours.sketch()).num_shared(theirs) > 0
    return Found(population, share, examples, pairs, whole / pairs, sketched / pairs)


def define(parser: Parser) -> None:
    option(parser, "--pairs N", "pairs of recordings of each kind", default=400)
    option(parser, "--examples N", "examples of a recording", type=int, nargs="+", default=[500, 2000])
    add_shared(parser, "--json")


COLUMNS: dict[str, Callable[[Found], str]] = {
    "examples": lambda each: f"{each.examples:,}",
    "population": lambda each: each.population,
    "taken from the first": lambda each: percent(each.share),
    "found": lambda each: percent(each.in_whole),
    "found by the sketch": lambda each: percent(each.by_sketch),
}


def execute(options: argparse.Namespace) -> None:
    kinds = [(*kind, options.pairs) for kind in product(options.examples, POPULATIONS, SHARES)]
    simulate("comparing", found, kinds, f"{options.pairs:,} pairs of each kind", COLUMNS, options.json)


def main(words: Sequence[str] | None = None) -> int:
    return run_benchmark("overlap", __doc__, define, execute, words)


if __name__ == "__main__":
    sys.exit(main())
