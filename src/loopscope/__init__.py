"""LoopScope: is the trajectory to blame, or the readout? Adaptive depth in looped Transformers.

`__init__.pyi` lists the public interface, for this file and for type checkers. Each name is imported when it is first
used, so that `import loopscope` and `loopscope --help` stay quick, and work on recordings never loads PyTorch.
"""

import re
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loopscope.errors import missing_extra

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOMES = {
    name: module
    for module, names in re.findall(r"^from (\S+) import (\([^)]*\)|.+)$", _STUB, re.MULTILINE)
    for name in re.findall(r"(\w+) as", names)
}
"""Where each public name is defined."""
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name of LoopScope when it is first used."""
    if name == "__version__":
        return version("loopscope")
    if name not in _HOMES:
        raise AttributeError(f"module 'loopscope' has no attribute '{name}'")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        raise missing_extra(error, f"loopscope.{name}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
