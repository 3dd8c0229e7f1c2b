"""How does a built-in signal go on from loop to loop? Its step: what a loop says, and what the step kept of the last.

The paper's signals are the vectorised definitions of `exits.signals`, here on a window of one or two loops. The others
are defined here and nowhere else: `patience`, `settling` and `hidden_acceleration`.

Shapes: N rows, each at a loop of its own, V classes, D width.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from loopscope.exits.signals import BELOW_ONE, Array, Signal, margin, present

State = tuple[Array, ...]
Stepped = tuple[Signal, State]

LARGEST_RATIO = 0.99
"""Steps that shrink more slowly than this, or grow, bound nothing; the bound stays finite, and very wide."""


def one_loop(compute: Callable[..., Signal]) -> Callable[[Array], Signal]:
    """A signal [N, T] of every loop by itself."""
    return lambda now: compute(now[:, None])[:, 0]


def two_loops(compute: Callable[..., Signal]) -> Callable[[Array, State | None], Stepped]:
    """A signal [N, T] that compares a loop with the one before."""

    def step(now: Array, state: State | None) -> Stepped:
        if state is None:
            return np.full(len(now), np.nan), (now,)
        return compute(np.stack((state[0], now), axis=1))[:, 1], (now,)

    return step


def running_cdf(gate_logits: Array, state: State | None) -> Stepped:
    """The exit CDF before loop T; that all that is left exits there is the policy's business."""
    so_far: Any = 0.0 if state is None else state[0]
    log_continue = so_far - np.logaddexp(0.0, gate_logits.astype(np.float64))
    return np.minimum(-np.expm1(log_continue), BELOW_ONE), (log_continue,)


def patience(answers: Array, state: State | None) -> Stepped:
    """For how many loops the answer has not changed: 0 at loop 1, and wherever it is not that of the loop before."""
    if state is None:
        return np.zeros(len(answers)), (answers, np.zeros(len(answers)))
    before, unchanged = state
    unchanged = np.where(answers == before, unchanged + 1, 0.0)
    return unchanged, (answers, unchanged)


def settling(logits: Array, state: State | None) -> Stepped:
    """The margin minus twice what the loops to come can still change of a logit: above 0, no answer is overturned.

    If every step of the logits is at most r times the one before, those after d_t add up to d_t r / (1 - r); r is the
    ratio of the last two, d the largest change of a logit. An answer falls only where its own logit sinks and another
    rises, hence twice. NaN until there are two steps.
    """
    if state is None:
        nothing = np.full(len(logits), np.nan)
        return nothing, (logits, nothing)
    before, last_step = state
    step = np.abs(present(logits).astype(np.float64) - present(before)).max(axis=-1)
    return margin(logits) - 2 * remaining_change(step, last_step), (logits, step)


def remaining_change(step: Signal, last_step: Signal) -> Signal:
    """[N] the geometric bound on what comes after a step; nothing after a step of 0, NaN without one before it."""
    with np.errstate(divide="ignore"):
        ratio = np.divide(step, last_step, out=np.where(np.isnan(last_step), np.nan, 0.0), where=step > 0)
    ratio = np.minimum(ratio, LARGEST_RATIO)
    return step * (ratio / (1 - ratio))


def hidden_acceleration(hidden: Array, state: State | None) -> Stepped:
    """|r_t - 2 r_{t-1} + r_{t-2}|: how much the step of the state changes. NaN until there are two steps."""
    states = hidden.astype(np.float64)
    if state is None:
        return np.full(len(hidden), np.nan), (states, np.full_like(states, np.nan))
    before, last_step = state
    step = states - before
    bend = step - last_step
    return np.sqrt(np.einsum("nd,nd->n", bend, bend)), (states, step)
