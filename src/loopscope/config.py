"""How are settings read? TOML or JSON into frozen structs, strictly: an unknown key or a wrong type is an error.

Defaults < preset or file < `--set a.b=c`. Each component keeps its own settings struct beside it; this module
only knows how to fill one.
"""

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from loopscope.errors import UserError
from loopscope.reading import DEEPEST, json_depth, read_bytes, read_text
from loopscope.validation import describe_misfit

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
Tally = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Layers = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Loops = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Width = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
Vocabulary = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Positions = Annotated[int, msgspec.Meta(ge=1, le=2**30)]
Epsilon = Annotated[float, msgspec.Meta(ge=0, le=1)]
RotaryBase = Annotated[float, msgspec.Meta(ge=1, le=1e15)]
Seed = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e18)]  # products of two are still numbers in float32
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


_LARGEST_TOML = 1 << 22


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every settings struct."""


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        tables = tomllib.loads(read_text(path, "TOML file", _LARGEST_TOML))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:  # int refuses thousands of digits with a ValueError of its own
        raise UserError(f"{path} is not valid TOML: {_briefly(error)}.") from None
    _check_bounds(tables, str(path))
    return tables


def with_overrides(values: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """`values` with each `a.b=c` of `assignments` set; c is read as TOML, or as text where it is not TOML."""
    result = _copy(values)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise UserError(f"'--set {assignment}' is not of the form a.b=c; write for instance --set training.seed=1.")
        *tables, name = key.strip().split(".")
        if len(tables) > DEEPEST:
            raise UserError(f"'--set {assignment}': the key has {len(tables):,} tables, one inside the other.")
        table = result
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise UserError(f"'--set {assignment}': {part} is a value, not a table.")
        table[name] = _toml_value(text.strip(), f"--set {key.strip()}")
    return result


def build(kind: type[T], values: Mapping[str, Any], source: str) -> T:
    """`values` as a `kind`; what does not fit is named with its key and `source`."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{source}: {describe_misfit(error, kind)}") from None
    except UnicodeEncodeError:
        raise UserError(f"{source}: a text holds half a character, which no file can hold; leave it out.") from None


def read_json(kind: type[T], path: Path, what: str) -> T:
    """The JSON file at `path` as a `kind`; `what` names it in errors."""
    data = read_bytes(path, what)
    try:
        data.decode()  # all of it: what a kind does not name is not looked at
        if json_depth(data) > DEEPEST:
            raise RecursionError
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {describe_misfit(error, kind)}") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a readable {what}: {_briefly(error)}.") from None


def to_json(value: object) -> bytes:
    """Indented JSON that ends in a newline; the same value gives the same bytes."""
    return msgspec.json.format(_encoded(value), indent=2) + b"\n"


def _encoded(value: object, order: Literal["sorted"] | None = None) -> bytes:
    try:
        return msgspec.json.encode(value, order=order)
    except UnicodeEncodeError:
        raise UserError("A text holds half a character, which no file can hold; leave it out.") from None


def plain(value: object) -> Any:
    """`value` as dicts, lists, numbers and text only."""
    return msgspec.to_builtins(value)


def digest(value: object) -> str:
    """A hash of the content of `value`, whatever the order of its keys."""
    return hashlib.sha256(_encoded(value, order="sorted")).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys at which two nested mappings differ."""
    found = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}")
    return found


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _toml_value(text: str, source: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: {_briefly(error)}.") from None
    _check_bounds(table, source)
    return table["value"] if len(table) == 1 else text


def _check_bounds(tables: Mapping[str, Any], source: str) -> None:
    """TOML's integers have 64 bits, and Python's reader takes longer ones; nobody needs tables without end."""
    level: list[Any] = [tables]
    for _ in range(DEEPEST):
        values = [value for each in level for value in (each.values() if isinstance(each, dict) else each)]
        if any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in values):
            raise UserError(f"{source}: a whole number is beyond 64 bits.")
        level = [value for value in values if isinstance(value, (dict, list))]
        if not level:
            return
    raise UserError(f"{source}: {_briefly(RecursionError())}.")


def _briefly(error: Exception) -> str:
    """What a reader of TOML or JSON found wrong."""
    if isinstance(error, RecursionError):
        return f"more than {DEEPEST} tables or lists are nested in one another"
    if "integer string conversion" in str(error):
        return "a number has thousands of digits"
    return str(error).rstrip(".")
