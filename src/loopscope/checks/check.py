"""What is the outcome of a check? One line: what was measured, what the limit is, and whether it passed."""

from typing import Literal, get_args

import msgspec

CheckKind = Literal["contract", "precision", "batch", "cache", "replay", "speed"]
CHECK_KINDS: tuple[CheckKind, ...] = get_args(CheckKind)


class Check(msgspec.Struct, frozen=True):
    kind: CheckKind
    what: str
    measured: float | None
    unit: str
    limit: float | None  # None: shown, not judged
    passed: bool | None
    note: str = ""
