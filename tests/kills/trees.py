"""What is in a folder, and is it what should be there?"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from loopscope.files import is_scratch

Tree = dict[str, str]
"""What every path below a folder is: the hash of a file, the place that a link points to, or a folder."""


def tree_of(folder: Path) -> Tree:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {os.path.relpath(path.readlink(), folder)}"
        elif path.is_dir():
            found[name] = "a folder"
        else:
            found[name] = _content(path)
    return found


def _content(path: Path) -> str:
    """The hash of a file. A PDF bears the time at which it was made: of that, only whether it is whole."""
    data = path.read_bytes()
    if path.suffix == ".pdf" and data.startswith(b"%PDF") and data.rstrip().endswith(b"%%EOF"):
        return "a whole PDF"
    return hashlib.sha256(data).hexdigest()


def leftovers(tree: Iterable[str]) -> list[str]:
    """What a writer that ended did not remove."""
    return [name for name in tree if _is_unfinished(name)]


def visible(tree: Tree) -> Tree:
    """What others see: nothing that is still being written."""
    return {name: value for name, value in tree.items() if not any(map(_is_unfinished, Path(name).parts))}


def _is_unfinished(name: str) -> bool:
    """Whether nothing has this name once the next call has ended."""
    return is_scratch(Path(name)) or name.endswith(".unfinished")


def differences(found: Tree, wanted: Tree) -> list[str]:
    words = {(True, False): "is missing", (False, True): "is too many", (True, True): "differs"}
    return [
        f"{name} {words[name in wanted, name in found]}"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]
