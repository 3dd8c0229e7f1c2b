"""When does a request exit? A readout with its threshold is an exit policy: one object for replay and live running.

A calibrated policy carries a certificate: what it guarantees, and what that rests on. A policy's file is JSON; the
weights of a fitted gate or a stopper lie beside it as safetensors, and the file holds their hash.
"""

import glob
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from loopscope.artifacts import is_intact, map_tensors, read_whole, sealed, sha256
from loopscope.config import Settings, Tally, build, plain, read_json, to_json
from loopscope.errors import UserError, reject
from loopscope.files import BESIDE, atomic_file, remove_leftovers, write_bytes
from loopscope.learned.attach import Fitted, attach
from loopscope.learned.fitted_gate import FittedGate
from loopscope.learned.stopper import Stopper, StopperContents
from loopscope.model_identity import model_words, same_model
from loopscope.readouts.readout import find_readout, readout_definition, required_readout
from loopscope.readouts.replay import signal
from loopscope.readouts.signals import own_name
from loopscope.row_overlap import KeySketch
from loopscope.scope import ANYTHING, CacheMode, Scope, scope_of
from loopscope.trajectory import Trajectory

Loss = Literal["gap", "disagreement"]
Bound = Literal["betting", "hoeffding_bentkus"]
BOUNDS: tuple[Bound, ...] = ("betting", "hoeffding_bentkus")
"""With which the losses of sequences are tested."""
Method = Literal["walk", "tolerance"]
"""How a threshold is proven: along thresholds that other data proposed, or as a tolerance limit of all data at once."""
_LEVELS_PER_LOOP_OF_SEQUENCES: Literal[16] = 16
Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]


class DataSummary(Settings, frozen=True, kw_only=True):
    """The data that a certificate rests on: which recording (by its hash), its split, and how many examples."""

    sha256: str  # `Trajectory.sha256`
    split: str | None
    examples: int
    sequences: int | None  # where an example is one decision of many
    seen: int | None  # how many of them occur in the training data, if that is known
    difficulty: dict[str, int] | None  # how many of each; None without difficulties, or with very many


class Evidence(Settings, frozen=True, kw_only=True):
    """The evidence for a guarantee: the loss observed at the threshold, over all examples or at one difficulty."""

    difficulty: float | None
    units: int  # examples, or sequences
    loss: float  # on average
    p_value: float | None  # of "the risk is above the limit"; None for a guarantee in expectation


class Guarantee(Settings, frozen=True, kw_only=True, omit_defaults=True):
    """The guarantee of a policy: the limit of its loss against full depth, with confidence or on average."""

    sentence: str
    loss: Loss
    max_drop: Share  # the risk that is allowed
    confidence: Share | None  # None: on average over calibration draws
    per_difficulty: bool
    unseen: bool  # for inputs that training did not have
    distinct: bool  # every input counts once
    loops: int  # T of the model: full depth
    candidates: list[str]  # the readouts among which the data of the grid chose
    finalists: list[str]  # those that were tested
    level: float | None  # the p-value that proves a threshold: 1 - confidence, by the number of finalists
    recording: str  # the hash of the whole recording; the tested examples may be a part of it
    tested: DataSummary
    grid: DataSummary  # where the thresholds come from
    thresholds: int  # how many were proven, of how many
    grid_size: int
    evidence: list[Evidence]
    full_depth_accuracy: float | None  # of the tested examples; None without labels
    average_loops: float  # what to expect
    average_loops_interval: tuple[float, float]  # 95 %, over examples
    average_loops_at_limit: float  # of the laxest threshold whose observed loss is within the limit: the price
    bound: Bound | None = None  # of sequences; examples, which are lost or not, have the exact binomial test
    tolerance: bool = False  # proven as a tolerance limit: all data were tested, and gave the threshold
    new_inputs: bool = False  # for inputs that the calibration data do not hold
    drawn: int | None = None  # examples of which those are counted that are distinct, or occur once
    order_seed: int | None = None  # with which the order was drawn in which sequences were bet on


class CalibrationExits(Settings, frozen=True, kw_only=True):
    """The exits of the calibration examples, as counts that fit into a policy's file.

    An example exits at a loop. A sequence of decisions has the average of their loops, rounded to a sixteenth: the
    rounding is the same for whatever comes later, so that ranks among the counts stay exact.
    """

    per_loop: Literal[1, 16]  # levels a loop: 1 for examples, 16 for averages over sequences
    counts: list[Tally]  # [levels] of units, from loop 1 to full depth

    @classmethod
    def of(cls, depths: NDArray[np.float64], num_loops: int, sequences: bool) -> Self:
        """Count the exit loops [units] of calibration units, each an average over its examples."""
        empty = cls(per_loop=_LEVELS_PER_LOOP_OF_SEQUENCES if sequences else 1, counts=[])
        levels = (num_loops - 1) * empty.per_loop + 1
        found = np.bincount(empty.levels(depths), minlength=levels)
        return msgspec.structs.replace(empty, counts=found.tolist())

    def levels(self, depths: NDArray[np.float64]) -> NDArray[np.int64]:
        """[units] the place of each among the counts."""
        return np.rint((depths - 1) * self.per_loop).astype(np.int64)

    @property
    def mean(self) -> float:
        """The average loop, as far as the rounding goes."""
        return 1 + float(np.average(np.arange(len(self.counts)), weights=self.counts)) / self.per_loop


class Certificate(Settings, frozen=True, kw_only=True):
    """The result of a calibration: the guarantee, and the exits of the tested examples for a monitor."""

    guarantee: Guarantee
    exits: CalibrationExits
    rows: tuple[dict[str, KeySketch], ...] = ()  # by which the examples of the recording and the grid are known again


NEVER = float(np.finfo(np.float64).max)
"""A threshold (or, where low means exit, minus this) that no signal meets: full depth, in a file, too."""
POLICY_SCHEMA: Literal[8] = 8
POLICY_FILE = "policy that `loopscope calibrate` wrote"
_MAX_POLICY_BYTES = 1 << 20
ORACLE_THRESHOLD = 0.5
"""Between wrong (0) and right (1)."""


class GateFile(Settings, frozen=True, kw_only=True):
    """The file beside a policy with the weights of its fitted gate or stopper, and their provenance."""

    file: str
    sha256: str
    provenance: dict[str, Any]
    stopper: StopperContents | None = None  # None: a gate


class PolicyFile(Settings, frozen=True, kw_only=True):
    """The contents of a policy's file, `policy.json`."""

    schema_version: Literal[8] = POLICY_SCHEMA
    readout: str
    threshold: float | None = None
    gate: GateFile | None = None
    scope: Scope = ANYTHING
    certificate: Certificate | None = None
    digest: str = ""  # of all of the above, where there is a certificate: it is void for another threshold

    @classmethod
    def read(cls, path: Path) -> Self:
        values: Any = read_json(object, path, POLICY_FILE)
        if not isinstance(values, dict) or "readout" not in values:
            raise UserError(f"{path} is not a policy: it has no readout; give a file that `loopscope calibrate` wrote.")
        if values.get("schema_version", POLICY_SCHEMA) != POLICY_SCHEMA:
            raise UserError(
                f"{path} has the policy schema {values['schema_version']}, this LoopScope reads {POLICY_SCHEMA}; "
                "calibrate again."
            )
        file = build(cls, values, str(path))
        if file.certificate is not None and not is_intact(file):
            raise UserError(
                f"{path} was altered since it was calibrated, so its guarantee is void; calibrate it again, or set its "
                "certificate to null."
            )
        return file


@dataclass(frozen=True, repr=False)
class ExitPolicy:
    """Combine a readout and a threshold into an exit rule, for replays and for live runs.

    A calibrated policy carries a certificate. LoopScope rejects a calibrated policy for models and kinds of decisions
    outside the policy's scope.

    Parameters
    ----------
    readout
        A name in `READOUTS`, or `gate:NAME` or `stopper:NAME`.
    threshold
        The value at which a row exits; for `fixed`, the loop (from 1). `oracle` takes no threshold.
    gate
        The fitted gate or stopper of the readout (default: none). A live run needs this gate or stopper.
    scope
        The model and the kind of decisions for which the policy holds (default: any).
    certificate
        The results of calibration (default: no guarantee).

    Raises
    ------
    UserError
        If the readout is unknown, or if the threshold does not fit the readout.

    Examples
    --------
    >>> policy = ls.ExitPolicy("margin", 2.0)
    >>> policy.exit_loops(test)[:5]
    array([3, 1, 2, 2, 2])
    >>> policy.exit_loops(logits=test.logits)[:5]
    array([3, 1, 2, 2, 2])
    """

    readout: str
    threshold: float | None = None
    gate: Fitted | None = None
    scope: Scope = ANYTHING
    certificate: Certificate | None = None

    def __post_init__(self) -> None:
        reject(self._problems())

    def _problems(self) -> Iterator[str]:
        takes, at = required_readout(self.readout).takes, self.threshold
        if (takes == "nothing") != (at is None) or isinstance(at, bool) or (at is not None and np.isnan(at)):
            yield f"The readout '{self.readout}' {'takes no' if takes == 'nothing' else 'needs a'} threshold; got {at}."
        if takes == "depth" and at is not None and (at < 1 or at % 1):
            yield f"A fixed depth is a whole number from 1 on, got {at}."
        if self.gate is not None and not self.readout.startswith(self.gate.prefix):
            what, prefix = self.gate.what, self.gate.prefix
            yield f"The readout '{self.readout}' takes no {what}; its name would begin with '{prefix}'."

    @property
    def guarantee(self) -> Guarantee | None:
        """Return the guarantee from calibration; None for a policy without a guarantee."""
        return None if self.certificate is None else self.certificate.guarantee

    @property
    def model(self) -> str | None:
        """Return the hash of the model's weights and configuration; None if the policy names no model."""
        return self.scope.model

    @property
    def cache(self) -> CacheMode:
        """Return the KV cache with which the policy writes text: the cache of its calibration, or `full`."""
        return self.scope.cache or "full"

    @property
    def fixed_depth(self) -> int | None:
        """Return the loop at which every row exits; None for a policy that reads a signal."""
        return int(self.threshold or 0) if required_readout(self.readout).takes == "depth" else None

    def __str__(self) -> str:
        if self.threshold is None:
            return self.readout
        return self.readout + (" at full depth" if abs(float(self.threshold)) >= NEVER else f" at {self.threshold:.6g}")

    def __repr__(self) -> str:
        return f"ExitPolicy({self}{'' if self.guarantee is None else f'; {self.guarantee.sentence}'})"

    def save(self, path: str | Path) -> None:
        """Write the policy as JSON, and the weights of its fitted gate beside it. LoopScope replaces an existing file.

        Parameters
        ----------
        path
            The policy file.

        Raises
        ------
        UserError
            If the threshold is infinite.
        """
        if self.threshold is not None and np.isinf(self.threshold):
            raise UserError("A policy file has a finite threshold; to never exit early, use 'fixed' at the full depth.")
        path = Path(path)
        with atomic_file(path, wait=True) as scratch:
            _remove_unused_gates(path)
            file = PolicyFile(
                readout=self.readout,
                threshold=None if self.threshold is None else float(self.threshold),
                gate=None if self.gate is None else _save_gate(self.gate, path),
                scope=self.scope,
                certificate=self.certificate,
            )
            scratch.write_bytes(to_json(file if self.certificate is None else sealed(file)))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a policy file, and check the weights of its gate against their hash.

        Parameters
        ----------
        path
            The policy file.

        Returns
        -------
        ExitPolicy
            The policy with its gate and its certificate.

        Raises
        ------
        UserError
            If the file is not a policy or was altered, or if its readout is not registered.
        """
        place = Path(path)
        return read_whole(place, lambda: cls._read(place))

    @classmethod
    def _read(cls, path: Path) -> Self:
        file = PolicyFile.read(path)
        if find_readout(file.readout) is None:
            raise UserError(
                f"{path} exits by the readout '{file.readout}', which is not installed: import the module or "
                "install the package that defines it (on the command line: --with-readout MODULE:NAME)."
            )
        gate = None
        if file.gate is not None:
            weights = path.with_name(Path(file.gate.file).name)  # beside it, whatever the file says
            if not weights.is_file() or sha256(weights) != file.gate.sha256:
                raise UserError(f"{weights}, the gate of {path}, is missing or was altered; make the policy again.")
            gate = _load_gate(file.gate, map_tensors(weights))
        return cls(file.readout, file.threshold, gate, file.scope, file.certificate)._as_defined()

    def check(self, weights: str | None, num_loops: int, here: Scope) -> None:
        """Reject a model, a full depth or a kind of decisions for which the policy does not hold.

        LoopScope does not compare a value that the policy or the caller does not know.

        Parameters
        ----------
        weights
            The hash of the model's weights; None if unknown.
        num_loops
            The number of loops of the model at full depth.
        here
            The kind of decisions to make.

        Raises
        ------
        UserError
            If a value differs from the policy's value.
        """
        self._as_defined()
        self.scope.check(here)
        if self.gate is not None:
            self.gate.check(weights)
        self.check_depth(num_loops)
        reject(self._misfits(weights, num_loops))

    def _misfits(self, weights: str | None, num_loops: int) -> Iterator[str]:
        without = "or use it without its guarantee (--any-model, or policy.for_any_model())"
        if self.model is not None and weights is not None and not same_model(self.model, weights):
            yield (
                f"This policy was calibrated for another model ({model_words(self.model, str(weights))}), and "
                f"guarantees nothing for this one; calibrate it for this model, {without}."
            )
        if self.guarantee is not None and self.guarantee.loops != num_loops:
            yield (
                f"This policy was calibrated for {self.guarantee.loops} loops, and here full depth is {num_loops}; "
                f"calibrate it for this depth, {without}."
            )

    def check_depth(self, num_loops: int) -> None:
        """Reject a full depth that does not fit the rule.

        Parameters
        ----------
        num_loops
            The number of loops of the model at full depth.

        Raises
        ------
        UserError
            If a fixed depth exceeds the full depth, or if a stopper was fitted to a different full depth.
        """
        if isinstance(self.gate, Stopper):
            self.gate.check_depth(num_loops)
        if (self.fixed_depth or 0) > num_loops:
            raise UserError(f"A fixed depth of {self.fixed_depth} is beyond the {num_loops} loops here; ask for fewer.")

    def _as_defined(self) -> Self:
        """Itself, unless the name of its readout has another meaning by now."""
        if self.scope.definition not in (None, readout_definition(self.readout)):
            raise UserError(
                f"This policy was made with another definition of the readout '{self.readout}' than the one that is "
                "known here; put that one back, or calibrate again."
            )
        return self

    def for_any_model(self) -> Self:
        """Drop the certificate, so that any model can use the rule.

        Returns
        -------
        ExitPolicy
            A policy with the same rule for decisions of the same kind, without a guarantee.
        """
        gate = self.gate and replace(
            self.gate, provenance={key: value for key, value in self.gate.provenance.items() if key != "weights_sha256"}
        )
        scope = msgspec.structs.replace(self.scope, model=None, precision=None)
        return replace(self, gate=gate, scope=scope, certificate=None)

    def for_stored_weights(self, weights: str) -> Self:
        """Return the policy for the same model after the weights were saved again with a different hash.

        Parameters
        ----------
        weights
            The hash of the saved weights.

        Returns
        -------
        ExitPolicy
            A policy with the same rule and certificate, for the new weights.
        """
        gate = self.gate
        if gate is not None and "weights_sha256" in gate.provenance:
            gate = replace(gate, provenance={**gate.provenance, "weights_sha256": weights})
        scope = self.scope if self.scope.model is None else msgspec.structs.replace(self.scope, model=weights)
        return replace(self, gate=gate, scope=scope)

    def exit_loops(self, recording: Trajectory | None = None, **arrays: Any) -> NDArray[np.int64]:
        """Replay the policy, and return the loop at which each example exits.

        Parameters
        ----------
        recording
            The recording to replay the policy on. Omit the recording if you pass arrays.
        **arrays
            The arrays of a `Trajectory` instead of a recording, such as `logits=` [N, T, V] or `gate_logits=` [N, T].

        Returns
        -------
        NDArray[np.int64]
            [N] the exit loops, from 1 to T.

        Raises
        ------
        UserError
            If the recording is of a different model than the policy, or lacks the arrays that the readout reads.
        """
        if recording is not None and arrays:
            raise UserError("Give a recording or arrays, not both.")
        trajectory = Trajectory(**arrays) if recording is None else recording
        self.check(trajectory.provenance.get("weights_sha256"), trajectory.num_loops, scope_of(trajectory))
        stops = self.stops(trajectory)
        stops[:, -1] = True
        return stops.argmax(axis=1) + 1

    def stops(self, trajectory: Trajectory) -> NDArray[np.bool_]:
        """Find the loops at which an example meets the policy's rule, even after its exit.

        Parameters
        ----------
        trajectory
            The recording whose signal the policy reads.

        Returns
        -------
        NDArray[np.bool_]
            [N, T] whether an example meets the rule; a signal that is NaN never meets the rule.
        """
        return self.decide(self.values(trajectory))

    def values(self, trajectory: Trajectory) -> NDArray[np.float64]:
        """Read the policy's signal on a recording.

        Parameters
        ----------
        trajectory
            The recording whose signal the policy reads.

        Returns
        -------
        NDArray[np.float64]
            [N, T] values of the signal.
        """
        if self.gate is not None:
            trajectory = attach(trajectory, {own_name(self.readout): self.gate})
        return signal(self.readout, trajectory)

    def decide(self, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Compare values of the signal with the threshold.

        Parameters
        ----------
        values
            Values of the signal, of any shape.

        Returns
        -------
        NDArray[np.bool_]
            Whether each value meets the rule, in the same shape.
        """
        threshold = ORACLE_THRESHOLD if self.threshold is None else self.threshold
        return values >= threshold if required_readout(self.readout).exits == "above" else values <= threshold


def chosen_scope(readout: str, recording: Trajectory) -> Scope:
    """The scope of a threshold that was chosen on a recording, with the definition of a custom readout."""
    return msgspec.structs.replace(scope_of(recording), definition=readout_definition(readout))


def _load_gate(file: GateFile, tensors: dict[str, NDArray[Any]]) -> Fitted:
    """Load the fitted gate or stopper of a policy from its tensors."""
    if file.stopper is None:
        return FittedGate.of_tensors(tensors, file.provenance)
    return Stopper.of_tensors(file.stopper, tensors, file.provenance)


def _save_gate(gate: Fitted, path: Path) -> GateFile:
    """Save the weights of a policy's gate beside the policy at `path`, under a name from their hash."""
    stem = f"{path.name.removesuffix('.json')}.gate"
    data = safetensors.numpy.save({name: np.asarray(values) for name, values in gate.tensors.items()})
    found = hashlib.sha256(data).hexdigest()
    weights = path.with_name(f"{stem}-{found[:8]}.safetensors")
    write_bytes(weights, data)
    contents = gate.contents if isinstance(gate, Stopper) else None
    return GateFile(file=weights.name, sha256=found, provenance=plain(dict(gate.provenance)), stopper=contents)


def _remove_unused_gates(path: Path) -> None:
    """Remove the gate weights of earlier policies at `path` that no other policy in the folder uses."""
    names = f"{glob.escape(path.name.removesuffix('.json'))}.gate-????????.safetensors"
    for beside in (file for prefix in BESIDE for file in path.parent.glob(f"{prefix}{names}")):
        remove_leftovers(path.with_name(beside.name.removeprefix(beside.name.split("-")[0] + "-")))
    for old in path.parent.glob(names):
        others = (o for o in path.parent.glob("*") if o.is_file() and o.stat().st_size < _MAX_POLICY_BYTES)
        if not any(old.name.encode() in other.read_bytes() for other in others):
            old.unlink(missing_ok=True)
