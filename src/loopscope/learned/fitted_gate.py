"""A gate that was fitted to a finished trajectory: a readout like any other, under the name `gate:NAME`.

It reads pooled states, which a recording keeps with `--hidden` and a running model has, so replay and live running use
the same few lines of NumPy and the network is not needed. Its weights are a folder, `gate.safetensors` and a manifest.

Shapes: N examples, T loops, D width, H hidden units.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from loopscope.artifacts import load_artifact, save_artifact
from loopscope.errors import UserError
from loopscope.leaks import OfSplit, check_other_data
from loopscope.model_identity import same_model
from loopscope.readouts.signals import FITTED_GATE, Signal, exit_cdf
from loopscope.trajectory import Trajectory
from loopscope.trajectory_checks import as_array

Array = NDArray[Any]

GATE = "gate"
GATE_SCHEMA = 1
GATE_WEIGHTS = "gate.safetensors"
_LAYERS = {2: ("weight", "bias"), 4: ("weight_1", "bias_1", "weight", "bias")}
_CHUNK = 4096


@dataclass(frozen=True, repr=False, eq=False)
class FittedGate:
    """Map pooled states to halt logits, with a gate that was fitted to a frozen trajectory.

    `fit_gate` makes a fitted gate. Its readout is `gate:NAME`.

    Parameters
    ----------
    weight
        [D] weights of a linear gate, or [H] weights after a hidden layer.
    bias
        The bias, a number.
    weight_1, bias_1
        [H, D] weights and [H] biases of the hidden layer with GELU (default: no hidden layer).
    provenance
        The settings of the fit, and the hash of the model's weights.

    Raises
    ------
    UserError
        If the shapes do not fit together, or if a number is not finite.

    Examples
    --------
    >>> gate = ls.FittedGate(weight=np.ones(4), bias=np.array(-2.0))
    >>> gate.halt_logits(np.zeros((2, 4)))
    array([-2., -2.])
    """

    weight: Array  # [D], or [H]
    bias: Array  # []
    weight_1: Array | None = None  # [H, D]
    bias_1: Array | None = None  # [H]
    provenance: Mapping[str, Any] = field(default_factory=dict)  # how it was fitted, and to which weights

    prefix: ClassVar[str] = FITTED_GATE
    what: ClassVar[str] = "gate"

    def __post_init__(self) -> None:
        """Reject weights that are not finite (they would never exit) or have another shape."""
        arrays = {name: as_array(value, f"{name} of a gate") for name, value in self.tensors.items()}
        width = arrays["weight"].shape
        inner = arrays["weight_1"].shape[1:] if "weight_1" in arrays else ()
        shapes = {"weight": width, "bias": (), "weight_1": (*width, *inner), "bias_1": width}
        fits = {*arrays} == {*_LAYERS.get(len(arrays), ())} and len(width) == 1 and len(inner) == ("weight_1" in arrays)
        if not fits or any(a.shape != shapes[name] or not np.isfinite(a).all() for name, a in arrays.items()):
            raise UserError(
                "A gate is weight [D] and bias [], or weight [H], bias [], weight_1 [H, D], bias_1 [H], all of finite "
                "numbers."
            )
        for name, array in arrays.items():
            object.__setattr__(self, name, array)

    @property
    def kind(self) -> str:
        """Return "linear" or "mlp"."""
        return "linear" if self.weight_1 is None else "mlp"

    @property
    def width(self) -> int:
        """Return D, the width of the states that the gate reads."""
        return int(self.weight.shape[0] if self.weight_1 is None else self.weight_1.shape[1])

    def __repr__(self) -> str:
        split = self.provenance.get("split")
        return f"FittedGate({self.kind}, width {self.width}{f', fitted to the {split} split' if split else ''})"

    @property
    def tensors(self) -> dict[str, Array]:
        """Return the arrays of the gate by name."""
        return {name: value for name in _LAYERS[4] if (value := getattr(self, name)) is not None}

    def halt_logits(self, pooled: Array) -> NDArray[np.float64]:
        """Compute halt logits from pooled states.

        Parameters
        ----------
        pooled
            [..., D] pooled states.

        Returns
        -------
        NDArray[np.float64]
            [...] halt logits.

        Raises
        ------
        UserError
            If the states and the gate differ in width.
        """
        if pooled.shape[-1] != self.width:
            raise UserError(f"The gate reads states of width {self.width}, and these have {pooled.shape[-1]}.")
        states = pooled.astype(np.float64)
        if self.weight_1 is not None and self.bias_1 is not None:
            states = states @ self.weight_1.T.astype(np.float64) + self.bias_1
            states *= ndtr(states)  # GELU
        return states @ self.weight.astype(np.float64) + self.bias

    def values(self, trajectory: Trajectory) -> Signal:
        """Compute the cumulative exit probabilities (CDF) on a recording.

        Parameters
        ----------
        trajectory
            A recording with hidden states.

        Returns
        -------
        NDArray[np.float64]
            [N, T] the probability that an example has exited by each loop.

        Raises
        ------
        UserError
            If the recording has no hidden states.
        """
        if trajectory.hidden is None:
            raise UserError(
                "A fitted gate reads hidden states, and this recording keeps none; record it with --hidden."
            )
        logits = np.empty(trajectory.hidden.shape[:2])
        for start in range(0, len(logits), _CHUNK):
            logits[start : start + _CHUNK] = self.halt_logits(trajectory.hidden[start : start + _CHUNK])
        return exit_cdf(logits)

    def check(self, weights: str | None) -> None:
        """Reject any model except the model to which the gate was fitted.

        Parameters
        ----------
        weights
            The hash of the model's weights; None if unknown.

        Raises
        ------
        UserError
            If the gate was fitted to a different model.
        """
        check_host(self.provenance, weights, "gate")

    def check_calibration(self, recording: OfSplit) -> None:
        """Reject data to which the gate was fitted; such data must neither choose nor test a threshold.

        Parameters
        ----------
        recording
            The recording or live run to check.

        Raises
        ------
        UserError
            If the gate was fitted to the given data.
        """
        check_other_data(self.provenance, recording, "gate")

    def save(self, folder: str | Path) -> None:
        """Write the gate to a folder; an interrupted write leaves no partial gate.

        Parameters
        ----------
        folder
            The folder of the gate.

        Raises
        ------
        UserError
            If the folder holds anything but a gate.
        """
        files = {GATE_WEIGHTS: self.tensors}
        save_artifact(folder, GATE, GATE_SCHEMA, {"kind": self.kind, "width": self.width}, self.provenance, files)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a gate, and check its file against the stored hash.

        Parameters
        ----------
        folder
            The folder of the gate.

        Returns
        -------
        FittedGate
            The fitted gate.

        Raises
        ------
        UserError
            If a file is missing or was altered.
        """
        found = load_artifact(Path(folder), GATE, GATE_SCHEMA, dict, GATE_WEIGHTS)
        return cls.of_tensors(found.arrays, found.provenance)

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Array], provenance: Mapping[str, Any]) -> Self:
        """Make a gate from its arrays.

        Parameters
        ----------
        tensors
            The arrays of the gate, by name.
        provenance
            The settings of the fit, and the hash of the model's weights.

        Returns
        -------
        FittedGate
            The fitted gate.

        Raises
        ------
        UserError
            If the arrays do not form a gate.
        """
        if set(tensors) != set(_LAYERS.get(len(tensors), ())):
            raise UserError(f"These are not the tensors of a gate: {', '.join(sorted(tensors))}.")
        return cls(**{name: np.array(value) for name, value in tensors.items()}, provenance=provenance)


def check_host(provenance: Mapping[str, Any], weights: str | None, what: str) -> None:
    """Reject a model or recording if a gate was fitted to another model (where both are known)."""
    own = provenance.get("weights_sha256")
    if own is not None and weights is not None and not same_model(own, weights):
        raise UserError(f"This {what} was fitted to the states of another model; fit one to this model.")
