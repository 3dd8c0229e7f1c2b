"""How does a split of a task become a recording? Every example of a split through every loop, straight to disk.

Examples run in batches of one length, so nothing is padded. Hidden states are large: unless they are asked for, only
the signals that need them are kept. Logits can be left out the same way.

Shapes: N examples, T loops, B rows of a batch, V classes, D width.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from loopscope.arguments import as_array, check_kind
from loopscope.artifacts import MANIFEST, Manifest, artifact_folder, check_replaceable, create_tensors
from loopscope.config import plain, read_json
from loopscope.engine.logit_stats import check_finite, check_logits
from loopscope.errors import UserError
from loopscope.exits.readouts import find_readout, readout_definition, readouts_reading
from loopscope.exits.recorded_signals import check_definition, replayed
from loopscope.exits.signals import OF_LOG_PROBS, SIGNALS, log_probs
from loopscope.model_identity import same_model
from loopscope.models import LoopedModel, Loops, load_model
from loopscope.models.checkpoint import weights_sha256
from loopscope.models.device import upload
from loopscope.progress import ProgressCallback, silent
from loopscope.tasks import Examples, drawn, seen, training_fingerprints
from loopscope.training.settings import RunSettings, read_run_settings
from loopscope.trajectory import (
    EXAMPLES,
    HIDDEN,
    RECORDING,
    RECORDING_FILES,
    SIGNAL_PREFIX,
    TRAJECTORY,
    Trajectory,
    seal,
)
from loopscope.writing import remove_leftovers, write_json

BATCH = 1024


@dataclass(frozen=True)
class Keep:
    """What a recording holds beside labels, difficulties, gate logits and the examples."""

    logits: bool = True
    hidden: bool = False

    @property
    def signals(self) -> list[str]:
        """The signals that are computed now, because what they need is not kept."""
        lost = {"logits": not self.logits, "hidden": not self.hidden}
        return [each.name for each in readouts_reading(*(source for source, gone in lost.items() if gone))]

    @property
    def provenance(self) -> dict[str, Any]:
        """What the signals of a user's readouts meant when they were recorded."""
        definitions = {name: found for name in self.signals if (found := readout_definition(name)) is not None}
        return {"signal_definitions": definitions} if definitions else {}


def record_task(
    run: Path,
    split: str,
    out: Path,
    keep: Keep | None = None,
    size: int | None = None,
    levels: range | None = None,
    device: str | torch.device = "cpu",
    progress: ProgressCallback = silent,
) -> Trajectory:
    """Records a split of the task that the run in `run` was trained on; an identical recording is used again."""
    keep = keep or Keep()
    settings = read_run_settings(run)
    examples = split_examples(settings, split, size, levels)
    model = load_model(run, device)
    provenance = {
        "weights_sha256": weights_sha256(run),
        "precision": model.precision,
        "run": plain(settings),
        "examples": len(examples),
        "levels": sorted({int(level) for level in examples.difficulty}),
        "keeps_logits": keep.logits,
        "keeps_hidden": keep.hidden,
    }
    if (found := existing_recording(out, split, provenance, keep)) is not None:
        return found
    provenance |= keep.provenance
    shape = (len(examples), model.num_loops)
    with artifact_folder(out, RECORDING, RECORDING_FILES) as scratch:
        layout = _layout(shape, keep, settings.task.vocab_size, settings.model.gate != "none")
        if settings.task.train_examples:  # what was drawn online nobody knows any more
            layout["seen"] = (shape[:1], np.bool_)
        arrays, needed = create_tensors(scratch / TRAJECTORY, layout), [TRAJECTORY, EXAMPLES]
        if keep.hidden:
            hidden = {"hidden": ((*shape, settings.model.width), np.float32)}
            arrays |= create_tensors(scratch / HIDDEN, hidden)
            needed.append(HIDDEN)
        arrays["labels"][:], arrays["difficulty"][:] = examples.labels, examples.difficulty
        if "seen" in layout:
            arrays["seen"][:] = seen(examples, training_fingerprints(settings.task))
        done = 0
        for rows in examples.same_length_batches(BATCH):
            batch = examples.take(rows)
            write_rows(arrays, rows, forward(model, batch, next(model.parameters()).device), batch.labels, keep)
            done += len(rows)
            progress(done, len(examples), "")
        write_json(scratch / EXAMPLES, settings.task.text(examples))
        for array in arrays.values():
            array.flush()  # type: ignore[attr-defined]
        seal(scratch, split, len(examples), model.num_loops, provenance, needed)
        return Trajectory.load(scratch)  # only what can be read takes its place


def record_model(
    model: LoopedModel,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    labels: ArrayLike | None = None,
    *,
    difficulty: ArrayLike | None = None,
    split: str | None = None,
    keep: Keep | None = None,
    progress: ProgressCallback = silent,
) -> Trajectory:
    """What a model in memory says of tokens [N, M] whose rows end at `lengths` (default: M), at each row's last token.

    Nothing is written; `save` of the trajectory does that.
    """
    check_kind(model, LoopedModel, "The model", "a LoopedModel, as load_model gives them")
    check_kind(split, (str, type(None)), "split", "a name such as 'validation'")
    check_kind(keep, (Keep, type(None)), "keep", "a Keep")
    model.require_evaluation()
    keep = keep or Keep()
    if labels is None and not keep.logits:
        raise UserError("Without labels a recording must keep its logits.")
    examples = _examples(model, tokens, lengths, labels, difficulty)
    arrays: dict[str, NDArray[Any]] = {}
    done = 0
    for rows in examples.same_length_batches(BATCH):
        batch = examples.take(rows)
        out = forward(model, batch, next(model.parameters()).device)
        if not arrays:  # only now is it known how many classes there are, and whether there is a gate
            whole = (len(examples), len(out.logits))
            if examples.labels.min() < 0 or examples.labels.max() >= out.logits.shape[-1]:
                raise UserError(f"A label is not one of the model's classes (0..{out.logits.shape[-1] - 1}).")
            layout = _layout(whole, keep, out.logits.shape[-1], out.gate_logits is not None)
            if keep.hidden:
                layout["hidden"] = ((*whole, out.hidden.shape[-1]), np.float32)
            arrays = {name: np.empty(shape, kind) for name, (shape, kind) in layout.items()}
        write_rows(arrays, rows, out, batch.labels, keep)
        done += len(rows)
        progress(done, len(examples), "")
    names = ("logits", "hidden", "gate_logits", "predictions", "label_log_probs")
    kept: dict[str, Any] = {name: arrays.get(name) for name in names}
    return Trajectory(
        **kept,
        signals={name: arrays[SIGNAL_PREFIX + name] for name in keep.signals},
        labels=None if labels is None else examples.labels,
        difficulty=None if difficulty is None else examples.difficulty,
        split=split,
        provenance={
            "weights_sha256": model.weights_sha256,
            "precision": model.precision,
            "tokens_sha256": _hash(examples),
            **keep.provenance,
        },
    )


def _examples(
    model: LoopedModel,
    tokens: ArrayLike,
    lengths: ArrayLike | None,
    labels: ArrayLike | None,
    difficulty: ArrayLike | None,
) -> Examples:
    """What was given, as examples of the model; zeros for what was not."""
    rows = as_array(tokens, "tokens")
    if rows.ndim != 2 or not rows.size:
        raise UserError(f"tokens must have the shape [examples, tokens], got {list(rows.shape)}.")
    given = {
        "tokens": rows,
        "lengths": np.full(len(rows), rows.shape[1]) if lengths is None else as_array(lengths, "lengths"),
    }
    for name, values in (("labels", labels), ("difficulty", difficulty)):
        given[name] = np.zeros(len(rows), dtype=np.int64) if values is None else as_array(values, name)
    for name, values in given.items():
        if values.dtype.kind not in "iu" or values.shape[:1] != rows.shape[:1] or values.ndim != 1 + (name == "tokens"):
            raise UserError(f"{name} must be whole numbers, a row or one number for each of the {len(rows)} examples.")
    examples = Examples(**{name: values.astype(np.int64, copy=False) for name, values in given.items()})
    if examples.lengths.min() < 1 or examples.lengths.max() > rows.shape[1]:
        raise UserError(f"lengths must be between 1 and the {rows.shape[1]} tokens of a row.")
    inside = rows[np.arange(rows.shape[1]) < examples.lengths[:, None]]
    if inside.min() < 0 or inside.max() >= model.vocab_size:
        raise UserError(f"There is a token outside the model's vocabulary (0..{model.vocab_size - 1}).")
    return examples


def _hash(examples: Examples) -> str:
    """What tells these inputs from others."""
    found = hashlib.sha256(np.ascontiguousarray(examples.lengths).data)
    found.update(examples.tokens[np.arange(examples.tokens.shape[1]) < examples.lengths[:, None]].data)
    return found.hexdigest()


def split_examples(settings: RunSettings, split: str, size: int | None, levels: range | None) -> Examples:
    """The examples of a split; those of extrapolation are harder than training's, as far as the block size goes."""
    if split == "extrapolation" and levels is None:
        levels = extrapolation_levels(settings)
    longest = settings.task.length((levels or settings.task.levels)[-1])
    if longest > settings.block_size:
        raise UserError(f"Examples of {longest} tokens do not fit the model's block size {settings.block_size}.")
    return drawn(settings.task, split, size, levels)


def extrapolation_levels(settings: RunSettings) -> range:
    """The difficulties beyond those of training that fit the model."""
    first = settings.task.levels[-1] + 1
    fitting = first
    while settings.task.length(fitting) <= settings.block_size:
        fitting += 1
    if fitting == first:
        raise UserError(
            f"The block size {settings.block_size} leaves no room for examples harder than those of training; "
            "train with a larger model.block_size to extrapolate."
        )
    return range(first, fitting)


_DIFFERS = {
    "split": "of another split",
    "weights_sha256": "of another model",
    "precision": "in another precision",
    "dtype": "in another precision",
    "run": "of another run",
    "text_sha256": "of other texts",
    "context": "with another context",
    "examples": "with another number of examples",
    "documents": "with another number of documents",
    "levels": "of other difficulties",
    "benchmark": "of another benchmark",
    "questions_sha256": "of other questions",
    "lm_eval": "by another version of lm_eval",
    "shard": "of another part",
    "state": "of other states",
    **dict.fromkeys(
        ("asked", "risk_target", "thresholds", "rule", "readouts", "planned", "proposing"),
        "for another promise or policy",
    ),
    "cache": "with another cache",
    "recording": "of another recording",
    "num_loops": "with another number of loops",
    "batch_size": "in batches of another size",
    "seed": "with another seed",
    "keeps_logits": "with logits in one of them only",
    "keeps_hidden": "with hidden states in one of them only",
}
"""How another recording differs, in words; the rest is called as it is."""


def holds_same(out: Path, kind: str, files: Collection[str], expected: Mapping[str, Any]) -> bool:
    """Whether `out` holds an artifact of this kind that says this of itself; one that says otherwise is refused."""
    remove_leftovers(out)
    if not (out / MANIFEST).is_file():
        check_replaceable(out, kind)
        return False
    try:
        manifest = read_json(Manifest, out / MANIFEST, "manifest")
    except UserError:  # cut or altered since
        check_replaceable(out, kind, files)
        return False
    check_replaceable(out, kind, files)
    found = {**manifest.contents, **manifest.provenance}
    changed = [name for name, value in expected.items() if not _same(name, found.get(name), value)]
    if changed:
        differs = ", ".join(dict.fromkeys(_DIFFERS.get(name, f"with another {name}") for name in changed))
        raise UserError(f"{out} holds another {kind} ({differs}); choose another --out, or remove it.")
    return True


def _same(name: str, found: Any, expected: Any) -> bool:
    return same_model(found, expected) if name == "weights_sha256" else bool(found == expected)


def existing_recording(out: Path, split: str, provenance: dict[str, Any], keep: Keep) -> Trajectory | None:
    """The recording in `out`, if it is this one; another is refused, also one that lacks a signal."""
    if not holds_same(out, RECORDING, RECORDING_FILES, {"split": split, **provenance}):
        return None
    try:
        recording = Trajectory.load(out)
    except UserError:  # cut or altered since: made again
        return None
    if lacking := [name for name in keep.signals if name not in recording.signals]:
        raise UserError(
            f"{out} holds a recording without the signal {', '.join(lacking)}; choose another --out, or remove it."
        )
    for name in keep.signals:
        check_definition(name, recording)
    return recording


@torch.inference_mode()
def forward(model: LoopedModel, batch: Examples, device: str | torch.device) -> Loops:
    """What the model says at every loop at the answer markers."""
    tokens, lengths = torch.from_numpy(batch.tokens), torch.from_numpy(batch.lengths)  # the model takes them there
    return model.loops(tokens, lengths, positions=upload(batch.lengths - 1, torch.device(device)))


def _layout(shape: tuple[int, int], keep: Keep, classes: int, gate: bool) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and type of every array but the hidden states; `shape` is [N, T]."""
    layout: dict[str, tuple[tuple[int, ...], Any]] = {
        "labels": (shape[:1], np.int64),
        "difficulty": (shape[:1], np.int64),
    }
    if keep.logits:
        layout["logits"] = ((*shape, classes), np.float32)
    else:
        layout |= {"predictions": (shape, np.int64), "label_log_probs": (shape, np.float64)}
    if gate:
        layout["gate_logits"] = (shape, np.float32)
    return layout | {SIGNAL_PREFIX + name: (shape, np.float64) for name in keep.signals}


def write_rows(
    arrays: dict[str, NDArray[Any]], rows: NDArray[np.int64], out: Loops, labels: NDArray[np.int64], keep: Keep
) -> None:
    """Puts what a model said about some examples in its place, with the signals of what is not kept."""
    outputs = {"logits": check_logits(_numpy(out.logits)), "hidden": check_finite(_numpy(out.hidden), "states")}
    if out.gate_logits is not None:
        arrays["gate_logits"][rows] = check_finite(_numpy(out.gate_logits), "halt logits")
    if keep.hidden:
        arrays["hidden"][rows] = outputs["hidden"]
    if keep.logits:
        arrays["logits"][rows] = outputs["logits"]
    else:
        log_p = log_probs(outputs["logits"])
        arrays["predictions"][rows] = outputs["logits"].argmax(axis=-1)
        arrays["label_log_probs"][rows] = np.take_along_axis(log_p, labels[:, None, None], axis=2)[..., 0]
    for name in keep.signals:
        if name in OF_LOG_PROBS:
            arrays[SIGNAL_PREFIX + name][rows] = SIGNALS[name][1](outputs["logits"], log_p)
        else:
            definition = find_readout(name)
            assert definition is not None
            assert definition.reads is not None
            arrays[SIGNAL_PREFIX + name][rows] = replayed(definition, outputs[definition.reads])


def _numpy(values: torch.Tensor) -> NDArray[Any]:
    """[T, B, ...] on any device as [B, T, ...] in float32."""
    return values.transpose(0, 1).float().cpu().numpy()
