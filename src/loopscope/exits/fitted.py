"""What was fitted to recordings: gates, which read states, and stoppers, which read signals. Both are readouts."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from loopscope.arguments import as_path, check_kind, check_mapping
from loopscope.artifacts import read_manifest, read_whole
from loopscope.exits.fitted_gate import GATE, GATE_SCHEMA, FittedGate
from loopscope.exits.stopper import KINDS, Stopper
from loopscope.trajectory import Trajectory, check_trajectory

Fitted: TypeAlias = FittedGate | Stopper


def check_gates(gates: object) -> None:
    check_mapping(gates, "gates")
    for gate in gates.values():  # type: ignore[attr-defined]
        check_kind(gate, (FittedGate, Stopper), "A gate", "a FittedGate or a Stopper")


def by_readout(gates: Mapping[str, Fitted]) -> dict[str, Fitted]:
    """Under the names of their readouts, `gate:NAME` and `stopper:NAME`."""
    return {gate.prefix + name: gate for name, gate in gates.items()}


def attach(trajectory: Trajectory, gates: Mapping[str, Fitted]) -> Trajectory:
    """The recording with the signal `gate:NAME` or `stopper:NAME` of each of these."""
    check_trajectory(trajectory, "What a gate is attached to")
    check_gates(gates)
    if not gates:
        return trajectory
    signals = dict(trajectory.signals)
    for readout, gate in by_readout(gates).items():
        gate.check(trajectory.provenance.get("weights_sha256"))
        signals[readout] = gate.values(trajectory)
    return replace(trajectory, signals=signals)


def load_fitted(folder: str | Path) -> Fitted:
    """The gate or the stopper in a folder."""
    path = as_path(folder, "The folder of a gate")
    return read_whole(path, lambda: _read(path))


def _read(folder: Path) -> Fitted:
    kind = read_manifest(folder, GATE, GATE_SCHEMA).contents.get("kind")
    return Stopper.load(folder) if kind in KINDS else FittedGate.load(folder)
