"""Does a name mean one thing, and is it a word of the field?"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import loopscope as ls

SOURCES = {path: ast.parse(path.read_text()) for path in sorted(Path(ls.__file__).parent.rglob("*.py"))}
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
    for path, tree in SOURCES.items():
        for name in definitions(tree):
            homes[name].append(str(path))
    twice = {name: paths for name, paths in homes.items() if len(paths) > 1 and name not in PER_VERB}
    assert not twice


def test_identifiers_are_words_of_the_field() -> None:
    found = {
        (path.name, name)
        for path, tree in SOURCES.items()
        for name in identifiers(tree)
        if not OUR_OWN_ENGLISH.isdisjoint(name.lower().strip("_").split("_"))
    }
    assert not found


def test_scripts_of_the_page_speak_the_same_words() -> None:
    found = {
        (path.name, name)
        for path in Path(ls.__file__).parent.rglob("*.js")
        for name in re.findall(r"(?:const|let|function) (\w+)", path.read_text())
        if not OUR_OWN_ENGLISH.isdisjoint(re.sub("([A-Z])", r" \1", name).lower().split())
    }
    assert not found


def test_every_file_has_its_place_in_the_architecture() -> None:
    """In the first column of a table, under its package; and no file stands there that is gone."""
    text = (Path(__file__).parents[1] / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    tables = text[text.index("## Packages and files") : text.index("## Layers")]
    named = re.findall(r"`([\w/.]+)`", "".join(re.findall(r"^\|[^|]*\|", tables, re.MULTILINE)))
    package = Path(ls.__file__).parent
    folders = {f"{path.parent.relative_to(package)}/" for path in SOURCES} - {"./"}
    files = [path.name if path.parent == package else path.stem for path in SOURCES if not path.name.startswith("__")]
    assert sorted(named) == sorted([*folders, *files])


def test_the_version_is_known() -> None:
    assert ls.__version__ == version("loopscope")
    citation = (Path(__file__).parents[1] / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {ls.__version__}\n" in citation
