"""What is a text? Documents in files, and their tokens by a checkpoint's own tokenizer.

A text file holds documents with `<|endoftext|>` between them; a `.jsonl` file one `{"text": ...}` a line.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError, reason
from loopscope.models.tokenizer import load_tokenizer
from loopscope.reading import read_bytes, read_text

END = "<|endoftext|>"


class _Line(msgspec.Struct):
    text: str


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
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise UserError(f'{path}: {reason(error)}; a line must be {{"text": "..."}}.') from None
    kept = [document for document in found if document.strip()]
    if not kept:
        raise UserError(f"There is no text in {', '.join(map(str, paths))}.")
    return kept


def tokenize_documents(documents: Sequence[str], checkpoint: Path) -> list[NDArray[np.int64]]:
    """The tokens of every document, and nothing before or after them."""
    tokenizer = load_tokenizer(checkpoint).backend_tokenizer
    return [
        np.array(each.ids, dtype=np.int64) for each in tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    ]
