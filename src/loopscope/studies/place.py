"""May a study go to this folder? Its names lead to artifacts of the store, and its report is of these; both stay so.

A study that grows keeps its folder. One whose runs of the same names are others takes another, and so does one that
has none of the runs there.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from loopscope.artifacts import MANIFEST
from loopscope.config import differences, plain
from loopscope.errors import UserError
from loopscope.models.configuration import CONFIG
from loopscope.reading import is_folder
from loopscope.recording_places import RECORDINGS
from loopscope.training.run_place import named_settings, trained_with
from loopscope.training.settings import RunSettings


def check_place(folder: Path, runs: Mapping[str, RunSettings]) -> None:
    """Refuses to mix links with what is somebody's own, and to let a name of another run mean one of these."""
    if any((folder / name).is_file() for name in (MANIFEST, CONFIG)):
        raise UserError(
            f"{folder} holds a run, a recording or a gate, and a study's folder is its own; choose another --out."
        )
    for name, settings in runs.items():
        config = folder / name / CONFIG
        if not config.exists():
            continue
        if not config.is_symlink():
            raise UserError(f"{config.parent} is a run of its own, not of a study; choose another --out.")
        if changed := differences(trained_with(config.parent) or {}, plain(settings)):
            raise UserError(
                f"{folder} holds a study whose run '{name}' has other settings ({named_settings(changed)}); "
                f"{_elsewhere(folder)}."
            )


def check_links(folder: Path, keys: Mapping[str, Collection[str]]) -> None:
    """Refuses names that lead to other artifacts than one of these, or only names that are not of this study."""
    found = {place.name: key for place in _folders(folder) if (key := _linked(place)) is not None}
    for name, key in found.items():
        if name in keys and key not in keys[name]:
            raise UserError(
                f"{folder} holds a study whose '{name}' was made otherwise: of other data, in another precision, on "
                f"another device, with other threads or by an earlier version; {_elsewhere(folder)}."
            )
    if found and not found.keys() & keys.keys():
        raise UserError(f"{folder} holds another study, with '{min(found)}'; {_elsewhere(folder)}.")


def _linked(place: Path) -> str | None:
    """The key of the run that a name leads to; of a checkpoint, that of its validation recording."""
    for link in (place / CONFIG, place / RECORDINGS / "validation"):
        if link.is_symlink() and link.exists():
            target = link.readlink()
            return target.parent.name if link.name == CONFIG else target.name
    return None


def _folders(folder: Path) -> list[Path]:
    return [place for place in sorted(folder.iterdir()) if place.is_dir()] if is_folder(folder) else []


def _elsewhere(folder: Path) -> str:
    """The advice, with a folder that is free; beside this one it has the same store."""
    if not folder.name.strip("."):
        return "choose another --out"
    number = 2
    while (free := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return f"choose another --out, such as {free}"
