"""The fuzzer, run for a short while; and against a LoopScope that lacks a check, which it must find."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

import loopscope.artifacts
import loopscope.trajectory_checks
from loopscope.errors import UserError
from loopscope.exits import readouts
from loopscope.exits.policy import PolicyFile
from loopscope.writing import BESIDE

from .arguments import GOOD, LAST, SLOW, verbs
from .kinds import KINDS
from .runner import Case, Fuzzer, Kind, MisledError, Report, schedule, working_folder
from .settings import check_holds
from .world import World


@pytest.fixture(scope="module", autouse=True)
def own_readouts() -> Iterator[None]:
    """What is registered here is not known to other tests."""
    tables: tuple[dict[str, Any], ...] = (readouts.READOUTS, readouts._KNOWN)
    before = [dict(table) for table in tables]
    yield
    for table, known in zip(tables, before, strict=True):
        table.clear()
        table.update(known)


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
    assert {name.partition(" --")[0] for name in GOOD} == verbs().keys()


def good_words(world: World, names: list[str]) -> Report:
    """What becomes of words that are not spoilt."""

    def attempt(name: str) -> Any:
        def run(world: World, case: Case) -> str:
            case.command(*GOOD[name](world, case), *LAST.get(name, lambda w, c: [])(world, case))
            return "same"

        return run

    kinds = {name: Kind(attempt(name), 1) for name in names}
    return Fuzzer(world, kinds).run(len(kinds))


def test_good_words_are_right(world: World) -> None:
    report = good_words(world, [name for name in GOOD if name not in SLOW])
    assert all(counts == {"same": 1} for counts in report.outcomes.values()), str(report)


@pytest.mark.long
def test_slow_good_words_are_right(world: World) -> None:
    for need in KINDS["slow-arguments"].needs:
        getattr(world, need)
    report = good_words(world, list(SLOW))
    assert all(counts == {"same": 1} for counts in report.outcomes.values()), str(report)


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
    report = fuzz(world, 150, *(name for name, kind in KINDS.items() if kind.quick))
    assert not report.failures, str(report)
    assert sum(counts["refused"] for counts in report.outcomes.values()) > 75


@pytest.mark.long
def test_ten_thousand_inputs_are_right_or_refused_in_a_sentence(world: World) -> None:
    report = fuzz(world, 10_000, *KINDS, seed=1)
    assert not report.failures, str(report)
    never = [name for name in GOOD if not report.verbs[name]["other"]]
    assert not never, str(report)


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

    monkeypatch.setattr(loopscope.trajectory_checks, "_check_logits", check)
    assert found_within(world, 300, "python", "AssertionError")


def test_a_whole_number_may_become_the_nearest_float() -> None:
    check_holds({"rate": float(2**63)}, {"rate": 2**63 - 1})
    for built, value in ((float(2**62), 2**63 - 1), (2**63, 2**63 - 1), (0.5, 0.25)):
        with pytest.raises(MisledError, match="rate is not what the file says"):
            check_holds({"rate": built}, {"rate": value})


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


@pytest.mark.parametrize("prefix", BESIDE)
def test_what_is_left_behind_or_changed_is_told(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()

    def leave(_: World, case: Case) -> None:
        (case.folder / "out" / f"{prefix}x").write_text("")

    def change(world: World, case: Case) -> None:
        (world.folder / "good").write_text("other")

    assert f"{prefix}x was left behind" in attempted(tmp_path / "first", leave)
    assert "good was changed or lost" in attempted(tmp_path / "second", change)


def test_an_escape_sequence_and_a_long_message_are_told(tmp_path: Path) -> None:
    def raises(message: str) -> Any:
        def attempt(_: World, case: Case) -> None:
            error = UserError("")  # which would have cleaned it
            error.args = (message,)
            raise error

        return attempt

    for name, message in (("first", "\x1b[2J"), ("second", "x" * 501)):
        (tmp_path / name).mkdir()
        what = attempted(tmp_path / name, raises(message))
        assert ("a raw character is printed" if name == "first" else "a message is too long") in what


def test_an_error_of_the_system_is_no_sentence_from_python(tmp_path: Path) -> None:
    def attempt(_: World, case: Case) -> None:
        (case.folder / "none").read_text()

    assert "FileNotFoundError" in attempted(tmp_path, attempt)


@pytest.mark.parametrize(
    ("printed", "what"),
    [
        ("print('\x1b[2J')", "a raw character is printed"),
        ("print('{\"a\": NaN}')", "--json prints what is no JSON"),
        ("print('a table')", "--json prints what is no JSON"),
        ("print('loopscope: one.\\nloopscope: two.', file=sys.stderr) or sys.exit(2)", "not one sentence"),
        (f"print('loopscope: error: {'x' * 501}', file=sys.stderr) or sys.exit(2)", "a message is too long"),
    ],
)
def test_what_a_command_prints_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, what: str
) -> None:
    def main(words: list[str]) -> int:
        exec(printed, {"sys": sys})
        return 0

    def attempt(_: World, case: Case) -> None:
        case.command("study", "plan", "--json")

    monkeypatch.setattr("fuzz.runner.main", main)
    assert what in attempted(tmp_path, attempt)


@pytest.mark.parametrize("title", ["a [/x] study", "[link=http://there]x"])
def test_it_finds_that_a_title_is_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, title: str) -> None:
    """As it was before `TextColumn(markup=False)`."""

    def main(words: list[str]) -> int:
        with Progress(TextColumn("{task.description}"), console=Console(file=sys.stderr)) as bar:
            bar.add_task(words[0], total=1)
        return 0

    def attempt(_: World, case: Case) -> None:
        case.command(title)

    monkeypatch.setattr("fuzz.runner.main", main)
    monkeypatch.setattr("fuzz.runner.ON_TERMINAL", 1.0)
    assert ("MarkupError" if "/x" in title else "a raw character is printed") in attempted(tmp_path, attempt)
