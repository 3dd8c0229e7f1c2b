"""Which signals has the paper? One number for every example and loop, vectorised over both.

Confidence: entropy, top1, margin. Convergence: kl, logit_change, hidden_change, hidden_cosine, which compare a loop
with the one before and are NaN at loop 1. Learned: gate, the exit CDF, and gate:NAME, that of a fitted gate. All are
causal (the value at loop t uses loops <= t only; the convergence signals look back one loop) and computed in float64:
near convergence, float32 would leave only rounding noise of a KL or an entropy. A missing class (-inf) counts in none.

Shapes: N examples, T loops, V classes, D width.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

Array = NDArray[Any]
Signal = NDArray[np.float64]
Source = Literal["logits", "hidden", "gate_logits", "predictions"]
"""What a signal can be computed from."""

CONVERGENCE = ("kl", "logit_change", "hidden_change", "hidden_cosine")
FITTED_GATE, STOPPER = "gate:", "stopper:"
"""How the signal and the readout of a fitted gate, or of a learned stopper, begin; the rest is its own name."""
FITTED = (FITTED_GATE, STOPPER)
BELOW_ONE = np.nextafter(1.0, 0.0)
_CHUNK = 1 << 17
"""Numbers that are worked on at a time, so that they stay in the cache."""


def is_gate(name: str) -> bool:
    """Whether this is an exit CDF: of the model's own gate, or of a fitted one."""
    return name == "gate" or name.startswith(FITTED_GATE)


def own_name(readout: str) -> str:
    """Of a fitted gate or a stopper: its name without `gate:` or `stopper:`."""
    return readout.partition(":")[2]


def entropy(logits: Array, log_p: Signal | None = None) -> Signal:
    log_p = log_probs(logits) if log_p is None else log_p
    p = np.exp(log_p)
    return _nonnegative(-np.einsum("...v,...v->...", p, present(log_p)))


def top1(logits: Array, log_p: Signal | None = None) -> Signal:
    log_p = log_probs(logits) if log_p is None else log_p
    return np.exp(log_p.max(axis=-1))


def margin(logits: Array) -> Signal:
    """The largest logit minus the second-largest."""
    two = np.partition(logits, logits.shape[-1] - 2, axis=-1)[..., -2:]
    return two[..., 1].astype(np.float64) - two[..., 0]


def kl(logits: Array, log_p: Signal | None = None) -> Signal:
    """KL(p_t || p_{t-1})."""
    log_p = log_probs(logits) if log_p is None else log_p
    p = np.exp(log_p[:, 1:])
    log_p = present(log_p)
    return _from_loop_2(_nonnegative(np.einsum("ntv,ntv->nt", p, log_p[:, 1:] - log_p[:, :-1])))


def logit_change(logits: Array) -> Signal:
    return hidden_change(present(logits))


def hidden_change(hidden: Array) -> Signal:
    step = hidden[:, 1:].astype(np.float64) - hidden[:, :-1]
    return _from_loop_2(_norm(step))


def hidden_cosine(hidden: Array) -> Signal:
    """1 - cos(r_t, r_{t-1})."""
    states = hidden.astype(np.float64)
    norms = _norm(states)
    products = np.einsum("ntd,ntd->nt", states[:, 1:], states[:, :-1])
    scale = np.maximum(norms[:, 1:] * norms[:, :-1], np.finfo(np.float64).tiny)
    return _from_loop_2(_nonnegative(1.0 - products / scale))


def exit_cdf(gate_logits: Array) -> Signal:
    """The probability of having exited by loop t; all that is left exits at T, and not a bit of it before.

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
"""What each of the paper's signals is computed from, and how; `exits.steps` has the others."""

OF_LOG_PROBS = ("entropy", "top1", "kl")
"""These take the log-probabilities as a second argument, if they are there already."""


def as_defined(name: str, values: Signal) -> Signal:
    """A signal that came with a recording, held to the same conventions as one computed here."""
    if name in CONVERGENCE:
        values[:, 0] = np.nan
    if is_gate(name):
        values[:, :-1] = np.minimum(values[:, :-1], BELOW_ONE)
        values[:, -1] = 1.0
    return values


def by_chunks(compute: Callable[[Array], Signal], values: Array) -> Signal:
    rows, loops = values.shape[:2]
    size = max(1, _CHUNK * rows // max(values.size, 1))
    result = np.empty((rows, loops))
    for start in range(0, rows, size):
        result[start : start + size] = compute(values[start : start + size])
    return result


def log_probs(logits: Array) -> Signal:
    """In float64; whoever computes several signals of the same logits computes it once."""
    return np.asarray(log_softmax(logits.astype(np.float64), axis=-1))


def present(values: Array) -> Array:
    """0 for a missing class: its probability is 0 at every loop, so it adds nothing."""
    missing = np.isneginf(values)
    return np.where(missing, 0.0, values) if missing.any() else values


def _norm(vectors: Signal) -> Signal:
    return np.sqrt(np.einsum("ntd,ntd->nt", vectors, vectors))


def _nonnegative(values: Signal) -> Signal:
    return np.maximum(values, 0.0)


def _from_loop_2(changes: Signal) -> Signal:
    return np.concatenate((np.full((len(changes), 1), np.nan), changes), axis=1)
