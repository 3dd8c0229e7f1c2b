"""How does an artifact get to disk and back without being silently altered?

It is a folder whose tensors are safetensors and everything else JSON; its manifest lists every file with its hash, and
only another of its kind takes its place (`files`: whole, or not at all). A single file carries its own hash (`sealed`).
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.config import build, digest, read_json, write_json
from loopscope.errors import UserError, reject
from loopscope.files import atomic_folder, is_folder, is_plain_name, no_folder, remove_leftovers

MANIFEST = "manifest.json"
T = TypeVar("T")

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
    """One file in the manifest of an artifact: its name, size and hash."""

    sha256: str
    bytes: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The manifest of an artifact: its contents, its provenance, and the hash of each file."""

    kind: str
    schema_version: int
    contents: dict[str, Any]
    provenance: dict[str, Any]
    files: dict[str, FileEntry]
    digest: str = ""  # of all of the above


def sealed(value: T) -> T:
    """Fill the field `digest` of a struct with the hash of its contents."""
    emptied: Any = msgspec.structs.replace(value, digest="")  # type: ignore[type-var]
    return msgspec.structs.replace(emptied, digest=digest(emptied))


def is_intact(value: Any) -> bool:
    """Whether a struct still has the hash that `sealed` gave it."""
    return bool(sealed(value).digest == value.digest)


def loopscope_version() -> str:
    """The installed version of LoopScope, for the manifest of an artifact."""
    return version("loopscope")


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def artifact_folder(path: Path, kind: str, files: Collection[str] = ()) -> AbstractContextManager[Path]:
    """Yield a folder to fill that replaces `path` at the end; it replaces only an artifact of the same kind.

    With the names of the `files` that it may have (the first: must have), also one whose manifest was cut off.
    """
    return atomic_folder(path, lambda place: check_replaceable(place, kind, files))


def check_replaceable(path: Path, kind: str, files: Collection[str] = ()) -> None:
    """Reject a path that holds anything but an artifact of this kind; call it before long work begins."""
    if path.exists() and not _is_replaceable_artifact(path, kind, files):
        raise UserError(f"{path} exists and is not a {kind}; choose another place, or remove it.")


def _is_replaceable_artifact(path: Path, kind: str, files: Collection[str]) -> bool:
    """Whether a writer may replace a folder: it is empty, or holds an artifact of this kind."""
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


def write_manifest(
    folder: Path,
    kind: str,
    schema_version: int,
    contents: Mapping[str, Any],
    provenance: Mapping[str, Any],
    needed: Collection[str] = (),
) -> None:
    """Write the manifest of an artifact: list and hash every file of `folder`, which must have the `needed` files."""
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
    write_json(folder / MANIFEST, sealed(manifest))


def read_manifest(folder: Path, kind: str, schema_version: int) -> Manifest:
    """Read the manifest of an artifact, and check its files against it."""
    if not is_folder(folder):
        remove_leftovers(folder)  # a writer may have been killed while it put another in its place
    if not is_folder(folder):
        raise no_folder(folder, f"the folder of a {kind}")
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} is not a {kind}: it has no {MANIFEST}.")
    manifest = read_json(Manifest, folder / MANIFEST, f"{kind} manifest")
    reject(_manifest_problems(folder, manifest, kind, schema_version))
    return manifest


def _manifest_problems(folder: Path, manifest: Manifest, kind: str, schema_version: int) -> Iterator[str]:
    """What is wrong with an artifact: its kind, its schema version, or files that do not match the manifest."""
    again = f"make the {kind} again"
    if manifest.kind != kind:
        yield f"{folder} is a {manifest.kind}, not a {kind}."
    if manifest.schema_version != schema_version:
        yield (
            f"{folder} has schema version {manifest.schema_version}, this LoopScope reads {schema_version}; {again}."
        )
    if not is_intact(manifest):
        yield f"{folder / MANIFEST} was altered; {again}."
    for name, entry in manifest.files.items():
        path = folder / name
        if not is_plain_name(name):
            yield f"{folder / MANIFEST} lists '{name}', which does not lie beside it; {again}."
        if not path.is_file():
            yield f"{path} is missing; {again}."
        if path.stat().st_size != entry.bytes or sha256(path) != entry.sha256:
            yield f"{path} does not have the hash of its manifest: it was cut off or altered; {again}."


def save_artifact(
    folder: str | Path,
    kind: str,
    schema_version: int,
    contents: Mapping[str, Any],
    provenance: Mapping[str, Any],
    files: Mapping[str, Any],
    known_files: Collection[str] = (),
) -> None:
    """Write an artifact whole or not at all; it replaces an earlier artifact of its kind.

    `files`: arrays by name for a name that ends in .safetensors, for others what becomes JSON. `known_files`: all that
    such an artifact may have (the first: must have).
    """
    with artifact_folder(Path(folder), kind, known_files or list(files)) as scratch:
        for name, value in files.items():
            (save_tensors if name.endswith(".safetensors") else write_json)(scratch / name, value)
        write_manifest(scratch, kind, schema_version, contents, provenance, list(files))


class LoadedArtifact(NamedTuple):
    """A loaded artifact: its contents, its provenance and its arrays, checked against their hashes."""

    contents: Any
    provenance: dict[str, Any]
    files: Collection[str]
    arrays: dict[str, NDArray[Any]]


def load_artifact(
    folder: Path, kind: str, schema_version: int, contents: type, tensors: str, others: Collection[str] = ()
) -> LoadedArtifact:
    """Load the artifact in `folder` with the arrays of its file `tensors`; require the files `others`, too."""
    manifest = read_manifest(folder, kind, schema_version)
    if missing := [name for name in (tensors, *others) if name not in manifest.files]:
        raise UserError(f"{folder} is a {kind} without {missing[0]}; make the {kind} again.")
    checked: Any = build(contents, manifest.contents, str(folder))
    return LoadedArtifact(checked, manifest.provenance, manifest.files, map_tensors(folder / tensors))


def read_whole(path: Path, read: Callable[[], T]) -> T:
    """Read one state of an artifact: call `read` again if another process replaces the artifact meanwhile."""
    while True:
        before = _file_identity(path)
        try:
            made = read()
        except (OSError, UserError):
            if _file_identity(path) == before:
                raise
        else:
            if _file_identity(path) == before:
                return made


def _file_identity(path: Path) -> tuple[int, ...] | None:
    """The identity of the file or folder at a path, to notice its replacement; None if nothing is there."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # no path can hold a zero byte
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def create_tensors(path: Path, layout: Mapping[str, tuple[tuple[int, ...], Any]]) -> dict[str, NDArray[Any]]:
    """Create a safetensors file of these shapes and dtypes; its arrays write through to disk.

    Its room is reserved before: a full disk is an error here, and not the end of the process at the first write.
    """
    header, size = _safetensors_header(layout)
    with path.open("wb") as file:
        file.write(header)
        file.flush()
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), len(header), size)
        else:  # macOS: there a full disk is noticed at the first write
            file.truncate(len(header) + size)
    return _map_arrays(path, "r+")


def map_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Memory-map the arrays of a safetensors file: reading an array loads only the parts that you use."""
    try:
        return _map_arrays(path, "r")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}); make it again.") from None


def save_tensors(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write `arrays` as one safetensors file."""
    header, _ = _safetensors_header({name: (array.shape, array.dtype) for name, array in arrays.items()})
    with path.open("wb") as file:
        file.write(header)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).data)


def _safetensors_header(layout: Mapping[str, tuple[tuple[int, ...], Any]]) -> tuple[bytes, int]:
    """The header of a safetensors file of these shapes and dtypes, and the number of bytes after it."""
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


def _map_arrays(path: Path, mode: Any) -> dict[str, NDArray[Any]]:
    """Memory-map the arrays of a safetensors file in a mode of NumPy."""
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
