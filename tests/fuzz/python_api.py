"""From Python: other arrays must be rejected, or mean what they say.

Which error a wrong type raises is not looked at, only whether something wrong is accepted.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import loopscope as ls

from .mutations import Rng
from .runner import Case
from .world import World


def arrays(world: World, case: Case) -> str:
    """A recording of arrays of which one or two have another type or shape, or a strange number."""
    whole = ls.Trajectory.load(world.recordings["plain"])
    rows, loops = whole.num_examples, whole.num_loops
    given = {name: np.array(getattr(whole, name)) for name in ("labels", "difficulty", "hidden", "gate_logits")}
    given |= {"seen": np.arange(rows) % 2 == 0, "sequences": np.arange(rows) // 4}
    if case.rng.random() < 0.5:
        given |= {"logits": np.array(whole.logits), "norms": np.ones((rows, whole.num_classes or 2), np.int64)}
    else:
        given |= {"predictions": np.array(whole.predicted), "label_log_probs": -whole.cross_entropy}
    for name in case.rng.sample(list(given), case.rng.choice((1, 1, 2))):
        given[name] = _other_array(case.rng, given[name])
        case.notes.append(f"{name}: {np.asarray(given[name], dtype=object).shape} {given[name]!r:.100}")
    try:
        made = ls.Trajectory(**given, signals={"own": np.zeros((rows, loops))}, split="validation")  # type: ignore[arg-type]
    except Exception:  # whatever Python, NumPy or LoopScope say
        return "refused"
    _check_trajectory(made, given)
    return "other"


def _other_array(rng: Rng, array: Any) -> Any:
    def with_one(value: float) -> Any:
        other = array.astype(np.float64)
        other.reshape(-1)[rng.randrange(other.size)] = value
        return other

    types = (np.float64, np.int64, np.int8, np.uint64, np.complex64, object, str, bool)
    strange: list[Callable[[], Any]] = [
        *(lambda kind=kind: array.astype(kind) for kind in types),  # type: ignore[misc]
        *(lambda value=value: with_one(value) for value in (np.nan, np.inf, -np.inf)),  # type: ignore[misc]
        *(lambda: array[:-1], lambda: array[:0], lambda: array.T, lambda: array[None], lambda: array.reshape(-1)),
        *(lambda: array + 0.5, lambda: array * 10**6, lambda: -1 - array.astype(int), lambda: array.tolist()),
        lambda: np.ma.masked_array(array, mask=True),
    ]
    return rng.choice(strange)()


def _check_trajectory(made: ls.Trajectory, given: dict[str, Any]) -> None:
    """What is said of it holds."""
    seen = np.asarray(given["seen"]).astype(bool)
    assert seen.all() or made.unseen().num_examples == int((~seen).sum()), "seen examples are counted as unseen"
    assert made.predicted.dtype.kind in "iu", "answers are no whole numbers"
    shape = (made.num_examples, made.num_loops)
    assert made.labels is None or made.correct.shape == shape, "answers are judged in another shape"
    assert made.norms is None or (np.asarray(made.norms) > 0).all(), "a choice has no characters"
    made.save(Path("saved"))
    assert ls.Trajectory.load(Path("saved")).sha256 == made.sha256, "a saved trajectory is loaded as another one"
