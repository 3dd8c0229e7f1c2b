"""How does text become tokens? By the checkpoint's own `tokenizer.json`, read as data: no code from it, no Python class
that it names, no model configuration. A text file holds documents with `<|endoftext|>` between them, a `.jsonl` file
one `{"text": ...}` a line.

Where does generated text end? At the configuration's eos and at the end of a chat turn, which is another token.

How does a chat become text? By the template of the checkpoint, which is a program of somebody else's. transformers runs
it in Jinja's sandbox, which keeps it from files and from Python, and not from memory and time. So it runs in a fork of
this process with limits to both, and only its text comes back, which has a limit too.
"""

import base64
import hashlib
import multiprocessing
import resource
import signal
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from loopscope.errors import UserError, brief, explained, tokenizing
from loopscope.files import is_folder, read_bytes, read_text

END = "<|endoftext|>"
FILE = "tokenizer.json"
ENDS_OF_TURN = ("<|im_end|>", "<|end_turn|>")
"""Ouro's (2, while its configuration says eos 0) and Huginn's (65508)."""
MAX_TEMPLATE_SECONDS = 5
"""Of computing; of waiting for it, where others compute too, six times as many."""
MAX_TEMPLATE_BYTES = 1 << 30
"""That the template may take beside what this process has."""
MAX_CHAT_BYTES = 1 << 24
MAX_GROWTH = 1024
"""Characters or tokens that a tokenizer may make of one character; known ones make 144 at most."""
_PARTS_INSIDE = ("normalizers", "pretokenizers", "processors", "decoders")
_TEXT, _REFUSED = b"+", b"-"


def load_tokenizer(source: str | Path) -> Any:
    """transformers' `PreTrainedTokenizerFast` from a checkpoint's folder or a Hub id."""
    from transformers import PreTrainedTokenizerFast

    require_tokenizer(source)
    with explained(f"No tokenizer could be read from {source}"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(source))
        tokenizer.eos_token_id  # noqa: B018 - of the wrong type where the file is wrong
    whole = tokenizer.backend_tokenizer
    whole.no_truncation()  # which a file may ask for: the settings of whoever saved it last
    whole.no_padding()
    _check_growth(whole, source)
    return tokenizer


def _check_growth(tokenizer: Any, source: str | Path) -> None:
    """Reject a tokenizer that can make very much of little text: it would fill the memory."""
    encoding = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor)
    written, read = (
        prod(_growth(msgspec.json.decode(part.__getstate__())) for part in parts if part is not None)
        for parts in (encoding, (tokenizer.decoder,))
    )
    if max(written, read) > MAX_GROWTH:
        raise UserError(
            f"The tokenizer of {source} can make a text more than {MAX_GROWTH} times as long; put the tokenizer of the "
            "model's maker there."
        )


def _growth(part: dict[str, Any]) -> int:
    """How many characters, or tokens, a part of a tokenizer can make of one."""
    inside = [each for name in _PARTS_INSIDE for each in part.get(name, ())]
    if inside:
        return prod(map(_growth, inside))
    match part["type"]:
        case "Replace":
            written, found = len(part["content"]), part["pattern"].get("String")
            return max(1, -(-written // len(found))) if found else 1 + written  # an expression may find nothing
        case "Prepend":
            return 1 + len(part["prepend"])
        case "ByteLevel":
            return 4
        case "TemplateProcessing":
            return max(1, len(part["single"]), len(part["pair"]))
        case "Precompiled":
            charsmap = base64.b64decode(part["precompiled_charsmap"])
            return max(map(len, charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")))
    return 1


def require_tokenizer(source: str | Path) -> None:
    """Reject a folder without one."""
    if is_folder(Path(source)) and not (Path(source) / FILE).is_file():
        raise UserError(f"{source} has no {FILE}; put the model's tokenizer files there.")


def check_context(context: int, longest: int) -> None:
    """Reject windows in which nothing is predicted, and those that the model does not take."""
    if not 2 <= context <= longest:
        raise UserError(f"A context of {context} tokens is not possible: choose 2 to {longest}.")


def read_documents(paths: Sequence[Path]) -> list[str]:
    """The documents of these files, in order, without empty ones."""
    found: list[str] = []
    for path in paths:
        found += _read_lines(path) if path.suffix == ".jsonl" else read_text(path, "text file", None).split(END)
    documents = [document for document in found if document.strip()]
    if not documents:
        raise UserError(f"There is no text in {', '.join(map(str, paths))}.")
    return documents


class _Line(msgspec.Struct):
    text: str


def _read_lines(path: Path) -> Iterator[str]:
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
    with tokenizing():
        encoded = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    return [np.array(tokens.ids, dtype=np.int64) for tokens in encoded]


def tokenization_sha256(rows: Iterable[NDArray[np.int64]]) -> str:
    """A hash of these rows of tokens: another tokenizer gives another one."""
    found = hashlib.sha256()
    for row in rows:
        found.update(f"{len(row)} ".encode())
        found.update(np.ascontiguousarray(row).data)
    return found.hexdigest()


def stop_tokens(tokenizer: Any, configured: Collection[int] = ()) -> set[int]:
    """The tokens that end a generated text: eos, by the configuration and the tokenizer, and the ends of a turn."""
    vocabulary = tokenizer.get_vocab()
    ends = {vocabulary[end] for end in ENDS_OF_TURN if end in vocabulary} | set(configured)
    return ends if tokenizer.eos_token_id is None else ends | {tokenizer.eos_token_id}


def encode(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """The tokens of a text, with those that the tokenizer adds by itself (`special`) or without."""
    try:
        text.encode()
    except UnicodeEncodeError:  # which a JSON file can write and no text can hold
        raise UserError(f"'{text[:60]}' is not text in Unicode: it holds half a character.") from None
    with tokenizing():
        ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of these tokens, without special ones."""
    with tokenizing():
        return str(tokenizer.decode(tokens, skip_special_tokens=True))


class Detokenizer:
    """Tokens become text as they come."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)
        decoder = tokenizer.backend_tokenizer.decoder
        self._may_panic = decoder is not None and b"Regex" in decoder.__getstate__()
        self.tokens: list[int] = []
        self.text = ""
        """What is sure by now; the rest of a character may be still to come."""

    def add(self, token: int) -> str:
        """What this token makes sure."""
        self.tokens.append(token)
        with tokenizing(self._may_panic):
            new = self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        self.text += new
        return new

    def rest(self) -> str:
        """What is left at the end: of a character that was never finished."""
        return decode(self._tokenizer, self.tokens)[len(self.text) :]


def chat_prompt(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """The tokens of a chat (messages with `role` and `content`), up to where the model's turn begins."""
    ids = encode(tokenizer, render_chat(tokenizer, messages, add_generation_prompt=True), False)
    if not ids:
        raise UserError("The model's chat template makes nothing of these messages; give them as plain text.")
    return ids


def render_chat(tokenizer: Any, messages: Sequence[dict[str, str]], **options: Any) -> str:
    """The chat (messages with `role` and `content`) as the model's template writes it; `options` are transformers'."""
    if tokenizer.chat_template is None:
        raise UserError("This tokenizer has no chat template: the model is no chat model; give it plain text.")
    import transformers.utils.chat_template_utils  # noqa: F401 - here, so that no fork has to

    answer = _in_a_fork(lambda: tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    kind, text = answer[:1], answer[1:].decode("utf-8", "surrogatepass")
    if kind == _TEXT:
        return text
    problem = "takes too much time or memory; put a template of the model's maker there"
    if kind == _REFUSED:
        problem = f"does not take these messages ({text})"
    raise UserError(f"The model's chat template {problem}.")


def _in_a_fork(make: Callable[[], str]) -> bytes:
    """What `make` returns or raises, after a mark that says which; nothing where it went beyond the limits."""
    context = multiprocessing.get_context("fork")
    reads, writes = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(make, writes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the fork needs nothing of theirs
        child.start()
    writes.close()
    try:
        return reads.recv_bytes() if reads.poll(6 * MAX_TEMPLATE_SECONDS) else b""
    except EOFError:  # it was ended by a limit
        return b""
    finally:
        reads.close()
        child.kill()
        child.join()


def _answer(make: Callable[[], str], writes: Connection) -> None:
    """In the fork: makes the text within the limits, and sends it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _limit()
    try:
        answer = _TEXT + str(make()).encode("utf-8", "surrogatepass")
    except (MemoryError, RecursionError):
        answer = b""
    except Exception as error:  # a template may be particular about roles and their order, or wrong
        answer = _REFUSED + (brief(str(error), 200) or type(error).__name__).encode()
    writes.send_bytes(answer if len(answer) <= MAX_CHAT_BYTES else b"")


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_TEMPLATE_SECONDS, MAX_TEMPLATE_SECONDS))
    pages = Path("/proc/self/statm")
    if pages.is_file():  # where it is not, memory ends with the time
        used = int(pages.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = used + MAX_TEMPLATE_BYTES if hard == resource.RLIM_INFINITY else min(used + MAX_TEMPLATE_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
