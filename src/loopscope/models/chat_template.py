"""How does a chat become text? By the template of the checkpoint, which is a program of somebody else's.

transformers runs it in Jinja's sandbox, which keeps it from files and from Python, and not from memory and time. So it
runs in a fork of this process with limits to both, and only its text comes back, which has a limit too.
"""

import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loopscope.errors import UserError, brief

_SECONDS = 5
"""Of computing; of waiting for it, where others compute too, six times as many."""
_BYTES = 1 << 30
"""That the template may take beside what this process has."""
_LONGEST = 1 << 24
_TEXT, _REFUSED = b"+", b"-"


def render_chat(tokenizer: Any, messages: Sequence[dict[str, str]], **options: Any) -> str:
    """The chat (messages with `role` and `content`) as the model's template writes it; `options` are transformers'."""
    if tokenizer.chat_template is None:
        raise UserError("This tokenizer has no chat template: the model is no chat model; give it plain text.")
    import transformers.utils.chat_template_utils  # noqa: F401 - here, so that no fork has to

    answer = _in_a_fork(lambda: tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    kind, text = answer[:1], answer[1:].decode("utf-8", "surrogatepass")
    if kind == _TEXT and len(answer) <= _LONGEST:
        return text
    if kind == _REFUSED:
        raise UserError(f"The model's chat template does not take these messages ({text}).")
    raise UserError(
        "The model's chat template takes too much time or memory; put a template of the model's maker there."
    )


def _in_a_fork(make: Any) -> bytes:
    """What `make` returns or raises, after a mark that says which; nothing where it went beyond the limits."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the fork needs nothing of theirs
        child = os.fork()
    if child == 0:
        _answer(make, reads, writes)
    os.close(writes)
    try:
        return _received(reads)
    finally:
        os.close(reads)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _answer(make: Any, reads: int, writes: int) -> None:
    """In the fork: makes the text within the limits, writes it, and ends without any of what this process would do."""
    try:
        os.close(reads)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _limit()
        try:
            answer = _TEXT + str(make()).encode("utf-8", "surrogatepass")
        except (MemoryError, RecursionError):
            answer = b""
        except Exception as error:  # a template may be particular about roles and their order, or wrong
            answer = _REFUSED + (brief(str(error), 200) or type(error).__name__).encode()
        for start in range(0, min(len(answer), _LONGEST + 1), 1 << 16):
            os.write(writes, answer[start : start + (1 << 16)])
    finally:
        os._exit(0)


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    pages = Path("/proc/self/statm")
    if pages.is_file():  # where it is not, memory ends with the time
        used = int(pages.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = used + _BYTES if hard == resource.RLIM_INFINITY else min(used + _BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _received(reads: int) -> bytes:
    """All that comes until the other end closes, unless that takes far too long."""
    received, end = bytearray(), time.monotonic() + 6 * _SECONDS
    while select.select([reads], [], [], max(0.0, end - time.monotonic()))[0]:
        part = os.read(reads, 1 << 16)
        if not part:
            return bytes(received)
        received += part
    return b""
