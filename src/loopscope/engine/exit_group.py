"""Which of the rows under one policy exit now? What the policy reads of them, computed where the model is.

Shapes: n rows, V vocabulary, D width.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from loopscope.engine.logit_stats import (
    LOGIT_SIGNALS,
    StreamedSignals,
    check_answers,
    check_finite,
    check_logits,
    likeliest_classes,
)
from loopscope.errors import UserError
from loopscope.exits import ExitPolicy
from loopscope.exits.exit_state import ExitState
from loopscope.models import LoopedModel

Integers = NDArray[np.int64]


class ExitGroup:
    """The rows that are asked after every loop, in the order of the exit state."""

    def __init__(self, model: LoopedModel, policy: ExitPolicy) -> None:
        self._model, self._exit_state = model, ExitState(policy, model.num_loops)
        streamed = [name for name in self._exit_state.signals if name in LOGIT_SIGNALS]
        self._streamed = StreamedSignals(streamed) if streamed else None
        self._sources = self._exit_state.sources(streamed)
        self.policy = policy
        self.rows: Integers = np.empty(0, dtype=np.int64)

    @property
    def reads_logits(self) -> bool:
        """Whether the head is needed to decide."""
        return self._streamed is not None or not {"logits", "predictions"}.isdisjoint(self._sources)

    @property
    def first_exit(self) -> int:
        """The loop before which nobody exits."""
        return 1 if self._exit_state.signals or self._sources else int(self.policy.threshold or 1)

    def admit(self, rows: Integers) -> None:
        """These begin a token."""
        self.rows = np.concatenate((self.rows, rows))
        self._exit_state.admit(len(rows))

    def keep(self, kept: NDArray[np.bool_]) -> Integers:
        """Those where the mask is false are asked no more; who they are."""
        if kept.all():
            return self.rows[:0]
        gone, self.rows = self.rows[~kept], self.rows[kept]
        self._exit_state.keep(kept)
        return gone

    def exits(self, loops: Integers, logits: Tensor | None, pooled: Callable[[], Tensor]) -> NDArray[np.bool_]:
        """[n] who exits after this loop [n] of theirs; `logits` [n, V] where the policy reads them, `pooled()` [n, D]
        their states."""
        computed = {} if self._streamed is None or logits is None else self._streamed.values(self.rows, loops, logits)
        now, states = {}, None
        for source in self._sources:
            if source == "logits" and logits is not None:
                now[source] = check_logits(logits.float().cpu().numpy())
            elif source == "predictions" and logits is not None:
                now[source] = check_answers(likeliest_classes(logits).cpu().numpy())
            else:
                states = pooled() if states is None else states
                outputs = states if source == "hidden" else self._model.halt(states)
                if outputs is None:
                    raise UserError("The model has no gate, so it cannot be run with the readout 'gate'.")
                what = "states" if source == "hidden" else "halt logits"
                now[source] = check_finite(outputs.float().cpu().numpy(), what)
        return self._exit_state.stops(loops, now, computed)
