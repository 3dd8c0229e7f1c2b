"""How does a fitted gate or stopper become a readout of a recording? Its signal stands beside the recorded ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from loopscope.artifacts import read_manifest, read_whole
from loopscope.leaks import FITTED_ON
from loopscope.learned.fitted_gate import GATE, GATE_SCHEMA, FittedGate
from loopscope.learned.stopper import STOPPER_KINDS, Stopper
from loopscope.readouts.signals import Signal
from loopscope.trajectory import Trajectory

Fitted: TypeAlias = FittedGate | Stopper


def by_readout(gates: Mapping[str, Fitted]) -> dict[str, Fitted]:
    """Fitted gates and stoppers by the names of their readouts, `gate:NAME` and `stopper:NAME`."""
    return {gate.prefix + name: gate for name, gate in gates.items()}


def attach(trajectory: Trajectory, gates: Mapping[str, Fitted]) -> Trajectory:
    """Add fitted gates and stoppers to a recording as readouts.

    Parameters
    ----------
    trajectory
        A recording of the model to which the gates and stoppers were fitted.
    gates
        The fitted gates and stoppers, by name.

    Returns
    -------
    Trajectory
        The recording, with a signal `gate:NAME` or `stopper:NAME` for each gate or stopper.

    Raises
    ------
    UserError
        If a gate or stopper was fitted to a different model, or if the recording lacks the arrays that it reads.

    Examples
    --------
    >>> stopper = ls.fit_stopper(recording("train", 2), trees=32)
    >>> sorted(ls.attach(test, {"price": stopper}).signals)
    ['stopper:price']
    """
    if not gates:
        return trajectory
    signals, known = dict[str, Signal](), trajectory.provenance.get(FITTED_ON)
    fitted_on = dict(known) if isinstance(known, dict) else {}
    for readout, gate in by_readout(gates).items():
        gate.check(trajectory.provenance.get("weights_sha256"))
        signals[readout] = gate.values(trajectory)
        fitted_on[readout] = dict(gate.provenance)
    return trajectory.with_signals(signals, {**trajectory.provenance, FITTED_ON: fitted_on})


def load_fitted(folder: str | Path) -> Fitted:
    """Load a fitted gate or a stopper from its folder."""
    path = Path(folder)
    return read_whole(path, lambda: _load_by_kind(path))


def _load_by_kind(folder: Path) -> Fitted:
    """Load a folder as a stopper or as a fitted gate, by the kind in its manifest."""
    kind = read_manifest(folder, GATE, GATE_SCHEMA).contents.get("kind")
    return Stopper.load(folder) if kind in STOPPER_KINDS else FittedGate.load(folder)
