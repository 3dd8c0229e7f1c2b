"""How does anything get to disk and back without being lost, half-written or silently altered?

Files and folders appear whole or not at all (written beside their place, then renamed), tensors are safetensors,
everything else is JSON, and a manifest lists every file of a folder with its hash.
"""

import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.config import digest, read_json, to_json
from loopscope.errors import UserError
from loopscope.reading import is_plain_name

MANIFEST = "manifest.json"
SCRATCH = ".partial-"

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
    """Writes `data` to `path`, whole or not at all."""
    with atomic_file(path) as scratch:
        scratch.write_bytes(data)


def write_json(path: Path, value: object) -> None:
    write_bytes(path, to_json(value))


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to; what was written replaces `path` at the end, unless an exception came."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=SCRATCH, dir=path.parent)
    os.close(handle)
    scratch = Path(name)
    try:
        yield scratch
        scratch.chmod(0o666 & ~_umask())
        _sync(scratch)
        scratch.replace(path)
        _sync(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, kind: str) -> Iterator[Path]:
    """Yields a folder to fill; it replaces `path` at the end. Only an earlier artifact of the same kind is replaced."""
    path = path.resolve()
    old = path.with_name(f"{path.name}.replaced")
    if old.is_dir() and not path.exists():
        old.rename(path)  # a writer was killed between its two renames
    check_replaceable(path, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_scratch(path.parent, f"{path.name}-")
    scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{path.name}-", dir=path.parent))
    try:
        yield scratch
        for file in scratch.iterdir():
            _sync(file)
        scratch.chmod(0o777 & ~_umask())
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        scratch.rename(path)
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_replaceable(path: Path, kind: str) -> None:
    """Refuses what exists and is no artifact of this kind; long work asks before it begins."""
    if path.exists() and not _replaceable(path, kind):
        raise UserError(f"{path} exists and is not a {kind}; choose another folder.")


def is_scratch(path: Path) -> bool:
    return path.name.startswith(SCRATCH)


def remove_scratch(folder: Path, name: str = "") -> None:
    """Removes what a killed writer left behind in `folder` (of the target `name` only)."""
    for leftover in folder.glob(f"{SCRATCH}{glob.escape(name)}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def write_manifest(
    folder: Path, kind: str, schema_version: int, contents: Mapping[str, Any], provenance: Mapping[str, Any]
) -> None:
    """Lists and hashes every file of `folder`."""
    files = {
        file.name: FileEntry(sha256(file), file.stat().st_size)
        for file in sorted(folder.iterdir())
        if file.name != MANIFEST
    }
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


def create_tensors(path: Path, layout: Mapping[str, tuple[tuple[int, ...], Any]]) -> dict[str, NDArray[Any]]:
    """A safetensors file of the given shapes and dtypes, as arrays that write through to disk."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (shape, dtype) in layout.items():
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        header[name] = {"dtype": _NAMES[np.dtype(dtype)], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return _map(path, "r+")


def map_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file, memory-mapped: only what is looked at is read."""
    try:
        return _map(path, "r")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}); make it again.") from None


def save_tensors(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Writes `arrays` as one safetensors file."""
    mapped = create_tensors(path, {name: (array.shape, array.dtype) for name, array in arrays.items()})
    for name, array in arrays.items():
        mapped[name][...] = array


def _map(path: Path, mode: Any) -> dict[str, NDArray[Any]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        header = json.loads(file.read(length))
    start = 8 + length
    arrays: dict[str, NDArray[Any]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
        if 0 in shape:
            arrays[name] = np.empty(shape, dtype)
        else:
            offset = start + entry["data_offsets"][0]
            arrays[name] = np.memmap(path, dtype=dtype, mode=mode, offset=offset, shape=shape)
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


def _replaceable(path: Path, kind: str) -> bool:
    if not path.is_dir():
        return False
    if not any(path.iterdir()):
        return True
    manifest = path / MANIFEST
    return manifest.is_file() and read_json(Manifest, manifest, "manifest").kind == kind


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
