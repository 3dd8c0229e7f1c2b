"""Recordings whose truth is known: how accurate they are at full depth, and when every example is right first."""

import numpy as np

import loopscope as ls

CLASSES = 4


def simulated(
    split: str,
    right: float = 1.0,
    loops: int = 4,
    forgets: bool = False,
    rows: int = 1500,
    late_gate: bool = False,
    seed: int = 0,
) -> ls.Trajectory:
    """A share of `right` examples is answered rightly from a loop on (most at loop 1), the others by lot, always alike.

    Confidence comes with the right answer, and the gate opens with it, or a loop before the last if it is late. One
    that `forgets` is right up to loop 2 only. Validation and test differ in their draw.
    """
    rng = np.random.default_rng([seed, len(split)])
    labels = rng.integers(0, CLASSES, rows)
    first = np.where(rng.random(rows) < 0.5, 1, rng.integers(1, loops + 1, rows))
    solved = (rng.random(rows) < right)[:, None] & (np.arange(1, loops + 1) >= first[:, None])
    if forgets:
        solved &= np.arange(1, loops + 1) <= 2
    guess = rng.integers(0, CLASSES, (rows, 1))
    answers = np.where(solved, labels[:, None], guess)
    logits = rng.normal(0, 0.1, (rows, loops, CLASSES))
    confidence = np.where(solved, 6.0, 1.0) + rng.normal(0, 0.5, (rows, loops))
    np.put_along_axis(logits, answers[..., None], confidence[..., None], axis=2)
    opens = np.broadcast_to(np.where(np.arange(loops) >= loops - 2, 4.0, -8.0), (rows, loops))
    return ls.Trajectory(
        logits=logits,
        labels=labels,
        difficulty=first,
        gate_logits=opens + rng.normal(0, 0.5, (rows, loops)) if late_gate else 2 * (confidence - 3.5),
        split=split,
    )


def pair(**changes: object) -> tuple[ls.Trajectory, ls.Trajectory]:
    """Validation and test."""
    return simulated("validation", **changes), simulated("test", **changes)  # type: ignore[arg-type]
