"""How does a split of a task become a recording? Every example runs through every loop, and goes straight to disk.

Examples run in batches of one length, so nothing is padded. Hidden states are large: by default a recording keeps only
the signals that need them. You can leave out logits the same way.

Shapes: N examples, M tokens, T loops, n rows of a batch, V classes, D width.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from loopscope.config import plain
from loopscope.engine.logit_signals import check_logits
from loopscope.engine.requests import check_tokens
from loopscope.errors import UserError
from loopscope.models.checkpoint import load_model, weights_sha256
from loopscope.models.device import upload
from loopscope.models.looped_model import LoopedModel, Loops
from loopscope.progress import ProgressCallback, silent
from loopscope.readouts.readout import readouts_reading
from loopscope.readouts.replay import replayed
from loopscope.readouts.signals import log_probs
from loopscope.recording.recording_folder import (
    ArrayLayout,
    Arrays,
    Keep,
    array_layout,
    by_row,
    check_repeatable,
    existing_recording,
    write_recording,
    write_states,
)
from loopscope.tasks import Examples, drawn, seen, training_fingerprints
from loopscope.training.run_folder import read_run_settings, task_of_run
from loopscope.training.settings import RunSettings
from loopscope.trajectory import SIGNAL_PREFIX, Trajectory
from loopscope.trajectory_checks import as_integers

BATCH = 1024


def record_task(
    run: Path,
    split: str,
    out: Path,
    keep: Keep | None = None,
    size: int | None = None,
    levels: range | None = None,
    device: str | torch.device = "cpu",
    progress: ProgressCallback = silent,
    loops: int | None = None,
    custom_tasks: Sequence[str] = (),
) -> Trajectory:
    """Record a split of the task that the run in `run` was trained on; an identical recording is used again.

    `loops` records fewer or more loops than in training; the last of them is the loop at which all examples exit.
    A custom task (module:Class) is imported if `custom_tasks` names it.
    """
    keep = keep or Keep()
    settings = read_run_settings(run)
    task = task_of_run(run, settings, custom_tasks)
    examples = split_examples(settings, split, size, levels)
    model, trained = load_model(run, device), settings.num_loops
    depth = trained if loops is None else loops
    if depth != trained:
        model.set_depth(depth)
    provenance = {
        "weights_sha256": weights_sha256(run),
        "precision": model.precision,
        "run": plain(settings),
        "examples": len(examples),
        "levels": sorted({int(level) for level in examples.difficulty}),
        "keeps_logits": keep.logits,
        "keeps_hidden": keep.hidden,
    }
    if depth != trained:
        provenance |= {"loops": depth, "trained_loops": trained}
    if (found := existing_recording(out, split, {**provenance, "loops": depth}, keep)) is not None:
        return found
    layout = _task_array_layout(model, examples, keep)
    if task.train_examples:  # examples drawn online are not stored, so they have no overlap
        layout["seen"] = ((len(examples),), np.bool_)

    def fill(arrays: Arrays) -> None:
        if "seen" in arrays:
            arrays["seen"][:] = seen(examples, training_fingerprints(task))
        _fill_split(arrays, model, examples, keep, progress)

    provenance |= keep.provenance
    return write_recording(out, split, layout, provenance, fill, task.text(examples))


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
    """Record a model's outputs at every loop, at the last token of each row.

    The function writes no files; `Trajectory.save` writes the recording.

    Parameters
    ----------
    model
        A looped model in evaluation mode.
    tokens
        [N, M] rows of tokens.
    lengths
        [N] the length of each row (default: M).
    labels
        [N] the right classes (default: none).
    difficulty
        [N] one number per example, such as its difficulty; reports group their tables by this number (default: none).
    split
        "train", "validation", "test" or "extrapolation" (default: none).
    keep
        The arrays that the recording keeps (default: logits and gate logits).
    progress
        A function that LoopScope calls with the number of finished examples, the number of all examples, and a note.

    Returns
    -------
    Trajectory
        The recording, with the hash of the model's weights.

    Raises
    ------
    UserError
        If the model cannot take the rows, or if it gives different answers when it runs again.

    Examples
    --------
    >>> tokens = np.random.default_rng(0).integers(0, 8, (20, 5))
    >>> ls.record_model(model, tokens, split="validation")
    Trajectory(20 examples, 4 loops, split='validation', keeps logits, gate_logits...)
    """
    keep = keep or Keep()
    if labels is None and not keep.logits:
        raise UserError("Without labels a recording must keep its logits.")
    examples = _as_examples(model, tokens, lengths, labels, difficulty)
    layout = _task_array_layout(model, examples, keep)
    arrays = {name: np.empty(shape, kind) for name, (shape, kind) in layout.items()}
    _fill_split(arrays, model, examples, keep, progress)
    hashed = hashlib.sha256(np.ascontiguousarray(examples.lengths).data)
    hashed.update(examples.tokens[np.arange(examples.tokens.shape[1]) < examples.lengths[:, None]].data)
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
            "tokens_sha256": hashed.hexdigest(),
            **keep.provenance,
        },
    )


def _as_examples(
    model: LoopedModel,
    tokens: ArrayLike,
    lengths: ArrayLike | None,
    labels: ArrayLike | None,
    difficulty: ArrayLike | None,
) -> Examples:
    """The given arrays as examples that the model can take; missing labels and difficulties are zeros."""
    rows = as_integers(tokens, "tokens")
    count, longest = rows.shape if rows.ndim == 2 else (0, 0)
    given = {"lengths": lengths, "labels": labels, "difficulty": difficulty}
    by_row = {
        name: np.full(count, longest if name == "lengths" else 0) if values is None else as_integers(values, name)
        for name, values in given.items()
    }
    if not count * longest or any(numbers.shape != (count,) for numbers in by_row.values()):
        shapes = {"tokens": rows.shape} | {name: numbers.shape for name, numbers in by_row.items()}
        raise UserError(f"tokens must have the shape [examples, tokens], the others one number an example: {shapes}.")
    examples = Examples(rows, **by_row)
    if examples.lengths.min() < 1 or examples.lengths.max() > longest:
        raise UserError(f"lengths must be between 1 and the {longest} tokens of a row.")
    check_tokens(model, rows[np.arange(longest) < examples.lengths[:, None]], "An example")
    return examples


def split_examples(settings: RunSettings, split: str, size: int | None, levels: range | None) -> Examples:
    """The examples of a task's split; extrapolation takes harder examples than training, up to the block size."""
    if split == "extrapolation" and levels is None:
        levels = extrapolation_levels(settings)
    return drawn(settings.generator, split, size, levels)


def extrapolation_levels(settings: RunSettings) -> range:
    """The difficulties beyond those of training whose examples fit the model."""
    task, block_size = settings.generator, settings.block_size
    first = task.levels[-1] + 1
    fitting = first
    while task.length(fitting) <= block_size and (task.hardest is None or fitting <= task.hardest):
        fitting += 1
    if fitting == first:
        if task.hardest == task.levels[-1]:
            raise UserError(f"No example of this task is harder than those of training ({task.hardest}).")
        raise UserError(
            f"The block size {block_size} leaves no room for examples harder than those of training; "
            "train with a larger model.block_size to extrapolate."
        )
    return range(first, fitting)


@torch.inference_mode()
def forward(model: LoopedModel, batch: Examples, device: str | torch.device) -> Loops:
    """The model's outputs at every loop, at the answer markers of a batch of task examples."""
    tokens, lengths = torch.from_numpy(batch.tokens), torch.from_numpy(batch.lengths)  # the model uploads them
    return model.loops(tokens, lengths, positions=upload(batch.lengths - 1, torch.device(device)))


def _task_array_layout(model: LoopedModel, examples: Examples, keep: Keep) -> ArrayLayout:
    """The arrays of the recording of a task's split."""
    return array_layout(model, (len(examples), model.num_loops), keep, ("labels", "difficulty"))


def _fill_split(arrays: Arrays, model: LoopedModel, examples: Examples, keep: Keep, progress: ProgressCallback) -> None:
    """Run all examples of a split, and write the arrays of its recording."""
    check_repeatable(model)
    arrays["labels"][:], arrays["difficulty"][:] = examples.labels, examples.difficulty
    device, done = next(model.parameters()).device, 0
    for rows in examples.same_length_batches(BATCH):
        batch = examples.take(rows)
        out = forward(model, batch, device)
        _write_task_logits(arrays, rows, check_logits(by_row(out.logits)), batch.labels, keep)
        write_states(arrays, rows, out, keep)
        done += len(rows)
        progress(done, len(examples), "")


def _write_task_logits(
    arrays: Arrays, rows: NDArray[np.int64], logits: NDArray[Any], labels: NDArray[np.int64], keep: Keep
) -> None:
    """Write the logits [n, T, V] of some examples, or their predictions and signals if logits are not kept."""
    if labels.min() < 0 or labels.max() >= logits.shape[-1]:
        raise UserError(f"A label is not one of the model's classes (0..{logits.shape[-1] - 1}).")
    if keep.logits:
        arrays["logits"][rows] = logits
        return
    arrays["predictions"][rows] = logits.argmax(axis=-1)
    arrays["label_log_probs"][rows] = np.take_along_axis(log_probs(logits), labels[:, None, None], axis=2)[..., 0]
    for readout in readouts_reading("logits"):
        arrays[SIGNAL_PREFIX + readout.name][rows] = replayed(readout, logits)
