"""Do these arrays make a recording? Their types, shapes and values, checked once, where a `Trajectory` is made.

Shapes: N examples, T loops, V classes, D width.
"""

import sys
import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.config import build, to_json
from loopscope.errors import RecordingWarning, UserError

Array = NDArray[Any]
_WIDE = ("logits", "hidden")
_ROUNDING = 1e-3
"""How far a sum of probabilities may be from 1."""
_ROUNDED_LOGIT = 0.01
"""The share by which half precision may change logits."""
_MIN_TO_WARN = 100
"""So many logits do not look like probabilities by chance."""


class _KnownProvenance(msgspec.Struct):
    """The part of a recording's provenance that LoopScope reads; the rest is the user's."""

    weights_sha256: str | None = None
    precision: str | None = None
    benchmark: str | None = None
    metric: str | None = None
    unit: Literal["answers", "questions", "tokens"] | None = None
    state: str | None = None
    signal_definitions: dict[str, str | None] = {}


def check_contents(trajectory: Any) -> None:
    """Reject arrays and a provenance that do not make a recording.

    Of a `Trajectory`, which imports this, with its arrays frozen.
    """
    build(_KnownProvenance, trajectory.provenance, "provenance")
    try:
        to_json(trajectory.provenance)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"provenance is saved as JSON, and this is none ({error}).") from None
    for problem in chain(_shape_problems(trajectory), _value_problems(trajectory)):
        raise UserError(problem)
    if "keeps_hidden" not in trajectory.provenance:  # LoopScope puts this key into its own recordings
        _warn_of_probabilities(trajectory.logits, trajectory.gate_logits)
        _warn_of_copies(trajectory.logits)


def _shape_problems(trajectory: Any) -> Iterator[str]:
    """What is wrong with the shapes of a recording's arrays."""
    for name in ("labels", "sequences", "predictions"):
        value = getattr(trajectory, name)
        if value is not None and not np.issubdtype(value.dtype, np.integer):
            yield f"{name} must be whole numbers, one for each example; got {value.dtype}."
    answers = trajectory.predictions if trajectory.logits is None else trajectory.logits
    if trajectory.logits is not None and (answers.ndim != 3 or answers.shape[2] < 2):
        yield f"logits must have the shape [examples, loops, classes], got {list(answers.shape)}."
    if answers.ndim < 2 or 0 in answers.shape[:2]:
        yield f"logits or predictions need at least one example and one loop; got the shape {list(answers.shape)}."
    rows, loops, classes = trajectory.num_examples, trajectory.num_loops, trajectory.num_classes
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(("labels", "difficulty", "seen", "sequences"), (rows,))
    expected |= dict.fromkeys(("logits", "hidden", "gate_logits", "predictions", "label_log_probs"), (rows, loops))
    expected["norms"] = (rows, classes or 0)
    swaps = {(loops, rows), (rows, classes)}  # loops first, and classes before loops
    for name, shape in expected.items():
        value = getattr(trajectory, name)
        if value is None or (value.shape[: len(shape)] == shape and value.ndim == len(shape) + (name in _WIDE)):
            continue
        swapped = any(value.shape[: len(shape)] == each[: len(shape)] for each in swaps)
        hint = "; logits are [examples, loops, classes]: are two axes swapped?" if swapped else "."
        yield f"{name} has the shape {list(value.shape)}, but there are {rows} examples and {loops} loops{hint}"
    for name, signal in trajectory.signals.items():
        if np.shape(signal) != (rows, loops):
            yield f"signal {name} has the shape {list(np.shape(signal))}, expected {[rows, loops]}."
    texts = trajectory.examples
    if texts is not None and (isinstance(texts, str) or len(texts) != rows):
        yield f"There are {1 if isinstance(texts, str) else len(texts)} example texts for {rows} examples."
    if texts is not None and not all(isinstance(text, str) for text in texts):
        yield "examples must be a list of texts, one for each example."


def _value_problems(trajectory: Any) -> Iterator[str]:
    """What is wrong with the values of a recording's arrays."""
    if trajectory.logits is not None:
        yield from _logit_problems(trajectory.logits, trajectory.labels)
    for name in ("gate_logits", "label_log_probs", "hidden", "difficulty"):
        if (value := getattr(trajectory, name)) is not None and not np.isfinite(value).all():
            yield f"{name} holds a value that is not finite (first: {_first_wrong_place(name, ~np.isfinite(value))})."
    for name in ("labels", "predictions"):
        if (value := getattr(trajectory, name)) is not None and value.min() < 0:
            yield f"{name} are classes, counted from 0, and one of them is below 0."
    if trajectory.label_log_probs is not None and trajectory.label_log_probs.max() > _ROUNDING:
        yield "label_log_probs are logarithms of probabilities, and one of them is above 0."
    missing = np.zeros(1, dtype=bool) if trajectory.logits is None else np.isneginf(trajectory.logits[:, 0])
    norms = trajectory.norms
    if norms is not None and not (np.isfinite(norms) & (norms > 0) | missing).all():
        yield "norms are the characters of every choice: finite numbers above 0."
    for name, values in trajectory.signals.items():  # one that looks back has no value (NaN) at its first loops
        unknown = np.isnan(values)
        if np.isinf(values).any() or (unknown[:, 1:] & ~unknown[:, :-1]).any():
            yield f"signal {name} holds a value that is not finite; NaN is for its first loops only."
    if trajectory.logits is not None and trajectory.predictions is not None:
        yield from _prediction_problems(trajectory.logits, trajectory.predictions)


def _prediction_problems(logits: Array, predictions: Array) -> Iterator[str]:
    """Find predictions that are not the class with the largest logit, up to rounding."""
    if predictions.max() >= logits.shape[2]:
        yield f"predictions name a class beyond the {logits.shape[2]} of the logits."
    top = logits.max(axis=-1).astype(np.float64)
    answered = np.take_along_axis(logits, predictions[..., None], axis=2)[..., 0]
    if (wrong := answered < top - _ROUNDED_LOGIT * (1 + np.abs(top))).any():
        yield (
            f"predictions and logits contradict each other (first: {_first_wrong_place('predictions', wrong)}, which "
            "is not the likeliest class there); leave out the predictions."
        )


def frozen(values: Array, name: str) -> Array:
    """A read-only view (whole numbers as int64, others as floats); do not change its source afterwards."""
    array = as_array(values, name)
    if name == "seen":
        array = _as_booleans(array)
    elif array.dtype == np.bool_ and name != "difficulty":
        raise UserError(f"{name} must be numbers, got booleans.")
    elif array.dtype.kind in "biu":
        array = array.astype(np.int64, copy=False)
    elif array.dtype not in (np.float16, np.float32):
        array = array.astype(np.float64, copy=False)
    array = array.view()
    array.flags.writeable = False
    return array


def _as_booleans(seen: Array) -> Array:
    """Convert 0 and 1 to booleans, because `~` of a whole number would make an index."""
    if seen.dtype != np.bool_ and not np.isin(seen, (0, 1)).all():
        raise UserError("seen must be true or false (or 1 or 0) for every example.")
    return seen.astype(np.bool_, copy=False)


def _logit_problems(logits: Array, labels: Array | None) -> Iterator[str]:
    """What is wrong with logits: NaN, or no choice for a label."""
    top = logits.max(axis=-1)
    for wrong, what in ((np.isnan(top), "NaN"), (np.isposinf(top), "+inf"), (np.isneginf(top), "-inf for every class")):
        if wrong.any():
            yield f"logits hold {what} (first: {_first_wrong_place('logits', wrong)}); check how they were computed."
    missing = np.isneginf(logits)
    if missing.any():
        if (differs := missing != missing[:, :1]).any():
            yield (
                f"A class is missing (-inf) at one loop of an example but not at another (first: "
                f"{_first_wrong_place('logits', differs)}); give -inf at all of its loops, or at none."
            )
        if (few := logits.shape[2] - missing[:, 0].sum(axis=-1) < 2).any():
            yield f"An example has fewer than two classes (first: {_first_wrong_place('logits', few)})."
    if labels is None:
        return
    classes = logits.shape[2]
    wrong = (labels < 0) | (labels >= classes)
    if not wrong.any():
        wrong = missing[np.arange(len(labels)), 0, labels]
    if wrong.any():
        row = int(wrong.argmax())
        among = f"0 to {classes - 1}" + (", without those that are -inf" if missing[row].any() else "")
        yield (
            f"labels[{row}] is {labels[row]}, which is not one of the classes of its example ({among}); "
            f"{_label_advice(labels, logits)}."
        )


def _label_advice(labels: Array, logits: Array) -> str:
    """The probable reason for labels that name no class."""
    low, high, (_, loops, classes) = labels.min(), labels.max(), logits.shape
    if low == 1 and high == classes:
        return "they seem to be counted from 1: count from 0"
    if low >= 0 and high < loops:
        return "logits are [examples, loops, classes], and two axes seem to be swapped"
    return "leave out examples without a label"


def _sums_to_one(logits: Array) -> bool:
    """Whether the last axis looks like probabilities."""
    return float(np.abs(logits.sum(axis=-1, dtype=np.float64) - 1).max()) < _ROUNDING


def _first_wrong_place(name: str, wrong: Array) -> str:
    """The first place at which an array is wrong, as an index in Python."""
    return f"{name}[{', '.join(map(str, np.argwhere(wrong)[0]))}]"


def _warn_of_copies(logits: Array | None) -> None:
    """Warn if every loop has the last loop's logits, because a verdict on them means nothing."""
    if logits is None or logits.shape[1] == 1 or len(logits) < _MIN_TO_WARN:
        return
    if all((part == part[:, :1]).all() for part in (logits[:_MIN_TO_WARN], logits)):  # the first few tell nearly always
        warnings.warn(
            "All loops have the same logits: no exit can differ from another. Were those of one loop recorded for all?",
            RecordingWarning,
            stacklevel=5,  # of whoever makes a Trajectory
        )


def _warn_of_probabilities(logits: Array | None, gate_logits: Array | None) -> None:
    """Warn if logits look like probabilities, because the verdict would be wrong."""
    if logits is not None and logits[..., 0].size >= _MIN_TO_WARN and logits.min() >= 0 and _sums_to_one(logits):
        warnings.warn(
            "All logits are 0 or more and sum to 1 over the classes, as probabilities do; of probabilities p give "
            "log(p), since entropies and margins would be those of other predictions.",
            RecordingWarning,
            stacklevel=5,  # of whoever makes a Trajectory
        )
    if gate_logits is None:
        return
    low, high = float(gate_logits.min()), float(gate_logits.max())
    if gate_logits.size >= _MIN_TO_WARN and low >= 0 and high <= 1 and high - low > 0.5:
        warnings.warn(
            "All gate_logits lie between 0 and 1, as probabilities do; they are halt logits, whose sigmoid is the "
            "probability of halting. If yours are probabilities p, give log(p / (1 - p)).",
            RecordingWarning,
            stacklevel=5,  # of whoever makes a Trajectory
        )


def as_array(values: Any, name: str) -> NDArray[Any]:
    """Convert numbers or booleans from NumPy, PyTorch or lists to an array."""
    array = np.asarray(_readable_by_numpy(values))
    if np.ma.isMaskedArray(values):
        raise UserError(f"{name} must be an array without a mask, which would be lost.")
    wraps = array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max
    if array.dtype.kind not in "biuf" or wraps:
        raise UserError(f"{name} must be made of numbers below 2**63, got an array of {array.dtype}.")
    return array


def _readable_by_numpy(values: Any) -> Any:
    """Detach a PyTorch tensor, and move it to the CPU in a type that NumPy can read."""
    torch = sys.modules.get("torch")  # without it there are no tensors
    if torch is None or not isinstance(values, torch.Tensor):
        return values
    values = values.detach().cpu()
    return values.float() if values.dtype == torch.bfloat16 else values


def as_integers(values: Any, name: str) -> NDArray[np.int64]:
    """Convert to an array of whole numbers; reject floats and booleans."""
    array = as_array(values, name)
    if array.dtype.kind not in "iu":
        raise UserError(f"{name} must be whole numbers, got an array of {array.dtype}.")
    return array.astype(np.int64, copy=False)


def as_token_row(values: Any, name: str) -> NDArray[np.int64]:
    """Convert a row of at least one token id to an array."""
    row = as_integers(values, name)
    if row.ndim != 1 or not len(row):
        raise UserError(f"{name} must be a row of at least one token, a whole number each.")
    return row
