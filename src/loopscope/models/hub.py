"""Where is a checkpoint? In a folder, or on the Hub under its name; only its data is fetched, never its code.

A name may pin its revision: `ByteDance/Ouro-1.4B@0123abc`.
"""

import re
from pathlib import Path

from loopscope.arguments import as_path
from loopscope.errors import UserError
from loopscope.reading import is_file, is_folder, no_folder

_DATA = ("*.json", "*.safetensors", "*.txt", "*.jinja")
_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_REASONS = {
    "LocalEntryNotFoundError": "it cannot be reached",
    "RepositoryNotFoundError": "it has none of this name, or not for you",
    "GatedRepoError": "its owner wants terms to be accepted there before",
    "RevisionNotFoundError": "it has no such revision",
}
"""By the names of huggingface_hub's errors, whose texts are for programmers."""


def find_checkpoint(source: str | Path, revision: str | None = None) -> Path:
    """The folder itself, or that into which the Hub's files were fetched."""
    path = as_path(source, "A checkpoint's folder or name")
    if is_folder(path):
        return path
    name, _, pinned = str(source).partition("@")
    if is_file(path) or not _NAME.fullmatch(name) or str(source).startswith("."):
        raise no_folder(path, "the folder of a checkpoint, or its name on the Hub")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"There is no folder {path}; to fetch it from the Hub install: pip install 'loopscope[lm]'."
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision or pinned or None, allow_patterns=list(_DATA)))
    except Exception as error:  # out of reach, unknown, not allowed: each library below has errors of its own
        message = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        reason = _REASONS.get(type(error).__name__, message)
        raise UserError(
            f"There is no folder {path}, and the Hub does not give it ({reason}); check the name and the connection."
        ) from None
