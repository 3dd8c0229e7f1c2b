"""How is an input spoilt? In its bytes, its structure, its tensors, or as a file; every change is drawn from a seed."""

import json
import random
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Rng = random.Random

_MARK = "@raw@"
"""Stands in a JSON value for text that no JSON writer would write."""

STRINGS = (
    *("", " ", "x", "none", "NaN", "1", "../../../etc/hostname", "/etc/hostname", "a/b", "\x1b[31mred\x1b[0m\x07"),
    *("\x9b31mred", "\x00", "two\nlines\r", "\u202ereversed", "\ud800", "é\U0001f600", "%s{0}{x!r}", "[red]", "[/x]"),
    *("[link=http://there]x", "A" * 5_000),
)
NUMBERS = (
    *("0", "-0", "1", "-1", "2", "3", "7", "64", "0.5", "-0.5", "1.5", "1e-300", "5e-324", "1e308", "1e400", "-1e400"),
    *("NaN", "Infinity", "-Infinity", str(10**6), str(10**9), str(2**31), str(2**40), str(2**63 - 1), str(2**63)),
    *(str(2**64), str(-(2**63) - 1), str(10**30), "9" * 5_000, "-" + "9" * 5_000, "1e" + "9" * 30, "0x10", "1_0"),
)


def json_text(rng: Rng) -> str:
    """A JSON value, or what looks like one."""
    return rng.choice(
        (
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice(NUMBERS),
            lambda: json.dumps(rng.choice(STRINGS)),
            lambda: rng.choice(("null", "true", "false", "[]", "{}", "[1]", "[null]", '{"": null}', "[[1, 2], [3]]")),
            lambda: (depth := rng.choice((60, 1_100, 100_000))) and "[" * depth + "]" * depth,
            lambda: (depth := rng.choice((60, 1_100, 20_000))) and '{"a":' * depth + "1" + "}" * depth,
        )
    )()


def toml_text(rng: Rng) -> str:
    """A TOML value, or what looks like one."""
    text = json_text(rng)
    return {"null": "nan", "NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(text, text)


def spoil_bytes(rng: Rng, data: bytes) -> bytes:
    """Flips, cuts, inserts or repeats some bytes."""
    at, other = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
    size = rng.choice((1, 1, 2, 8, 64, 1_000))
    before, some, after = data[:at], data[at : at + size], data[at + size :]
    flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in some[:1]) + some[1:]
    byte_order, half, overlong, separator = b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xc0\xaf", b"\xe2\x80\xa8"
    odd = rng.choice((b"\x00", b"\xff\xfe", byte_order, b"\r\n", b"\x1b[2J", half, overlong, separator))
    return rng.choice(
        (
            before + flipped + after,
            before + after,
            before + rng.randbytes(rng.choice((1, 4, 50))) + some + after,
            before + some * rng.choice((2, 3, 50)) + after,
            before,
            before + odd + some + after,
            before + data[other : other + size] + after,
        )
    )


def spoil_json(rng: Rng, data: bytes) -> bytes:
    """Changes a value, a key or the shape of a JSON text."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return spoil_bytes(rng, data)
    raws: list[str] = []

    def raw(text: str) -> str:
        raws.append(text)
        return f"{_MARK}{len(raws) - 1}{_MARK}"

    places = list(_places(value))
    if not places or rng.random() < 0.03:
        return json_text(rng).encode("utf-8", "surrogatepass")
    if rng.random() < 0.05:  # says the same in other bytes
        return json.dumps(value, indent=rng.choice((None, 0, 7)), sort_keys=rng.random() < 0.5).encode() + b" \n"
    holder, key = rng.choice(places)
    change = rng.randrange(8)
    if change == 0:
        del holder[key]
    elif change == 1:
        other, elsewhere = rng.choice(places)
        holder[key], other[elsewhere] = other[elsewhere], holder[key]
    elif change == 2 and isinstance(holder, dict):
        holder[rng.choice((key.upper(), key + " ", *STRINGS))] = holder.pop(key)
    elif change == 3 and isinstance(holder, dict):
        holder[raw(f"{json.dumps(key)}: {json_text(rng)}, {json.dumps(key)}")] = holder.pop(key)
    elif change == 4:
        holder[key] = rng.choice(([holder[key]], {"value": holder[key]}, str(holder[key]), None))
    elif change == 5 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = rng.choice((holder[key] + 1, -holder[key], holder[key] * 2, holder[key] / 3, holder[key] + 1e-9))
    elif change == 6 and isinstance(holder, dict):
        holder[rng.choice(STRINGS)] = raw(json_text(rng))
    else:
        holder[key] = raw(json_text(rng))
    text = json.dumps(value)
    for number, each in enumerate(raws):
        text = text.replace(f'"{_MARK}{number}{_MARK}"', each)
    return text.encode("utf-8", "surrogatepass")


def _places(value: Any) -> Any:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def spoil_lines(rng: Rng, data: bytes) -> bytes:
    """Changes one of some JSON lines, or their order."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    change = rng.randrange(5)
    if change == 0:
        del lines[at]
    elif change == 1:
        lines.insert(at, lines[rng.randrange(len(lines))])
    elif change == 2:
        rng.shuffle(lines)
    else:
        lines[at] = spoil_json(rng, lines[at])
    return b"\n".join(lines)


def spoil_toml(rng: Rng, data: bytes) -> bytes:
    """Changes a value, a key or a table of a TOML text."""
    lines = data.decode().split("\n")
    at = rng.choice([number for number, line in enumerate(lines) if line.strip()])
    key, equals, _ = lines[at].partition("=")
    change = rng.randrange(8)
    if change == 0:
        del lines[at]
    elif change == 1:
        lines.insert(at, lines[at])
    elif change == 2:
        lines.insert(at, lines.pop(rng.randrange(len(lines))))
    elif change == 3:
        lines.insert(at, f"{rng.choice(('x', 'seed', json.dumps(rng.choice(STRINGS))))} = {toml_text(rng)}")
    elif change == 4:
        lines[at] = rng.choice(("[", "[[", "")) + "a." * rng.choice((1, 2_000)) + "b" + rng.choice(("]", "]]", " = 1"))
    elif equals:
        lines[at] = f"{key}= {toml_text(rng)}"
    else:
        lines[at] = lines[at].upper()
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def tensor_file(header: bytes, payload: bytes) -> bytes:
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + payload


_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1, "U8": 1}
_STRANGE = {
    "F64": (0x7FF8 << 48, 0x7FF0 << 48, 0xFFF0 << 48, 0x7FE0 << 48),
    "F32": (0x7FC0_0000, 0x7F80_0000, 0xFF80_0000, 0x7F00_0000),
    "F16": (0x7E00, 0x7C00, 0xFC00, 0x7800),
    "BF16": (0x7FC0, 0x7F80, 0xFF80, 0x7F00),
}
"""NaN, inf, -inf and a huge number."""


def spoil_tensors(rng: Rng, data: bytes) -> bytes:
    """Changes the header of a safetensors file, or numbers of its tensors."""
    length = 8 + int.from_bytes(data[:8], "little")
    header, payload = json.loads(data[8:length]), data[length:]
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    shape, (start, end) = list(entry["shape"]), entry["data_offsets"]
    change = rng.randrange(10)
    if change < 3:
        return tensor_file(spoil_json(rng, json.dumps(header).encode()), payload)
    if change == 3:
        entry["shape"] = rng.choice(([*shape, 1], shape[:-1], shape[::-1], [-1], [2**62, 4], [0], ["a"], None, 3))
    elif change == 4:
        entry["dtype"] = rng.choice((*_SIZES, "F8_E4M3", "C64", "", "object", 3, None))
    elif change == 5:
        pairs = ([start, end + 8], [start + 1, end], [end, start], [-8, end], [0, 2**63], [start])
        entry["data_offsets"] = rng.choice((*pairs, rng.choice([*header.values()]).get("data_offsets")))
    elif change == 6:
        some = ({"step": "-1"}, {"step": "9" * 5_000}, {"step": "x"}, {}, 3, {"a": 1}, None)
        header["__metadata__"] = rng.choice(some)
    elif change == 7:
        payload = rng.choice((payload[:-1], payload[: len(payload) // 2], b"", payload + b"\0" * 8))
    elif change == 8:
        return struct.pack("<Q", rng.choice((0, 1, len(data), 2**40, 2**63, 2**64 - 1))) + data[8:]
    elif start < end:  # one number becomes another
        size = _SIZES[entry["dtype"]]
        at = start + size * rng.randrange((end - start) // size)
        flipped = int.from_bytes(payload[at : at + size], "little") ^ 1 << rng.randrange(8 * size)
        odd = rng.choice((flipped, *_STRANGE.get(entry["dtype"], ())))
        payload = payload[:at] + odd.to_bytes(size, "little") + payload[at + size :]
    return tensor_file(json.dumps(header).encode(), payload)


SPOILERS: dict[str, Callable[[Rng, bytes], bytes]] = {
    ".json": spoil_json,
    ".jsonl": spoil_lines,
    ".toml": spoil_toml,
    ".safetensors": spoil_tensors,
}


def spoil_file(rng: Rng, path: Path) -> str:
    """Puts something else in the place of a file."""
    path.unlink()
    what = rng.choice(("missing", "empty", "folder", "loop", "nowhere", "null", "closed", "neighbour"))
    if what == "empty":
        path.write_bytes(b"")
    elif what == "folder":
        path.mkdir()
    elif what in ("loop", "nowhere", "null"):
        path.symlink_to({"loop": path.name, "nowhere": "no-such-file", "null": "/dev/null"}[what])
    elif what == "closed":
        path.write_bytes(b"secret")
        path.chmod(0)
    elif what == "neighbour" and (others := sorted(each for each in path.parent.iterdir() if each.is_file())):
        shutil.copyfile(rng.choice(others), path)
    return what


def spoil(rng: Rng, path: Path, others: Sequence[Path] = ()) -> str:
    """Spoils a file in one way or, seldom, two; returns how. `others` are files of the same kind from elsewhere."""
    draw = rng.random()
    if draw < 0.08:
        return f"{path.name}: {spoil_file(rng, path)}"
    if draw < 0.12 and others:
        other = rng.choice(others)
        shutil.copyfile(other, path)
        return f"{path.name}: that of {other.parent.name}"
    data = path.read_bytes()
    spoiler = SPOILERS.get(path.suffix, spoil_bytes)
    for _ in range(1 if rng.random() < 0.9 else 2):
        try:
            data = (spoiler if rng.random() < 0.8 else spoil_bytes)(rng, data)
        except (ValueError, LookupError, TypeError, struct.error, RecursionError):  # the first left no structure
            data = spoil_bytes(rng, data)
    path.write_bytes(data)
    return f"{path.name}: {spoiler.__name__}"
