"""Measure speed-ups side by side, interleaved.

loopscope bench exits runs/demo/fixed-geometric
loopscope bench generation runs/small-ouro --text validation.txt --policy policy.json
loopscope bench guarantees
"""

from typing import Any

from loopscope.cli.bench import drift, exits, generation, guarantees, record, scoring, sweep, train
from loopscope.cli.options import add_group


def define(subparsers: Any) -> None:
    kinds = add_group(subparsers, "bench", __doc__)
    for kind in (exits, scoring, generation, train, record, sweep, guarantees, drift):
        kind.define(kinds)
