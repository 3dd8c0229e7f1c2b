"""How does a policy decide while the model runs? Loop by loop, on those that are still active, by the same definition.

An exit state keeps what the step of the policy's readout returned at the loop before, row by row, and nothing else: its
decisions are those of a replay of the same values.

Shapes: N active requests, T loops, V classes, D width.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError
from loopscope.exits.policy import ExitPolicy
from loopscope.exits.readouts import Readout, State, find_readout, readout_kind
from loopscope.exits.recorded_signals import class_counts
from loopscope.exits.signals import FITTED

Array = NDArray[Any]


class ExitState:
    """Follows some requests through their loops and says who exits; they may be at different loops."""

    def __init__(self, policy: ExitPolicy, num_loops: int) -> None:
        kind, readout = readout_kind(policy.readout), find_readout(policy.readout)
        if kind == "oracle":
            raise UserError("The oracle needs the labels, so it can be replayed but not run.")
        if policy.readout.startswith(FITTED) and policy.gate is None:
            raise UserError(f"To run with '{policy.readout}' the policy must carry that gate; give it with --gate.")
        if kind == "depth" and int(policy.threshold or 0) > num_loops:
            raise UserError(f"A fixed depth of {policy.threshold} is beyond the model's {num_loops} loops.")
        if readout is not None and readout.reads is None:
            raise UserError(
                f"The signal '{policy.readout}' only exists recorded, so its policy can be replayed but not run; give "
                "it a step, and say what it reads of a model."
            )
        self.policy, self.num_loops = policy, num_loops
        self.source = None if readout is None else "hidden" if policy.gate else readout.reads
        """What the decision needs of every request and loop: logits, hidden, gate_logits, predictions, or nothing."""
        self._rows = None if readout is None else RowStates(readout)

    def admit(self, count: int) -> None:
        """So many more requests, after those that are there, begin with the next loop."""
        if self._rows is not None:
            self._rows.admit(count)

    def keep(self, rows: Array) -> None:
        """Those where this mask is false are gone."""
        self.reorder(np.flatnonzero(rows))

    def reorder(self, order: Array) -> None:
        """They stand in another order from now on, those that were just admitted included."""
        if self._rows is not None:
            self._rows.take(order)

    def stops(
        self, loop: NDArray[np.int64], now: Array | None = None, values: NDArray[np.float64] | None = None
    ) -> NDArray[np.bool_]:
        """[N] who exits after this loop [N] of theirs, in which they said `now` [N, ...].

        Where the policy's signal is computed elsewhere, `values` [N] of it are all that is needed.
        """
        last = loop >= self.num_loops
        if self._rows is None:
            return last | (loop >= int(self.policy.threshold or 0))
        if values is None:
            assert now is not None
            values = self._rows.advance(self.policy.gate.halt_logits(now) if self.policy.gate else now)
        return last | self.policy.decide(values)


class RowStates:
    """What a readout's step returned at the loop before, for rows that come and go.

    Rows whose states have the same shapes are stepped together; those that are new have none. A question's logits go to
    the step as wide as it has choices, whoever runs beside it.
    """

    def __init__(self, readout: Readout) -> None:
        self._readout = readout
        self._groups: list[tuple[int | None, State]] = []  # the classes of their rows, and their states
        self._group: NDArray[np.int64] = np.empty(0, dtype=np.int64)  # [N] the group of each row, -1 where it is new
        self._place: NDArray[np.int64] = np.empty(0, dtype=np.int64)  # [N] and where it stands in it

    def admit(self, count: int) -> None:
        self._group = np.append(self._group, np.full(count, -1))
        self._place = np.append(self._place, np.zeros(count, dtype=np.int64))

    def take(self, order: Array) -> None:
        self._group, self._place = self._group[order], self._place[order]

    def advance(self, now: Array) -> NDArray[np.float64]:
        """[N] the signal of all rows, which say `now` [N, ...] at a loop of theirs."""
        assert len(now) == len(self._group)
        values = np.empty(len(now))
        parts: dict[Any, list[tuple[Array, State]]] = {}
        for rows, width, state in self._stepped_together(now):
            values[rows], after = self._readout.advance(now[rows] if width is None else now[rows, :width], state)
            shapes = None if after is None else tuple((each.shape[1:], each.dtype) for each in after)
            parts.setdefault((width, shapes), []).append((rows, after))
        if not self._readout.looks_back:
            return values
        self._groups = []
        for (width, _), group in parts.items():
            rows = np.concatenate([rows for rows, _ in group])
            states = [state for _, state in group if state is not None]
            self._group[rows], self._place[rows] = len(self._groups), np.arange(len(rows))
            self._groups.append((width, tuple(map(np.concatenate, zip(*states, strict=True))) if states else None))
        return values

    def _stepped_together(self, now: Array) -> list[tuple[Array, int | None, State]]:
        """Rows, how many classes they have (if that is what they say), and their states."""
        new = np.flatnonzero(self._group < 0)
        together: list[tuple[Array, int | None, State]] = []
        if self._readout.reads == "logits":
            widths = class_counts(now[new])
            together += [(new[widths == width], width, None) for width in np.unique(widths).tolist()]
        elif len(new):
            together.append((new, None, None))
        for number, (width, state) in enumerate(self._groups):
            rows = np.flatnonzero(self._group == number)
            if len(rows):
                place = self._place[rows]
                together.append((rows, width, None if state is None else tuple(each[place] for each in state)))
        return together
