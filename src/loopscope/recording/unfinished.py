"""How is long work kept until its artifact is whole? In parts beside it, each under a name that has its hash."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.artifacts import map_tensors, save_tensors, sha256
from loopscope.config import digest, read_json
from loopscope.errors import UserError
from loopscope.writing import SCRATCH, is_scratch, remove_scratch, room_for, write_json

Arrays = dict[str, NDArray[Any]]

_WHAT = "what.json"
_PART = "{}.safetensors"


def unfinished_folder(out: Path) -> Path:
    return out.with_name(f"{out.name}.unfinished")


def kept_parts(folder: Path, description: dict[str, Any]) -> list[Arrays]:
    """What an earlier try at the same work has left; another's is refused."""
    expected = digest(description)
    remove_scratch(folder)
    if all(map(is_scratch, folder.iterdir())):
        write_json(folder / _WHAT, expected)
    elif not (folder / _WHAT).is_file() or read_json(str, folder / _WHAT, "unfinished recording") != expected:
        raise UserError(f"{folder} holds another unfinished recording; choose another --out, or remove it.")
    return [part for file in sorted(folder.glob(_PART.format("*"))) if (part := _kept(file)) is not None]


def keep_part(part: Arrays, folder: Path) -> None:
    """Writes a part under a name that has its hash: what was altered since is made again."""
    with room_for(folder), tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as scratch:
        file = Path(scratch, "part")
        save_tensors(file, part)
        file.rename(folder / _PART.format(sha256(file)))


def _kept(file: Path) -> Arrays | None:
    if not file.is_file():
        raise UserError(f"{file} is no file; remove {file.parent}, and what it was for is done again.")
    if file.name != _PART.format(sha256(file)):
        file.unlink()
        return None
    return {name: np.array(values) for name, values in map_tensors(file).items()}
