"""What is a readout's signal on a recording? As recorded, or its definition replayed over the loops that it keeps.

Shapes: N examples, T loops, V classes.
"""

import warnings

import numpy as np

from loopscope.errors import UserError, check_known
from loopscope.readouts.readout import READOUTS, Readout, find_readout
from loopscope.readouts.signals import CONVERGENCE, FITTED, OWN_GATES, SIGNALS, Array, Signal, as_defined, by_chunks
from loopscope.trajectory import NO_LABELS, Trajectory

_MISSING = {
    "gate_logits": "The recording has no gate logits: its model has no gate, so the readout '{name}' cannot be used.",
    "logits": "The recording has no logits and no recorded signal '{name}'.",
    "hidden": "The recording has no hidden states, which '{name}' needs; record it again with --hidden, or give your "
    "own as Trajectory(hidden=...).",
    "correct": NO_LABELS,
    "fitted": "The recording does not have the signal '{name}'; give the fitted gate with --fitted.",
    "recorded": "The signal '{name}' only exists recorded, and this recording does not have it.",
}
_REPLAYED_ALONE = 4
"""Rows that are replayed once more by themselves."""
_ROUNDING = 1e-5
"""The relative difference that another batch may cause in a float32 step, by another order of sums."""
_RECORDED_ROUNDING = 1e-4
"""How far a recorded signal may lie from what is computed here (relative): it may have been rounded to float32."""


def signal(name: str, trajectory: Trajectory) -> Signal:
    """Read a signal that a recording holds, or compute the signal from other arrays of the recording.

    Parameters
    ----------
    name
        The name of a readout or a recorded signal.
    trajectory
        The recording to read.

    Returns
    -------
    NDArray[np.float64]
        [N, T] values; NaN if the signal has no value yet.

    Raises
    ------
    UserError
        If the recording lacks the arrays that the signal needs.

    Examples
    --------
    >>> ls.signal("entropy", test).shape
    (1000, 4)
    """
    if name == "gate" and gate_readout(trajectory) == "halting":
        raise UserError("The gate of this recording was trained with ACT, which exits by another rule; use 'halting'.")
    definition = find_readout(name)
    key = definition if definition is not None and not name.startswith(FITTED) else name
    if key not in trajectory.computed:
        result = _recorded_or_replayed(name, definition, trajectory)
        result.flags.writeable = False
        trajectory.computed[key] = result
    return trajectory.computed[key]


def _recorded_or_replayed(name: str, definition: Readout | None, trajectory: Trajectory) -> Signal:
    """Read a signal from a recording, or replay its definition."""
    if _is_recorded(name, definition, trajectory):
        check_definition(name, trajectory)
        recorded = as_defined(name, np.array(trajectory.signals[name], dtype=np.float64))
        _check_against_replay(name, definition, recorded, trajectory)
        return recorded
    if definition is None:
        check_known(name, [*SIGNALS, *trajectory.signals], "signal")
    assert definition is not None
    source = "fitted" if name.startswith(FITTED) else definition.reads or "recorded"
    values = None if source in ("fitted", "recorded") else _recorded_source(definition, trajectory)
    if values is None:
        raise UserError(_MISSING[source].format(name=name))
    return replayed(definition, values)


def _is_recorded(name: str, definition: Readout | None, trajectory: Trajectory) -> bool:
    """Whether a recording holds the signal itself; depths and the oracle are never recorded."""
    return name in trajectory.signals and (definition is None or definition.takes == "threshold")


def _recorded_source(definition: Readout, trajectory: Trajectory) -> Array | None:
    """[N, T, ...] the recorded values that a readout reads; None if the recording lacks them."""
    if definition.reads == "loop":
        return np.tile(np.arange(1, trajectory.num_loops + 1), (trajectory.num_examples, 1))
    if definition.reads == "correct":
        return None if trajectory.labels is None else trajectory.correct
    return trajectory.predicted if definition.reads == "predictions" else getattr(trajectory, str(definition.reads))


def check_definition(name: str, trajectory: Trajectory) -> None:
    """Reject a recorded signal of a custom readout whose definition has changed."""
    definition, recorded = find_readout(name), trajectory.provenance.get("signal_definitions", {}).get(name)
    if definition is None or definition.step is None or recorded in (None, definition.definition_sha256):
        return
    raise UserError(
        f"The signal '{name}' was recorded with another definition of the readout '{name}' than the one that is known "
        "here; record again, or put that definition back."
    )


def _check_against_replay(name: str, definition: Readout | None, recorded: Signal, trajectory: Trajectory) -> None:
    """Reject a recorded signal that differs from its replay: a running policy would exit by another rule."""
    if definition is None or definition.reads is None or name.startswith(FITTED):
        return
    foreign = definition.reads == "predictions" and trajectory.logits is None  # as foreign as the signal beside them
    values = None if foreign else _recorded_source(definition, trajectory)
    if values is None:
        return
    computed = as_defined(name, replayed(definition, values))
    if not np.allclose(recorded, computed, rtol=_RECORDED_ROUNDING, atol=_RECORDED_ROUNDING / 100, equal_nan=True):
        raise UserError(
            f"The recorded signal '{name}' is not what the readout '{name}' makes of the {definition.reads} in the "
            "same recording, so that it would exit by another rule live than replayed; give the signal another name."
        )


def gate_readout(trajectory: Trajectory) -> str:
    """The readout of the model's own gate in a recording: `gate` or `halting`, by the model's training."""
    run = trajectory.provenance.get("run")
    objective = run.get("objective") if isinstance(run, dict) else None
    return "halting" if isinstance(objective, dict) and objective.get("name") == "act" else "gate"


def has_signal(name: str, trajectory: Trajectory) -> bool:
    """Whether a recording has the data for a signal, and enough loops."""
    if name in OWN_GATES and name != gate_readout(trajectory):
        return False
    definition = find_readout(name)
    recorded = _is_recorded(name, definition, trajectory)
    if not recorded:
        if definition is None or definition.reads is None or name.startswith(FITTED):
            return False
        if _recorded_source(definition, trajectory) is None:
            return False
    if name in CONVERGENCE:
        return trajectory.num_loops > 1 and not (recorded and np.isnan(trajectory.signals[name]).all())
    if name in SIGNALS or (definition is not None and definition.takes != "threshold"):
        return True
    try:
        return bool(not np.isnan(signal(name, trajectory)[:, -1]).all())
    except UserError as error:
        if definition is None or not definition.is_own:
            raise
        warnings.warn(f"{error} It is left out here.", stacklevel=2)  # the others are not to suffer from it
        return False


def available_readouts(*trajectories: Trajectory) -> list[str]:
    """The readouts that every one of these recordings has the data for."""
    fitted = sorted({name for trajectory in trajectories for name in trajectory.signals if name.startswith(FITTED)})
    return [name for name in (*READOUTS, *fitted) if all(has_signal(name, each) for each in trajectories)]


def replayed(definition: Readout, values: Array) -> Signal:
    """[N, T] the signal, replayed by a readout's step on recorded values [N, T, ...]."""
    if definition.name in SIGNALS:
        return by_chunks(SIGNALS[definition.name][1], values)
    result = np.empty(values.shape[:2])
    if definition.reads == "logits":
        counts = class_counts(values[:, 0])
        for count in np.unique(counts):
            rows = counts == count
            result[rows] = _replayed_alike(definition, values[rows][..., :count])
    else:
        result[:] = _replayed_alike(definition, values)
    gone = np.isnan(result[:, 1:]) & ~np.isnan(result[:, :-1])
    if gone.any():
        raise UserError(
            f"The readout '{definition.name}' has no value (NaN) at loop {int(gone.any(axis=0).argmax()) + 2} of an "
            "example that had one before; NaN is for the first loops only."
        )
    return result


def class_counts(logits: Array) -> Array:
    """[N] the number of classes that each row of logits [N, V] has; a question may have fewer choices."""
    if not np.isneginf(logits[:, -1]).any():
        return np.full(len(logits), logits.shape[1])
    return logits.shape[1] - np.isneginf(logits)[:, ::-1].argmin(axis=1)


def _replayed_alike(definition: Readout, values: Array) -> Signal:
    """Replay rows of equal width; a custom step must treat each row as if it were alone."""
    result = by_chunks(lambda part: _run_steps(definition, part), values)
    if definition.is_own and len(values) > 1:
        few = np.unique(np.linspace(0, len(values) - 1, _REPLAYED_ALONE).astype(int))
        with np.errstate(all="ignore"):
            alone = np.concatenate([_run_steps(definition, values[row : row + 1]) for row in few])
            for others in (result[few], _run_steps(definition, values[few])):
                if not _signals_agree(others, alone, _ROUNDING):
                    raise UserError(
                        f"The readout '{definition.name}' says something else of a row alone than of the same row "
                        "among others; its step must look at every row by itself: no mean, maximum or rank over the "
                        "rows, and no chance."
                    )
    return result


def _signals_agree(values: Signal, others: Signal, tolerance: float) -> bool:
    """Whether two signals differ by at most the tolerance, relative to the largest value."""
    scale = max(np.abs(others[~np.isnan(others)]).max(initial=0.0), np.finfo(np.float64).tiny)
    return np.allclose(values / scale, others / scale, rtol=0.0, atol=tolerance, equal_nan=True)


def _run_steps(definition: Readout, values: Array) -> Signal:
    """Run a readout's step from loop to loop."""
    columns, state = [], None
    for loop in range(values.shape[1]):
        column, state = definition.advance(values[:, loop], state)
        columns.append(column)
    return np.stack(columns, axis=1)
