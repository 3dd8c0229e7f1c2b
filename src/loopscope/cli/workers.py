"""Who trains? The workers that torchrun started, or this process alone."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loopscope.training.parallel import Workers


def with_workers(options: argparse.Namespace, execute: "Callable[[argparse.Namespace, Workers], None]") -> None:
    from loopscope.training.parallel import exit_worker, join_workers, shared_device

    options.device = shared_device(options.device)
    with join_workers(options.device) as workers:
        execute(options, workers)
    if workers.count > 1:
        exit_worker(0)
