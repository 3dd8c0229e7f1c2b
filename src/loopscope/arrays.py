"""Is what a caller gave an array of numbers? What would lose something on the way to NumPy is rejected."""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError


def as_array(values: Any, name: str) -> NDArray[Any]:
    """An array of numbers or booleans, from NumPy, PyTorch or lists."""
    array = np.asarray(_without_device(values))
    if np.ma.isMaskedArray(values):
        raise UserError(f"{name} must be an array without a mask, which would be lost.")
    wraps = array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max
    if array.dtype.kind not in "biuf" or wraps:
        raise UserError(f"{name} must be made of numbers below 2**63, got an array of {array.dtype}.")
    return array


def _without_device(values: Any) -> Any:
    """A tensor of PyTorch without what keeps NumPy from reading it: its gradient, its device, and bfloat16."""
    torch = sys.modules.get("torch")  # without it there are no tensors
    if torch is None or not isinstance(values, torch.Tensor):
        return values
    values = values.detach().cpu()
    return values.float() if values.dtype == torch.bfloat16 else values


def as_integers(values: Any, name: str) -> NDArray[np.int64]:
    """An array of whole numbers; floats and booleans are none."""
    array = as_array(values, name)
    if array.dtype.kind not in "iu":
        raise UserError(f"{name} must be whole numbers, got an array of {array.dtype}.")
    return array.astype(np.int64, copy=False)


def as_token_row(values: Any, name: str) -> NDArray[np.int64]:
    """At least one token."""
    row = as_integers(values, name)
    if row.ndim != 1 or not len(row):
        raise UserError(f"{name} must be a row of at least one token, a whole number each.")
    return row
