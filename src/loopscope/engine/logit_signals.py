"""How are the signals of logits computed on the model's device? Block by block, for rows followed loop by loop.

A vocabulary has tens of thousands of classes, so logits stay on the model's device, and only one number of every row
and loop leaves it. The definitions are those of `readouts.signals`, in float64 if the device has it. All signals are
sums over the classes, computed block by block: so many numbers in double precision would not fit a processor's cache,
nor, with many rows, the memory.

Shapes: n rows, R rows that are followed, T loops, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.errors import UserError
from loopscope.models.device import accumulator, upload
from loopscope.readouts.signals import CONVERGENCE, LARGEST_RATIO, SIGNALS

Array = NDArray[Any]
Integers = NDArray[np.int64]

LOGIT_SIGNALS = (*(name for name, (source, _) in SIGNALS.items() if source == "logits"), "settling")
"""The signals that are computed on the device; the host computes a custom readout, by its step."""
_LOOKING_BACK = {*CONVERGENCE, "settling"}
NO_ANSWER = -1
"""The class of logits that are not finite: it is copied to the host with the classes, without a further wait."""
_CACHED_LOGITS = 1 << 15
"""Logits that a CPU processes at a time: as many as its cache holds."""
_DEVICE_LOGITS = 1 << 24


class LogitStats(NamedTuple):
    """Hold the statistics of rows' logits at a loop that the signals of the next loop compare with."""

    logits: Tensor  # [n, V] in float32
    peak: Tensor  # [n] the largest logit
    log_sum: Tensor  # [n] log sum exp (logits - peak)
    step: Tensor  # [n] the largest change of a logit since the previous loop, NaN at the first loop


def logit_statistics(
    names: Collection[str], logits: Tensor, previous: LogitStats | None = None
) -> tuple[dict[str, Tensor], LogitStats]:
    """[n] each named signal of logits [n, V]; NaN if it needs a previous loop and there is none."""
    single = logits.float()
    precise = accumulator(logits.device)
    peak = single.amax(-1).to(precise)
    missing = single.device.type != "cpu" or bool(single.amin() == -torch.inf)  # else the check would wait
    weighing = not {"entropy", "top1", "kl"}.isdisjoint(names)
    previous_stats = previous if not _LOOKING_BACK.isdisjoint(names) else None
    total, surprise, drift, change, largest = torch.zeros((5, len(single)), dtype=precise, device=single.device)
    for columns in _blocks(single.shape[1], _logits_at_a_time(single)) if weighing or previous_stats else ():
        now = _zero_missing(single[:, columns], precise, missing)
        if previous_stats is not None:
            step = now - _zero_missing(previous_stats.logits[:, columns], precise, missing)
            change += torch.linalg.vector_norm(step, dim=-1).square()
            if "settling" in names:
                largest = torch.maximum(largest, torch.linalg.vector_norm(step, torch.inf, dim=-1))
        if weighing:
            shifted = now.sub_(peak[:, None])
            weights = shifted.exp()
            if missing:
                weights.masked_fill_(single[:, columns].isneginf(), 0.0)
            total += weights.sum(-1)
            surprise -= shifted.mul_(weights).sum(-1)
            if previous_stats is not None:
                drift += step.sub_((peak - previous_stats.peak)[:, None]).mul_(weights).sum(-1)
    stats = LogitStats(single, peak, total.log(), torch.full_like(total, torch.nan) if previous is None else largest)
    found = {"entropy": surprise / total + stats.log_sum, "top1": 1.0 / total, "logit_change": change.sqrt()}
    if not {"margin", "settling"}.isdisjoint(names):
        first = single.argmax(-1, keepdim=True)
        found |= {"predictions": first[:, 0], "margin": peak - single.scatter(1, first, -torch.inf).amax(-1)}
    if previous_stats is not None:
        found["kl"] = (drift / total - (stats.log_sum - previous_stats.log_sum)).clamp(min=0)
        if "settling" in names:
            found["settling"] = found["margin"] - 2 * _remaining_change(largest, previous_stats.step)
    else:
        found |= dict.fromkeys(_LOOKING_BACK, torch.full_like(total, torch.nan))
    return {name: found[name] for name in names}, stats


def likeliest_classes(logits: Tensor) -> Tensor:
    """[n] the class with the largest logit; `NO_ANSWER` if it is NaN or infinite; a missing class is -inf."""
    found = logits.argmax(-1, keepdim=True)  # a NaN counts as the largest
    return found.masked_fill(~logits.gather(-1, found).isfinite(), NO_ANSWER)[..., 0]


def check_answers(classes: Array) -> Array:
    """Reject predictions that contain `NO_ANSWER`."""
    check_finite(np.where(classes == NO_ANSWER, np.nan, 0.0), "logits")
    return classes


def check_logits(logits: Array) -> Array:
    """Reject logits [..., V] whose largest value in any row is not finite."""
    check_finite(logits.max(axis=-1), "logits")
    return logits


def check_finite(values: Array, what: str) -> Array:
    """Reject outputs of a model that contain NaN or infinity."""
    if not np.isfinite(values).all():
        raise not_finite(what)
    return values


def not_finite(what: str) -> UserError:
    """The error for outputs of a model that contain NaN or infinity."""
    return UserError(
        f"The model's {what} hold a value that is not finite (NaN or infinity), so that they answer nothing; check its "
        "weights, or run it in float32 (--dtype float32)."
    )


def _remaining_change(step: Tensor, last_step: Tensor) -> Tensor:
    """[n] the signal `remaining_change` of `readouts.signals`, on the device."""
    ratio = torch.where(step > 0, step / last_step, torch.where(last_step.isnan(), torch.nan, 0.0))
    ratio = ratio.clamp(max=LARGEST_RATIO)
    return step * (ratio / (1 - ratio))


def kl_divergence(logits: Tensor, other: Tensor) -> Tensor:
    """[n] KL(p || q) in nats between the predictions p of logits [n, V] and q of `other`."""
    parts = []
    for rows in _row_blocks(logits):
        _, stats = logit_statistics(("top1",), other[rows])
        parts.append(logit_statistics(("kl",), logits[rows], stats)[0]["kl"])
    return torch.cat(parts)


def logit_signals(logits: Tensor, labels: Tensor) -> dict[str, Array]:
    """[n, T] all signals of logits [T, n, V], by name, with predictions and label_log_probs for labels [n]."""
    parts = []
    for rows in _row_blocks(logits[0]):
        stats, loops = None, []
        for now in logits[:, rows]:
            signals, stats = logit_statistics((*LOGIT_SIGNALS, "predictions"), now, stats)
            label = stats.logits.gather(1, labels[rows, None])[:, 0]
            loops.append(signals | {"label_log_probs": label - stats.peak - stats.log_sum})
        parts.append({name: torch.stack([loop[name] for loop in loops], dim=1) for name in loops[0]})
    return {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}


class StreamedSignals:
    """Compute signals of logits on the device, for rows that are followed loop by loop."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._looks_back = not _LOOKING_BACK.isdisjoint(names)
        self._previous: LogitStats | None = None  # [R, ...] the previous loop, by row, if a signal compares with it

    def values(self, rows: Integers, loops: Integers, logits: Tensor) -> dict[str, NDArray[np.float64]]:
        """[n] each signal of rows with logits [n, V] at their loop [n]."""
        return self.by_name(self.table(rows, loops, logits).cpu().numpy(), loops)

    def table(self, rows: Integers, loops: Integers, logits: Tensor) -> Tensor:
        """[signals, n] the signals of rows with logits [n, V] at their loop [n], still on the device."""
        index, parts = upload(rows, logits.device), []
        kept = self._allocated(int(rows.max()) + 1, logits) if self._looks_back else None
        for part in _row_blocks(logits):
            previous = None if kept is None else LogitStats(*(each.index_select(0, index[part]) for each in kept))
            found, stats = logit_statistics(self._names, logits[part], previous)
            parts.append(torch.stack([found[name].to(stats.peak) for name in self._names]))
            if "settling" in self._names:  # the row's previous logits are those of a different token
                first = upload(loops[part] == 1, logits.device)
                stats = stats._replace(step=stats.step.masked_fill(first, torch.nan))
            for each, new in zip(kept or (), stats, strict=False):
                each.index_copy_(0, index[part], new)
        return torch.cat(parts, dim=1)

    def by_name(self, table: Array, loops: Integers) -> dict[str, NDArray[np.float64]]:
        """[n] each signal, from a table that was copied to the host."""
        values = zip(self._names, table.astype(np.float64), strict=True)
        return {name: _nan_before_first(name, row, loops) for name, row in values}

    def _allocated(self, rows: int, logits: Tensor) -> LogitStats:
        if self._previous is None:
            numbers = torch.empty(0, dtype=accumulator(logits.device), device=logits.device)
            empty = logits.new_empty((0, logits.shape[1]), dtype=torch.float32)
            self._previous = LogitStats(empty, numbers, numbers, numbers)
        if (more := rows - len(self._previous.peak)) > 0:
            self._previous = LogitStats(
                *(torch.cat((each, each.new_zeros((more, *each.shape[1:])))) for each in self._previous)
            )
        return self._previous


def _nan_before_first(name: str, values: NDArray[np.float64], loops: Integers) -> NDArray[np.float64]:
    """A signal's values, with NaN at loops at which it has no value yet."""
    without = 0 if name not in _LOOKING_BACK else 2 if name == "settling" else 1
    check_finite(values[loops > without], "logits")
    return np.where(loops == 1, np.nan, values) if without else values


def _zero_missing(logits: Tensor, precise: torch.dtype, missing: bool) -> Tensor:
    """A copy of logits in this precision, with 0 for a missing class."""
    values = logits.to(precise, copy=True)
    return values.masked_fill_(values.isneginf(), 0.0) if missing else values


def _logits_at_a_time(logits: Tensor) -> int:
    """Logits that are processed at a time on their device."""
    return _CACHED_LOGITS if logits.device.type == "cpu" else _DEVICE_LOGITS


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    """Split logits [n, V] into blocks of rows that are processed together."""
    return _blocks(len(logits), max(1, _logits_at_a_time(logits) // logits.shape[1]))


def _blocks(length: int, size: int) -> Iterator[slice]:
    """Split a length into slices of at most `size`."""
    return (slice(start, start + size) for start in range(0, length, size))
