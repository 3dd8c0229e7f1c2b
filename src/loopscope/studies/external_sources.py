"""Which checkpoint or data does a study mean, and what tells it from any other?

A folder is told by the hashes of its files, wherever it lies; what comes from the Hub by its id, and by its revision
where the study pins one (`ByteDance/Ouro-1.4B@0123abc`).
"""

import re
from functools import cache
from pathlib import Path

from loopscope.artifacts import sha256
from loopscope.config import Settings, digest
from loopscope.errors import UserError
from loopscope.models.configuration import CONFIG, require_config, weight_files
from loopscope.reading import is_folder, no_folder

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+(@[\w.-]+)?")
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt")


class ExternalSource(Settings, frozen=True, kw_only=True):
    """Something that is not in the store: where it is, and what tells it from anything else."""

    source: str
    identity: str

    @property
    def name(self) -> str:
        """How a reader knows it: the last part of its folder's name or its id."""
        return Path(self.source).name.partition("@")[0]


@cache
def external_checkpoint(model: str) -> ExternalSource:
    """The folder of a checkpoint, told by its files; or a checkpoint of the Hub."""
    folder = Path(model)
    if is_folder(folder):
        require_config(folder)
        files = {folder / CONFIG, *weight_files(folder), *(file for kind in _TOKENIZER for file in folder.glob(kind))}
        if missing := sorted(file.name for file in files if not file.is_file()):
            raise UserError(f"The checkpoint in {folder} lacks the file {missing[0]}; fetch or make it again.")
        return ExternalSource(source=str(folder.resolve()), identity=_hashes(folder, files))
    if not _HUB_ID.fullmatch(model) or is_folder(Path(folder.parts[0])):
        raise no_folder(folder, "the folder of a checkpoint, or an id such as ByteDance/Ouro-1.4B")
    return ExternalSource(source=model, identity=model)


@cache
def external_data(folder: str, benchmark: str) -> ExternalSource:
    """The local files of a benchmark."""
    place = Path(folder) / benchmark
    files = {file for file in place.rglob("*") if file.is_file()}
    if not files:
        raise UserError(f"There are no files of {benchmark} in {place}; docs/benchmarks.md shows the layout of --data.")
    return ExternalSource(source=str(Path(folder).resolve()), identity=_hashes(place, files))


def _hashes(folder: Path, files: set[Path]) -> str:
    return digest({str(file.relative_to(folder)): sha256(file) for file in files})
