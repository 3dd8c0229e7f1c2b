"""What does a run's folder hold, and which run owns it? Configuration and metrics, read and written without PyTorch.

The folder holds `config.json` (all settings), `data.json` (split sizes and their overlap) and `metrics.jsonl`. During
the run it also holds `state.safetensors` (`training_loop.py`), afterwards `model.safetensors` and `hashes.json`. No
file in it depends on the time or on the machine's name.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from loopscope.config import differences, plain, read_json, write_json
from loopscope.errors import UserError
from loopscope.files import (
    is_file,
    is_folder,
    is_scratch,
    no_folder,
    only_writer,
    remove_scratch,
    room_for,
    write_bytes,
)
from loopscope.models.checkpoint_folder import (
    CONFIG,
    WEIGHTS,
    check_hashes,
    is_of_task,
    known_sha256,
    read_checkpoint_config,
)
from loopscope.tasks import Task, examples_sha256
from loopscope.training.settings import CustomTaskSettings, RunSettings, build_run_settings, with_sources

STATE_FILE = "state.safetensors"
METRICS_FILE = "metrics.jsonl"
DATA_FILE = "data.json"
CUSTOM_EXAMPLES = "custom_examples_sha256"
"""The entry of `data.json` with the hash of a custom task's examples."""

_NAMES = {
    "text_sha256.train": "--text",
    "text_sha256.validation": "--validation",
    "start_sha256": "--start",
    "teacher_sha256": "--teacher",
    "objective.source_sha256": "the source text of the objective",
    "objective.prior_sha256": "the source text of the prior",
    "model.source_sha256": "the source text of the model",
    "task.source_sha256": "the source text of the task",
}
"""The names of settings that are hashes, as errors call them."""


class _TrainedCheckpoint(msgspec.Struct, frozen=True):
    """The part of a checkpoint's `config.json` that a LoopScope run writes."""

    run: dict[str, Any] | None = None


def trained_with(folder: Path) -> dict[str, Any] | None:
    """The settings of the run that trained the checkpoint in `folder`; None if no LoopScope run did."""
    return read_json(_TrainedCheckpoint, folder / CONFIG, "run configuration").run


def read_run_settings(run: Path) -> RunSettings:
    """Read the settings of the run on a task in a folder."""
    if not is_file(run / CONFIG):
        other = UserError(f"{run} is not a run: it has no {CONFIG}; give a folder that `loopscope train` made.")
        raise other if is_folder(run) else no_folder(run, "the folder of a finished run")
    if not is_of_task(run):
        raise UserError(f"{run} has no task of its own: it is a model of text; give a run that was trained on a task.")
    config = read_checkpoint_config(run)
    settings = build_run_settings(config.run, str(run / CONFIG))
    sizes = config.vocab_size, config.block_size
    if not isinstance(settings, CustomTaskSettings):  # only custom code knows the sizes of a custom task
        sizes = settings.generator.vocab_size, settings.block_size
    if (config.model, config.vocab_size, config.block_size) != (settings.model, *sizes):
        raise UserError(
            f"{run / CONFIG} contradicts itself (model, vocab_size or block_size); put training's file back."
        )
    return settings


def task_of_run(run: Path, settings: RunSettings, custom_tasks: Sequence[str] = ()) -> Task:
    """The task of the run in a folder; a custom task must also be named in `custom_tasks`."""
    if isinstance(settings, CustomTaskSettings):
        name = settings.task.name
        if name not in custom_tasks:
            raise UserError(
                f"{run} was trained on a task in code, '{name}', which is not run because a file names it; add "
                f"--with-task {name} (in Python: custom_tasks=['{name}'])."
            )
        check_examples(run, settings)
    return settings.generator


def check_examples(run: Path, settings: RunSettings) -> None:
    """Reject a custom task whose examples differ from those with which the run in a folder began."""
    if not isinstance(settings, CustomTaskSettings):
        return
    before = read_json(dict[str, Any], run / DATA_FILE, "file of a run's data").get(CUSTOM_EXAMPLES)
    if before != examples_sha256(settings.generator):
        raise UserError(
            f"The task '{settings.task.name}' draws or answers otherwise than when the run in {run} began, with the "
            "same source text; what its module imports must be as it was, and no draw may depend on time or hash()."
        )


def check_run_place(folder: Path, settings: RunSettings | None = None) -> None:
    """Reject a folder that holds files but no run; with settings, also a folder with a run of different settings."""
    if is_file(folder / CONFIG):
        if settings is not None:
            check_same_run(folder, {"run": plain(with_sources(settings))})
    elif is_folder(folder) and not all(map(is_scratch, folder.iterdir())):
        raise UserError(f"{folder} exists and is not a run; choose another --out.")


def check_same_run(folder: Path, config: Mapping[str, Any]) -> None:
    """Reject the checkpoint in `folder` if its run has a different configuration."""
    found = read_json(dict[str, Any], folder / CONFIG, "run configuration")
    changed = differences({name: found.get(name) for name in config}, config)
    if changed:
        names = named_settings([name.removeprefix("run.") for name in changed])
        what = f"a run with other settings ({names})" if found.get("run") else "a checkpoint that was not trained here"
        raise UserError(f"{folder} holds {what}; choose another --out, or remove it.")


def named_settings(changed: list[str]) -> str:
    """The first few changed settings, under the names that users know."""
    return ", ".join(_NAMES.get(name, name) for name in changed[:3])


@contextmanager
def claim_run_folder(folder: Path, config: dict[str, Any], files: Sequence[str]) -> Iterator[None]:
    """Claim a folder for the run with this configuration and this process; reject a folder of a different run.

    If a new run fails while it prepares its `files`, they are removed, so that the corrected run can use the folder.
    """
    with only_writer(folder):
        check_run_place(folder)
        new = not (folder / CONFIG).is_file()
        if new:
            write_json(folder / CONFIG, config)
        check_same_run(folder, config)
        remove_scratch(folder)
        try:
            yield
        finally:
            if new and not (folder / METRICS_FILE).exists():
                for name in files:
                    (folder / name).unlink(missing_ok=True)


_NO_METRICS = (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError)
"""What reading lines raises that are no metrics."""


def append_metrics(folder: Path, entry: dict[str, Any]) -> None:
    """Append an entry to the run's `metrics.jsonl`."""
    with room_for(folder / METRICS_FILE), (folder / METRICS_FILE).open("ab") as file:
        file.write(_log_line(entry))


def cut_metrics(folder: Path, steps: int) -> None:
    """Cut the run's log after its first `steps` steps."""
    write_bytes(folder / METRICS_FILE, b"".join(map(_log_line, read_metrics(folder, steps))))


def metrics_sha256(folder: Path, steps: int) -> str:
    """The hash of the log of the first `steps` steps, synced to disk first: a state must not be ahead of its log."""
    if (folder / METRICS_FILE).is_file():
        with (folder / METRICS_FILE).open("rb") as file:
            os.fsync(file)
    return hashlib.sha256(b"".join(map(_log_line, read_metrics(folder, steps)))).hexdigest()


def read_metrics(folder: Path, steps: int, finished: bool = False) -> list[dict[str, Any]]:
    """The log of the first `steps` steps; a killed run may have logged more steps, and a partial last line.

    The last entry of a finished run is a validation.
    """
    if not finished and not (folder / METRICS_FILE).is_file():
        return []
    try:
        lines = (folder / METRICS_FILE).read_bytes().split(b"\n")[:-1]
        entries = [entry for entry in map(json.loads, lines) if entry["step"] <= steps]
        if finished:
            entries[-1]["validation_accuracy"]
    except _NO_METRICS:
        raise UserError(f"{folder / METRICS_FILE} was altered; train the run again in another folder.") from None
    return entries


def run_weights(run: Path) -> str:
    """The identity of a finished run's model, from its file and without PyTorch."""
    check_hashes(run)
    return known_sha256(run.resolve() / WEIGHTS)


def logged_steps(folder: Path) -> int:
    """The last step in the log of the run in `folder`; a resumed run may repeat some of these steps."""
    try:
        return int(json.loads((folder / METRICS_FILE).read_bytes().splitlines()[-1])["step"])
    except _NO_METRICS:
        return 0


def _log_line(entry: dict[str, Any]) -> bytes:
    """An entry of the run's log as a line."""
    return json.dumps(entry).encode() + b"\n"
