"""How is each built-in signal computed? One number for every example and loop, causal: from loops up to this one.

Confidence: entropy, top1, margin. Convergence: kl, logit_change, hidden_change, hidden_cosine, which compare a loop
with the one before and are NaN at loop 1. Learned: gate, the exit CDF, and gate:NAME, that of a fitted gate. These are
the paper's, vectorised over examples and loops; as steps from loop to loop they are the same lines on a window of one
or two loops. The others are defined as steps: patience, settling, hidden_acceleration, and halting, which is the own
gate's signal of a model that was trained with ACT. All are computed in float64:
near convergence, float32 would leave only rounding noise of a KL or an entropy. A missing class (-inf) counts in none.

Shapes: N examples (in a step: rows, each at a loop of its own), T loops, V classes, D width.
"""

from collections.abc import Callable, Collection
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, log_softmax

Array = NDArray[Any]
Signal = NDArray[np.float64]
Source = Literal["logits", "hidden", "gate_logits", "predictions", "loop", "correct"]
"""What a signal can be computed from: what a model says at a loop, the number of the loop, or whether it is right."""
State = tuple[Array, ...]
Stepped = tuple[Signal, State]

CONVERGENCE = ("kl", "logit_change", "hidden_change", "hidden_cosine")
FITTED_GATE, STOPPER = "gate:", "stopper:"
"""How the signal and the readout of a fitted gate, or of a learned stopper, begin; the rest is its own name."""
FITTED = (FITTED_GATE, STOPPER)
BELOW_ONE = np.nextafter(1.0, 0.0)
OWN_GATES = ("gate", "halting")
"""Signals of a model's own gate: of most, and of one that was trained with ACT. A model has one of them."""
HALTED = 0.99
"""ACT halts where its halt probabilities add up to this."""
_CHUNK = 1 << 17
"""Numbers that are worked on at a time, so that they stay in the cache."""
LARGEST_RATIO = 0.99
"""Steps that shrink more slowly than this, or grow, bound nothing; the bound stays finite, and very wide."""


def is_gate(name: str) -> bool:
    """Whether a readout is an exit CDF: of the model's own gate, or of a fitted gate."""
    return name in OWN_GATES or name.startswith(FITTED_GATE)


def own_gate(names: Collection[str]) -> str | None:
    """The readout of the model's own gate among these; None if there is none."""
    return next((name for name in OWN_GATES if name in names), None)


def own_name(readout: str) -> str:
    """The name of a fitted gate or a stopper, without `gate:` or `stopper:`."""
    return readout.partition(":")[2]


def entropy(logits: Array) -> Signal:
    """The signal `entropy`: of the class probabilities at a loop."""
    log_p = log_probs(logits)
    return np.maximum(-np.einsum("...v,...v->...", np.exp(log_p), present(log_p)), 0.0)


def top1(logits: Array) -> Signal:
    """The signal `top1`: the largest class probability."""
    return np.exp(log_probs(logits).max(axis=-1))


def margin(logits: Array) -> Signal:
    """The signal `margin`: the largest logit minus the second-largest."""
    two = np.partition(logits, logits.shape[-1] - 2, axis=-1)[..., -2:]
    return two[..., 1].astype(np.float64) - two[..., 0]


def kl(logits: Array) -> Signal:
    """KL(p_t || p_{t-1})."""
    log_p = log_probs(logits)
    p = np.exp(log_p[:, 1:])
    log_p = present(log_p)
    divergence = np.einsum("ntv,ntv->nt", p, log_p[:, 1:] - log_p[:, :-1])
    return _from_loop_2(np.maximum(divergence, 0.0))


def logit_change(logits: Array) -> Signal:
    """The signal `logit_change`: how far the logits moved since the loop before."""
    return hidden_change(present(logits))


def hidden_change(hidden: Array) -> Signal:
    """The signal `hidden_change`: how far the hidden state moved since the loop before."""
    step = hidden[:, 1:].astype(np.float64) - hidden[:, :-1]
    return _from_loop_2(_vector_norm(step))


def hidden_cosine(hidden: Array) -> Signal:
    """The signal `hidden_cosine`: 1 - cos(r_t, r_{t-1})."""
    states = hidden.astype(np.float64)
    norms = _vector_norm(states)
    products = np.einsum("ntd,ntd->nt", states[:, 1:], states[:, :-1])
    scale = np.maximum(norms[:, 1:] * norms[:, :-1], np.finfo(np.float64).tiny)
    return _from_loop_2(np.maximum(1.0 - products / scale, 0.0))


def exit_cdf(gate_logits: Array) -> Signal:
    """The signal `gate`: the probability of an exit by loop t; the rest exits at loop T.

    Before T the CDF is below 1 however large the halt logits are; where float64 would round it up, it stays just
    below, so that a threshold of 1 means loop T.
    """
    log_continue = -np.logaddexp(0.0, gate_logits[:, :-1].astype(np.float64))
    cdf = np.ones(gate_logits.shape)
    cdf[:, :-1] = np.minimum(-np.expm1(log_continue.cumsum(axis=1)), BELOW_ONE)
    return cdf


SIGNALS: dict[str, tuple[Source, Callable[..., Signal]]] = {
    "gate": ("gate_logits", exit_cdf),
    "entropy": ("logits", entropy),
    "top1": ("logits", top1),
    "margin": ("logits", margin),
    "kl": ("logits", kl),
    "logit_change": ("logits", logit_change),
    "hidden_change": ("hidden", hidden_change),
    "hidden_cosine": ("hidden", hidden_cosine),
}
"""The source and the function of each of the paper's signals."""


def as_defined(name: str, values: Signal) -> Signal:
    """Give a recorded signal the conventions of a computed one, such as NaN at loop 1."""
    if name in CONVERGENCE:
        values[:, 0] = np.nan
    if is_gate(name):
        values[:, :-1] = np.minimum(values[:, :-1], BELOW_ONE)
        values[:, -1] = 1.0
    return values


def by_chunks(compute: Callable[[Array], Signal], values: Array) -> Signal:
    """Compute a signal some rows at a time, so that the numbers stay in the cache."""
    rows, loops = values.shape[:2]
    size = max(1, _CHUNK * rows // max(values.size, 1))
    result = np.empty((rows, loops))
    for start in range(0, rows, size):
        result[start : start + size] = compute(values[start : start + size])
    return result


def log_probs(logits: Array) -> Signal:
    """Log-probabilities of logits, in float64."""
    return np.asarray(log_softmax(logits.astype(np.float64), axis=-1))


def present(values: Array) -> Array:
    """Replace the logits of missing classes by 0: their probability is 0 at every loop."""
    missing = np.isneginf(values)
    return np.where(missing, 0.0, values) if missing.any() else values


def _vector_norm(vectors: Signal) -> Signal:
    """The Euclidean norm of each vector."""
    return np.sqrt(np.einsum("ntd,ntd->nt", vectors, vectors))


def _from_loop_2(changes: Signal) -> Signal:
    """Put NaN before a signal that begins at loop 2."""
    return np.concatenate((np.full((len(changes), 1), np.nan), changes), axis=1)


def one_loop(compute: Callable[..., Signal]) -> Callable[[Array], Signal]:
    """Make a signal [N, T] from a function of one loop."""
    return lambda now: compute(now[:, None])[:, 0]


def two_loops(compute: Callable[..., Signal]) -> Callable[[Array, State | None], Stepped]:
    """Make the step of a signal that compares a loop with the one before."""

    def step(now: Array, state: State | None) -> Stepped:
        if state is None:
            return np.full(len(now), np.nan), (now,)
        return compute(np.stack((state[0], now), axis=1))[:, 1], (now,)

    return step


def running_cdf(gate_logits: Array, state: State | None) -> Stepped:
    """The step of `gate`: the exit CDF before loop T."""
    so_far: Any = 0.0 if state is None else state[0]
    log_continue = so_far - np.logaddexp(0.0, gate_logits.astype(np.float64))
    return np.minimum(-np.expm1(log_continue), BELOW_ONE), (log_continue,)


def halting(gate_logits: Array, state: State | None) -> Stepped:
    """The step of `halting`: the sum of halt probabilities, as ACT exits by it."""
    so_far: Any = 0.0 if state is None else state[0]
    spent = so_far + expit(gate_logits.astype(np.float64))
    return np.where(spent >= HALTED, BELOW_ONE, spent), (spent,)


def patience(answers: Array, state: State | None) -> Stepped:
    """The step of `patience`: for how many loops the answer has not changed; 0 at loop 1."""
    if state is None:
        return np.zeros(len(answers)), (answers, np.zeros(len(answers)))
    before, unchanged = state
    unchanged = np.where(answers == before, unchanged + 1, 0.0)
    return unchanged, (answers, unchanged)


def settling(logits: Array, state: State | None) -> Stepped:
    """The step of `settling`: the margin minus twice the most that later loops can change a logit.

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
    """[N] the geometric bound on the changes after a step; 0 after a step of 0, NaN without an earlier step."""
    with np.errstate(divide="ignore"):
        ratio = np.divide(step, last_step, out=np.where(np.isnan(last_step), np.nan, 0.0), where=step > 0)
    ratio = np.minimum(ratio, LARGEST_RATIO)
    return step * (ratio / (1 - ratio))


def hidden_acceleration(hidden: Array, state: State | None) -> Stepped:
    """The step of `hidden_acceleration`: |r_t - 2 r_{t-1} + r_{t-2}|; NaN until there are two steps."""
    states = hidden.astype(np.float64)
    if state is None:
        return np.full(len(hidden), np.nan), (states, np.full_like(states, np.nan))
    before, last_step = state
    step = states - before
    bend = step - last_step
    return np.sqrt(np.einsum("nd,nd->n", bend, bend)), (states, step)
