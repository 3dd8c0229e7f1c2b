"""How does text become tokens? By the checkpoint's own `tokenizer.json`, which LoopScope reads as data.

No code from the checkpoint runs, and the classes that it names are ignored. A text file holds documents with
`<|endoftext|>` between them, a `.jsonl` file one `{"text": ...}` a line.

Generated text ends at the configuration's eos, and at the end of a chat turn, which is a different token.

A chat becomes text by the checkpoint's template, which is a foreign program. transformers runs it in Jinja's sandbox,
which keeps it from files and from Python, but does not limit memory and time. So LoopScope runs it in a fork of this
process with limits to both; only its text comes back, and that has a limit too.
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
"""The end-of-turn tokens of Ouro (2, while its configuration has eos 0) and Huginn (65508)."""
MAX_TEMPLATE_SECONDS = 5
"""The computing time of a template; the time to wait for it is six times as long, for busy machines."""
MAX_TEMPLATE_BYTES = 1 << 30
"""The memory of a template, on top of this process's own."""
MAX_CHAT_BYTES = 1 << 24
MAX_GROWTH = 1024
"""The most characters or tokens that a tokenizer may make from one character; known tokenizers make at most 144."""
_PARTS_INSIDE = ("normalizers", "pretokenizers", "processors", "decoders")
_TEXT, _REFUSED = b"+", b"-"


def load_tokenizer(source: str | Path) -> Any:
    """Load transformers' `PreTrainedTokenizerFast` from a checkpoint's folder or a Hub id."""
    from transformers import PreTrainedTokenizerFast

    require_tokenizer(source)
    with explained(f"No tokenizer could be read from {source}"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(source))
        tokenizer.eos_token_id  # noqa: B018 - raises if the file has a wrong type
    whole = tokenizer.backend_tokenizer
    whole.no_truncation()  # a file may contain the truncation of its last user
    whole.no_padding()
    _check_growth(whole, source)
    return tokenizer


def _check_growth(tokenizer: Any, source: str | Path) -> None:
    """Reject a tokenizer that makes very long output from little text, which would fill the memory."""
    encoding = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor)
    written, read = (
        prod(_largest_growth(msgspec.json.decode(part.__getstate__())) for part in parts if part is not None)
        for parts in (encoding, (tokenizer.decoder,))
    )
    if max(written, read) > MAX_GROWTH:
        raise UserError(
            f"The tokenizer of {source} can make a text more than {MAX_GROWTH} times as long; put the tokenizer of the "
            "model's maker there."
        )


def _largest_growth(part: dict[str, Any]) -> int:
    """The most characters, or tokens, that a part of a tokenizer makes from one character."""
    inside = [each for name in _PARTS_INSIDE for each in part.get(name, ())]
    if inside:
        return prod(map(_largest_growth, inside))
    match part["type"]:
        case "Replace":
            written, found = len(part["content"]), part["pattern"].get("String")
            return max(1, -(-written // len(found))) if found else 1 + written  # an expression may match nothing
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
    """Reject a checkpoint without a tokenizer."""
    if is_folder(Path(source)) and not (Path(source) / FILE).is_file():
        raise UserError(f"{source} has no {FILE}; put the model's tokenizer files there.")


def check_context(context: int, longest: int) -> None:
    """Reject a context with nothing to predict, or longer than the model takes."""
    if not 2 <= context <= longest:
        raise UserError(f"A context of {context} tokens is not possible: choose 2 to {longest}.")


def read_documents(paths: Sequence[Path]) -> list[str]:
    """Read the documents of text files in order, without empty documents."""
    found: list[str] = []
    for path in paths:
        found += _read_lines(path) if path.suffix == ".jsonl" else read_text(path, "text file", None).split(END)
    documents = [document for document in found if document.strip()]
    if not documents:
        raise UserError(f"There is no text in {', '.join(map(str, paths))}.")
    return documents


class _JsonlLine(msgspec.Struct):
    """A line of a `.jsonl` text file."""

    text: str


def _read_lines(path: Path) -> Iterator[str]:
    """Read the documents of a `.jsonl` text file."""
    decoder = msgspec.json.Decoder(_JsonlLine)
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
    """Tokenize every document, without special tokens before or after it."""
    tokenizer = load_tokenizer(checkpoint).backend_tokenizer
    with tokenizing():
        encoded = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    return [np.array(tokens.ids, dtype=np.int64) for tokens in encoded]


def tokenization_sha256(rows: Iterable[NDArray[np.int64]]) -> str:
    """A hash of tokenized documents, which differs between tokenizers."""
    found = hashlib.sha256()
    for row in rows:
        found.update(f"{len(row)} ".encode())
        found.update(np.ascontiguousarray(row).data)
    return found.hexdigest()


def stop_tokens(tokenizer: Any, configured: Collection[int] = ()) -> set[int]:
    """The tokens that end a generated text: eos of configuration and tokenizer, and the ends of a chat turn."""
    vocabulary = tokenizer.get_vocab()
    ends = {vocabulary[end] for end in ENDS_OF_TURN if end in vocabulary} | set(configured)
    return ends if tokenizer.eos_token_id is None else ends | {tokenizer.eos_token_id}


def encode(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """Tokenize a text, with the tokens that the tokenizer itself adds (`special`) or without."""
    try:
        text.encode()
    except UnicodeEncodeError:  # a JSON file can contain characters that no text can
        raise UserError(f"'{text[:60]}' is not text in Unicode: it holds half a character.") from None
    with tokenizing():
        ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, without special tokens."""
    with tokenizing():
        return str(tokenizer.decode(tokens, skip_special_tokens=True))


class Detokenizer:
    """Turn generated tokens into text as they come."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)
        decoder = tokenizer.backend_tokenizer.decoder
        self._may_panic = decoder is not None and b"Regex" in decoder.__getstate__()
        self.tokens: list[int] = []
        self.text = ""
        """The text that is final; its next character may be incomplete."""

    def add(self, token: int) -> str:
        """Add a token; return the text that it completes."""
        self.tokens.append(token)
        with tokenizing(self._may_panic):
            new = self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        self.text += new
        return new

    def rest(self) -> str:
        """The rest at the end: the text of an incomplete character."""
        return decode(self._tokenizer, self.tokens)[len(self.text) :]


def chat_prompt(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Tokenize a chat (messages with `role` and `content`), up to the beginning of the model's turn."""
    ids = encode(tokenizer, render_chat(tokenizer, messages, add_generation_prompt=True), False)
    if not ids:
        raise UserError("The model's chat template makes nothing of these messages; give them as plain text.")
    return ids


def render_chat(tokenizer: Any, messages: Sequence[dict[str, str]], **options: Any) -> str:
    """Render a chat (messages with `role` and `content`) by the model's template, with transformers' `options`."""
    if tokenizer.chat_template is None:
        raise UserError("This tokenizer has no chat template: the model is no chat model; give it plain text.")
    import transformers.utils.chat_template_utils  # noqa: F401 - imported here, so that no fork has to

    answer = _run_in_fork(lambda: tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    kind, text = answer[:1], answer[1:].decode("utf-8", "surrogatepass")
    if kind == _TEXT:
        return text
    problem = "takes too much time or memory; put a template of the model's maker there"
    if kind == _REFUSED:
        problem = f"does not take these messages ({text})"
    raise UserError(f"The model's chat template {problem}.")


def _run_in_fork(make: Callable[[], str]) -> bytes:
    """The result or the error of `make` in a fork, with a mark for which; empty if it exceeded the limits."""
    context = multiprocessing.get_context("fork")
    reads, writes = context.Pipe(duplex=False)
    child = context.Process(target=_answer_in_fork, args=(make, writes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about other threads, which the fork does not need
        child.start()
    writes.close()
    try:
        return reads.recv_bytes() if reads.poll(6 * MAX_TEMPLATE_SECONDS) else b""
    except EOFError:  # a limit ended the fork
        return b""
    finally:
        reads.close()
        child.kill()
        child.join()


def _answer_in_fork(make: Callable[[], str], writes: Connection) -> None:
    """In the fork: make the text within the limits, and send it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _limit_fork()
    try:
        answer = _TEXT + str(make()).encode("utf-8", "surrogatepass")
    except (MemoryError, RecursionError):
        answer = b""
    except Exception as error:  # a template may reject roles or their order, or be wrong
        answer = _REFUSED + (brief(str(error), 200) or type(error).__name__).encode()
    writes.send_bytes(answer if len(answer) <= MAX_CHAT_BYTES else b"")


def _limit_fork() -> None:
    """Limit the computing time and memory of this process, the fork that runs a chat template."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_TEMPLATE_SECONDS, MAX_TEMPLATE_SECONDS))
    pages = Path("/proc/self/statm")
    if pages.is_file():  # elsewhere the time limit must do
        used = int(pages.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = used + MAX_TEMPLATE_BYTES if hard == resource.RLIM_INFINITY else min(used + MAX_TEMPLATE_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
