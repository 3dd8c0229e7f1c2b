"""Where does a verb compute? On the device and with the threads that its options name."""

import argparse
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device_of(options: argparse.Namespace) -> "torch.device":
    import torch

    from loopscope.machine import keep_memory
    from loopscope.models.device import check_device

    keep_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic; read at the first use of CUDA
    return check_device(options.device)
