"""Do rooms that import on demand offer what they say?"""

import ast
import importlib
from pathlib import Path

import pytest

ROOMS = ("loopscope.models", "loopscope.training", "loopscope.studies")


@pytest.mark.parametrize("room", ROOMS)
def test_what_is_typed_is_offered(room: str) -> None:
    module = importlib.import_module(room)
    tree = ast.parse(Path(module.__file__ or "").read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    names = {alias.name for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    (offered,) = (node for node in ast.walk(typed) if isinstance(node, ast.Dict))
    words = {word for value in offered.values if isinstance(value, ast.Constant) for word in str(value.value).split()}
    assert names == words
    assert all(getattr(module, name) is not None for name in names)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018
