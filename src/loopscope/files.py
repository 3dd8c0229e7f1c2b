"""How is a file read safely, and written whole or not at all?

Reading is bounded: LoopScope rejects a folder, a device or a pipe in place of a file, endless files, endless nesting,
and bytes that are no text. Writers fill a temporary file or folder and rename it at the end. One process writes at a
time and holds a lock; the next writer removes what a killed one left behind.
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
"""Seconds: a process that only removes leftovers holds a lock for less."""
_MAX_NAME = 255 - max(map(len, BESIDE))
is_there, is_file, is_folder = os.path.exists, os.path.isfile, os.path.isdir
"""False for a name that the system cannot have, where methods of `Path` raise: one that is too long, for instance."""


def read_bytes(path: Path, what: str, largest: int | None = MAX_FILE_BYTES) -> bytes:
    """Read a regular file of at most `largest` bytes; `what` names it in errors, as in `TOML file`."""
    require_file(path, what)
    with path.open("rb") as file:
        data = file.read() if largest is None else file.read(largest + 1)
    if largest is not None and len(data) > largest:
        raise UserError(f"{path} is too large for a {what}: at most {largest:,} bytes are read.")
    return data


def read_text(path: Path, what: str, largest: int | None = MAX_FILE_BYTES) -> str:
    """Read a text file in UTF-8, with or without a byte order mark."""
    try:
        return read_bytes(path, what, largest).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start:,}); convert it.") from None


def near(path: Path) -> str:
    """The hint ` (did you mean runs/demo?)` for a missing path, if its folder has a similar name."""
    try:
        close = closest(path.name, [each.name for each in islice(path.parent.iterdir(), 1000)], 0.8)
    except OSError:
        return ""
    return "" if close is None or close == path.name else f" (did you mean {path.with_name(close)}?)"


def no_folder(path: Path, expected: str) -> UserError:
    """The error for a path that should be a folder and is a file, or is missing; `expected` says what to give."""
    if is_there(path):
        return UserError(f"{path} is a file; give {expected}.")
    return UserError(f"There is no folder {path}{near(path)}; give {expected}.")


def no_such_toml(source: str, shipped: Sequence[str], what: str) -> UserError:
    """The error for a name that is neither a TOML file nor one of the files that ship with LoopScope."""
    path, rest = Path(source), f"give a TOML file, or one of: {', '.join(shipped)}"
    if is_folder(path):
        return UserError(f"{source} is a folder; {rest}.")
    if path.suffix == ".toml" or path.name != source:
        return UserError(f"There is no file {source}{near(path) or did_you_mean(path.stem, shipped)}; {rest}.")
    return UserError(f"There is no {what} '{source}'{did_you_mean(source, shipped)}; {rest}.")


def require_file(path: Path, what: str) -> None:
    """Require a regular file: reject a missing path, a folder, a device or a pipe (which might never end)."""
    if is_file(path):
        return
    kind = f"{path} is {'a folder' if is_folder(path) else 'a device or a pipe'}"
    raise UserError(f"{kind if is_there(path) else f'There is no file {path}{near(path)}'}; give a {what}.")


def out_folder(text: str | Path) -> Path:
    """A folder to write to; reject the path of a file."""
    for place in (Path(text), *Path(text).parents):
        if is_file(place):
            raise UserError(f"{place} is a file; give a folder.")
    return Path(text)


def new_path(text: str | Path) -> Path:
    """A path to write to; reject a file that has contents."""
    out = Path(text)
    if out.exists() and not (out.is_file() and not out.stat().st_size):
        remove_leftovers(out)
        raise UserError(f"{out} is there already; choose another place (--out), or remove it.")
    return out


def is_plain_name(name: str) -> bool:
    """Whether a name is a file in the same folder, and leads nowhere else."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, after any other writer of it."""
    with atomic_file(path, wait=True) as scratch:
        scratch.write_bytes(data)


@contextmanager
def atomic_file(path: Path, wait: bool = False) -> Iterator[Path]:
    """Yield a temporary file; it replaces `path` at the end, unless an exception came."""
    path = _with_room_for_suffix(path)
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
            _remove_path(scratch)


@contextmanager
def atomic_folder(path: Path, check: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a temporary folder; it replaces `path` at the end. `check` may reject that replacement."""
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
            _finish_killed_write(path)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Create `folder` if it is missing, and keep other processes from writing into it."""
    out_folder(folder)
    new = not is_there(folder)
    try:
        with _held_lock(folder / LOCK, folder):
            yield
    finally:
        if new:
            with suppress(OSError):
                folder.rmdir()  # unless something was put there


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[None]:
    """Keep other processes from replacing `path`, and remove leftovers of killed writers."""
    path = _with_room_for_suffix(path)
    with _held_lock(path.with_name(LOCK + path.name), path, wait):
        _finish_killed_write(path)
        yield


def remove_scratch(folder: Path) -> None:
    """Remove the temporary files of killed writers in `folder`; files of running writers stay."""
    for beside in [path for path in folder.iterdir() if is_scratch(path)]:
        prefix = next(prefix for prefix in BESIDE if beside.name.startswith(prefix))
        if name := beside.name.removeprefix(prefix):  # the folder's own lock has none
            remove_leftovers(folder / name)


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files of a killed writer of `path`, unless another process writes it now."""
    path = _absolute(path)
    if path.name and any(os.path.lexists(path.with_name(prefix + path.name)) for prefix in BESIDE):
        with suppress(BusyError), locked(path):
            pass


def is_scratch(path: Path) -> bool:
    """Whether a path is a temporary file of a writer."""
    return path.name.startswith(BESIDE)


def discard(folder: Path) -> None:
    """Remove a folder with its contents; its name is free at once."""
    aside = folder.with_name(SCRATCH + folder.name)
    folder.rename(aside)
    _remove_path(aside)


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Turn the error of a full disk into a sentence that names the artifact, not its temporary file."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        scratch = next((parent for parent in path.parents if parent.name.startswith(SCRATCH)), None)
        target = path if scratch is None else scratch.with_name(scratch.name.removeprefix(SCRATCH))
        raise UserError(f"{target} could not be written ({error.strerror}); make room, and try again.") from None


class BusyError(UserError):
    """Another process writes the same file or folder."""


@contextmanager
def _held_lock(lock: Path, path: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock of `path`: an open file that stays locked as long as this process lives."""
    while True:
        if (handle := _open_lock(lock, path)) is None:
            continue
        try:
            _lock_handle(handle, path, wait)
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


def _open_lock(lock: Path, path: Path) -> int | None:
    """Open the lock file of `path`, and create its folder if needed; None if another process removed it meanwhile."""
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


def _lock_handle(handle: int, path: Path, wait: bool) -> None:
    """Lock an open file: wait for another process, or raise `BusyError`."""
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


def _finish_killed_write(path: Path) -> None:
    """Finish the work of a killed writer: put the old contents of `path` back, or remove them if new ones exist."""
    scratch, old = (path.with_name(prefix + path.name) for prefix in (SCRATCH, REPLACED))
    if old.exists() and not path.exists():
        old.rename(path)
    _remove_path(old)
    _remove_path(scratch)


def _remove_path(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _with_room_for_suffix(path: Path) -> Path:
    """The absolute path; reject a name that leaves no room for the suffixes of temporary files."""
    path = _absolute(path)
    if not 0 < len(os.fsencode(path.name)) <= _MAX_NAME:
        raise UserError(f"{path} cannot be written; choose a place whose name has 1 to {_MAX_NAME} bytes.")
    return path


def _absolute(path: Path) -> Path:
    """The absolute path in a folder without links; a link at `path` itself is replaced, not followed."""
    return _resolved(path) if path.name in ("", "..") else _resolved(path.parent) / path.name


def _resolved(path: Path) -> Path:
    """Resolve the links of a path; a loop of links becomes a `UserError`."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # links that lead to themselves, for instance
        raise UserError(f"{path} leads nowhere ({error}); choose another place.") from None


def _sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
