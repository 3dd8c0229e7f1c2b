"""Is what a caller gave from Python of the kind that is meant? It is converted where that is exact, or refused.

NumPy and Python take much for numbers: True is 1, `~0` an index, a list of lists of different lengths no array at all.
Each check gives back the value, or says in one sentence what was expected.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError, did_you_mean

SPLITS = ("train", "validation", "test", "extrapolation")
T = TypeVar("T")


def as_array(values: Any, name: str) -> NDArray[Any]:
    """An array of numbers or booleans."""
    try:
        array = np.asarray(_plain_tensor(values))
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise UserError(f"{name} must be an array of numbers whose rows are equally long.") from None
    if np.ma.isMaskedArray(values):
        raise UserError(f"{name} must be an array without a mask, which would be lost.")
    if array.dtype.kind not in "biuf":
        raise UserError(f"{name} must be made of numbers, got an array of {array.dtype}.")
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise UserError(f"{name} holds a number above 2**63 - 1.")
    return array


def _plain_tensor(values: Any) -> Any:
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
    row = as_array(values, name)
    if row.ndim != 1 or not len(row) or row.dtype.kind not in "iu":
        raise UserError(f"{name} must be a row of at least one token, a whole number each.")
    return row.astype(np.int64, copy=False)


def as_count(value: Any, name: str, least: int = 1) -> int:
    """A whole number from `least` on."""
    if not isinstance(value, Integral) or isinstance(value, bool | np.bool_):
        raise UserError(f"{name} must be a whole number, got {_short(value)}.")
    if value < least:
        raise UserError(f"{name} must be at least {least}, got {value}.")
    return int(value)


def as_number(value: Any, name: str) -> float:
    """A number that is not NaN; it may be infinite."""
    if not isinstance(value, Real) or isinstance(value, bool | np.bool_):
        raise UserError(f"{name} must be a number, got {_short(value)}.")
    try:
        number = float(value)
    except OverflowError:
        raise UserError(f"{name} is too large for a floating-point number.") from None
    if np.isnan(number):
        raise UserError(f"{name} must be a number, got NaN.")
    return number


def as_path(value: Any, name: str) -> Path:
    if not isinstance(value, str | Path) or "\0" in str(value):
        raise UserError(f"{name} must be a path, got {_short(value)}.")
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise UserError(f"{name} must be a path, and {_short(value)} holds half a character.") from None
    return Path(value)


def check_kind(value: T, kind: type | tuple[type, ...], name: str, what: str) -> T:
    """The value, if it is a `kind`, of which `what` is the name."""
    if not isinstance(value, kind):
        raise UserError(f"{name} must be {what}, got {_short(value)}.")
    return value


def check_list(values: T, name: str, what: str = "a list") -> T:
    """The values, if one can go through them; a text and an array without axes are no list."""
    if isinstance(values, str | bytes) or (isinstance(values, np.ndarray) and not values.ndim):
        raise UserError(f"{name} must be {what}, got {_short(values)}.")
    return check_kind(values, Iterable, name, what)


def check_flag(value: Any, name: str) -> None:
    check_kind(value, bool, name, "True or False")


def check_split_name(name: str) -> None:
    """Refuses a split that there is none of: what guards evaluation data goes by its name."""
    if name not in SPLITS:
        raise UserError(f"There is no split '{name}'{did_you_mean(name, SPLITS)}; choose one of {', '.join(SPLITS)}.")


def check_mapping(value: Any, name: str) -> None:
    """Refuses what is no mapping from names."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{name} must be a mapping from names, such as a dict, got {_short(value)}.")


def _short(value: Any) -> str:
    """A value in a message: itself where that is short, else its type."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else ""
    return text if 0 < len(text) <= 40 else f"a value of the type {type(value).__name__}"
