"""May a run go to this folder? Its files say so, without PyTorch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from loopscope.config import differences, plain, read_json
from loopscope.errors import UserError
from loopscope.models.configuration import CONFIG, ModelType, read_checkpoint_config
from loopscope.reading import is_file, is_folder
from loopscope.training.custom_objectives import with_source
from loopscope.training.settings import RunSettings
from loopscope.writing import is_scratch

_OPTIONS = {
    "text_sha256.train": "--text",
    "text_sha256.validation": "--validation",
    "start_sha256": "--start",
    "teacher_sha256": "--teacher",
}
"""What of a run's settings the command line says elsewhere than in a TOML file."""


class _Trained(msgspec.Struct, frozen=True):
    run: dict[str, Any] | None = None


def trained_with(folder: Path) -> dict[str, Any] | None:
    """The settings of the run that trained the checkpoint in `folder`; None if it was not trained here."""
    if read_json(ModelType, folder / CONFIG, "run configuration").model_type == "loopscope":
        return read_checkpoint_config(folder).run
    return read_json(_Trained, folder / CONFIG, "run configuration").run


def check_run_place(folder: Path, settings: RunSettings | None = None) -> None:
    """Refuses a folder that holds something, and no run; with settings, also one with a run that has others."""
    if not is_folder(folder):
        return
    if is_file(folder / CONFIG):
        if settings is not None:
            objective = with_source(settings.objective)
            check_same_run(folder, plain(msgspec.structs.replace(settings, objective=objective)))
    elif not all(map(is_scratch, folder.iterdir())):
        raise UserError(f"{folder} exists and is not a run; choose another --out.")


def check_same_run(folder: Path, run: Mapping[str, Any]) -> None:
    """Refuses the checkpoint in `folder` if it is not of the run with these settings."""
    before = trained_with(folder)
    if before is None:
        raise UserError(f"{folder} holds a checkpoint that was not trained here; choose another --out.")
    changed = differences(before, run)
    if changed == ["objective.source_sha256"]:
        raise UserError(
            f"{folder} holds a run whose objective '{run['objective']['name']}' had another source text; "
            "choose another --out, or put the old text back."
        )
    if changed:
        raise UserError(
            f"{folder} holds a run with other settings ({named_settings(changed)}); choose another --out, or remove it."
        )


def named_settings(changed: list[str]) -> str:
    """The first few of these settings, as a user gives them."""
    return ", ".join(_OPTIONS.get(name, name) for name in changed[:3])
