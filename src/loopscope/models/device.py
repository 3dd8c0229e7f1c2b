"""Where may a model run? On the CPU, or on a CUDA device that is there."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.errors import UserError


def check_device(name: str | torch.device) -> torch.device:
    """The device of this name, after something was put there."""
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        raise UserError(f"The device '{name}' is not available here; take the CPU (--device cpu).") from None
    return device


def upload(values: Tensor | NDArray[Any], device: torch.device) -> Tensor:
    """The values on a device. To CUDA without a wait: from ordinary memory the host would, for all that runs there."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
