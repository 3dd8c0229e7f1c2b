"""What is a trajectory? The recorded outputs of a model at every loop for every example, without the network.

A recording is a folder: `manifest.json` (schema version, split, provenance, hashes), `trajectory.safetensors` (all
arrays but the hidden states), `hidden.safetensors` and `examples.json` where they were kept. Arrays are memory-mapped
when loaded. Instead of logits a recording may carry precomputed signals, predictions and the log-probability of the
label, for models whose vocabulary is too large to keep. Labels may be missing: what compares a loop with the last one
needs none. Where one request yields many decisions (the tokens of a text), `sequences` says which belong together.

Shapes: N examples, T loops, V classes, D width. A class that an example does not have (a question with fewer choices)
is -inf in its logits at every loop.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from loopscope.artifacts import load_artifact, map_tensors, read_whole, save_artifact
from loopscope.config import Settings, plain, read_json
from loopscope.errors import UserError, check_known
from loopscope.model_identity import same_model
from loopscope.row_overlap import KeySketch, RowKeys, common_kind, number_keys, sequence_keys, text_keys
from loopscope.trajectory_checks import Array, as_array, as_integers, check_contents, frozen

RECORDING = "recording"
RECORDING_SCHEMA = 1
TRAJECTORY, HIDDEN, EXAMPLES = RECORDING_FILES = ("trajectory.safetensors", "hidden.safetensors", "examples.json")

_ARRAYS = (
    "logits",
    "labels",
    "difficulty",
    "gate_logits",
    "predictions",
    "label_log_probs",
    "seen",
    "sequences",
    "norms",
)
SPLITS = ("train", "validation", "test", "extrapolation")
SIGNAL_PREFIX = "signal."
_COPY_STEP = 2.0**-12
"""The scores of copies are rounded to this step: above the rounding of single precision."""
_NEVER_ZERO = 1e-6
"""Added to cross-entropies before their logarithm, where copies are told from examples that are all but certain."""
_CERTAIN = 1e-3
"""Added to cross-entropies before their logarithm: below it, their differences are rounding."""
_AT_ONCE = 1 << 20
"""Numbers that are worked on at a time."""
NO_LABELS = (
    "This recording has no labels, without which it cannot be told what is right: give them (labels=...), or ask how "
    "often exits differ from full depth (loopscope calibrate --loss disagreement)."
)


class RecordingContents(Settings, frozen=True, kw_only=True):
    """The contents of a recording in its manifest."""

    split: str | None
    examples: int
    loops: int


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Trajectory:
    """Hold one recording: the outputs of a model at each of T loops for each of N examples.

    Pass NumPy arrays or PyTorch tensors. LoopScope checks the arrays once, and makes them read-only.

    Parameters
    ----------
    logits
        [N, T, V] the logits of V classes. For a class that an example does not have, the logit is -inf at every loop.
    labels
        [N] the right class, counted from 0.
    difficulty
        [N] one number per example; reports group their tables and figures by this number.
    hidden
        [N, T, D] pooled states, for the readouts and fitted gates that read them.
    gate_logits
        [N, T] halt logits of the model's own gate. The sigmoid of a halt logit is the probability that the row halts at
        this loop, given that the row did not halt before. Every row halts at the last loop.
    split
        "train", "validation", "test" or "extrapolation". LoopScope never chooses thresholds on "test" or
        "extrapolation".
    predictions, label_log_probs
        Instead of logits: [N, T] the predicted class and the log-probability of the label.
    signals
        Values [N, T] of readouts, by name.
    seen
        [N] whether the input is in the training data.
    sequences
        [N] the number of the request to which a decision belongs, if a request makes many decisions.
    norms
        [N, V] the number of characters in each choice of a question.
    examples
        The N inputs as text.
    provenance
        The origin of the recording. If the origin has "weights_sha256", the hash of the weights, LoopScope rejects
        policies of other models.

    Raises
    ------
    UserError
        If there are neither logits nor predictions, or if arrays do not fit together.

    Examples
    --------
    >>> recording = ls.Trajectory(logits=np.zeros((10, 4, 3)), labels=np.zeros(10, dtype=int), split="validation")
    >>> recording
    Trajectory(10 examples, 4 loops, split='validation', keeps logits, labels)
    >>> recording.correct.mean(axis=0)
    array([1., 1., 1., 1.])
    """

    logits: Array | None = None
    labels: Array | None = None
    difficulty: Array | None = None
    hidden: Array | None = None
    gate_logits: Array | None = None
    split: str | None = None
    predictions: Array | None = None
    label_log_probs: Array | None = None
    signals: Mapping[str, Array] = field(default_factory=dict)
    seen: Array | None = None
    sequences: Array | None = None
    norms: Array | None = None
    examples: Sequence[str] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    computed: dict[Any, Array] = field(
        default_factory=dict, init=False
    )  # signals that were asked for, and grids: (name, ...)

    def __post_init__(self) -> None:
        if self.split is not None:
            check_split_name(self.split)
        if self.logits is None and self.predictions is None:
            raise UserError("A trajectory needs logits, or the predictions of every loop in their place.")
        for name, value in self._arrays.items():
            object.__setattr__(self, name, frozen(value, name))
        signals = {name: frozen(values, f"signal {name}") for name, values in self.signals.items()}
        object.__setattr__(self, "signals", signals)
        if isinstance(self.examples, np.ndarray):
            object.__setattr__(self, "examples", self.examples.tolist())
        check_contents(self)

    def __repr__(self) -> str:
        return (
            f"Trajectory({self.num_examples} examples, {self.num_loops} loops, split={self.split!r}, "
            f"keeps {', '.join([*self._arrays, *self.signals])})"
        )

    @property
    def _arrays(self) -> dict[str, Array]:
        """The arrays that the recording holds, by name, hidden states last."""
        names = (*_ARRAYS, "hidden")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def num_examples(self) -> int:
        """Return N, the number of examples."""
        return len(self._answers)

    @property
    def num_loops(self) -> int:
        """Return T, the number of loops."""
        return int(self._answers.shape[1])

    @property
    def num_classes(self) -> int | None:
        """Return V, the number of classes; None if only predictions were kept."""
        return None if self.logits is None else int(self.logits.shape[2])

    @property
    def _answers(self) -> Array:
        """[N, T, ...] logits or predictions, whichever there are."""
        answers = self.predictions if self.logits is None else self.logits
        assert answers is not None
        return answers

    @cached_property
    def predicted(self) -> Array:
        """Return [N, T] the class that each loop predicts."""
        return self._answers if self.logits is None else self.logits.argmax(axis=-1)

    @cached_property
    def correct(self) -> Array:
        """Return [N, T] whether each loop predicts the label."""
        return self.predicted == self.required_labels[:, None]

    @property
    def required_labels(self) -> Array:
        """Return [N] the labels; raise `UserError` if the recording has no labels."""
        return require_labels(self.labels)

    @cached_property
    def cross_entropy(self) -> Array:
        """Return [N, T] the negative log-probability of the label."""
        if self.label_log_probs is not None:
            return -self.label_log_probs.astype(np.float64)
        if self.logits is None:
            raise UserError("This recording keeps no label log-probabilities, so it has no cross-entropy.")
        found, labels = np.empty(self.logits.shape[:2]), self.required_labels
        for rows in _row_slices(self.logits):
            logits = self.logits[rows].astype(np.float64)
            label = np.take_along_axis(logits, labels[rows, None, None], axis=2)[..., 0]
            top = logits.max(axis=-1)
            found[rows] = top + np.log(np.exp(logits - top[..., None]).sum(axis=-1)) - label
        return found

    @cached_property
    def sha256(self) -> str:
        """Return a hash of the recording, without the hidden states, the signals and the texts."""
        sha = hashlib.sha256()
        for name, value in self._arrays.items():
            if name != "hidden":
                sha.update(f"{name} {value.dtype} {value.shape} ".encode())
                sha.update(np.ascontiguousarray(value).data)
        return sha.hexdigest()

    def take(self, rows: Array) -> Self:
        """Select some examples of the recording.

        Parameters
        ----------
        rows
            The indices of the examples, or a mask [N].

        Returns
        -------
        Trajectory
            A recording of the selected examples, in the given order.

        Raises
        ------
        UserError
            If the rows are neither indices nor a mask.
        """
        chosen = self._row_numbers(as_array(rows, "rows"))
        return type(self)(
            **{name: values[chosen] for name, values in self._arrays.items()},
            split=self.split,
            signals={name: values[chosen] for name, values in self.signals.items()},
            examples=None if self.examples is None else [self.examples[row] for row in chosen],
            provenance=self.provenance,
        )

    def with_signals(self, signals: Mapping[str, Array], provenance: Mapping[str, Any]) -> Self:
        """Add signals to a copy of the recording.

        Parameters
        ----------
        signals
            Values [N, T], by names that begin with `gate:` or `stopper:`.
        provenance
            The provenance of the new recording.

        Returns
        -------
        Trajectory
            The same recording with the added signals.
        """
        other = replace(self, signals={**self.signals, **signals}, provenance=provenance)
        given = {each.name for each in fields(self)}
        other.__dict__.update({name: value for name, value in self.__dict__.items() if name not in given})
        for key, values in self.computed.items():
            if (key[0] if isinstance(key, tuple) else key) not in signals:
                other.computed[key] = values
        return other

    def _row_numbers(self, rows: Array) -> NDArray[np.int64]:
        """[n] the indices of some rows, given as indices or as a mask; reject an array that could be either."""
        mask, size = rows.dtype == np.bool_, self.num_examples
        chosen = np.flatnonzero(rows) if mask or not rows.size else as_integers(rows, "rows")
        fits = len(rows) == size if mask else not len(chosen) or 0 <= chosen.min() <= chosen.max() < size
        if rows.ndim != 1 or not fits or (not mask and len(rows) == size > 2 and chosen.max() <= 1):
            raise UserError(
                f"rows must be indices from 0 to {size - 1}, or a mask of {size} booleans, as in rows == 1; got an "
                f"array {list(rows.shape)} of {rows.dtype}."
            )
        return chosen

    def unseen(self) -> Self:
        """Select the examples that are not in the training data.

        Returns
        -------
        Trajectory
            A recording of the unseen examples.

        Raises
        ------
        UserError
            If the recording does not mark the training inputs, or has no unseen examples.
        """
        if self.seen is None or self.seen.all():
            why = "does not say which examples training had" if self.seen is None else "has none that training had not"
            raise UserError(
                f"The recording {why}, so that none is unseen; record others or say it (Trajectory(seen=...)), or ask "
                "for all of them (leave out --unseen)."
            )
        return self.take(~self.seen)

    @cached_property
    def units(self) -> NDArray[np.int64] | None:
        """Return [N] the number of the sequence or the repeated input to which an example belongs.

        None means that every example was drawn independently.
        """
        wholes = self.examples if self.sequences is None else self.sequences.tolist()
        if wholes is None:
            return None
        numbers: dict[Any, int] = {}
        units = [numbers.setdefault(whole, len(numbers)) for whole in wholes]
        return None if len(numbers) == len(units) else np.array(units, dtype=np.int64)

    @property
    def num_units(self) -> int:
        """Return the number of units that were drawn independently."""
        return self.num_examples if self.units is None else int(self.units.max()) + 1

    def distinct(self, *, alone: bool = False, ordered: bool = False) -> Self:
        """Select examples so that every input counts once.

        Parameters
        ----------
        alone
            Whether to keep only inputs that occur once (default: keep one copy of each input).
        ordered
            Whether to keep the order of the recording (default: use a random order, which is always the same).

        Returns
        -------
        Trajectory
            A recording of the examples that are kept.

        Raises
        ------
        UserError
            If the recording does not keep its inputs as text.
        """
        if self.examples is None or self.sequences is not None:
            raise UserError(
                "Only a recording that keeps its inputs as text, one a decision, can count each once; count all of "
                "them (leave out --distinct and --new-inputs), or give the inputs: Trajectory(examples=...)."
            )
        rng = np.random.default_rng(0)
        rows = rng.permutation(self.num_examples) if ordered else np.arange(self.num_examples)
        texts = np.array(self.examples, dtype=object)[rows]
        _, first, counts = np.unique(texts, return_index=True, return_counts=True)
        chosen = rows[first[counts == 1] if alone else first]
        return self.take(np.sort(chosen) if ordered else rng.permutation(chosen))

    @cached_property
    def copies(self) -> NDArray[np.int64] | None:
        """Return [N] the number of the input that an example seems to copy, judged by its scores.

        None if the inputs are known, or if there are fewer than two examples per input on average.
        """
        if self.examples is not None or self.sequences is not None:
            return None
        if self.logits is not None:
            scores = self.logits
        elif self.label_log_probs is not None:
            scores = np.log(np.maximum(self.cross_entropy, 0) + _NEVER_ZERO)
        elif self._own_signals is not None:
            scores = self._own_signals
        else:
            return None
        different, numbers = np.unique(number_keys(self.predicted, scores, _COPY_STEP), return_inverse=True)
        return numbers if 2 * len(different) <= self.num_examples else None

    @property
    def _own_signals(self) -> Array | None:
        """[N, signals, T] all recorded signals except those of attached gates."""
        names = sorted(name for name in self.signals if ":" not in name)
        return np.stack([self.signals[name] for name in names], axis=1) if names else None

    @cached_property
    def row_keys(self) -> dict[str, RowKeys]:
        """Return the keys that identify examples: texts, rounded scores and predictions, the most reliable first."""
        keys = {} if self.examples is None or self.sequences is not None else {"texts": text_keys(self.examples)}
        if self.labels is not None and not (self.logits is None and self.label_log_probs is None):
            whole = np.stack([self.labels, self.predicted[:, -1]], axis=1)
            keys["log-probabilities"] = number_keys(whole, np.log(np.maximum(self.cross_entropy, 0) + _CERTAIN))
        elif self.logits is not None:
            keys["logits"] = number_keys(self.predicted[:, -1:], self.logits)
        elif self._own_signals is not None:
            keys["signals"] = number_keys(self.predicted, self._own_signals)
        keys["predictions"] = number_keys(self.predicted)
        if self.sequences is not None:
            keys = {kind: sequence_keys(values, self.sequences) for kind, values in keys.items()}
        return {kind: RowKeys.of(values) for kind, values in keys.items()}

    @property
    def row_sketch(self) -> dict[str, KeySketch]:
        """Return a small sample of `row_keys` for a file; `num_shared` takes this sample instead of the recording."""
        return {kind: keys.sketch() for kind, keys in self.row_keys.items()}

    def num_shared(self, other: "Trajectory | Mapping[str, KeySketch]") -> int:
        """Count the examples that another recording also holds, without matches that chance explains.

        LoopScope identifies examples by their texts if both recordings have texts, and otherwise by rounded answers.

        Parameters
        ----------
        other
            Another recording, or its `row_sketch`.

        Returns
        -------
        int
            The number of examples of this recording that the other recording also holds.
        """
        theirs = (
            other.row_keys
            if isinstance(other, Trajectory)
            else {kind: RowKeys.of_sketch(sketch) for kind, sketch in other.items()}
        )
        kind = common_kind(self.row_keys, theirs)
        if kind is None:
            return 0
        ours = self.row_keys[kind]
        return round(theirs[kind].num_shared(ours) / ours.units * self.num_examples)

    def same_data(self, other: "Trajectory") -> bool:
        """Tell whether two recordings hold the same data.

        Parameters
        ----------
        other
            The recording to compare with.

        Returns
        -------
        bool
            True if both recordings hold the same split of the same model, or the same labels and answers.
        """
        if self is other:
            return True
        model, names = self.provenance.get("weights_sha256"), ("benchmark", "text_sha256", "tokens_sha256")
        known = model is not None and same_model(model, other.provenance.get("weights_sha256"))
        alike = all(self.provenance.get(name) == other.provenance.get(name) for name in names)
        if known and alike and self.split is not None and self.split == other.split:
            return True
        ours, theirs = (each.labels if each.labels is not None else np.empty(0) for each in (self, other))
        if not np.array_equal(ours, theirs) or not np.array_equal(self.predicted, other.predicted):
            return False
        if self.logits is None or other.logits is None or self.logits.shape != other.logits.shape:
            return True
        return np.allclose(self.logits, other.logits, rtol=1e-3, atol=1e-3)

    def save(self, folder: str | Path) -> None:
        """Write the recording to a folder; an interrupted write leaves no partial recording.

        LoopScope replaces an existing recording.

        Parameters
        ----------
        folder
            The folder of the recording.

        Raises
        ------
        UserError
            If the folder holds anything but a recording.
        """
        arrays = {name: values for name, values in self._arrays.items() if name != "hidden"}
        arrays |= {SIGNAL_PREFIX + name: values for name, values in self.signals.items()}
        arrays = {name: _narrowest_integers(values) for name, values in arrays.items()}
        files: dict[str, Any] = {TRAJECTORY: dict(sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize))}
        if self.hidden is not None:
            files[HIDDEN] = {"hidden": self.hidden}
        if self.examples is not None:
            files[EXAMPLES] = list(self.examples)
        contents = RecordingContents(split=self.split, examples=self.num_examples, loops=self.num_loops)
        save_artifact(folder, RECORDING, RECORDING_SCHEMA, plain(contents), self.provenance, files, RECORDING_FILES)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a recording, and check every file against its hash.

        Parameters
        ----------
        folder
            The folder of the recording.

        Returns
        -------
        Trajectory
            The recording; its arrays are memory-mapped.

        Raises
        ------
        UserError
            If a file is missing or was altered.
        """
        path = Path(folder)
        return read_whole(path, lambda: cls._read(path))

    @classmethod
    def _read(cls, path: Path) -> Self:
        found = load_artifact(path, RECORDING, RECORDING_SCHEMA, RecordingContents, TRAJECTORY)
        arrays = found.arrays
        recorded = [name for name in arrays if name.startswith(SIGNAL_PREFIX)]
        signals = {name.removeprefix(SIGNAL_PREFIX): arrays.pop(name) for name in recorded}
        if HIDDEN in found.files:
            arrays |= map_tensors(path / HIDDEN)
        if unknown := sorted({*arrays} - {*_ARRAYS, "hidden"}):
            raise UserError(f"{path} holds '{unknown[0]}', which no recording has; make the recording again.")
        examples = read_json(list[str], path / EXAMPLES, "list of examples", None) if EXAMPLES in found.files else None
        try:
            return cls(
                **arrays, split=found.contents.split, signals=signals, examples=examples, provenance=found.provenance
            )
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def _narrowest_integers(values: Array) -> Array:
    """Store whole numbers in the smallest type that holds them; other arrays stay as they are."""
    if values.dtype != np.int64:
        return values
    low, high = values.min(), values.max()
    kinds = (np.int8, np.int16, np.int32, np.int64)
    return values.astype(next(kind for kind in kinds if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max))


def _row_slices(values: Array) -> Iterator[slice]:
    """Slices of the rows of [N, ...], so small that working on one takes little memory."""
    size = max(1, _AT_ONCE * len(values) // max(values.size, 1))
    return (slice(start, start + size) for start in range(0, len(values), size))


def concatenate(parts: Sequence[Trajectory]) -> Trajectory:
    """Join the parts of a recording, and the provenance that all parts share."""
    first = parts[0]
    models = [part.provenance.get("weights_sha256") for part in parts]
    for other, model in zip(parts[1:], models[1:], strict=True):
        for what, ours, theirs in (
            ("weights", True, same_model(models[0], model)),
            ("split", first.split, other.split),
            ("loops", first.num_loops, other.num_loops),
            ("classes", first.num_classes, other.num_classes),
            ("arrays", [*first._arrays], [*other._arrays]),
            ("signals", set(first.signals), set(other.signals)),
            ("definitions of signals", *(p.provenance.get("signal_definitions") for p in (first, other))),
            ("texts", first.examples is None, other.examples is None),
            ("fitted signals", first.provenance.get("fitted_on"), other.provenance.get("fitted_on")),
        ):
            if ours != theirs:
                raise UserError(f"Recordings that differ in their {what} are not parts of one; record them alike.")
    provenance = {
        key: value for key, value in first.provenance.items() if all(p.provenance.get(key) == value for p in parts)
    }
    if None not in models:
        provenance["weights_sha256"] = min(map(str, models), key=len)  # without a configuration, if one has none
    if "examples" in first.provenance:
        provenance["examples"] = sum(part.num_examples for part in parts)
    return Trajectory(
        **{name: np.concatenate([part._arrays[name] for part in parts]) for name in first._arrays},
        split=first.split,
        signals={name: np.concatenate([part.signals[name] for part in parts]) for name in first.signals},
        examples=None if first.examples is None else [text for part in parts for text in part.examples or ()],
        provenance=provenance,
    )


def require_labels(labels: Array | None) -> Array:
    """Require labels, for results that need the right answers."""
    if labels is None:
        raise UserError(NO_LABELS)
    return labels


def check_split_name(name: str) -> None:
    """Reject an unknown split name, because the name protects evaluation data."""
    check_known(name, SPLITS, "split")
