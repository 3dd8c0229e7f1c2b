"""When does a request exit? A readout with its threshold is an exit policy: one object for replay and live running.

Its file is JSON; the weights of a fitted gate or a stopper lie beside it as safetensors, and the file holds their hash.
"""

import glob
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from loopscope.arguments import as_number, as_path, check_kind
from loopscope.artifacts import map_tensors, read_whole, sha256
from loopscope.config import Settings, build, digest, plain, read_json, to_json
from loopscope.errors import UserError
from loopscope.exits.calibration_exits import CalibrationExits
from loopscope.exits.fitted import Fitted, attach
from loopscope.exits.fitted_gate import FittedGate
from loopscope.exits.guarantee import Guarantee
from loopscope.exits.readouts import READOUTS, find_readout, readout_definition, readout_kind
from loopscope.exits.recorded_signals import signal
from loopscope.exits.scope import ANYTHING, Scope, scope_of
from loopscope.exits.signals import own_name
from loopscope.exits.stopper import Stopper, StopperContents
from loopscope.model_identity import model_words, same_model
from loopscope.reading import read_bytes
from loopscope.trajectory import Trajectory, check_trajectory
from loopscope.writing import BESIDE, atomic_file, remove_leftovers, write_bytes

NEVER = float(np.finfo(np.float64).max)
"""A threshold (or, where low means exit, minus this) that no signal meets: full depth, in a file, too."""


_SMALL = 1 << 20
"""Bytes; a policy has a few thousand."""
POLICY_FILE = "policy that `loopscope calibrate` wrote"
"""As it is called where there is none."""


class GateFile(Settings, frozen=True, kw_only=True):
    """Where the weights of a policy's fitted gate or stopper are, and what they were fitted to."""

    file: str
    sha256: str
    provenance: dict[str, Any]
    stopper: StopperContents | None = None  # None: a gate


class PolicyFile(Settings, frozen=True, kw_only=True):
    """What the file of a policy says."""

    schema_version: Literal[7] = 7
    readout: str
    threshold: float | None = None
    definition_sha256: str | None = None  # of a readout of the user's, as it was
    gate: GateFile | None = None
    model: str | None = None
    scope: Scope = ANYTHING
    guarantee: Guarantee | None = None
    calibration_exits: CalibrationExits | None = None
    digest: str = ""  # of all of the above, where there is a promise: it is void for another threshold

    def seal(self) -> str:
        return digest(msgspec.structs.replace(self, digest=""))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Older files know no bounds, no stoppers, no exit counts or no scope; the oldest call a guarantee a promise.

        What sealed them is checked before.
        """
        is_object = read_bytes(path, POLICY_FILE).lstrip().startswith(b"{")  # else it is a text, say
        values = read_json(dict[str, Any], path, "policy") if is_object else {}
        if "readout" not in values:
            why = "it has no readout" if is_object else "it is no JSON object"
            raise UserError(f"{path} is not a policy: {why}; give a file that `loopscope calibrate` wrote.")
        older = values.get("schema_version") in (1, 2, 3, 4, 5, 6)
        if older:
            sealed = values.get("digest") == digest({**values, "digest": ""})
            values |= {"guarantee": values.pop("promise", values.get("guarantee")), "schema_version": 7}
        file = build(cls, values, str(path))
        if file.guarantee is not None and not (sealed if older else file.digest == file.seal()):
            raise UserError(
                f"{path} was altered since it was calibrated, so its promise is void; calibrate it again, or set its "
                "guarantee to null."
            )
        of_text = file.guarantee is not None and file.guarantee.tested.sequences is not None
        if older and of_text and file.scope == ANYTHING:
            return msgspec.structs.replace(file, scope=Scope(unit="tokens", cache="full"))
        return file


@dataclass(frozen=True, repr=False)
class ExitPolicy:
    """A readout with its threshold. `fixed` takes the depth as its threshold, `oracle` takes none.

    With the readout `gate:NAME` or `stopper:NAME` it carries that gate or stopper, unless it is only replayed on
    recordings that have its signal. A calibrated one carries its promise, the model for which it was made (the hash of
    its weights and configuration), and its scope: the kind of decisions that it was calibrated on, to which it is held
    wherever it is used.
    """

    readout: str
    threshold: float | None = None
    gate: Fitted | None = None
    model: str | None = None
    guarantee: Guarantee | None = None
    scope: Scope = ANYTHING
    definition_sha256: str | None = None  # of a readout of the user's, as it was when the threshold was chosen
    calibration_exits: CalibrationExits | None = None  # of what the promise was tested on, for a monitor

    def __post_init__(self) -> None:
        kind = readout_kind(self.readout)
        if self.threshold is not None:
            as_number(self.threshold, "A threshold")
        check_kind(self.gate, (FittedGate, Stopper, type(None)), "The gate of a policy", "a FittedGate or a Stopper")
        check_kind(self.model, (str, type(None)), "The model of a policy", "the hash of its weights")
        check_kind(self.guarantee, (Guarantee, type(None)), "The guarantee of a policy", "one that calibration made")
        check_kind(
            self.calibration_exits, (CalibrationExits, type(None)), "calibration_exits", "what calibration counted"
        )
        check_kind(self.scope, Scope, "The scope of a policy", "a Scope")
        if kind == "oracle":
            if self.threshold is not None:
                raise UserError("The oracle takes no threshold.")
        elif self.threshold is None:
            raise UserError(f"The readout '{self.readout}' needs a threshold that is a number.")
        elif kind == "depth" and (self.threshold < 1 or not float(self.threshold).is_integer()):
            raise UserError(f"A fixed depth is a whole number from 1 on, got {self.threshold}.")
        if self.gate is not None and not self.readout.startswith(self.gate.prefix):
            what = "stopper" if isinstance(self.gate, Stopper) else "fitted gate"
            raise UserError(
                f"The readout '{self.readout}' takes no {what}; its name would begin with '{self.gate.prefix}'."
            )

    def __str__(self) -> str:
        if self.threshold is None:
            return self.readout
        return self.readout + (" at full depth" if abs(self.threshold) >= NEVER else f" at {self.threshold:.6g}")

    def __repr__(self) -> str:
        return f"ExitPolicy({self}{'' if self.guarantee is None else f'; {self.guarantee.sentence}'})"

    def save(self, path: str | Path) -> None:
        """Writes the policy as JSON, and the weights of its fitted gate beside it."""
        if self.threshold is not None and np.isinf(self.threshold):
            raise UserError("A policy file has a finite threshold; to never exit early, use 'fixed' at the full depth.")
        path = as_path(path, "path")
        with atomic_file(path, wait=True) as scratch:
            _remove_gates(path)
            file = PolicyFile(
                readout=self.readout,
                threshold=None if self.threshold is None else float(self.threshold),
                definition_sha256=self.definition_sha256,
                gate=None if self.gate is None else _save_gate(self.gate, path),
                model=self.model,
                scope=self.scope,
                guarantee=self.guarantee,
                calibration_exits=self.calibration_exits,
            )
            scratch.write_bytes(
                to_json(file if self.guarantee is None else msgspec.structs.replace(file, digest=file.seal()))
            )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The policy in a file, after the weights of its gate were checked against their hash."""
        path = as_path(path, "The file of a policy")
        return read_whole(path, lambda: cls._read(path))

    @classmethod
    def _read(cls, path: Path) -> Self:
        file = PolicyFile.read(path)
        own = find_readout(file.readout)
        if own is None and file.readout not in READOUTS:
            raise UserError(
                f"{path} exits by the readout '{file.readout}', which is not installed: import the module or "
                "install the package that defines it (on the command line: --with-readout MODULE:NAME)."
            )
        gate = None
        if file.gate is not None:
            weights = path.with_name(Path(file.gate.file).name)  # beside it, whatever the file says
            if not weights.is_file() or sha256(weights) != file.gate.sha256:
                raise UserError(f"{weights}, the gate of {path}, is missing or was altered; make the policy again.")
            gate = _gate_of(file.gate, map_tensors(weights))
        return cls(
            readout=file.readout,
            threshold=file.threshold,
            gate=gate,
            model=file.model,
            guarantee=file.guarantee,
            scope=file.scope,
            definition_sha256=file.definition_sha256,
            calibration_exits=file.calibration_exits,
        )._as_defined()

    def check(self, weights: str | None, num_loops: int, here: Scope) -> None:
        """Refuses another model than the one it was made for, another full depth, or decisions of another kind.

        Each where both sides say what they are; `here` is what would be decided about.
        """
        self._as_defined()
        self.scope.check(here)
        if self.gate is not None:
            self.gate.check(weights)
        if isinstance(self.gate, Stopper):
            self.gate.check_depth(num_loops)
        if self.model is not None and weights is not None and not same_model(self.model, weights):
            raise UserError(
                f"This policy was calibrated for another model ({model_words(self.model, str(weights))}), and "
                "promises nothing for this one; calibrate it for this model, or use it without its promise "
                "(--any-model, or policy.for_any_model())."
            )
        if self.guarantee is not None and self.guarantee.loops != num_loops:
            raise UserError(
                f"This policy was calibrated for {self.guarantee.loops} loops, and here full depth is {num_loops}; "
                "calibrate it for this depth, or use it without its promise (--any-model, or policy.for_any_model())."
            )

    def _as_defined(self) -> Self:
        """Itself, unless the name of its readout has another meaning by now."""
        if self.definition_sha256 not in (None, readout_definition(self.readout)):
            raise UserError(
                f"This policy was made with another definition of the readout '{self.readout}' than the one that is "
                "known here; put that one back, or calibrate again."
            )
        return self

    def for_any_model(self) -> Self:
        """The same rule without its promise, for whatever model in whatever precision, for decisions of its kind."""
        gate = self.gate and replace(
            self.gate, provenance={key: value for key, value in self.gate.provenance.items() if key != "weights_sha256"}
        )
        scope = msgspec.structs.replace(self.scope, precision=None)
        return replace(self, gate=gate, model=None, guarantee=None, scope=scope, calibration_exits=None)

    def exit_loops(self, trajectory: Trajectory) -> NDArray[np.int64]:
        """[N] the loop in 1..T at which every example exits."""
        check_trajectory(trajectory, "What a policy is replayed on")
        self.check(trajectory.provenance.get("weights_sha256"), trajectory.num_loops, scope_of(trajectory))
        if readout_kind(self.readout) == "depth":
            assert self.threshold is not None
            if self.threshold > trajectory.num_loops:
                raise UserError(
                    f"A fixed depth of {self.threshold:g} is beyond the recording's {trajectory.num_loops} loops; "
                    "choose less."
                )
            return np.full(trajectory.num_examples, int(self.threshold))
        stops = np.array(self.stops(trajectory))
        stops[:, -1] = True
        return stops.argmax(axis=1) + 1

    def stops(self, trajectory: Trajectory) -> NDArray[np.bool_]:
        """[N, T] at which loops the rule says stop; a signal that is NaN never does."""
        check_trajectory(trajectory, "What a policy is replayed on")
        if self.threshold is None:  # the oracle
            return trajectory.correct
        return self.decide(self.values(trajectory))

    def values(self, trajectory: Trajectory) -> NDArray[np.float64]:
        """[N, T] the policy's signal on a recording."""
        if self.gate is not None:
            trajectory = attach(trajectory, {own_name(self.readout): self.gate})
        return signal(self.readout, trajectory)

    def decide(self, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether these values of the policy's signal say stop, whatever their shape: recorded or live."""
        assert self.threshold is not None
        return values >= self.threshold if readout_kind(self.readout) == "above" else values <= self.threshold


def _gate_of(file: GateFile, tensors: dict[str, NDArray[Any]]) -> Fitted:
    if file.stopper is None:
        return FittedGate.of_tensors(tensors, file.provenance)
    return Stopper.of_tensors(file.stopper, tensors, file.provenance)


def _save_gate(gate: Fitted, path: Path) -> GateFile:
    """Writes the weights of the gate beside the policy at `path`; by their name, an earlier one keeps its own."""
    stem = f"{path.name.removesuffix('.json')}.gate"
    data = safetensors.numpy.save({name: np.asarray(values) for name, values in gate.tensors.items()})
    found = hashlib.sha256(data).hexdigest()
    weights = path.with_name(f"{stem}-{found[:8]}.safetensors")
    write_bytes(weights, data)
    contents = gate.contents if isinstance(gate, Stopper) else None
    return GateFile(file=weights.name, sha256=found, provenance=plain(dict(gate.provenance)), stopper=contents)


def _remove_gates(path: Path) -> None:
    """Removes weights that earlier policies at `path` had, if no policy beside it has them."""
    names = f"{glob.escape(path.name.removesuffix('.json'))}.gate-????????.safetensors"
    for beside in (file for prefix in BESIDE for file in path.parent.glob(f"{prefix}{names}")):
        remove_leftovers(path.with_name(beside.name.removeprefix(beside.name.split("-")[0] + "-")))
    for old in path.parent.glob(names):
        others = (other for other in path.parent.glob("*") if other.is_file() and other.stat().st_size < _SMALL)
        if not any(old.name.encode() in other.read_bytes() for other in others):
            old.unlink(missing_ok=True)


def accuracy_and_loops(policy: ExitPolicy, trajectory: Trajectory) -> tuple[float, float]:
    """Accuracy and average loops of a policy replayed on a recording."""
    loops = policy.exit_loops(trajectory)
    right = trajectory.correct[np.arange(len(loops)), loops - 1]
    return float(right.mean()), float(loops.mean())
