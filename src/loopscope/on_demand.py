"""How does a room offer names without importing what they need? Each is imported when it is first asked for.

PyTorch takes seconds to import. A room whose settings and checks do without it lists its names here, so that a wrong
argument is answered before any of it is loaded.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def offered(room: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a room: `names` has, by module, the names that it offers, with spaces between them."""
    homes = {name: module for module, words in names.items() for name in words.split()}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{room}' has no attribute '{name}'")
        value = getattr(import_module(f"{room}.{homes[name]}"), name)
        setattr(import_module(room), name, value)
        return value

    return find
