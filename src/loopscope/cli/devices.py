"""Where does a verb compute? On the device and with the threads that its options name, or on the best there is."""

import argparse
import os
from typing import TYPE_CHECKING

from loopscope.cli.output import print_note

if TYPE_CHECKING:
    import torch


def device_of(options: argparse.Namespace) -> "torch.device":
    """The device, which is there, with the threads that are asked for."""
    import torch

    from loopscope.machine import keep_memory
    from loopscope.models.device import check_device

    keep_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic; read at the first use of CUDA
    resolve_auto(options)
    return check_device(options.device)


def resolve_auto(options: argparse.Namespace) -> None:
    """Puts what `auto` takes in its place, and says so once."""
    if options.device != "auto":
        return
    from loopscope.models.device import check_device

    options.device = str(check_device("auto"))
    if os.environ.get("RANK", "0") == "0":
        other = "no GPU was found" if options.device == "cpu" else "--device cpu takes the CPU"
        print_note(f"Device: {options.device} ({other}).")
