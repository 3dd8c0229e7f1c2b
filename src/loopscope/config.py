"""How are settings read? TOML or JSON into frozen structs, strictly: an unknown key or a wrong type is an error.

Defaults < preset or file < `--set a.b=c`. Each component keeps its own settings struct beside it; this module
only knows how to fill one.
"""

import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from loopscope.errors import UserError, did_you_mean
from loopscope.files import MAX_FILE_BYTES, read_bytes, read_text, write_bytes

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
Tally = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Layers = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Loops = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Width = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
Vocabulary = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Positions = Annotated[int, msgspec.Meta(ge=1, le=2**26)]
Epsilon = Annotated[float, msgspec.Meta(ge=0, le=1)]
RotaryBase = Annotated[float, msgspec.Meta(ge=1, le=1e15)]
Seed = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e18)]  # products of two are still numbers in float32
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Option = bool | int | Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)] | str
"""A keyword argument of the user's own code, as a settings file gives it."""

_MAX_TOML_BYTES = 1 << 22
_TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every settings struct."""


def require_values(*rules: tuple[object, str]) -> None:
    """Reject a configuration with the message of the first rule that does not hold."""
    for holds, message in rules:
        if not holds:
            raise ValueError(message)


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file."""
    text = read_text(path, "TOML file", _MAX_TOML_BYTES)
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # int refuses thousands of digits with a ValueError of its own
        raise UserError(f"{path} is not valid TOML: {_parser_error(error)}.") from None
    _check_toml_bounds(tables, str(path))
    return tables


def with_overrides(values: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Set each `a.b=c` of `assignments` in the settings `values`; c is read as TOML, or else as text."""
    result = deepcopy(dict(values))
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise UserError(f"'--set {assignment}' is not of the form a.b=c; write for instance --set training.seed=1.")
        *tables, name = key.strip().split(".")
        table = result
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise UserError(f"'--set {assignment}': {part} is a value, not a table.")
        table[name] = _override_value(text.strip())
    _check_toml_bounds(result, "--set")
    return result


def build(kind: type[T], values: Mapping[str, Any], source: str) -> T:
    """Build a settings struct of the type `kind`; an error names the key that does not fit, and `source`."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{source}: {_describe_misfit(error, kind)}") from None
    except UnicodeEncodeError:
        raise UserError(f"{source}: a name in it is not text in Unicode: it holds half a character.") from None


def read_json(kind: type[T], path: Path, what: str, largest: int | None = MAX_FILE_BYTES) -> T:
    """Read a JSON file as a struct of the type `kind`; `what` names the file in errors."""
    data = read_bytes(path, what, largest)
    try:
        data.decode()  # all of it, because the decoder skips unknown keys
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {_describe_misfit(error, kind)}") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a readable {what}: {_parser_error(error)}.") from None


def write_json(path: Path, value: object) -> None:
    """Write a value as a JSON file, whole or not at all."""
    write_bytes(path, to_json(value))


def to_json(value: object) -> bytes:
    """Encode a value as indented JSON with a final newline; equal values give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def plain(value: object) -> Any:
    """Turn settings into dicts, lists, numbers and text only."""
    return msgspec.to_builtins(value)


def digest(value: object) -> str:
    """The hash of the contents of settings; the order of keys does not matter."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys (`training.steps`) at which two settings differ."""
    found = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}")
    return found


def _override_value(text: str) -> Any:
    """Read the value of an override as TOML, or keep it as text."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text


def _check_toml_bounds(tables: Mapping[str, Any], source: str) -> None:
    """Reject whole numbers and nesting that TOML allows and JSON does not hold."""
    try:
        msgspec.json.encode(tables)
    except (OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise UserError(f"{source}: {_parser_error(error)}.") from None


def _parser_error(error: Exception) -> str:
    """Shorten the error of a TOML or JSON parser."""
    if isinstance(error, RecursionError):
        return "tables or lists are nested in one another without end"
    if isinstance(error, OverflowError) or "integer string conversion" in str(error):
        return "a whole number is beyond 64 bits"
    return str(error).rstrip(".")


def _describe_misfit(error: msgspec.ValidationError, kind: Any) -> str:
    """The sentence for a settings value of a wrong type, or an unknown key."""
    message, _, where = str(error).rstrip(".").partition(" - at `$")
    key = where.rstrip("`").lstrip(".")
    found = [kind]
    for part in re.findall(r"[^.\[\]]+", key):
        found = [inner for each in found for inner in _types_inside(each, part)]
    text = _plain_words(message, list(_union_members(found)))
    return f"{key}: {text}." if key else f"{text}."


def _plain_words(message: str, kinds: list[Any]) -> str:
    """Translate msgspec's message about a wrong type into plain words."""
    if unknown := re.fullmatch("Object contains unknown field `(.*)`", message, re.DOTALL):
        structs = [each for each in kinds if isinstance(each, type) and issubclass(each, msgspec.Struct)]
        known = [name for each in structs for name in each.__struct_encode_fields__]
        listed = f"; the keys are {', '.join(dict.fromkeys(known))}" if known else ""
        return f"unknown key `{unknown[1]}`{did_you_mean(unknown[1], known) or listed}"
    if missing := re.fullmatch("Object missing required field `(.*)`", message, re.DOTALL):
        return f"the key `{missing[1]}` is missing"
    if invalid := re.fullmatch("Invalid (?:enum )?value '?(.*?)'?", message, re.DOTALL):
        known = [str(value) for each in kinds if get_origin(each) is Literal for value in get_args(each)]
        choice = f"; choose one of {', '.join(known)}" if known else ""
        return f"there is no '{invalid[1]}' here{did_you_mean(invalid[1], known)}{choice}"
    message = re.sub(
        "`([^`]*)`", lambda found: " or ".join(_TYPE_WORDS.get(each, each) for each in found[1].split(" | ")), message
    )
    message = re.sub(r"matching regex '(.*)'$", r"of the form \1", message, flags=re.DOTALL)
    return re.sub("^Expected ", "expected ", message)


def _union_members(kinds: list[Any]) -> Iterator[Any]:
    """The member types of a union type; else the type itself."""
    for each in kinds:
        if get_origin(each) in (Union, UnionType, Annotated):
            yield from _union_members([part for part in get_args(each) if isinstance(part, type) or get_args(part)])
        else:
            yield each


def _types_inside(kind: Any, part: str) -> Iterator[Any]:
    """The types that a settings type allows at a key, or in a list."""
    for each in _union_members([kind]):
        if isinstance(each, type) and issubclass(each, msgspec.Struct):
            tag = each.__struct_config__.tag_field
            if part == tag:
                yield Literal[each.__struct_config__.tag]
            yield from (hint for name, hint in get_type_hints(each, include_extras=True).items() if name == part)
        elif get_origin(each) in (list, tuple):
            yield from (inner for inner in get_args(each) if inner is not ...)
        elif get_origin(each) is dict:
            yield get_args(each)[1]
