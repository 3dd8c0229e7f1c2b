"""What is a text? Documents in files, and their tokens by a checkpoint's own tokenizer.

A text file holds documents with `<|endoftext|>` between them; a `.jsonl` file one `{"text": ...}` a line.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError
from loopscope.models.tokenizer import load_tokenizer
from loopscope.reading import read_bytes, read_text

END = "<|endoftext|>"


class _Line(msgspec.Struct):
    text: str


def check_context(context: int, longest: int) -> None:
    """Refuses windows in which nothing is predicted, and those that the model does not take."""
    if not 2 <= context <= longest:
        raise UserError(f"A context of {context} tokens is not possible: choose 2 to {longest}.")


def read_documents(paths: Sequence[Path]) -> list[str]:
    """The documents of these files, in order, without empty ones."""
    found: list[str] = []
    for path in paths:
        if path.suffix != ".jsonl":
            found += read_text(path, "text file", None).split(END)
            continue
        data = read_bytes(path, "text file", None)
        try:
            found += [line.text for line in msgspec.json.Decoder(_Line).decode_lines(data)]
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise UserError(f'{_wrong_line(data, path)}; a line must be {{"text": "..."}}.') from None
    kept = [document for document in found if document.strip()]
    if not kept:
        raise UserError(f"There is no text in {', '.join(map(str, paths))}.")
    return kept


def _wrong_line(data: bytes, path: Path) -> str:
    """What is wrong with which line, where one is."""
    for number, line in enumerate(data.split(b"\n"), start=1):
        try:
            if line.strip():
                msgspec.json.decode(line, type=_Line)
        except msgspec.ValidationError as error:
            wrong = "has no `text`" if "missing required field" in str(error) else "does not say what its `text` is"
            return f"Line {number} of {path} {wrong}"
        except (msgspec.DecodeError, ValueError, RecursionError):
            return f"Line {number} of {path} is not JSON"
    return f"{path} has a line that is not JSON"


def tokenize_documents(documents: Sequence[str], checkpoint: Path) -> list[NDArray[np.int64]]:
    """The tokens of every document, and nothing before or after them."""
    tokenizer = load_tokenizer(checkpoint).backend_tokenizer
    return [
        np.array(each.ids, dtype=np.int64) for each in tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    ]
