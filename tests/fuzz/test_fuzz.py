"""The fuzzer, run for a short while; and against a LoopScope that lacks a check, which it must find."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from conftest import forgetting_readouts, verbs
from rich.console import Console
from rich.progress import Progress, TextColumn

import loopscope as ls
from loopscope.errors import UserError
from loopscope.files import BESIDE

from .arguments import GOOD, SLOW, good_words, last_words
from .kinds import KINDS
from .runner import Case, Fuzzer, Kind, working_folder
from .world import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """With what the tests below need that spoil LoopScope itself: it was made before."""
    with working_folder() as folder, forgetting_readouts():
        made = World(folder)
        for name in ("recording", "gate", "policy", "arguments"):
            made.make(KINDS[name].needs)
        yield made


def fuzzed(world: World, inputs: int, *names: str, seed: int = 0) -> Fuzzer:
    fuzzer = Fuzzer(world, {name: KINDS[name] for name in names}, seed)
    fuzzer.run(inputs)
    assert not fuzzer.failures, str(fuzzer)
    return fuzzer


def test_every_verb_has_good_words() -> None:
    assert {name.partition(" --")[0] for name in GOOD} == verbs().keys()


@pytest.mark.parametrize("kind", ["arguments", pytest.param("slow-arguments", marks=pytest.mark.long)])
def test_good_words_are_right(kind: str, world: World) -> None:
    """Those that are not spoilt."""

    def attempt(name: str) -> Any:
        def run(world: World, case: Case) -> str:
            case.command(*good_words(name, world, case), *last_words(name, world, case))
            return "same"

        return run

    world.make(KINDS[kind].needs)
    kinds = {name: Kind(attempt(name), 1) for name in GOOD if (name in SLOW) == (kind == "slow-arguments")}
    fuzzer = Fuzzer(world, kinds)
    assert {fuzzer.attempt(name, 0) for name in kinds} == {"same"}, str(fuzzer)


def test_inputs_are_right_or_refused_in_a_sentence(world: World) -> None:
    fuzzer = fuzzed(world, 150, *(name for name, kind in KINDS.items() if kind.quick))
    assert sum(counts["refused"] for counts in fuzzer.outcomes.values()) > 75


@pytest.mark.long
def test_ten_thousand_inputs_are_right_or_refused_in_a_sentence(world: World) -> None:
    fuzzer = fuzzed(world, 10_000, *KINDS, seed=1)
    assert all(fuzzer.verbs[name]["other"] for name in GOOD), str(fuzzer)


def found_within(world: World, inputs: int, kind: str, what: str) -> bool:
    """Whether so many inputs of a kind are enough to find a failure."""
    fuzzer = Fuzzer(world, {kind: KINDS[kind]})
    return any(fuzzer.attempt(kind, index) == "FAILED" and what in fuzzer.failures[-1].what for index in range(inputs))


@pytest.mark.parametrize(
    ("check", "found", "kind", "what"),
    [
        ("artifacts._manifest_problems", [], "recording", "a recording was altered, and is accepted"),
        ("artifacts.is_intact", True, "gate", "a gate was altered, and is accepted"),
        ("policy.is_intact", True, "policy", "a guaranteed policy was altered, and is accepted"),
    ],
)
def test_it_finds_that_a_check_is_missing(
    check: str, found: object, kind: str, what: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"loopscope.{check}", lambda *_: found)
    assert found_within(world, 100, kind, what)


def test_it_finds_that_what_is_wrong_is_accepted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ls.Trajectory, "unseen", lambda trajectory: trajectory)
    assert found_within(world, 30, "arrays", "seen examples are counted as unseen")


def _raise(message: str) -> None:
    error = UserError("")  # which would have cleaned it
    error.args = (message,)
    raise error


def _hang() -> None:
    while True:
        pass


def _bar(title: str) -> None:
    """As it was before `TextColumn(markup=False)`."""
    with Progress(TextColumn("{task.description}"), console=Console(file=sys.stderr)) as bar:
        bar.add_task(title, total=1)


def _refuse(said: str) -> None:
    print(said, file=sys.stderr)
    sys.exit(2)


def printing(print_it: Callable[[], None], *options: str) -> Callable[[World, Case], str]:
    """A command that does this."""

    def act(_: World, case: Case) -> str:
        with patch("fuzz.runner.main", lambda words: print_it() or 0):
            return case.command("study", "plan", *options)

    return act


JUDGED: list[tuple[str, Callable[[World, Case], object]]] = [
    ("TooLongError", lambda world, case: _hang()),
    ("good was changed or lost", lambda world, case: (world.folder / "good").write_text("other")),
    ("a raw character is printed", lambda world, case: _raise("\x1b[2J")),
    ("a message is too long", lambda world, case: _raise("x" * 501)),
    ("FileNotFoundError", lambda world, case: (case.folder / "none").read_text()),
    *(
        ("was left behind", lambda world, case, left=f"{prefix}x": (case.folder / "out" / left).touch())
        for prefix in BESIDE
    ),
    ("a raw character is printed", printing(lambda: print("\x1b[2J"))),
    ("--json prints what is no JSON", printing(lambda: print('{"a": NaN}'), "--json")),
    ("--json prints what is no JSON", printing(lambda: print("a table"), "--json")),
    ("not one sentence", printing(lambda: _refuse("loopscope: one.\nloopscope: two."))),
    ("a message is too long", printing(lambda: _refuse(f"loopscope: error: {'x' * 501}"))),
    ("MarkupError", printing(lambda: _bar("a [/x] study"))),
    ("a raw character is printed", printing(lambda: _bar("[link=http://there]x"))),
]


@pytest.mark.parametrize(("what", "act"), JUDGED)
def test_what_an_input_does_is_judged(what: str, act: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.runner.SECONDS", 0.05)
    monkeypatch.setattr("fuzz.runner.ON_TERMINAL", 1.0)
    (tmp_path / "world").mkdir()
    (tmp_path / "world" / "good").write_text("good")
    kinds = {"odd": Kind(lambda world, case: act(world, case) and None, 1)}
    fuzzer = Fuzzer(World(tmp_path / "world"), kinds, keep=tmp_path / "kept")
    assert fuzzer.attempt("odd", 3) == "FAILED"
    assert "--only odd --index 3" in str(fuzzer)
    assert (tmp_path / "kept" / "odd-3" / "in").is_dir()
    assert what in fuzzer.failures[0].what
