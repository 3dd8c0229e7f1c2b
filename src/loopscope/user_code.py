"""Where is the code that a user names? `module:name` in a settings file is a custom objective, prior, task or model.

Python finds the module where it finds modules, the current folder included. `source_of` and `source_sha256` read its
text and run nothing of it, so that the text can enter the settings of a run as a hash: with another text it is another
run. `load_code` imports it. Only what the user asked for imports it, so that nobody runs code because a file names it.
"""

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from loopscope.errors import UserError, reason

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_user_name(name: str) -> bool:
    """Whether a name has the form module:name."""
    return _NAME.fullmatch(name) is not None


def source_of(name: str, what: str, given: Any = None) -> tuple[bytes, Path | None]:
    """The source text of the module of a user's name, and its file; for a function in a notebook its own text, no file.

    `what` says what it is, for errors. `given` is the object itself, where Python has it already. Python runs the
    `__init__` of the packages around the module, and nothing of the module itself.
    """
    module, file, problem = name.partition(":")[0], None, "it must be in the current folder, in PYTHONPATH or installed"
    if given is not None:
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is None and (inspect.isfunction(given) or inspect.isclass(given)):
            try:
                return inspect.getsource(given).encode(), None
            except (OSError, TypeError):
                problem = "put it into a file of its own"
    else:
        if "" not in sys.path:  # the current folder, which a script that pip installed does not look into
            sys.path.append("")
        importlib.invalidate_caches()
        try:
            spec = importlib.util.find_spec(module)
            file = None if spec is None else spec.origin
        except Exception as error:
            problem = reason(error)
    if file is None or not file.endswith(".py") or not Path(file).is_file():
        raise UserError(f"There is no module '{module}' with a source text for the {what} '{name}': {problem}.")
    return Path(file).read_bytes(), Path(file)


def source_sha256(name: str, what: str, recorded: str | None = None, given: Any = None) -> str:
    """The hash of a user's source text; reject a text that differs from the `recorded` hash."""
    found = hashlib.sha256(source_of(name, what, given)[0]).hexdigest()
    if recorded not in (None, found):
        raise UserError(f"The source text of '{name}' is not the one that these settings name; put it back.")
    return found


def load_code(name: str, what: str, given: Any = None) -> Any:
    """Load the user's function or class, if its source text still says the same."""
    text, file = source_of(name, what, given)
    found = _import_user_code(name, what) if given is None else given
    if file is not None and not _is_compiled_from(text, found):
        raise UserError(f"{file}, with '{name}', was changed after Python had imported it; start Python again.")
    return found


def _import_user_code(name: str, what: str) -> Any:
    """Import the user's module, and turn its errors into one sentence."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
        if found.__module__ != module:  # the source text of the module that defines it belongs to the run
            raise UserError(f"it is defined in '{found.__module__}'; name it where it is defined")
    except (Exception, SystemExit) as error:
        raise UserError(f"The {what} '{name}' cannot be imported: {reason(error)}.") from None
    return found


def _is_compiled_from(text: bytes, found: Any) -> bool:
    """Whether Python compiles the current source text to this function, or to every method of this class.

    pytest makes something else of its tests.
    """
    module = sys.modules.get(found.__module__)
    file, loader = (getattr(module, name, None) for name in ("__file__", "__loader__"))
    parts = vars(found).values() if inspect.isclass(found) else [found]
    codes = {getattr(inspect.unwrap(part), "__code__", None) for part in parts if callable(part)}
    own = {code for code in codes if code is not None and code.co_filename == file}  # a dataclass's __init__ is not
    if not own or type(loader) is not SourceFileLoader:
        return True
    try:
        return own <= _nested_code(compile(text, str(file), "exec", dont_inherit=True))
    except SyntaxError:
        return False


def _nested_code(code: CodeType) -> set[CodeType]:
    """A code object with all code that is defined in it."""
    return {code}.union(*(_nested_code(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
