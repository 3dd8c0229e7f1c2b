"""Which rows exit after this loop? Rows, questions, text and vLLM use one `ExitDecision`.

Shapes: n rows, N rows of all decisions, V vocabulary, D width.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.engine.logit_signals import (
    LOGIT_SIGNALS,
    Array,
    Integers,
    StreamedSignals,
    check_answers,
    check_finite,
    check_logits,
    likeliest_classes,
)
from loopscope.errors import UserError
from loopscope.exit_state import ExitState
from loopscope.models.device import accumulator, to_host
from loopscope.models.looped_model import LoopedModel
from loopscope.policy import NEVER, ExitPolicy
from loopscope.readouts.readout import required_readout
from loopscope.scope import Scope


class ExitDecision:
    """Decide which of the rows under one policy exit; the rows may be at different loops.

    With `on_device`, LoopScope computes signals of logits on the model's device, as for the recording of a text.
    Without it, it computes them on the host, by the same steps as a replay.
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
        self.first_exit = followed.fixed_depth or 1  # no row can exit before this loop, so the signal is not computed
        self.rows: Integers = np.empty(0, dtype=np.int64)  # [n] the caller's indices of the followed rows

    def admit(self, rows: Integers) -> None:
        """Follow these rows, which begin with the next loop."""
        self.rows = np.concatenate((self.rows, rows))
        self._state.admit(len(rows))

    def reorder(self, order: Integers) -> None:
        self.rows = self.rows[order]
        self._state.reorder(order)

    def keep(self, kept: NDArray[np.bool_]) -> Integers:
        """Stop following the rows where the mask is false, and return them."""
        gone = self.rows[~kept]
        if len(gone):
            self.reorder(np.flatnonzero(kept))
        return gone

    def exits(self, loops: Integers, logits: Tensor | Array | None, pooled: Callable[[], Tensor]) -> NDArray[np.bool_]:
        """[n] which rows exit after their loop [n].

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
        """[n, ...] the values of a source at the rows' loop: logits, predictions, hidden states or halt logits."""
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
    """Hold the rows that one decision reads after a loop, with their logits."""

    decision: ExitDecision
    loops: Integers  # [n]
    logits: Tensor  # [n, V]
    pooled: Callable[[], Tensor]  # [n, D]


def exits_and_answers(readers: Sequence[DecisionRows], logits: Tensor) -> tuple[list[NDArray[np.bool_]], Integers]:
    """For each decision [n] which of its rows exit, and the likeliest class of all rows' `logits` [N, V].

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
    """Whether no value can meet the policy's threshold, so that no signal needs to be computed."""
    above = required_readout(policy.readout).exits == "above"
    return policy.threshold is not None and (policy.threshold if above else -policy.threshold) >= NEVER


def check_executable(model: LoopedModel, policy: ExitPolicy, num_loops: int, here: Scope) -> None:
    """Reject a policy of a different model or kind of decisions, and a policy that can only be replayed."""
    tied = policy.model is not None or policy.gate is not None  # else the model's slow hash is not needed
    policy.check(model.weights_sha256 if tied else None, num_loops, here)
    ExitState(policy, num_loops)
