"""How does a recording get into its folder? Straight to disk, or in parts that an interrupted recording resumes.

An identical artifact is used again, and a different one is rejected. Long work keeps its parts beside the artifact
until it is complete. The name of each part has its hash, so that an altered part is made again.

Shapes: N examples, T loops, V classes, D width.
"""

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from loopscope.artifacts import (
    MANIFEST,
    Manifest,
    artifact_folder,
    check_replaceable,
    create_tensors,
    map_tensors,
    save_tensors,
    sha256,
    write_manifest,
)
from loopscope.config import digest, read_json, write_json
from loopscope.engine.logit_signals import check_finite
from loopscope.errors import UserError
from loopscope.files import SCRATCH, discard, is_scratch, only_writer, remove_leftovers, remove_scratch, room_for
from loopscope.model_identity import same_model
from loopscope.models.looped_model import LoopedModel, Loops
from loopscope.readouts.readout import readout_definition, readouts_reading
from loopscope.readouts.replay import check_definition, replayed
from loopscope.trajectory import (
    EXAMPLES,
    HIDDEN,
    RECORDING,
    RECORDING_FILES,
    RECORDING_SCHEMA,
    SIGNAL_PREFIX,
    TRAJECTORY,
    Trajectory,
)

Arrays = dict[str, NDArray[Any]]
ArrayLayout = dict[str, tuple[tuple[int, ...], Any]]
"""The shape and type of every array of a recording."""
T = TypeVar("T")

_DESCRIPTION = "what.json"
_REPEATED_TOKENS = 16
_ROUNDINGS = 16
"""How many roundings two passes over the same rows may differ: some devices add numbers in any order."""
_PART = "{}.safetensors"


@dataclass(frozen=True)
class Keep:
    """Choose what a recording holds beside labels, difficulties, gate logits and examples."""

    logits: bool = True
    hidden: bool = False

    @property
    def signals(self) -> list[str]:
        """The signals to compute while recording, because the recording does not keep the arrays that they need."""
        lost = {"logits": not self.logits, "hidden": not self.hidden}
        return [readout.name for readout in readouts_reading(*(source for source, gone in lost.items() if gone))]

    @property
    def provenance(self) -> dict[str, Any]:
        """The definitions of custom readouts at the time of the recording."""
        definitions = {name: readout_definition(name) for name in self.signals}
        definitions = {name: definition for name, definition in definitions.items() if definition is not None}
        return {"signal_definitions": definitions} if definitions else {}


def array_layout(model: LoopedModel, shape: tuple[int, int], keep: Keep, by_example: Sequence[str]) -> ArrayLayout:
    """The arrays of a recording of shape [N, T], hidden states last; `by_example` names whole numbers [N]."""
    probe = model.loops(torch.zeros((1, 1), dtype=torch.int64), num_loops=1)
    layout: ArrayLayout = dict.fromkeys(by_example, (shape[:1], np.int64))
    if keep.logits:
        layout["logits"] = ((*shape, probe.logits.shape[-1]), np.float32)
    else:
        layout |= {"predictions": (shape, np.int64), "label_log_probs": (shape, np.float64)}
    if probe.gate_logits is not None:
        layout["gate_logits"] = (shape, np.float32)
    layout |= {SIGNAL_PREFIX + name: (shape, np.float64) for name in keep.signals}
    return layout | ({"hidden": ((*shape, probe.hidden.shape[-1]), np.float32)} if keep.hidden else {})


def write_recording(
    out: Path,
    split: str,
    layout: ArrayLayout,
    provenance: Mapping[str, Any],
    fill: Callable[[Arrays], None],
    examples: Sequence[str] | None = None,
) -> Trajectory:
    """Write the recording into `out`: `fill` writes arrays mapped to the disk, so they need not fit in memory."""
    with artifact_folder(out, RECORDING, RECORDING_FILES) as scratch:
        hidden = {name: size for name, size in layout.items() if name == "hidden"}
        arrays = create_tensors(scratch / TRAJECTORY, {name: layout[name] for name in layout if name not in hidden})
        needed = [TRAJECTORY]
        if hidden:
            arrays |= create_tensors(scratch / HIDDEN, hidden)
            needed.append(HIDDEN)
        fill(arrays)
        for array in arrays.values():
            array.flush()  # type: ignore[attr-defined]
        if examples is not None:
            write_json(scratch / EXAMPLES, examples)
            needed.append(EXAMPLES)
        count, loops = arrays["logits" if "logits" in arrays else "predictions"].shape[:2]
        contents = {"split": split, "examples": count, "loops": loops}
        write_manifest(scratch, RECORDING, RECORDING_SCHEMA, contents, provenance, needed)
        return Trajectory.load(scratch)  # only a readable recording is moved to `out`


def write_states(arrays: Arrays, rows: NDArray[np.int64], out: Loops, keep: Keep) -> None:
    """Write gate logits and states [T, n, ...] of some examples into a recording's arrays, or the states' signals."""
    if out.gate_logits is not None:
        arrays["gate_logits"][rows] = check_finite(by_row(out.gate_logits), "halt logits")
    states = check_finite(by_row(out.hidden), "states")
    if keep.hidden:
        arrays["hidden"][rows] = states
        return
    for readout in readouts_reading("hidden"):
        arrays[SIGNAL_PREFIX + readout.name][rows] = replayed(readout, states)


def by_row(values: torch.Tensor) -> NDArray[Any]:
    """Turn [T, n, ...] on any device into [n, T, ...] in float32."""
    return values.transpose(0, 1).float().cpu().numpy()


@torch.inference_mode()
def check_repeatable(model: LoopedModel) -> None:
    """Before recording, reject a model whose answers differ in a second run: its recording would be a random draw."""
    model.require_evaluation()
    rows = np.random.default_rng(0).integers(0, model.vocab_size, (2, min(model.block_size, _REPEATED_TOKENS)))
    first, again = (model.loops(torch.from_numpy(rows)).logits.nan_to_num() for _ in range(2))
    if (first - again).abs().max() > _ROUNDINGS * torch.finfo(first.dtype).eps * first.abs().max():
        raise UserError(
            "The model answers the same rows otherwise the second time, although it is in evaluation mode; keep "
            "dropout and noise to training, or draw noise from a fixed seed (loopscope.check_model says more)."
        )


def existing_recording(out: Path, split: str, provenance: dict[str, Any], keep: Keep) -> Trajectory | None:
    """The recording in `out` if it is the requested one; a different one, or one that lacks a signal, is rejected."""
    expected = {"split": split, **provenance}
    recording = existing_artifact(out, RECORDING, RECORDING_FILES, expected, Trajectory.load)
    if recording is None:
        return None
    if lacking := [name for name in keep.signals if name not in recording.signals]:
        raise UserError(
            f"{out} holds a recording without the signal {', '.join(lacking)}; choose another --out, or remove it."
        )
    for name in keep.signals:
        check_definition(name, recording)
    return recording


def existing_artifact(
    out: Path, kind: str, files: Collection[str], expected: Mapping[str, Any], load: Callable[[Path], T]
) -> T | None:
    """The artifact in `out`; None if there is none or it is damaged; one with other provenance is rejected."""
    remove_leftovers(out)
    if not (out / MANIFEST).is_file():
        check_replaceable(out, kind)
        return None
    check_replaceable(out, kind, files)
    try:
        manifest = read_json(Manifest, out / MANIFEST, "manifest")
    except UserError:  # cut or altered since: made again
        return None
    found = {**manifest.contents, **manifest.provenance}
    changed = [name for name, value in expected.items() if not _same_provenance(name, found.get(name), value)]
    if changed:
        words = [
            name.replace("weights_sha256", "model")
            .removesuffix("_sha256")
            .replace("keeps_", "choice of ")
            .replace("loops", "number of loops")
            .replace("_", " ")
            for name in changed
        ]
        raise UserError(
            f"{out} holds another {kind} (of another {', '.join(words)}); choose another --out, or remove it."
        )
    try:
        return load(out)
    except UserError:  # cut or altered since: made again
        return None


def _same_provenance(name: str, found: Any, expected: Any) -> bool:
    """Whether an entry of an artifact's provenance has the expected value."""
    return same_model(found, expected) if name == "weights_sha256" else bool(found == expected)


def resume_or_make(out: Path, existing: Callable[[], T | None], make: Callable[[Path], None]) -> T:
    """The artifact in `out`; if there is none, `make` writes it into a folder, given the folder of unfinished parts."""
    unfinished = unfinished_folder(out)
    remove_leftovers(unfinished)
    if not unfinished.exists() and (found := existing()) is not None:
        return found
    with only_writer(unfinished):
        if (found := existing()) is None:
            make(unfinished)
            found = existing()
        discard(unfinished)
    assert found is not None
    return found


def unfinished_folder(out: Path) -> Path:
    """The folder beside `out` that keeps the parts of an unfinished recording."""
    out = out.absolute()  # "." has no name
    return out.with_name(f"{out.name}.unfinished")


def kept_parts(folder: Path, description: dict[str, Any]) -> list[Arrays]:
    """The parts that an interrupted recording has left; parts of a different recording are rejected."""
    expected = digest(description)
    remove_scratch(folder)
    if all(map(is_scratch, folder.iterdir())):
        write_json(folder / _DESCRIPTION, expected)
    described = folder / _DESCRIPTION
    if not described.is_file() or read_json(str, described, "unfinished recording") != expected:
        raise UserError(f"{folder} holds another unfinished recording; choose another --out, or remove it.")
    files = [file for file in sorted(folder.glob(_PART.format("*"))) if file.is_file()]
    return [part for file in files if (part := _load_part(file)) is not None]


def keep_part(part: Arrays, folder: Path) -> None:
    """Write a finished part of an unfinished recording, under a name with its hash."""
    with room_for(folder), tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as scratch:
        file = Path(scratch, "part")
        save_tensors(file, part)
        file.rename(folder / _PART.format(sha256(file)))


def _load_part(file: Path) -> Arrays | None:
    """A part of an unfinished recording; None, and the file is removed, if the file was altered."""
    if file.name != _PART.format(sha256(file)):
        file.unlink()
        return None
    return {name: np.array(values) for name, values in map_tensors(file).items()}
