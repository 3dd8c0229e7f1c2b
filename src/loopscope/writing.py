"""How does anything get to disk without being lost or half-written?

Files and folders appear whole or not at all (written beside their place, then renamed), by one writer at a time, which
holds a lock on what it writes. What a killed writer left behind is removed by the next, and a disk that is full is said
in one sentence.
"""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loopscope.config import to_json
from loopscope.errors import UserError
from loopscope.reading import is_there

LOCK, SCRATCH, REPLACED = BESIDE = (".lock-", ".partial-", ".replaced-")
"""What is called so, and then like its target, is beside it while it is written: the lock of its writer, what there is
of it, and what it replaces. A folder that is written into has its lock inside."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PATIENCE = 0.5
"""Seconds: whoever only looks after leftovers holds a lock for less."""
_LONGEST_NAME = 255 - max(map(len, BESIDE))


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, whole or not at all; whoever is writing it already is waited for."""
    with atomic_file(path, wait=True) as scratch:
        scratch.write_bytes(data)


def write_json(path: Path, value: object) -> None:
    write_bytes(path, to_json(value))


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
    if is_there(folder) and not folder.is_dir():
        raise UserError(f"{folder} is a file; give a folder.")
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
        if error.errno not in _FULL:
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
    except OSError as error:
        if made and isinstance(error, FileNotFoundError) and not lock.parent.is_dir():
            return None
        if error.errno in _FULL:
            raise
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another place.") from None
    except RecursionError:
        raise UserError(f"{path} cannot be written: it lies too deep; choose another place.") from None


def _lock(handle: int, path: Path, wait: bool) -> None:
    patience = time.monotonic() + _PATIENCE
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
    if not 0 < len(os.fsencode(path.name)) <= _LONGEST_NAME:
        raise UserError(f"{path} cannot be written; choose a place whose name has 1 to {_LONGEST_NAME} bytes.")
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
