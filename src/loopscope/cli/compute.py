"""Where does a verb compute, and how far is it? On the device that its options name, or on the best there is."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import TYPE_CHECKING

from loopscope.cli.output import print_note
from loopscope.progress import ProgressCallback, track

if TYPE_CHECKING:
    import torch


def device_of(options: argparse.Namespace) -> "torch.device":
    """The device, which is there, with the threads that are asked for."""
    import torch

    from loopscope.models.device import check_device, keep_memory

    keep_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic; read at the first use of CUDA
    name = getattr(options, "device", "cpu")
    device = check_device(name)
    if name == "auto":
        options.device = str(device)
        other = "no GPU was found" if options.device == "cpu" else "--device cpu takes the CPU"
        options.chosen_device = f"Device: {options.device} ({other})."
    return device


def announce_device(options: argparse.Namespace) -> None:
    """Says once what `auto` took: when the work begins, so that nothing is announced that is then refused."""
    note = getattr(options, "chosen_device", None)
    if note is not None and os.environ.get("RANK", "0") == "0":
        print_note(note)
    options.chosen_device = None


@contextmanager
def working(options: argparse.Namespace, title: str, *notes: str, unit: str = "") -> Iterator[ProgressCallback]:
    """Shows progress, counted in this unit; at its first step says what it runs on, and these notes."""
    waiting = list(notes)
    with track(title, unit=unit) as advance:
        here = sys.stderr  # that of the work may be kept from other libraries

        def announced(done: int, total: int, note: str) -> None:
            with redirect_stderr(here):
                announce_device(options)
                while waiting:
                    print_note(waiting.pop(0))
            advance(done, total, note)

        yield announced
