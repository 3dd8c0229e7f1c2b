"""Is a run's folder as the run left it? `hashes.json` holds the hash of every file that the run wrote.

It is written before the weights appear, and they come last: a run that is killed in between has no weights, so it goes
on and writes both again. A folder without hashes (a checkpoint from the Hub, a run of an earlier LoopScope, weights
copied by themselves) is taken as it is.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import msgspec

from loopscope.artifacts import sha256
from loopscope.config import digest, read_json
from loopscope.errors import UserError
from loopscope.writing import write_json

HASHES = "hashes.json"


class RunHashes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: dict[str, str]
    digest: str  # of the above


def write_hashes(folder: Path, files: Mapping[str, str]) -> None:
    """Notes these files of `folder`, each with its hash."""
    write_json(folder / HASHES, RunHashes(dict(files), digest(files)))


def check_hashes(folder: Path) -> None:
    """Refuses a file of `folder` that is not as its run wrote it; one that is not there can mislead nobody."""
    if not (folder / HASHES).is_file():
        return
    hashes = read_json(RunHashes, folder / HASHES, "list of hashes")
    if digest(hashes.files) != hashes.digest:
        raise UserError(f"{folder / HASHES} was altered; train the run again, or remove it if the change is yours.")
    for name, expected in hashes.files.items():
        file = folder.resolve() / name
        if file.is_file() and known_sha256(file) != expected:
            raise UserError(
                f"{folder / name} was altered since its run wrote it: it does not have the hash of {HASHES}; train the "
                f"run again in another folder, or remove {HASHES} if the change is yours."
            )


def known_sha256(file: Path) -> str:
    """Computed once in a process, for a file as it was then: the parts of a study are many, checkpoints are large."""
    now = file.stat()
    return _hash(file, (now.st_size, now.st_ino, now.st_mtime_ns, now.st_ctime_ns))


@lru_cache(maxsize=64)
def _hash(file: Path, _: tuple[int, ...]) -> str:
    return sha256(file)
