"""Where may a model run? On the CPU, or on a CUDA device that is there."""

import torch

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
