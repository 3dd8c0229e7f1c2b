"""What is a text? Documents in files, and their tokens by a checkpoint's own tokenizer.

A text file holds documents with `<|endoftext|>` between them; a `.jsonl` file one `{"text": ...}` a line.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError
from loopscope.files import read_bytes, read_text
from loopscope.models.tokenizer import load_tokenizer

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
        found += _lines(path) if path.suffix == ".jsonl" else read_text(path, "text file", None).split(END)
    documents = [document for document in found if document.strip()]
    if not documents:
        raise UserError(f"There is no text in {', '.join(map(str, paths))}.")
    return documents


def _lines(path: Path) -> Iterator[str]:
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(read_bytes(path, "text file", None).split(b"\n"), start=1):
        try:
            if line.strip():
                yield decoder.decode(line).text
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            wrong = "is not JSON"
            if isinstance(error, msgspec.ValidationError):
                wrong = "does not say what its `text` is"
            raise UserError(f'Line {number} of {path} {wrong}; a line must be {{"text": "..."}}.') from None


def tokenize_documents(documents: Sequence[str], checkpoint: Path) -> list[NDArray[np.int64]]:
    """The tokens of every document, and nothing before or after them."""
    tokenizer = load_tokenizer(checkpoint).backend_tokenizer
    encoded = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    return [np.array(tokens.ids, dtype=np.int64) for tokens in encoded]
