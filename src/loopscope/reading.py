"""How is a file read that may hold anything? Whole, within bounds, or one sentence says why not.

Whatever reads JSON, TOML or text goes through here: a folder, a device or a pipe in place of a file, a file without
end, nesting without end, and bytes that are no text are refused before anything is made of them.
"""

import re
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from pathlib import Path

from loopscope.errors import UserError, closest, did_you_mean

DEEPEST = 64
"""Tables or lists inside one another; no file of ours comes near."""
_SMALL = 1 << 28
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def read_bytes(path: Path, what: str, largest: int | None = _SMALL) -> bytes:
    """All bytes of a regular file of at most so many; `what` names it in errors, as in `TOML file`."""
    require_file(path, what)
    size = path.stat().st_size
    if largest is not None and size > largest:
        raise UserError(f"{path} is too large for a {what}: {size:,} bytes, and at most {largest:,} are read.")
    with path.open("rb") as file:
        data = file.read() if largest is None else file.read(largest + 1)
    if largest is not None and len(data) > largest:  # those of /proc have no size
        raise UserError(f"{path} is too large for a {what}: at most {largest:,} bytes are read.")
    return data


def read_text(path: Path, what: str, largest: int | None = _SMALL) -> str:
    """The text of a file in UTF-8, with a byte order mark or without."""
    try:
        return read_bytes(path, what, largest).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start:,}); convert it.") from None


def is_there(path: Path) -> bool:
    """Whether there is something; nothing is by a name that the system cannot have."""
    return _answered(path.exists)


def is_file(path: Path) -> bool:
    return _answered(path.is_file)


def is_folder(path: Path) -> bool:
    return _answered(path.is_dir)


def _answered(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError:  # a name that is too long, for instance
        return False


def near(path: Path) -> str:
    """What may be meant by a path that is not there: ` (did you mean runs/demo?)`, if its folder has such a name."""
    try:
        close = closest(path.name, [each.name for each in islice(path.parent.iterdir(), 1000)], 0.8)
    except OSError:
        return ""
    return "" if close is None or close == path.name else f" (did you mean {path.with_name(close)}?)"


def no_folder(path: Path, expected: str) -> UserError:
    """What is said of a path that should be a folder: it is a file, or nothing is there; `expected` is to be given."""
    if is_there(path):
        return UserError(f"{path} is a file; give {expected}.")
    return UserError(f"There is no folder {path}{near(path)}; give {expected}.")


def no_such_toml(source: str, shipped: Sequence[str], what: str) -> UserError:
    """What is said where neither a TOML file nor one of those that ship with LoopScope, each a `what`, is given."""
    path, rest = Path(source), f"give a TOML file, or one of: {', '.join(shipped)}"
    if is_folder(path):
        return UserError(f"{source} is a folder; {rest}.")
    if path.suffix == ".toml" or path.name != source:
        return UserError(f"There is no file {source}{near(path) or did_you_mean(path.stem, shipped)}; {rest}.")
    return UserError(f"There is no {what} '{source}'{did_you_mean(source, shipped)}; {rest}.")


def require_file(path: Path, what: str) -> None:
    """Refuses what is not there, and a folder, a device or a pipe, on which a reader could wait for ever."""
    if not is_there(path):
        raise UserError(f"There is no file {path}{near(path)}; give a {what}.")
    if path.is_file():
        return
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a {what}.")
    raise UserError(f"{path} is a device or a pipe; give a {what} that lies on a disk.")


def json_depth(data: bytes) -> int:
    """How deep lists and objects are nested in a JSON text, without reading it."""
    if data.count(b"[") + data.count(b"{") <= DEEPEST:
        return 0  # not deep, whatever it is
    brackets = _STRING.sub(b"", data).translate(None, _NO_BRACKETS)
    return max(accumulate(1 if each in b"[{" else -1 for each in brackets), default=0)


def is_plain_name(name: str) -> bool:
    """Whether a name from a file is that of a file in the same folder, and not a way out of it."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")
