"""What is in a folder, and is it what should be there?"""

import hashlib
import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

LEFTOVERS = (".partial-*", "*.replaced", "*.unfinished", "*.tmp")
"""Names that nothing has once the next call has ended."""

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
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def leftovers(tree: Iterable[str]) -> list[str]:
    """What a writer that ended did not remove."""
    return [name for name in tree if any(fnmatch(Path(name).name, pattern) for pattern in LEFTOVERS)]


def visible(tree: Tree) -> Tree:
    """What others see: nothing that is still being written."""
    gone = [name for name in tree if any(is_scratch(part) for part in Path(name).parts)]
    return {name: value for name, value in tree.items() if name not in set(gone)}


def is_scratch(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in (".partial-*", "*.replaced", "*.unfinished"))


def differences(found: Tree, wanted: Tree) -> list[str]:
    words = {(True, False): "is missing", (False, True): "is too many", (True, True): "differs"}
    return [
        f"{name} {words[name in wanted, name in found]}"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]
