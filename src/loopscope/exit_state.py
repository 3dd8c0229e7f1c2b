"""How does a policy decide while the model runs? Loop by loop, for the active requests, exactly as in a replay.

An exit state keeps one thing per row: the value that the policy's readout returned at the loop before. It decides as a
replay of the same values does.

Shapes: N active requests, T loops, V classes, D width.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError
from loopscope.learned.fitted_gate import FittedGate
from loopscope.learned.stopper import Stopper, readout_for_stopper
from loopscope.policy import ExitPolicy
from loopscope.readouts.readout import NOT_LIVE, Readout, required_readout
from loopscope.readouts.replay import class_counts
from loopscope.readouts.signals import FITTED, STOPPER, State

Array = NDArray[Any]


def check_drafts(policy: ExitPolicy, num_loops: int) -> None:
    """Reject a policy under which lossless text would have no drafts."""
    if policy.fixed_depth == num_loops:
        raise UserError(
            "Lossless text needs a policy that lets tokens exit early, since those are its drafts; full depth drafts "
            "nothing. Give a policy, a readout with its threshold, or fewer loops."
        )


class ExitState:
    """Follow requests through their loops in a running model, and decide which of them exit."""

    def __init__(self, policy: ExitPolicy, num_loops: int) -> None:
        definition = required_readout(policy.readout)
        if definition.reads in NOT_LIVE:
            raise UserError(
                f"'{policy.readout}' needs the labels, or only exists recorded, so its policy can be replayed but not "
                "run; give a readout that has a step and says what it reads of a model."
            )
        if policy.readout.startswith(FITTED) and policy.gate is None:
            what = "stopper" if policy.readout.startswith(STOPPER) else "gate"
            raise UserError(f"To run with '{policy.readout}' the policy must carry that {what}; give it with --fitted.")
        policy.check_depth(num_loops)
        self.policy, self.num_loops = policy, num_loops
        self._stopper: RowStates | None = None
        followed: dict[str, Readout] = {policy.readout: definition}
        if isinstance(policy.gate, Stopper):
            followed = {name: readout_for_stopper(name) for name in policy.gate.signals}
            self._stopper = RowStates(policy.gate.readout())
        self._signals = {name: RowStates(each) for name, each in followed.items()}
        self._sources: dict[str, str] = {name: str(each.reads) for name, each in followed.items()}
        if isinstance(policy.gate, FittedGate):
            self._sources = {policy.readout: "hidden"}

    @property
    def signals(self) -> tuple[str, ...]:
        """The signals that the decision needs of every request and loop: the policy's own, or its stopper's."""
        return tuple(name for name, source in self._sources.items() if source != "loop")

    def sources(self, computed: Collection[str] = ()) -> tuple[str, ...]:
        """The sources of these signals (such as logits or hidden), without signals in `computed`."""
        return tuple(dict.fromkeys(self._sources[name] for name in self.signals if name not in computed))

    def admit(self, count: int) -> None:
        """Admit this many new requests behind the current ones; they begin with the next loop."""
        for rows in self._followed:
            rows.admit(count)

    def reorder(self, order: Array) -> None:
        """Put the requests into another order, new ones included; requests that `order` lacks are dropped."""
        for rows in self._followed:
            rows.take(order)

    @property
    def _followed(self) -> list["RowStates"]:
        return [*self._signals.values(), *([] if self._stopper is None else [self._stopper])]

    def stops(
        self,
        loop: NDArray[np.int64],
        now: Mapping[str, Array] | None = None,
        computed: Mapping[str, NDArray[np.float64]] | None = None,
    ) -> NDArray[np.bool_]:
        """[N] whether each request exits after its loop [N], from the values `now`, [N, ...] per source.

        Signals that are computed elsewhere, [N] each, are given by their names.
        """
        inputs = {"loop": loop, **(now or {})}
        values = {**(computed or {})}
        gate = self.policy.gate
        for name, rows in self._signals.items():
            if name not in values:
                output = inputs[self._sources[name]]
                values[name] = rows.advance(gate.halt_logits(output) if isinstance(gate, FittedGate) else output)
        decisive = values.get(self.policy.readout)
        if self._stopper is not None:
            decisive = self._stopper.advance(np.stack([values[name] for name in self._signals], axis=1))
        assert decisive is not None
        return (loop >= self.num_loops) | self.policy.decide(decisive)


class RowStates:
    """The state of a readout's step for rows that come and go: its value at the loop before.

    Rows whose states have the same shapes are stepped together; those that are new have none. A question's logits go to
    the step as wide as it has choices, whoever runs beside it.
    """

    def __init__(self, readout: Readout) -> None:
        self._readout = readout
        self._groups: list[tuple[int | None, State | None]] = []  # the classes of their rows, and their states
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
        parts: dict[Any, list[tuple[Array, State | None]]] = {}
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

    def _stepped_together(self, now: Array) -> list[tuple[Array, int | None, State | None]]:
        """Rows, how many classes they have (if that is what they say), and their states."""
        new = np.flatnonzero(self._group < 0)
        together: list[tuple[Array, int | None, State | None]] = []
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
