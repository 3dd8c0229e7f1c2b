"""How does LoopScope report bad input? With one sentence that a user can act on.

The command line prints the sentence of a `UserError` and exits with code 2; any other exception is a bug of ours and
keeps its traceback. An error in a user's function is the user's, too: `reason` gives it in one line. A message may
quote a file or an argument: `visible` escapes all that would steer a terminal, and `brief` keeps the message short.
"""

import difflib
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from threading import Lock
from urllib.parse import unquote

_LIBRARIES = ("loopscope", "importlib", "numpy", "scipy", "torch")
"""A line of theirs in a traceback is not the user's."""
_STEERS_TERMINAL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""Control characters, marks that reorder a line, and halves of characters."""
_NUMBER = re.compile(r"\d+")
_MAX_MEANT = 3
_MIN_LONG_NAME = 8
"""Letters; two names of fewer are alike by chance where they share three of five."""
_MAX_MESSAGE = 450
_MAX_NAME = 255
_STANDARD_ERROR = 2
_STREAM_LOCK = Lock()
"""The stream is the process's, so one thread at a time takes it."""
_EXTRAS = {
    "torch": "torch",
    "jinja2": "report",
    "vl_convert": "report",
    "transformers": "transformers",
    "tokenizers": "transformers",
    "huggingface_hub": "transformers",
    "accelerate": "transformers",
    "peft": "peft",
    "lm_eval": "lm",
    "vllm": "vllm",
    "ray": "ray",
    "gguf": "gguf",
}
"""Which extra of LoopScope installs a package that the core does without."""


class RecordingWarning(UserWarning):
    """Warn about a valid recording that is probably not meant so."""


class UserError(ValueError):
    """Report bad input: the message says what is wrong and what to do.

    The command line prints the message and exits with code 2.

    Parameters
    ----------
    message
        The message, in one or two sentences.

    Examples
    --------
    >>> try:
    ...     ls.ExitPolicy("margn", 2.0)
    ... except ls.UserError as error:
    ...     print(str(error)[:56])
    There is no readout 'margn' (did you mean 'margin'?); ch
    """

    def __init__(self, message: str) -> None:
        super().__init__(brief(message))


def visible(text: str, keep: str = "\n\t") -> str:
    """Escape control characters of a text for the terminal, as JSON does: `\u001b`."""
    return _STEERS_TERMINAL.sub(lambda found: found[0] if found[0] in keep else f"\\u{ord(found[0]):04x}", text)


def brief(message: str, longest: int = _MAX_MESSAGE) -> str:
    """Shorten a message to one visible line; a message that is too long loses its middle."""
    return _without_middle(visible(_without_middle(" ".join(message.splitlines()), longest), keep=""), longest)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint ` (did you mean 'margin'?)` for an unknown name; empty if no known name is close.

    Nobody who writes another number has misspelt it: `float64` does not mean `float16`.
    """
    known = [each for each in known if not _NUMBER.search(name) or _NUMBER.findall(each) in ([], _NUMBER.findall(name))]
    begun = [name] if name in known else [each for each in known if len(name) > 2 and each.startswith(name)]
    meant = begun if 1 <= len(begun) <= _MAX_MEANT else filter(None, [closest(name, known)])
    names = " or ".join(f"'{each}'" for each in meant)
    return f" (did you mean {names}?)" if names else ""


def closest(name: str, known: Iterable[str], alike: float | None = None) -> str | None:
    """The known name that an unknown name probably means; `alike` is the least similarity, from 0 to 1.

    The dashes of an option, which all options have, do not count.
    """
    bare, names = name.lstrip("-"), {each.lstrip("-"): each for each in known}
    least = alike or (0.7 if len(bare) < _MIN_LONG_NAME else 0.6)
    close = [] if len(bare) > _MAX_NAME else difflib.get_close_matches(bare, list(names), 1, least)
    return names[close[0]] if close else None


def _without_middle(text: str, longest: int) -> str:
    """Cut the middle out of a text that is longer than `longest`."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"


def check_known(name: str, known: Iterable[str], what: str) -> None:
    """Reject an unknown name with a hint at the closest one; `what` says what is named."""
    if name not in (known := [*known]):
        raise UserError(f"There is no {what} '{name}'{did_you_mean(name, known)}; choose one of {', '.join(known)}.")


def reject(problems: Iterable[str]) -> None:
    """Raise a `UserError` for the first of these sentences, if there is any."""
    for problem in problems:
        raise UserError(problem)


@contextmanager
def explained(sentence: str) -> Iterator[None]:
    """Turn any error of another library about a file into this sentence with its reason; Rust may panic."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        why = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise UserError(f"{sentence} ({why}).") from None


@contextmanager
def tokenizing(may_panic: bool = True) -> Iterator[None]:
    """Turn a tokenizer's error into a sentence, and hide the message of a Rust panic."""
    unusable = "The model's tokenizer cannot be used; fetch its files again"
    with explained(unusable), _without_panics() if may_panic else nullcontext():
        yield


@contextmanager
def _without_panics() -> Iterator[None]:
    """Hold standard error back in a file, and print it afterwards unless Rust panicked."""
    with _STREAM_LOCK:
        try:
            stream = os.dup(_STANDARD_ERROR)
        except OSError:  # the caller closed it
            yield
            return
        file, panicked = _unnamed_file(), False
        os.dup2(file, _STANDARD_ERROR)
        try:
            yield
        except BaseException as error:
            panicked = type(error).__name__ == "PanicException"
            raise
        finally:
            os.dup2(stream, _STANDARD_ERROR)
            os.close(stream)
            if size := os.lseek(file, 0, os.SEEK_CUR):
                os.lseek(file, 0, os.SEEK_SET)
                os.write(_STANDARD_ERROR, b"" if panicked else os.read(file, size))
                os.lseek(file, 0, os.SEEK_SET)


@cache
def _unnamed_file() -> int:
    """The temporary file that holds standard error back; opened once, because it is needed for every token."""
    file, path = tempfile.mkstemp()
    Path(path).unlink()
    return file


def reason(error: BaseException) -> str:
    """An error in one line, with the place in the user's file."""
    text = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, UserError):
        return text
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {text}"
    files = [str(getattr(sys.modules.get(name), "__file__", None) or "<") for name in _LIBRARIES]
    not_theirs = ("<", *(str(Path(file).parent) for file in files if file != "<"))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(not_theirs)]
    where = "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in frames[-1:])
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that PyTorch ran out of memory; this does not import PyTorch."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def missing_extra(error: ModuleNotFoundError, what: str) -> Exception:
    """The sentence for a missing package that an extra installs; any other import error stays."""
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return error
    return UserError(f"{what} needs {package}; install it with: {install_command(_EXTRAS[package])}.")


def install_command(extra: str) -> str:
    """The command that installs an extra, from the place where LoopScope itself was installed."""
    try:
        origin = json.loads(distribution("loopscope").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url, named = str(origin.get("url", "")), f"loopscope[{extra}]"
    if origin.get("dir_info", {}).get("editable"):
        return f"pip install -e '{unquote(url.removeprefix('file://'))}[{extra}]'"
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return f"pip install '{named} @ {url}'" if url else f"pip install '{named}'"
