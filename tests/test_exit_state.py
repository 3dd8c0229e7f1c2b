"""Live decisions: the same as a replay, whoever else is there and whenever they came."""

import numpy as np
import pytest
from conftest import random_trajectory

import loopscope as ls
from loopscope.exit_state import ExitState
from loopscope.readouts.readout import required_readout
from loopscope.readouts.signals import SIGNALS

READOUTS = [*SIGNALS, "fixed", "stopper:induction", "stopper:classifier", "gate:linear", "gate:mlp"]


def threshold(readout: str, trajectory: ls.Trajectory) -> float:
    if readout == "fixed":
        return 3
    values = ls.signal(readout, trajectory)
    return float(np.nanquantile(values[:, :-1], 0.6 if required_readout(readout).exits == "above" else 0.4))


@pytest.mark.parametrize("readout", READOUTS)
def test_follows_the_replay(readout: str) -> None:
    """Requests come in at random times and leave when they are told to."""
    trajectory, kind, fitted = random_trajectory(rows=120, loops=5), readout.partition(":")[2], None
    if kind in ("induction", "classifier"):
        fitted = ls.fit_stopper(random_trajectory(1, rows=150, loops=5), kind=kind)  # type: ignore[arg-type]
    elif kind:
        weights = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
        layer = (weights[2:], weights[1]) if kind == "mlp" else ()
        fitted = ls.FittedGate(weights[0], np.float32(-0.2), *layer)
    if fitted is not None:
        trajectory = ls.attach(trajectory, {kind: fitted})
    policy = ls.ExitPolicy(readout, threshold(readout, trajectory), fitted)
    expected = policy.exit_loops(trajectory)
    assert len(set(expected)) > 1 or readout == "fixed"
    exit_state = ExitState(policy, trajectory.num_loops)
    said = {"predictions": trajectory.predicted}
    for name in exit_state.sources():
        said.setdefault(name, np.asarray(getattr(trajectory, name), dtype=np.float32))
    rng = np.random.default_rng(0)
    waiting, active, loop, exits = list(range(120)), np.empty(0, int), np.empty(0, int), {}
    while waiting or len(active):
        new = [waiting.pop() for _ in range(min(len(waiting), int(rng.integers(0, 9))))]
        exit_state.admit(len(new))
        active, loop = np.append(active, new).astype(int), np.append(loop, [0] * len(new)).astype(int) + 1
        if not len(active):
            continue
        stops = exit_state.stops(loop, {name: values[active, loop - 1] for name, values in said.items()})
        exits |= dict(zip(active[stops].tolist(), loop[stops].tolist(), strict=True))
        exit_state.reorder(np.flatnonzero(~stops))
        active, loop = active[~stops], loop[~stops]
    single = ls.Trajectory(
        logits=np.asarray(trajectory.logits, dtype=np.float32),
        labels=trajectory.labels,
        hidden=np.asarray(trajectory.hidden, dtype=np.float32),
        gate_logits=np.asarray(trajectory.gate_logits, dtype=np.float32),
    )
    assert [exits[row] for row in range(120)] == policy.exit_loops(single).tolist()
