"""How does a file get read that may hold anything, and written without being lost or half-written?

Reading is bounded: a folder, a device or a pipe in place of a file, a file without end, nesting without end, and bytes
that are no text are rejected before anything is made of them. Files and folders appear whole or not at all (written
beside their place, then renamed), by one writer at a time, which holds a lock. The next writer removes what a killed
one left behind.
"""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from loopscope.errors import UserError, closest, did_you_mean

MAX_FILE_BYTES = 1 << 28
LOCK, SCRATCH, REPLACED = BESIDE = (".lock-", ".partial-", ".replaced-")
"""What is called so, and then like its target, is beside it while it is written: the lock of its writer, what there is
of it, and what it replaces. A folder that is written into has its lock inside."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOCK_PATIENCE = 0.5
"""Seconds: whoever only looks after leftovers holds a lock for less."""
_MAX_NAME = 255 - max(map(len, BESIDE))
is_there, is_file, is_folder = os.path.exists, os.path.isfile, os.path.isdir
"""False for a name that the system cannot have, where methods of `Path` raise: one that is too long, for instance."""


def read_bytes(path: Path, what: str, largest: int | None = MAX_FILE_BYTES) -> bytes:
    """All bytes of a regular file of at most so many; `what` names it in errors, as in `TOML file`."""
    require_file(path, what)
    with path.open("rb") as file:
        data = file.read() if largest is None else file.read(largest + 1)
    if largest is not None and len(data) > largest:
        raise UserError(f"{path} is too large for a {what}: at most {largest:,} bytes are read.")
    return data


def read_text(path: Path, what: str, largest: int | None = MAX_FILE_BYTES) -> str:
    """The text of a file in UTF-8, with a byte order mark or without."""
    try:
        return read_bytes(path, what, largest).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start:,}); convert it.") from None


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
    if is_file(path):
        return
    kind = f"{path} is {'a folder' if is_folder(path) else 'a device or a pipe'}"
    raise UserError(f"{kind if is_there(path) else f'There is no file {path}{near(path)}'}; give a {what}.")


def out_folder(text: str | Path) -> Path:
    """A folder to write to: no file is in its way."""
    for place in (Path(text), *Path(text).parents):
        if is_file(place):
            raise UserError(f"{place} is a file; give a folder.")
    return Path(text)


def new_path(text: str | Path) -> Path:
    """What is written and not there yet; in an empty file nothing is."""
    out = Path(text)
    if out.exists() and not (out.is_file() and not out.stat().st_size):
        remove_leftovers(out)
        raise UserError(f"{out} is there already; choose another place (--out), or remove it.")
    return out


def is_plain_name(name: str) -> bool:
    """Whether a name from a file is that of a file in the same folder, and not a way out of it."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, whole or not at all; whoever is writing it already is waited for."""
    with atomic_file(path, wait=True) as scratch:
        scratch.write_bytes(data)


@contextmanager
def atomic_file(path: Path, wait: bool = False) -> Iterator[Path]:
    """Yields a file to write to; it replaces `path` at the end, unless an exception came."""
    path = _named(path)
    if is_there(path) and not path.is_file():
        raise UserError(f"{path} is not a file that could be replaced; choose another place.")
    with room_for(path), locked(path, wait):
        scratch = path.with_name(SCRATCH + path.name)
        try:
            yield scratch
            _sync(scratch)
            scratch.replace(path)
            _sync(path.parent)
        finally:
            _remove(scratch)


@contextmanager
def atomic_folder(path: Path, check: Callable[[Path], None]) -> Iterator[Path]:
    """Yields a folder to fill; it replaces `path` at the end, of which `check` refuses what must stay."""
    path = _resolved(path)
    with room_for(path), locked(path):
        check(path)
        scratch, old = (path.with_name(prefix + path.name) for prefix in (SCRATCH, REPLACED))
        scratch.mkdir()
        made = os.open(scratch, os.O_RDONLY)
        try:
            yield scratch
            if not _is_at(made, scratch):
                raise UserError(f"{scratch} was removed while it was written; run the same command again.")
            for file in (*scratch.iterdir(), scratch):
                _sync(file)
            if path.exists():
                path.rename(old)
            scratch.rename(path)
            _sync(path.parent)
        finally:
            os.close(made)
            _settle(path)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Makes `folder` if need be and keeps every other process from writing into it."""
    out_folder(folder)
    new = not is_there(folder)
    try:
        with _held(folder / LOCK, folder):
            yield
    finally:
        if new:
            with suppress(OSError):
                folder.rmdir()  # unless something was put there


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[None]:
    """Keeps every other process from replacing what is at `path`, and removes what a killed one left beside it."""
    path = _named(path)
    with _held(path.with_name(LOCK + path.name), path, wait):
        _settle(path)
        yield


def remove_scratch(folder: Path) -> None:
    """Removes what killed writers left behind in `folder`; what somebody is writing stays."""
    for beside in [path for path in folder.iterdir() if is_scratch(path)]:
        prefix = next(prefix for prefix in BESIDE if beside.name.startswith(prefix))
        if name := beside.name.removeprefix(prefix):  # the folder's own lock has none
            remove_leftovers(folder / name)


def remove_leftovers(path: Path) -> None:
    """Removes what a killed writer of `path` left behind, unless somebody is writing it now."""
    path = _absolute(path)
    if path.name and any(os.path.lexists(path.with_name(prefix + path.name)) for prefix in BESIDE):
        with suppress(BusyError), locked(path):
            pass


def is_scratch(path: Path) -> bool:
    return path.name.startswith(BESIDE)


def discard(folder: Path) -> None:
    """Removes a folder with all that is in it: at once for others, who may make it anew."""
    aside = folder.with_name(SCRATCH + folder.name)
    folder.rename(aside)
    _remove(aside)


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """A disk that is full is said in one sentence, of what the user knows: the artifact, and not its scratch."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        scratch = next((parent for parent in path.parents if parent.name.startswith(SCRATCH)), None)
        target = path if scratch is None else scratch.with_name(scratch.name.removeprefix(SCRATCH))
        raise UserError(f"{target} could not be written ({error.strerror}); make room, and try again.") from None


class BusyError(UserError):
    """Another process is at it."""


@contextmanager
def _held(lock: Path, path: Path, wait: bool = False) -> Iterator[None]:
    """Holds the lock of `path`: a file that is locked as long as this process lives, however that ends."""
    while True:
        if (handle := _open(lock, path)) is None:
            continue
        try:
            _lock(handle, path, wait)
            if not _is_at(handle, lock):  # whoever had it is done
                continue
            try:
                yield
            finally:
                if _is_at(handle, lock):
                    lock.unlink()
            return
        finally:
            os.close(handle)


def _open(lock: Path, path: Path) -> int | None:
    """Opens the lock of `path`, in a folder that is made if need be; None if somebody removed that meanwhile."""
    made = False
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        made = True
        return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except (OSError, RecursionError) as error:
        if made and isinstance(error, FileNotFoundError) and not lock.parent.is_dir():
            return None
        if getattr(error, "errno", None) in _DISK_FULL:
            raise
        raise UserError(f"{path} cannot be written ({error}); choose another place.") from None


def _lock(handle: int, path: Path, wait: bool) -> None:
    patience = time.monotonic() + _LOCK_PATIENCE
    try:
        while True:
            try:
                return fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                if time.monotonic() > patience:
                    raise
                time.sleep(0.05)
    except BlockingIOError:
        raise BusyError(f"Another process is writing {path}; wait for it, or choose another place.") from None
    except OSError as error:
        raise UserError(
            f"The filesystem of {path} has no locks ({error.strerror}), so two writers could not be kept apart; choose "
            "a place on another, or mount it with locks."
        ) from None


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file or folder is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def _settle(path: Path) -> None:
    """Ends what a writer of `path` began: what stands aside goes back to its place, or away if there is a new one."""
    scratch, old = (path.with_name(prefix + path.name) for prefix in (SCRATCH, REPLACED))
    if old.exists() and not path.exists():
        old.rename(path)
    _remove(old)
    _remove(scratch)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _named(path: Path) -> Path:
    """Where it is, if its name leaves room for those of what is beside it."""
    path = _absolute(path)
    if not 0 < len(os.fsencode(path.name)) <= _MAX_NAME:
        raise UserError(f"{path} cannot be written; choose a place whose name has 1 to {_MAX_NAME} bytes.")
    return path


def _absolute(path: Path) -> Path:
    """Its own name in a folder without links: a link at `path` itself is what is written, not where it leads."""
    return _resolved(path) if path.name in ("", "..") else _resolved(path.parent) / path.name


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # links that lead to themselves, for instance
        raise UserError(f"{path} leads nowhere ({error}); choose another place.") from None


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
