"""Train, record, diagnose and report five small models.

loopscope demo --out runs/demo
loopscope demo --out runs/quick --set training.steps=300

The same as `loopscope study run demo`. An interrupted demo continues with the same command; what is finished is used
again.
"""

from typing import Any

from loopscope.cli.study import define_demo


def define(subparsers: Any) -> None:
    define_demo(subparsers, __doc__)
