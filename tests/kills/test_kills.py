"""Killed, out of room or in company, a writer loses nothing: a short run of `python -m tests.kills`, and a long one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import verbs

from .scenes import SCENES

QUICK = ("record task", "ExitPolicy.save over others")
WRITES = {"out", "figure", "store"}
"""Options that say where something is written."""
READS = {"study plan", "study status"}
"""Verbs that have such an option to find what another one wrote."""


def tried(*words: str) -> list[dict[str, Any]]:
    """What was counted, in a process that has not run anything that threads of its own do."""
    command = [sys.executable, "-m", "tests.kills", "--json", *words]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert ended.returncode in (0, 1), ended.stderr
    return json.loads(ended.stdout)


def check(counts: list[dict[str, Any]], *kinds: str) -> None:
    some = [count for count in counts if count["what"] in kinds]
    assert some
    assert all(count["tries"] for count in some)
    assert [(count["scene"], fault) for count in some for fault in count["faults"]] == []


@pytest.fixture(scope="module")
def quick() -> list[dict[str, Any]]:
    return tried(
        "--kills", "8", "--pairs", "2", "--disks", "few", *(word for name in QUICK for word in ("--only", name))
    )


@pytest.mark.parametrize("kinds", [("kill",), ("two writers", "neighbours"), ("full disk",)], ids=", ".join)
def test_nothing_is_lost(kinds: tuple[str, ...], quick: list[dict[str, Any]]) -> None:
    """Killed, it ends with the same bytes; in company one artifact is whole; a full disk is one sentence."""
    some = [count for count in quick if count["what"] in kinds]
    if not some and kinds == ("full disk",):
        pytest.skip("this system lets users mount nothing, so there is no small disk")
    check(quick, *kinds)
    if kinds == ("kill",):
        assert sum(count["tries"] for count in some) == 8
    if kinds == ("full disk",):
        assert all(count["outcomes"].get("refused") for count in some)


@pytest.mark.long
def test_two_hundred_kills_of_all_that_writes() -> None:
    counts = tried("--kills", "200", "--pairs", "6", "--seed", "1")
    check(counts, "kill", "two writers", "neighbours", "full disk")
    assert sum(count["tries"] for count in counts if count["what"] == "kill") == 200
    signals = {name for count in counts if count["what"] == "kill" for name in count["outcomes"]}
    assert {"SIGKILL", "SIGTERM", "SIGINT"} <= signals


def test_every_verb_that_writes_is_a_scene() -> None:
    names = {scene.name for scene in SCENES}
    missing = [
        verb
        for verb, parser in verbs().items()
        if verb not in READS
        and any(action.dest in WRITES for action in parser._actions)
        and not any(name.startswith(verb) for name in names)
    ]
    assert missing == []
