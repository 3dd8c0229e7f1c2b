"""What do logits over a whole vocabulary say? The signals of `exits.signals`, computed where the logits are.

Tens of thousands of classes stay on the model's device; one number of every row and loop leaves it. The definitions
are those of `exits.signals`, in float64 where the device has it. All are sums over the classes, taken block by block:
so many numbers in double precision would not fit a processor's cache, nor, with many rows, the memory.

Shapes: n rows, R rows that are followed, T loops, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.errors import UserError
from loopscope.exits.signals import CONVERGENCE, SIGNALS
from loopscope.exits.steps import LARGEST_RATIO
from loopscope.models.device import accumulator, upload

Array = NDArray[Any]
Integers = NDArray[np.int64]

LOGIT_SIGNALS = (*(name for name, (source, _) in SIGNALS.items() if source == "logits"), "settling")
"""Those that are computed here; a user's own take the plain way, by their step."""
_LOOKING_BACK = {*CONVERGENCE, "settling"}
NO_ANSWER = -1
"""In the place of a class where logits are not finite: what is fetched anyway says it, and nobody waits for it."""
_BLOCK = {"cpu": 1 << 15}
"""Logits that are worked on at a time: on a processor as many as its cache holds, elsewhere `_MANY`."""
_MANY = 1 << 24


class LogitStats(NamedTuple):
    """What rows said at a loop, as far as the next loop is compared with it."""

    logits: Tensor  # [n, V] in float32
    peak: Tensor  # [n] the largest logit
    log_sum: Tensor  # [n] log sum exp (logits - peak)
    step: Tensor  # [n] the largest change of a logit since the loop before, NaN where there is none


def logit_statistics(
    names: Collection[str], logits: Tensor, previous: LogitStats | None = None
) -> tuple[dict[str, Tensor], LogitStats]:
    """[n] each of these signals of logits [n, V], NaN where they need a loop before and there is none."""
    single = logits.float()
    precise = accumulator(logits.device)
    peak = single.amax(-1).to(precise)
    missing = single.device.type != "cpu" or bool(single.amin() == -torch.inf)  # elsewhere, asking would mean waiting
    weighing = not {"entropy", "top1", "kl"}.isdisjoint(names)
    previous_stats = previous if not _LOOKING_BACK.isdisjoint(names) else None
    total, surprise, drift, change, largest = torch.zeros((5, len(single)), dtype=precise, device=single.device)
    for columns in _slices(single.shape[1], _block(single)) if weighing or previous_stats else ():
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
    """[n] the class with the largest logit, `NO_ANSWER` where that is NaN or infinite; a missing class is -inf."""
    found = logits.argmax(-1, keepdim=True)  # a NaN counts as the largest
    return found.masked_fill(~logits.gather(-1, found).isfinite(), NO_ANSWER)[..., 0]


def check_answers(classes: Array) -> Array:
    """The same, if none of them is `NO_ANSWER`."""
    if (classes == NO_ANSWER).any():
        raise not_finite("logits")
    return classes


def check_logits(logits: Array) -> Array:
    """[..., V] the same, if every row has a largest logit that is finite."""
    if not np.isfinite(logits.max(axis=-1)).all():
        raise not_finite("logits")
    return logits


def check_finite(values: Array, what: str) -> Array:
    if not np.isfinite(values).all():
        raise not_finite(what)
    return values


def not_finite(what: str) -> UserError:
    return UserError(
        f"The model's {what} hold a value that is not finite (NaN or infinity), so that they answer nothing; check its "
        "weights, or run it in float32 (--dtype float32)."
    )


def _remaining_change(step: Tensor, last_step: Tensor) -> Tensor:
    """[n] as `exits.steps.remaining_change` has it."""
    ratio = torch.where(step > 0, step / last_step, torch.where(last_step.isnan(), torch.nan, 0.0))
    ratio = ratio.clamp(max=LARGEST_RATIO)
    return step * (ratio / (1 - ratio))


def kl_divergence(logits: Tensor, other: Tensor) -> Tensor:
    """[n] KL(p || q) in nats between the predictions p of logits [n, V] and q of others."""
    parts = []
    for rows in _rows(logits):
        _, stats = logit_statistics(("top1",), other[rows])
        parts.append(logit_statistics(("kl",), logits[rows], stats)[0]["kl"])
    return torch.cat(parts)


def logit_signals(logits: Tensor, labels: Tensor) -> dict[str, Array]:
    """[n, T] each, of logits [T, n, V] and labels [n]: predictions, label_log_probs and the signals, by their names."""
    columns: dict[str, list[Tensor]] = {}
    for rows in _rows(logits[0]):
        stats = None
        for now in logits[:, rows]:
            found, stats = logit_statistics((*LOGIT_SIGNALS, "predictions"), now, stats)
            label = stats.logits.gather(1, labels[rows, None])[:, 0]
            found["label_log_probs"] = label - stats.peak - stats.log_sum
            for name, values in found.items():
                columns.setdefault(name, []).append(values)
    return {name: _table(values, len(logits)) for name, values in columns.items()}


class StreamedSignals:
    """Some of these signals, of rows that are followed loop by loop."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._looks_back = not _LOOKING_BACK.isdisjoint(names)
        self._previous: LogitStats | None = None  # [R, ...] the loop before, by row, if a signal looks back

    def values(self, rows: Integers, loops: Integers, logits: Tensor) -> dict[str, NDArray[np.float64]]:
        """[n] each signal of these rows, which say logits [n, V] at this loop [n] of theirs."""
        index, parts = upload(rows, logits.device), []
        kept = self._allocated(int(rows.max()) + 1, logits) if self._looks_back else None
        for part in _rows(logits):
            previous = None if kept is None else LogitStats(*(each.index_select(0, index[part]) for each in kept))
            found, stats = logit_statistics(self._names, logits[part], previous)
            parts.append(torch.stack([found[name].to(stats.peak) for name in self._names]))
            if "settling" in self._names:  # what the row said before was another token
                first = torch.from_numpy(loops[part] == 1).to(logits.device)
                stats = stats._replace(step=stats.step.masked_fill(first, torch.nan))
            for each, new in zip(kept or (), stats, strict=False):
                each.index_copy_(0, index[part], new)
        table = torch.cat(parts, dim=1).cpu().numpy().astype(np.float64)
        return {name: _from_its_first(name, values, loops) for name, values in zip(self._names, table, strict=True)}

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


def _from_its_first(name: str, values: NDArray[np.float64], loops: Integers) -> NDArray[np.float64]:
    """The same, NaN at loops that have no value yet."""
    without = 0 if name not in _LOOKING_BACK else 2 if name == "settling" else 1
    check_finite(values[loops > without], "logits")
    return np.where(loops == 1, np.nan, values) if without else values


def _zero_missing(logits: Tensor, precise: torch.dtype, missing: bool) -> Tensor:
    """A copy in this precision, with 0 for a missing class."""
    values = logits.to(precise, copy=True)
    return values.masked_fill_(values.isneginf(), 0.0) if missing else values


def _block(logits: Tensor) -> int:
    return _BLOCK.get(logits.device.type, _MANY)


def _rows(logits: Tensor) -> Iterator[slice]:
    """The rows of [n, V] that are worked on together."""
    return _slices(len(logits), max(1, _block(logits) // logits.shape[1]))


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))


def _table(values: list[Tensor], loops: int) -> Array:
    """The loops of one part of the rows after the other, as one [n, T]."""
    parts = [torch.stack(values[first : first + loops], dim=1) for first in range(0, len(values), loops)]
    return torch.cat(parts).cpu().numpy()
