"""What does a run's folder hold, and how does a killed run find its way back?

`config.json` (all settings), `data.json` (split sizes and their overlap), `metrics.jsonl`, and `state.safetensors`
(weights, optimizer and step) while it runs, `model.safetensors` and `hashes.json` once it is finished. A state knows
its own hash and those of the files beside it. Nothing in the folder depends on the time or on the machine's name.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from loopscope.artifacts import sha256
from loopscope.config import digest, read_json
from loopscope.errors import UserError
from loopscope.models import LoopedModel
from loopscope.models.checkpoint import CONFIG, WEIGHTS, first_not_finite, write_tensors
from loopscope.models.contract import tensors_sha256
from loopscope.models.run_hashes import write_hashes
from loopscope.training.optimizers import Optimizers
from loopscope.training.run_place import check_run_place, check_same_run, trained_with
from loopscope.writing import atomic_file, only_writer, remove_scratch, room_for, write_bytes, write_json

STATE_FILE = "state.safetensors"
METRICS_FILE = "metrics.jsonl"
DATA_FILE = "data.json"


def steps_done(folder: Path) -> int:
    """How many steps of the run in `folder` need not be done again; all of a finished run."""
    if (folder / WEIGHTS).is_file():
        run = trained_with(folder)
        return 0 if run is None else int(run["training"]["steps"])
    if not (folder / STATE_FILE).is_file():
        return 0
    with _open_state(folder) as file:
        return _saved_step(file)


def logged_steps(folder: Path) -> int:
    """How far the run in `folder` has come, as it said last; it may have to repeat some of it."""
    try:
        return int(json.loads((folder / METRICS_FILE).read_bytes().splitlines()[-1])["step"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return 0


@contextmanager
def claimed(folder: Path, config: dict[str, Any], files: Sequence[str]) -> Iterator[None]:
    """Makes the folder that of the run with this configuration, for this process; another run's is refused.

    A new one that is refused while its `files` are prepared leaves none of them: the corrected one has its place.
    """
    with only_writer(folder):
        new = not (folder / CONFIG).is_file()
        _claim(folder, config)
        remove_scratch(folder)
        try:
            yield
        except UserError:
            if new and not (folder / METRICS_FILE).exists():
                for name in files:
                    (folder / name).unlink(missing_ok=True)
            raise


def _claim(folder: Path, config: dict[str, Any]) -> None:
    if (folder / CONFIG).is_file():
        check_same_run(folder, config["run"])
        found = read_json(dict[str, Any], folder / CONFIG, "run configuration")
        altered = [key for key, value in config.items() if found.get(key, value) != value]
        if altered:
            raise UserError(
                f"{folder / CONFIG} was altered: its {', '.join(altered[:3])} contradicts the settings of its run; "
                "train the run again in another folder."
            )
        return
    check_run_place(folder)
    write_json(folder / CONFIG, config)


def save_state(folder: Path, model: LoopedModel, optimizers: Optimizers, step: int, written: dict[str, str]) -> None:
    tensors = {f"model.{name}": value for name, value in _weights(model).items()}
    tensors |= {f"optimizer.{name}": value for name, value in optimizers.tensors().items()}
    tensors = _fetched(tensors)
    files = json.dumps(written | {METRICS_FILE: _metrics_sha256(folder, step)})
    metadata = {"step": str(step), "files": files}
    _write_tensors(folder / STATE_FILE, tensors, metadata | {"sha256": _state_sha256(tensors, metadata)})


def _state_sha256(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Of everything that a state says, whatever the order in its file."""
    return digest([metadata, tensors_sha256(dict(sorted(tensors.items())))])


def finish(folder: Path, model: LoopedModel, written: dict[str, str]) -> None:
    """Writes the weights; the hashes of all files come first, so that a folder with weights has those of its files."""
    written = written | {METRICS_FILE: sha256(folder / METRICS_FILE)}
    _write_tensors(
        folder / WEIGHTS,
        _weights(model),
        ready=lambda scratch: write_hashes(folder, written | {WEIGHTS: sha256(scratch)}),
    )


def _weights(model: LoopedModel) -> dict[str, Tensor]:
    """Every tensor once."""
    return {name: value for name, value in model.state_dict().items() if name not in model.tied}


def restore(folder: Path, model: LoopedModel, optimizers: Optimizers, written: dict[str, str]) -> int:
    """Puts the run back to its last saved state; returns the number of steps done."""
    if not (folder / STATE_FILE).is_file():
        return 0
    with _open_state(folder) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
        step = _saved_step(file)
        _check_state(folder, tensors, file.metadata(), step, written)
        weights = _part(tensors, "model.")
        model.load_state_dict(weights | {name: weights[other] for name, other in model.tied.items()})
        optimizers.restore(_part(tensors, "optimizer."))
        return step


def _check_state(
    folder: Path, tensors: dict[str, Tensor], metadata: dict[str, str], step: int, written: dict[str, str]
) -> None:
    """Refuses a state, or files beside it, that are not as they were when it was saved."""
    expected = metadata.pop("sha256", None)
    if expected is None:
        raise UserError(
            f"{folder / STATE_FILE} has no hash: it was altered, or an earlier version saved it; remove it, and the "
            "run begins again."
        )
    if _state_sha256(tensors, metadata) != expected:
        raise UserError(f"{folder / STATE_FILE} was altered since it was saved; remove it, and the run begins again.")
    now = written | {METRICS_FILE: _metrics_sha256(folder, step)}
    for name, before in json.loads(metadata["files"]).items():
        if now.get(name, before) != before:
            raise UserError(
                f"{folder / name} was altered since the run saved its state; train the run again in another folder."
            )


@contextmanager
def _open_state(folder: Path) -> Iterator[Any]:
    try:
        with safe_open(folder / STATE_FILE, framework="pt") as file:
            yield file
    except UserError:
        raise
    except (SafetensorError, RuntimeError, TypeError, KeyError, ValueError) as error:
        raise UserError(
            f"{folder / STATE_FILE} cannot be read ({error}); remove it, and the run begins again."
        ) from None


def _saved_step(file: Any) -> int:
    return int(file.metadata()["step"])


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _fetched(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def _write_tensors(
    path: Path,
    tensors: dict[str, Tensor],
    metadata: dict[str, str] | None = None,
    ready: Callable[[Path], None] | None = None,
) -> None:
    """Writes a file, whole or not at all; `ready` is called when all of it is written, before it is in its place."""
    held = _fetched(tensors)
    if first_not_finite({name: value for name, value in held.items() if not name.startswith("optimizer.")}) is not None:
        raise UserError("The weights are no longer finite; lower training.learning_rate, and train in another folder.")
    with atomic_file(path) as scratch:
        write_tensors(held, scratch, metadata)
        if ready is not None:
            ready(scratch)


def append_metrics(folder: Path, entry: dict[str, Any]) -> None:
    with room_for(folder / METRICS_FILE), (folder / METRICS_FILE).open("ab") as file:
        file.write(_line(entry))


def cut_metrics(folder: Path, steps: int) -> None:
    """Leaves what the first `steps` steps logged."""
    write_bytes(folder / METRICS_FILE, b"".join(map(_line, read_metrics(folder, steps))))


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _metrics_sha256(folder: Path, steps: int) -> str:
    """Of what the first `steps` steps logged, which is on disk by now: a state must not know more than there is."""
    if (folder / METRICS_FILE).is_file():
        with (folder / METRICS_FILE).open("rb") as file:
            os.fsync(file)
    return hashlib.sha256(b"".join(map(_line, read_metrics(folder, steps)))).hexdigest()


def read_metrics(folder: Path, steps: int) -> list[dict[str, Any]]:
    """What the first `steps` steps logged; a killed run may have logged more, and its last line may be cut off."""
    if not (folder / METRICS_FILE).is_file():
        return []
    lines = (folder / METRICS_FILE).read_bytes().split(b"\n")[:-1]
    try:
        entries = [json.loads(line) for line in lines]
        return [entry for entry in entries if entry["step"] <= steps]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder / METRICS_FILE} was altered; train the run again in another folder.") from None
