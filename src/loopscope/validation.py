"""What does not fit about a setting? msgspec's message in plain words, the key first, with what was probably meant."""

import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from loopscope.errors import did_you_mean

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}


def describe_misfit(error: msgspec.ValidationError, kind: Any) -> str:
    """The sentence for a value that is no `kind`."""
    message, _, where = str(error).rstrip(".").partition(" - at `$")
    key = where.rstrip("`").lstrip(".")
    found = [kind]
    for part in re.findall(r"[^.\[\]]+", key):
        found = [inner for each in found for inner in _inside(each, part)]
    text = _plain(message, list(_kinds(found)))
    return f"{key}: {text}." if key else f"{text}."


def _plain(message: str, kinds: list[Any]) -> str:
    if unknown := re.fullmatch("Object contains unknown field `(.*)`", message, re.DOTALL):
        known = [name for each in kinds for name in _fields(each)]
        listed = f"; the keys are {', '.join(dict.fromkeys(known))}" if known else ""
        return f"unknown key `{unknown[1]}`{did_you_mean(unknown[1], known) or listed}"
    if missing := re.fullmatch("Object missing required field `(.*)`", message, re.DOTALL):
        return f"the key `{missing[1]}` is missing"
    if invalid := re.fullmatch("Invalid (?:enum )?value '?(.*?)'?", message, re.DOTALL):
        known = [str(value) for each in kinds if get_origin(each) is Literal for value in get_args(each)]
        choice = f"; choose one of {', '.join(known)}" if known else ""
        return f"there is no '{invalid[1]}' here{did_you_mean(invalid[1], known)}{choice}"
    message = re.sub(
        "`([^`]*)`", lambda found: " or ".join(_WORDS.get(each, each) for each in found[1].split(" | ")), message
    )
    message = re.sub(r"matching regex '(.*)'$", r"of the form \1", message, flags=re.DOTALL)
    return re.sub("^Expected ", "expected ", message)


def _kinds(kinds: list[Any]) -> Iterator[Any]:
    """Those that a kind is made of, where it is one of several."""
    for each in kinds:
        if get_origin(each) in (Union, UnionType, Annotated):
            yield from _kinds([part for part in get_args(each) if isinstance(part, type) or get_args(part)])
        else:
            yield each


def _inside(kind: Any, part: str) -> Iterator[Any]:
    """What kinds may be at a key, or in a list."""
    for each in _kinds([kind]):
        if isinstance(each, type) and issubclass(each, msgspec.Struct):
            tag = each.__struct_config__.tag_field
            if part == tag:
                yield Literal[each.__struct_config__.tag]
            yield from (hint for name, hint in get_type_hints(each, include_extras=True).items() if name == part)
        elif get_origin(each) in (list, tuple):
            yield from (inner for inner in get_args(each) if inner is not ...)
        elif get_origin(each) is dict:
            yield get_args(each)[1]


def _fields(kind: Any) -> tuple[str, ...]:
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return ()
    return kind.__struct_encode_fields__
