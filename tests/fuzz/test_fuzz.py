"""The fuzzer, run for a short while; and against a LoopScope that lacks a check, which it must find."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loopscope.artifacts
import loopscope.trajectory
from loopscope.exits.policy import PolicyFile

from .arguments import GOOD, verbs
from .kinds import KINDS
from .runner import Case, Fuzzer, Kind, Report, schedule, working_folder
from .world import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """With what the tests below need that spoil LoopScope itself: it was made before."""
    with working_folder() as folder:
        made = World(folder)
        for name in ("recording", "gate", "policy", "python"):
            for need in KINDS[name].needs:
                getattr(made, need)
        yield made


def fuzz(world: World, inputs: int, *names: str, seed: int = 0) -> Report:
    return Fuzzer(world, {name: KINDS[name] for name in names}, seed).run(inputs)


def test_every_verb_has_good_words() -> None:
    assert GOOD.keys() == verbs().keys()


def test_every_kind_has_its_share_however_many_inputs_there_are() -> None:
    first, all_of_them = list(schedule(KINDS, 200)), list(schedule(KINDS, 2_000))
    assert first == all_of_them[:200]
    assert {kind for kind, _ in first} == set(KINDS)
    whole = sum(kind.share for kind in KINDS.values())
    for name, kind in KINDS.items():
        numbers = [index for other, index in all_of_them if other == name]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) == pytest.approx(2_000 * kind.share / whole, abs=1)


def test_inputs_are_right_or_refused_in_a_sentence(world: World) -> None:
    report = fuzz(world, 250, *(name for name, kind in KINDS.items() if kind.quick))
    assert not report.failures, str(report)
    assert sum(counts["refused"] for counts in report.outcomes.values()) > 100


@pytest.mark.long
def test_ten_thousand_inputs_are_right_or_refused_in_a_sentence(world: World) -> None:
    report = fuzz(world, 10_000, *KINDS, seed=1)
    assert not report.failures, str(report)


def found_within(world: World, inputs: int, kind: str, what: str) -> bool:
    """Whether so many inputs of a kind are enough to find a failure."""
    fuzzer = Fuzzer(world, {kind: KINDS[kind]})
    return any(
        fuzzer.attempt(kind, index) == "FAILED" and what in fuzzer.report.failures[-1].what for index in range(inputs)
    )


def test_it_finds_that_hashes_are_not_checked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopscope.artifacts, "_check", lambda *_: None)
    assert found_within(world, 100, "recording", "a recording was altered, and is accepted")


def test_it_finds_that_a_manifest_is_not_sealed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopscope.artifacts.Manifest, "seal", lambda manifest: manifest.digest)
    assert found_within(world, 100, "gate", "a gate was altered, and is accepted")


def test_it_finds_that_a_promise_is_not_sealed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PolicyFile, "seal", lambda policy: policy.digest)
    assert found_within(world, 100, "policy", "a promised policy was altered, and is accepted")


def test_it_finds_an_exception_that_is_no_sentence(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(logits: Any, labels: Any) -> None:
        assert len(logits) == 40

    monkeypatch.setattr(loopscope.trajectory, "_check_logits", check)
    assert found_within(world, 300, "python", "AssertionError")


def attempted(tmp_path: Path, attempt: Any) -> str:
    """What is said of an input that behaves like this."""
    (tmp_path / "world").mkdir()
    (tmp_path / "world" / "good").write_text("good")
    fuzzer = Fuzzer(World(tmp_path / "world"), {"odd": Kind(attempt, 1)}, keep=tmp_path / "kept")
    assert fuzzer.attempt("odd", 3) == "FAILED"
    assert (tmp_path / "kept" / "odd-3" / "failure.txt").is_file()
    assert "--only odd --index 3" in str(fuzzer.report)
    return fuzzer.report.failures[0].what


def test_a_hang_is_ended_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(_: World, case: Case) -> None:
        while True:
            pass

    monkeypatch.setattr("fuzz.runner.SECONDS", 0.05)
    assert "TooLongError" in attempted(tmp_path, hang)


def test_what_is_left_behind_or_changed_is_told(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()

    def leave(_: World, case: Case) -> None:
        (case.folder / "out" / ".partial-x").write_text("")

    def change(world: World, case: Case) -> None:
        (world.folder / "good").write_text("other")

    assert ".partial-x was left behind" in attempted(tmp_path / "first", leave)
    assert "good was changed or lost" in attempted(tmp_path / "second", change)


def test_an_escape_sequence_and_a_long_message_are_told(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()

    def raises(message: str) -> Any:
        def attempt(_: World, case: Case) -> None:
            raise loopscope.artifacts.UserError(message)

        return attempt

    assert "a raw character is printed" in attempted(tmp_path / "first", raises("\x1b[2J"))
    assert "a message is too long" in attempted(tmp_path / "second", raises("x" * 501))
