"""How does anything get to disk and back without being lost, half-written or silently altered?

Files and folders appear whole or not at all (written beside their place, then renamed), by one writer at a time, which
holds a lock on what it writes; tensors are safetensors, everything else is JSON, and a manifest lists every file of a
folder with its hash.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.config import digest, read_json, to_json
from loopscope.errors import UserError
from loopscope.reading import is_plain_name

MANIFEST = "manifest.json"
T = TypeVar("T")
LOCK, SCRATCH, REPLACED = BESIDE = (".lock-", ".partial-", ".replaced-")
"""What is called so, and then like its target, is beside it while it is written: the lock of its writer, what there is
of it, and what it replaces. A folder that is written into has its lock inside."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PATIENCE = 0.5
"""Seconds: whoever only looks after leftovers holds a lock for less."""
_LONGEST_NAME = 255 - max(map(len, BESIDE))

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(kind): name for name, kind in _DTYPES.items()}


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str
    bytes: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a folder holds, where it came from, and the hash of each of its files."""

    kind: str
    schema_version: int
    contents: dict[str, Any]
    provenance: dict[str, Any]
    files: dict[str, FileEntry]
    digest: str = ""  # of all of the above

    def seal(self) -> str:
        return digest(msgspec.structs.replace(self, digest=""))


def loopscope_version() -> str:
    return version("loopscope")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    if path.exists() and not path.is_file():
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
def atomic_folder(path: Path, kind: str, files: Collection[str] = ()) -> Iterator[Path]:
    """Yields a folder to fill; it replaces `path` at the end. Only an earlier artifact of the same kind is replaced.

    With the names of the `files` that it may have (the first: must have), also one whose manifest was cut off.
    """
    path = _resolved(path)
    with room_for(path), locked(path):
        check_replaceable(path, kind, files)
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


def check_replaceable(path: Path, kind: str, files: Collection[str] = ()) -> None:
    """Refuses what exists and is no artifact of this kind; long work asks before it begins."""
    if path.exists() and not _replaceable(path, kind, files):
        raise UserError(f"{path} exists and is not a {kind}; choose another place, or remove it.")


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Makes `folder` if need be and keeps every other process from writing into it."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give a folder.")
    new = not folder.exists()
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


def discard(folder: Path) -> None:
    """Removes a folder with all that is in it: at once for others, who may make it anew."""
    aside = folder.with_name(SCRATCH + folder.name)
    folder.rename(aside)
    _remove(aside)


def is_scratch(path: Path) -> bool:
    return path.name.startswith(BESIDE)


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


class BusyError(UserError):
    """Another process is at it."""


def _settle(path: Path) -> None:
    """Ends what a writer of `path` began: what stands aside goes back to its place, or away if there is a new one."""
    scratch, old = (path.with_name(prefix + path.name) for prefix in (SCRATCH, REPLACED))
    if old.exists() and not path.exists():
        old.rename(path)
    _remove(old)
    _remove(scratch)


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


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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


def write_manifest(
    folder: Path,
    kind: str,
    schema_version: int,
    contents: Mapping[str, Any],
    provenance: Mapping[str, Any],
    needed: Collection[str] = (),
) -> None:
    """Lists and hashes every file of `folder`, which must have the `needed` ones."""
    files = {
        file.name: FileEntry(sha256(file), file.stat().st_size)
        for file in sorted(folder.iterdir())
        if file.name != MANIFEST
    }
    if missing := [name for name in needed if name not in files]:
        raise UserError(f"{folder / missing[0]} vanished before the {kind} was finished; run the same command again.")
    manifest = Manifest(
        kind=kind,
        schema_version=schema_version,
        contents=dict(contents),
        provenance={"loopscope": loopscope_version(), **provenance},
        files=files,
    )
    write_json(folder / MANIFEST, msgspec.structs.replace(manifest, digest=manifest.seal()))


def read_manifest(folder: Path, kind: str, schema_version: int) -> Manifest:
    """The manifest of `folder`, after its files were checked against it."""
    if not folder.is_dir():
        remove_leftovers(folder)  # a writer may have been killed while it put another in its place
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}; give the folder of a {kind}.")
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} is not a {kind}: it has no {MANIFEST}.")
    manifest = read_json(Manifest, folder / MANIFEST, f"{kind} manifest")
    if manifest.kind != kind:
        raise UserError(f"{folder} is a {manifest.kind}, not a {kind}.")
    if manifest.schema_version != schema_version:
        raise UserError(
            f"{folder} has schema version {manifest.schema_version}, this LoopScope reads {schema_version}; "
            f"make the {kind} again."
        )
    if manifest.seal() != manifest.digest:
        raise UserError(f"{folder / MANIFEST} was altered; make the {kind} again.")
    for name, entry in manifest.files.items():
        if not is_plain_name(name):
            raise UserError(f"{folder / MANIFEST} lists '{name}', which does not lie beside it; make the {kind} again.")
        _check(folder / name, entry, kind)
    return manifest


def read_whole(path: Path, read: Callable[[], T]) -> T:
    """What `read` makes of the artifact at `path`, all of one: it begins again if another took its place meanwhile."""
    while True:
        before = _identity(path)
        try:
            made = read()
        except (OSError, UserError):
            if _identity(path) == before:
                raise
        else:
            if _identity(path) == before:
                return made


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def create_tensors(path: Path, layout: Mapping[str, tuple[tuple[int, ...], Any]]) -> dict[str, NDArray[Any]]:
    """A safetensors file of the given shapes and dtypes, as arrays that write through to disk.

    Its room is reserved before: a full disk is an error here, and not the end of the process at the first write.
    """
    header, size = _header(layout)
    with path.open("wb") as file:
        file.write(header)
        file.flush()
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), len(header), size)
        else:  # macOS: there a full disk is noticed at the first write
            file.truncate(len(header) + size)
    return _map(path, "r+")


def map_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file, memory-mapped: only what is looked at is read."""
    try:
        return _map(path, "r")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}); make it again.") from None


def save_tensors(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Writes `arrays` as one safetensors file."""
    header, _ = _header({name: (array.shape, array.dtype) for name, array in arrays.items()})
    with path.open("wb") as file:
        file.write(header)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).data)


def _header(layout: Mapping[str, tuple[tuple[int, ...], Any]]) -> tuple[bytes, int]:
    """The beginning of a safetensors file of these shapes and dtypes, and how many bytes follow it."""
    entries: dict[str, Any] = {}
    offset = 0
    for name, (shape, dtype) in layout.items():
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        entries[name] = {
            "dtype": _NAMES[np.dtype(dtype)],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    return len(text).to_bytes(8, "little") + text, offset


def _map(path: Path, mode: Any) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    with path.open("r+b" if mode == "r+" else "rb") as file:  # once: another may take its place at any time
        length = int.from_bytes(file.read(8), "little")
        if length > os.fstat(file.fileno()).st_size:
            raise ValueError("the header is longer than the file")
        for name, entry in json.loads(file.read(length)).items():
            if name == "__metadata__":
                continue
            dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
            if 0 in shape:
                arrays[name] = np.empty(shape, dtype)
            else:
                offset = 8 + length + entry["data_offsets"][0]
                arrays[name] = np.memmap(file, dtype=dtype, mode=mode, offset=offset, shape=shape)
    return arrays


def _check(path: Path, entry: FileEntry, kind: str) -> None:
    if not path.is_file():
        raise UserError(f"{path} is missing; make the {kind} again.")
    if path.stat().st_size != entry.bytes:
        raise UserError(
            f"{path} has {path.stat().st_size:,} bytes, its manifest says {entry.bytes:,}: it was cut off or altered; "
            f"make the {kind} again."
        )
    if sha256(path) != entry.sha256:
        raise UserError(f"{path} does not have the hash of its manifest: it was altered; make the {kind} again.")


def _replaceable(path: Path, kind: str, files: Collection[str]) -> bool:
    if not path.is_dir():
        return False
    found = {file.name for file in path.iterdir()}
    if not found:
        return True
    if MANIFEST not in found:
        return False
    try:
        return read_json(Manifest, path / MANIFEST, "manifest").kind == kind
    except UserError:
        return bool(files) and {MANIFEST, next(iter(files))} <= found <= {MANIFEST, *files}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
