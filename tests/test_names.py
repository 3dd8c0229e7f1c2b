"""Does a name mean one thing, and is it a word of the field?"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import loopscope as ls

SOURCES = sorted(Path(ls.__file__).parent.rglob("*.py"))
PER_VERB = {"define", "execute"}
"""What every module of a verb has."""
OUR_OWN_ENGLISH = {"said", "told", "asked", "wanted", "heard", "telling", "beginnings", "slot"}
"""Plain words that docstrings may use, and that defeat a search for what the field calls it."""


def definitions(tree: ast.Module) -> Iterator[str]:
    """Classes and functions of a module that others may import."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            yield node.name


def identifiers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name


def test_a_public_name_is_defined_once() -> None:
    homes = defaultdict(list)
    for path in SOURCES:
        for name in definitions(ast.parse(path.read_text())):
            homes[name].append(str(path))
    twice = {name: paths for name, paths in homes.items() if len(paths) > 1 and name not in PER_VERB}
    assert not twice


def test_identifiers_are_words_of_the_field() -> None:
    found = {
        (path.name, name)
        for path in SOURCES
        for name in identifiers(ast.parse(path.read_text()))
        if not OUR_OWN_ENGLISH.isdisjoint(name.lower().strip("_").split("_"))
    }
    assert not found


def test_the_version_is_known() -> None:
    assert ls.__version__ == version("loopscope")
