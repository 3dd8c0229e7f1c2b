"""How does a killed run find its way back? By its last saved state: weights, optimizers and step, hashed together.

A state knows its own hash and those of the files beside it, so that a run does not resume from anything altered.
"""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from loopscope.artifacts import sha256
from loopscope.config import digest
from loopscope.errors import UserError
from loopscope.files import atomic_file
from loopscope.models.checkpoint import first_not_finite, write_tensors
from loopscope.models.checkpoint_folder import WEIGHTS, write_hashes
from loopscope.models.looped_model import LoopedModel, tensors_sha256
from loopscope.training.optimizers import Optimizers
from loopscope.training.run_folder import METRICS_FILE, STATE_FILE, metrics_sha256, trained_with


def steps_done(folder: Path) -> int:
    """How many steps of the run in `folder` need not be done again; all of a finished run."""
    if (folder / WEIGHTS).is_file():
        run = trained_with(folder)
        return 0 if run is None else int(run["training"]["steps"])
    return _read_state(folder, with_tensors=False)[0] if (folder / STATE_FILE).is_file() else 0


def save_state(folder: Path, model: LoopedModel, optimizers: Optimizers, step: int, written: dict[str, str]) -> None:
    """Saves the run after `step` steps; `written` has the hashes of the files that it wrote before the first."""
    tensors = {f"model.{name}": value for name, value in _finite_weights(model).items()}
    tensors |= {f"optimizer.{name}": value for name, value in optimizers.tensors().items()}
    files = json.dumps(written | {METRICS_FILE: metrics_sha256(folder, step)})
    metadata = {"step": str(step), "files": files}
    with atomic_file(folder / STATE_FILE) as scratch:
        write_tensors(tensors, scratch, metadata | {"sha256": _state_sha256(tensors, metadata)})


def restore(folder: Path, model: LoopedModel, optimizers: Optimizers, written: dict[str, str]) -> int:
    """Puts the run back to its last saved state; returns the number of steps done."""
    if not (folder / STATE_FILE).is_file():
        return 0
    step, metadata, tensors = _read_state(folder, with_tensors=True)
    is_altered = metadata.pop("sha256", None) != _state_sha256(tensors, metadata)
    altered = [STATE_FILE] if is_altered else _altered_files(folder, metadata, written)
    if altered:
        raise UserError(
            f"{folder / altered[0]} was altered since the run saved its state; train the run again in another folder."
        )
    weights = _part(tensors, "model.")
    model.load_state_dict(weights | {name: weights[other] for name, other in model.tied.items()})
    optimizers.restore(_part(tensors, "optimizer."))
    return step


def _altered_files(folder: Path, metadata: dict[str, str], written: dict[str, str]) -> list[str]:
    """The files beside a state that are not as they were when it was saved."""
    now = written | {METRICS_FILE: metrics_sha256(folder, int(metadata["step"]))}
    return [name for name, before in json.loads(metadata["files"]).items() if now.get(name, before) != before]


def finish(folder: Path, model: LoopedModel, written: dict[str, str]) -> None:
    """Writes the weights; the hashes of all files come first, so that a folder with weights has those of its files."""
    weights = _finite_weights(model)
    with atomic_file(folder / WEIGHTS) as scratch:
        write_tensors(weights, scratch)
        write_hashes(folder, written | {METRICS_FILE: sha256(folder / METRICS_FILE), WEIGHTS: sha256(scratch)})
    (folder / STATE_FILE).unlink(missing_ok=True)


def _read_state(folder: Path, with_tensors: bool) -> tuple[int, dict[str, str], dict[str, Tensor]]:
    """The step, all metadata and the tensors of a state."""
    try:
        with safe_open(folder / STATE_FILE, framework="pt") as file:
            metadata, names = dict(file.metadata()), file.keys() if with_tensors else ()
            return int(metadata["step"]), metadata, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, RuntimeError, TypeError, KeyError, ValueError) as error:
        raise UserError(
            f"{folder / STATE_FILE} cannot be read ({error}); remove it, and the run begins again."
        ) from None


def _state_sha256(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Of everything that a state says, whatever the order in its file."""
    return digest([metadata, tensors_sha256(dict(sorted(tensors.items())))])


def _finite_weights(model: LoopedModel) -> dict[str, Tensor]:
    """Every tensor once, as a file holds it."""
    state = model.state_dict()
    weights = {name: value.detach().cpu().contiguous() for name, value in state.items() if name not in model.tied}
    if first_not_finite(weights):
        raise UserError("The weights are no longer finite; lower training.learning_rate, and train in another folder.")
    return weights


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
