"""Which rows exit after this loop? Rows, questions, text and vLLM ask one `ExitDecision`.

A policy's signals of logits over a whole vocabulary are computed where the logits are: tens of thousands of classes
stay on the model's device, and one number of every row and loop leaves it. The definitions are those of
`exits.signals`, in float64 where the device has it. All are sums over the classes, taken block by block: so many
numbers in double precision would not fit a processor's cache, nor, with many rows, the memory.

Shapes: n rows, R rows that are followed, T loops, V vocabulary, D width.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.errors import UserError
from loopscope.exit_state import ExitState
from loopscope.models.device import accumulator, upload
from loopscope.models.looped_model import LoopedModel
from loopscope.policy import NEVER, ExitPolicy
from loopscope.readouts.readout import required_readout
from loopscope.readouts.signals import CONVERGENCE, LARGEST_RATIO, SIGNALS
from loopscope.scope import Scope

Array = NDArray[Any]
Integers = NDArray[np.int64]

LOGIT_SIGNALS = (*(name for name, (source, _) in SIGNALS.items() if source == "logits"), "settling")
"""The signals that are computed on the device; a custom readout is computed on the host, by its step."""
_LOOKING_BACK = {*CONVERGENCE, "settling"}
NO_ANSWER = -1
"""In the place of a class where logits are not finite: it is fetched with the classes, so that nobody waits for it."""
_CACHED_LOGITS = 1 << 15
"""Logits that a processor works on at a time: as many as its cache holds."""
_DEVICE_LOGITS = 1 << 24


class ExitDecision:
    """Decides which of the rows under one policy exit; they may be at different loops.

    `on_device` computes signals of logits on the model's device, as a text's recording does. Without it they are
    computed on the host, by the very steps that a replay takes.
    """

    def __init__(
        self, model: LoopedModel, policy: ExitPolicy, num_loops: int | None = None, on_device: bool = True
    ) -> None:
        self._model, self.policy = model, policy
        followed = ExitPolicy("fixed", num_loops or model.num_loops) if _never_exits(policy) else policy
        self._state = ExitState(followed, num_loops or model.num_loops)
        streamed = [name for name in self._state.signals if on_device and name in LOGIT_SIGNALS]
        self._streamed = StreamedSignals(streamed) if streamed else None
        self._sources = self._state.sources(streamed)
        self.reads_logits = bool(streamed) or not {"logits", "predictions"}.isdisjoint(self._sources)
        self.first_exit = followed.fixed_depth or 1  # the loop before which nobody exits, so that nobody is asked
        self.rows: Integers = np.empty(0, dtype=np.int64)  # [n] who is asked, by numbers of the caller's

    def admit(self, rows: Integers) -> None:
        """These rows begin with the next loop."""
        self.rows = np.concatenate((self.rows, rows))
        self._state.admit(len(rows))

    def reorder(self, order: Integers) -> None:
        self.rows = self.rows[order]
        self._state.reorder(order)

    def keep(self, kept: NDArray[np.bool_]) -> Integers:
        """Forgets the rows where the mask is false, and returns them."""
        gone = self.rows[~kept]
        if len(gone):
            self.reorder(np.flatnonzero(kept))
        return gone

    def exits(self, loops: Integers, logits: Tensor | Array | None, pooled: Callable[[], Tensor]) -> NDArray[np.bool_]:
        """[n] which rows exit after this loop [n] of theirs.

        `logits` [n, V] are given if the decision reads them; `pooled()` are the rows' states [n, D].
        """
        if not len(self.rows):
            return np.empty(0, dtype=bool)
        computed = {}
        if self._streamed is not None:
            assert isinstance(logits, Tensor)
            computed = self._streamed.values(self.rows, loops, logits)
        return self._decide(loops, computed, logits, pooled)

    def _decide(
        self, loops: Integers, computed: dict[str, Array], logits: Tensor | Array | None, pooled: Callable[[], Tensor]
    ) -> NDArray[np.bool_]:
        states = None if {"hidden", "gate_logits"}.isdisjoint(self._sources) else pooled()
        now = {source: self._read(source, logits, states) for source in self._sources}
        return self._state.stops(loops, now, computed)

    def _read(self, source: str, logits: Any, states: Any) -> Array:
        """[n, ...] what the rows say now: logits, the classes that these answer, states or halt logits."""
        if source == "predictions" and isinstance(logits, Tensor):
            return check_answers(likeliest_classes(logits).cpu().numpy())
        if source in ("logits", "predictions"):
            values = check_logits(to_host(logits) if isinstance(logits, Tensor) else logits)
            return values if source == "logits" else values.argmax(axis=-1)
        if source == "hidden":
            return check_finite(to_host(states), "states")
        halt_logits = self._model.halt(states)
        if halt_logits is None:
            raise UserError("The model has no gate, so it cannot be run with the readout 'gate'.")
        return check_finite(to_host(halt_logits), "halt logits")


class DecisionRows(NamedTuple):
    """The rows of a decision, and what they have come to."""

    decision: ExitDecision
    loops: Integers  # [n]
    logits: Tensor  # [n, V]
    pooled: Callable[[], Tensor]  # [n, D]


def exits_and_answers(readers: Sequence[DecisionRows], logits: Tensor) -> tuple[list[NDArray[np.bool_]], Integers]:
    """For each of these [n] which of its rows exit, and the likeliest class by all `logits` [N, V].

    Signals and classes leave the device together: the host waits once.
    """
    if not len(logits):
        return [np.empty(0, dtype=bool)] * len(readers), np.empty(0, dtype=np.int64)
    tables = [
        None if decision._streamed is None or not len(loops) else decision._streamed.table(decision.rows, loops, own)
        for decision, loops, own, _ in readers
    ]
    parts = [likeliest_classes(logits).to(accumulator(logits.device))]
    parts += [table.flatten() for table in tables if table is not None]
    fetched = (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu().numpy()
    first, exits = len(logits), []
    for table, (decision, loops, own, pooled) in zip(tables, readers, strict=True):
        if table is None or decision._streamed is None:
            exits.append(decision.exits(loops, own, pooled))
        else:
            values = fetched[first : first + table.numel()].reshape(table.shape)
            exits.append(decision._decide(loops, decision._streamed.by_name(values, loops), own, pooled))
            first += table.numel()
    return exits, fetched[: len(logits)].astype(np.int64)


def _never_exits(policy: ExitPolicy) -> bool:
    """Whether no value meets the threshold: then nothing is computed to compare with it."""
    above = required_readout(policy.readout).exits == "above"
    return policy.threshold is not None and (policy.threshold if above else -policy.threshold) >= NEVER


def check_executable(model: LoopedModel, policy: ExitPolicy, num_loops: int, here: Scope) -> None:
    """Rejects a policy of another model or kind of decisions, and one that can only be replayed."""
    tied = policy.model is not None or policy.gate is not None  # else nobody needs the hash, which takes a while
    policy.check(model.weights_sha256 if tied else None, num_loops, here)
    ExitState(policy, num_loops)


def to_host(values: Tensor) -> Array:
    return values.float().cpu().numpy()


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
    check_finite(np.where(classes == NO_ANSWER, np.nan, 0.0), "logits")
    return classes


def check_logits(logits: Array) -> Array:
    """[..., V] the same, if every row has a largest logit that is finite."""
    check_finite(logits.max(axis=-1), "logits")
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
    parts = []
    for rows in _rows(logits[0]):
        stats, loops = None, []
        for now in logits[:, rows]:
            signals, stats = logit_statistics((*LOGIT_SIGNALS, "predictions"), now, stats)
            label = stats.logits.gather(1, labels[rows, None])[:, 0]
            loops.append(signals | {"label_log_probs": label - stats.peak - stats.log_sum})
        parts.append({name: torch.stack([loop[name] for loop in loops], dim=1) for name in loops[0]})
    return {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}


class StreamedSignals:
    """Some of these signals, of rows that are followed loop by loop."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._looks_back = not _LOOKING_BACK.isdisjoint(names)
        self._previous: LogitStats | None = None  # [R, ...] the loop before, by row, if a signal looks back

    def values(self, rows: Integers, loops: Integers, logits: Tensor) -> dict[str, NDArray[np.float64]]:
        """[n] each signal of these rows, which say logits [n, V] at this loop [n] of theirs."""
        return self.by_name(self.table(rows, loops, logits).cpu().numpy(), loops)

    def table(self, rows: Integers, loops: Integers, logits: Tensor) -> Tensor:
        """[signals, n] of these rows, which say logits [n, V] at this loop [n] of theirs; still on the device."""
        index, parts = upload(rows, logits.device), []
        kept = self._allocated(int(rows.max()) + 1, logits) if self._looks_back else None
        for part in _rows(logits):
            previous = None if kept is None else LogitStats(*(each.index_select(0, index[part]) for each in kept))
            found, stats = logit_statistics(self._names, logits[part], previous)
            parts.append(torch.stack([found[name].to(stats.peak) for name in self._names]))
            if "settling" in self._names:  # what the row said before was another token
                first = upload(loops[part] == 1, logits.device)
                stats = stats._replace(step=stats.step.masked_fill(first, torch.nan))
            for each, new in zip(kept or (), stats, strict=False):
                each.index_copy_(0, index[part], new)
        return torch.cat(parts, dim=1)

    def by_name(self, table: Array, loops: Integers) -> dict[str, NDArray[np.float64]]:
        """[n] each signal, of a table that was fetched."""
        values = zip(self._names, table.astype(np.float64), strict=True)
        return {name: _from_its_first(name, row, loops) for name, row in values}

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
    return _CACHED_LOGITS if logits.device.type == "cpu" else _DEVICE_LOGITS


def _rows(logits: Tensor) -> Iterator[slice]:
    """The rows of [n, V] that are worked on together."""
    return _slices(len(logits), max(1, _block(logits) // logits.shape[1]))


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))
