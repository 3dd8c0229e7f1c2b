"""On which device does a model run, and how do values get there? The CPU, a CUDA device, or MPS if it works."""

import ctypes
import os
from contextlib import suppress
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.errors import UserError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the option numbers of mallopt
_LARGE = 1 << 30


def check_device(name: str | torch.device) -> torch.device:
    """Find a device that works by allocating on it; `auto` takes the first of CUDA, MPS and the CPU that works."""
    candidates = [name]
    if name == "auto":
        candidates = [f"cuda:{torch.cuda.current_device()}"] if torch.cuda.is_available() else []
        candidates += ["mps", "cpu"]
    for candidate in candidates:
        with suppress(RuntimeError, AssertionError):
            device = torch.device(candidate)
            if device.type in ("cpu", "cuda", "mps"):
                torch.ones(1, device=device)
                return device
    raise UserError(f"The device '{name!s:.60}' is not available here; take the CPU (--device cpu).")


def devices_of_type(device: torch.device) -> list[str]:
    """All devices of this type on this machine: every CUDA device, or the device itself."""
    if device.type != "cuda":
        return [device.type]
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())]


def accumulator(device: torch.device) -> torch.dtype:
    """The type for sums on a device: float64 if the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def upload(values: Tensor | NDArray[Any], device: torch.device) -> Tensor:
    """Copy values to a device; to CUDA from pinned memory, so that the host does not wait."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_memory() -> None:
    """Let glibc keep freed memory: otherwise new pages for large tensors cost a tenth of a small model's time."""
    with suppress(AttributeError, OSError, TypeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _LARGE)


def to_host(values: Tensor) -> NDArray[Any]:
    """Copy a tensor to the host as float32."""
    return values.float().cpu().numpy()
