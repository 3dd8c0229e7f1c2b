"""What is said when the input is wrong: one sentence that a user can act on.

The command line turns a `UserError` into that sentence and exit code 2; any other exception is a bug of ours
and keeps its traceback. What a function of the user's raises is the user's, too: `reason` says it in a line.
"""

import sys
import traceback
from pathlib import Path

_LIBRARIES = ("loopscope", "numpy", "scipy", "torch")
"""A line of theirs in a traceback is not the user's."""


class UserError(ValueError):
    """Bad input; the message says what is wrong and what to do."""


def reason(error: BaseException) -> str:
    """An error in one line, with the place in the user's file."""
    text = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {text}"
    files = [str(getattr(sys.modules.get(name), "__file__", None) or "<") for name in _LIBRARIES]
    not_theirs = ("<", *(str(Path(file).parent) for file in files if file != "<"))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(not_theirs)]
    where = "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in frames[-1:])
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"
