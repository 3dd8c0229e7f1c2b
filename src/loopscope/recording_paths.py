"""Where are a model's recordings? In the folder of its run, in the folder that holds them, or in one of their own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loopscope.artifacts import MANIFEST
from loopscope.config import read_json
from loopscope.errors import UserError
from loopscope.files import is_file, is_folder, no_folder

RECORDINGS = "recordings"
_CONFIG = "config.json"
"""The file in the folder of a run or another checkpoint, which has a model to record."""
ANALYSED = ("validation", "test")
"""The splits that an analysis needs: one chooses thresholds, the other evaluates them."""


def find_recording(path: Path, split: str) -> Path:
    """Find a recording: `path` itself, or the recording of this split in a run or a recordings folder."""
    if _is_recording(path):
        return path
    return _folder_with_splits((split,), path, "a recording, or a run that has one") / split


def find_recordings(path: Path) -> Path:
    """Find the folder with the recordings `validation` and `test`: in a run, or `path` itself."""
    if _is_recording(path):
        raise _two_recordings_needed(path)
    return _folder_with_splits(ANALYSED, path, "a run whose validation and test splits are recorded")


def _folder_with_splits(splits: Sequence[str], path: Path, expected: str) -> Path:
    """Find the folder with recordings of these splits, in `path` or `path` itself; `expected` is for the error."""
    folder = _recordings_in(path)
    if not is_folder(folder):
        raise no_folder(path, expected)
    for split in splits:
        if not is_folder(folder / split):
            raise _recording_missing(folder, path, split)
    return folder


def recordings_at(run: Path, loops: int | None, trained: int) -> Path:
    """The recordings folder of a run at this depth; other depths than the trained one have folders of their own."""
    folder = run / RECORDINGS
    return folder if loops in (None, trained) else folder / f"{loops}-loops"


def run_of_recordings(path: Path) -> Path:
    """The run folder, from itself, its recordings folder, or one of its recordings."""
    folder = path.parent if _is_recording(path) else path
    return folder.parent if folder.name == RECORDINGS else folder


def holds_recordings(path: Path) -> bool:
    """Whether a path is a recording, or a folder with a recording in it."""
    return _is_recording(path) or (is_folder(path) and any(map(_is_recording, path.iterdir())))


def recorded_name(folder: Path) -> str:
    """The name of the model in a folder that `find_recordings` found."""
    return (folder.parent if folder.name == RECORDINGS else folder).resolve().name


def _is_recording(path: Path) -> bool:
    """Whether a folder has the manifest of a recording."""
    return is_file(path / MANIFEST)


def _json_value(file: Path, key: str) -> str | None:
    """The value of a JSON file at `key`, as text; None if the file cannot be read."""
    try:
        found: dict[str, Any] = read_json(dict, file, "file")
    except (OSError, UserError):
        return None
    return str(found.get(key))


def _recordings_in(path: Path) -> Path:
    """The folder `recordings` in a run, or the path itself."""
    return path / RECORDINGS if is_folder(path / RECORDINGS) else path


def _two_recordings_needed(path: Path) -> UserError:
    """The error for one recording where a command needs two."""
    if _json_value(path / MANIFEST, "kind") == "live run":
        return UserError(
            f"{path} is a live run, which only `loopscope calibrate` and `loopscope check --policy` read; give the "
            "recordings of the model."
        )
    folder = path.parent
    if path.name in ANALYSED and all(map(_is_recording, (folder / split for split in ANALYSED))):
        give = f"give the folder of both: {folder}"
    else:
        give = (
            "give a folder that holds both, as `validation` and `test`, or give both to `loopscope sweep VALIDATION "
            "TEST`"
        )
    return UserError(
        f"{path} is one recording, and this needs two: one to choose thresholds on and one to judge them on; {give}."
    )


def _recording_missing(folder: Path, path: Path, split: str) -> UserError:
    """The error for a missing recording, with the command that makes it."""
    run = path.parent if path.name == RECORDINGS else path
    if is_file(run / _CONFIG):
        record = f"task {run}" if _json_value(run / _CONFIG, "model_type") == "loopscope" else f"text {run} FILE"
        make = f"make it with: loopscope record {record} --split {split} --out {run / RECORDINGS / split}"
    elif below := sorted(each.name for each in folder.iterdir() if is_folder(_recordings_in(each) / split)):
        make = f"give one of those in it that have: {', '.join(below[:5])}{' and others' if below[5:] else ''}"
    else:
        make = f"record it there (--out), or save your own: Trajectory(...).save('{folder / split}')"
    return UserError(f"{folder} has no recording '{split}'; {make}.")
