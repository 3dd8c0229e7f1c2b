"""How does a policy decide while the model runs? Loop by loop, on those that are still active, from the same functions.

An exit state keeps what its signal looks back on (the loop before, or all halt logits so far) and nothing else, so its
decisions are those of a replay of the same values.

Shapes: N active requests, T loops, V classes, D width.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError
from loopscope.exits.policy import ExitPolicy
from loopscope.exits.readouts import readout_kind
from loopscope.exits.signals import CONVERGENCE, FITTED, SIGNALS, exit_cdf, is_gate

Array = NDArray[Any]


class ExitState:
    """Follows some requests through their loops and says who exits; they may be at different loops."""

    def __init__(self, policy: ExitPolicy, num_loops: int) -> None:
        kind = readout_kind(policy.readout)
        if kind == "oracle":
            raise UserError("The oracle needs the labels, so it can be replayed but not run.")
        if policy.readout.startswith(FITTED) and policy.gate is None:
            raise UserError(f"To run with '{policy.readout}' the policy must carry that gate; give it with --gate.")
        if kind == "depth" and int(policy.threshold or 0) > num_loops:
            raise UserError(f"A fixed depth of {policy.threshold} is beyond the model's {num_loops} loops.")
        self.policy, self.num_loops = policy, num_loops
        self.source = None if kind == "depth" else "hidden" if policy.gate else SIGNALS[policy.readout][0]
        """What the decision needs of every request and loop: logits, hidden, gate_logits, or nothing."""
        self._before: Array | None = None  # [N, ...] the loop before (NaN at loop 1), or [N, T] all halt logits so far
        self._new = 0

    def admit(self, count: int) -> None:
        """So many more requests, after those that are there, begin with the next loop."""
        self._new += count

    def keep(self, rows: Array) -> None:
        """Those where this mask is false are gone."""
        if self._before is not None:
            self._before = self._before[rows]

    def reorder(self, order: Array) -> None:
        """They stand in another order from now on, those that were just admitted included."""
        if self._before is None:
            return
        new = np.full((self._new, self._before.shape[1]), 0.0 if is_gate(self.policy.readout) else np.nan)
        self._before, self._new = np.concatenate((self._before, new.astype(self._before.dtype)))[order], 0

    def stops(
        self, loop: NDArray[np.int64], now: Array | None = None, values: NDArray[np.float64] | None = None
    ) -> NDArray[np.bool_]:
        """[N] who exits after this loop [N] of theirs, in which they said `now` [N, ...].

        Where the policy's signal is computed elsewhere, `values` [N] of it are all that is needed.
        """
        last = loop >= self.num_loops
        if self.source is None:
            return last | (loop >= int(self.policy.threshold or 0))
        if values is None:
            assert now is not None
            values = self.values(loop, now)
        return last | self.policy.decide(values)

    def values(self, loop: NDArray[np.int64], now: Array) -> NDArray[np.float64]:
        """[N] the policy's signal at this loop."""
        readout, new = self.policy.readout, self._new
        self._new = 0
        if is_gate(readout):
            history = _extended(self._before, new, self.num_loops, 0.0, np.float64)
            history[np.arange(len(loop)), loop - 1] = self.policy.gate.halt_logits(now) if self.policy.gate else now
            self._before = history
            return exit_cdf(history)[np.arange(len(loop)), loop - 1]
        compute = SIGNALS[readout][1]
        if readout not in CONVERGENCE:
            return compute(now[:, None])[:, 0]
        width = now.shape[1] if self._before is None else max(now.shape[1], self._before.shape[1])
        now = _widened(now, width)
        before = _extended(self._before, new, width, np.nan)
        self._before = now
        return compute(np.stack((before, now), axis=1))[:, 1]


def _extended(values: Array | None, count: int, width: int, fill: float, dtype: type = np.float32) -> Array:
    more: Array = np.full((count, width), fill, dtype=dtype)
    return more if values is None else np.concatenate((_widened(values, width), more))


def _widened(values: Array, width: int) -> Array:
    """Questions with more choices came or went: those that an example does not have are -inf."""
    missing = width - values.shape[1]
    return np.pad(values, ((0, 0), (0, missing)), constant_values=-np.inf) if missing else values
