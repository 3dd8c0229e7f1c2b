"""How does a checkpoint become a recording? Every example of a split through every loop, straight to disk.

Examples run in batches of one length, so nothing is padded. Hidden states are large: unless they are asked for, only
the signals that need them are kept. Logits can be left out the same way.

Shapes: N examples, T loops, B rows of a batch, V classes, D width.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loopscope.artifacts import MANIFEST, Manifest, atomic_folder, create_tensors, write_json
from loopscope.config import plain, read_json
from loopscope.errors import UserError
from loopscope.exits.signals import OF_LOG_PROBS, SIGNALS, log_softmax
from loopscope.models import LoopedModel, Loops, load_model
from loopscope.models.checkpoint import weights_sha256
from loopscope.progress import Advance, silent
from loopscope.tasks import Examples, drawn, seen, training_fingerprints
from loopscope.training.settings import RunSettings, settings_of
from loopscope.trajectory import KIND, SIGNAL_PREFIX, Trajectory, seal

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
        return [name for name, (source, _) in SIGNALS.items() if lost.get(source, False)]


def record(
    run: Path,
    split: str,
    out: Path,
    keep: Keep | None = None,
    size: int | None = None,
    levels: range | None = None,
    device: str | torch.device = "cpu",
    progress: Advance = silent,
) -> Trajectory:
    """Records a split of the task that the run in `run` was trained on; an identical recording is used again."""
    keep = keep or Keep()
    settings = settings_of(run)
    examples = examples_of(settings, split, size, levels)
    model = load_model(run, device)
    provenance = {
        "weights_sha256": weights_sha256(run),
        "run": plain(settings),
        "examples": len(examples),
        "levels": sorted({int(level) for level in examples.difficulty}),
        "keeps_logits": keep.logits,
        "keeps_hidden": keep.hidden,
    }
    if _is_there(out, split, provenance):
        try:
            return Trajectory.load(out)
        except UserError:  # cut or altered since: made again
            pass
    shape = (len(examples), model.num_loops)
    with atomic_folder(out, KIND) as scratch:
        layout = _layout(settings, shape, keep)
        arrays = create_tensors(scratch / "trajectory.safetensors", layout)
        if keep.hidden:
            hidden = {"hidden": ((*shape, settings.model.width), np.float32)}
            arrays |= create_tensors(scratch / "hidden.safetensors", hidden)
        arrays["labels"][:], arrays["difficulty"][:] = examples.labels, examples.difficulty
        if "seen" in layout:
            arrays["seen"][:] = seen(examples, training_fingerprints(settings.task))
        done = 0
        for rows in examples.same_length_batches(BATCH):
            batch = examples.take(rows)
            _write(arrays, rows, forward(model, batch, device), batch.labels, keep)
            done += len(rows)
            progress(done, len(examples), "")
        write_json(scratch / "examples.json", settings.task.text(examples))
        for array in arrays.values():
            array.flush()  # type: ignore[attr-defined]
        seal(scratch, split, len(examples), model.num_loops, provenance)
    return Trajectory.load(out)


def examples_of(settings: RunSettings, split: str, size: int | None, levels: range | None) -> Examples:
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


def _is_there(out: Path, split: str, provenance: dict[str, Any]) -> bool:
    if not (out / MANIFEST).is_file():
        return False
    manifest = read_json(Manifest, out / MANIFEST, "manifest")
    found = {**manifest.contents, **manifest.provenance}
    changed = [name for name, value in {"split": split, **provenance}.items() if found.get(name) != value]
    if changed:
        raise UserError(
            f"{out} holds another recording (different {', '.join(changed)}); choose another --out, or remove it."
        )
    return True


@torch.inference_mode()
def forward(model: LoopedModel, batch: Examples, device: str | torch.device) -> Loops:
    """What the model says at every loop at the answer markers."""
    tokens, lengths = (torch.from_numpy(array).to(device) for array in (batch.tokens, batch.lengths))
    return model.loops(tokens, lengths, positions=lengths - 1)


def _layout(settings: RunSettings, shape: tuple[int, int], keep: Keep) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and type of every array but the hidden states; `shape` is [N, T]."""
    layout: dict[str, tuple[tuple[int, ...], Any]] = {
        "labels": (shape[:1], np.int64),
        "difficulty": (shape[:1], np.int64),
    }
    if keep.logits:
        layout["logits"] = ((*shape, settings.task.vocab_size), np.float32)
    else:
        layout |= {"predictions": (shape, np.int64), "label_log_probs": (shape, np.float64)}
    if settings.model.gate != "none":
        layout["gate_logits"] = (shape, np.float32)
    layout |= {SIGNAL_PREFIX + name: (shape, np.float64) for name in keep.signals}
    if settings.task.train_examples:  # what was drawn online nobody knows any more
        layout["seen"] = (shape[:1], np.bool_)
    return layout


def _write(
    arrays: dict[str, NDArray[Any]],
    rows: NDArray[np.int64],
    out: Loops,
    labels: NDArray[np.int64],
    keep: Keep,
) -> None:
    said = {"logits": _numpy(out.logits), "hidden": _numpy(out.hidden)}
    if out.gate_logits is not None:
        arrays["gate_logits"][rows] = _numpy(out.gate_logits)
    if keep.hidden:
        arrays["hidden"][rows] = said["hidden"]
    if keep.logits:
        arrays["logits"][rows] = said["logits"]
    else:
        log_p = log_softmax(said["logits"])
        arrays["predictions"][rows] = said["logits"].argmax(axis=-1)
        arrays["label_log_probs"][rows] = np.take_along_axis(log_p, labels[:, None, None], axis=2)[..., 0]
    for name in keep.signals:
        source, compute = SIGNALS[name]
        given = (said[source], log_p) if name in OF_LOG_PROBS else (said[source],)
        arrays[SIGNAL_PREFIX + name][rows] = compute(*given)


def _numpy(values: torch.Tensor) -> NDArray[Any]:
    """[T, B, ...] on any device as [B, T, ...] in float32."""
    return values.transpose(0, 1).float().cpu().numpy()
