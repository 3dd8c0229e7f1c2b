"""The command line as a whole: help, usage and errors, one sentence with exit code 2 for whatever is wrong."""

import argparse
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from conftest import random_trajectory

import loopscope as ls
from cli.conftest import Command, run, settings
from loopscope.checks.model_contract import CHECK_KINDS
from loopscope.cli import VERBS, inputs, main, make_parser, options, selfcheck
from loopscope.cli.output import percent, print_json, print_note, print_sentences, print_table, print_text
from loopscope.engine import generation
from loopscope.engine.decoder import CACHE_MODES
from loopscope.errors import UserError, install_command
from loopscope.models.checkpoint import DTYPES, INT8
from loopscope.progress import track
from loopscope.scope import CacheMode

ESCAPES = "\x1b[31m\x1b]0;owned\x07"
HEAVY = ("torch", "scipy.stats", "altair", "transformers")
LIGHT = ("numpy", "rich", "msgspec")
"""What the help of all verbs does without."""


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    groups = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: each for group in groups for name, each in group.items()}


def every_parser(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for verb, each in subparsers(parser).items():
        yield from every_parser(f"{name} {verb}", each)


PARSERS = dict(every_parser("loopscope", make_parser()))


def test_bad_input_is_one_sentence_and_exit_code_2(recorded: Path, tmp_path: Path, command: Command) -> None:
    validation, test = (recorded / "recordings" / split for split in ("validation", "test"))
    corrupt = tmp_path / "corrupt"
    corrupt.mkdir()
    for file in test.iterdir():
        (corrupt / file.name).write_bytes(file.read_bytes()[: -3 if file.suffix == ".safetensors" else None])
    out = ("--out", tmp_path / "run")
    for words, sentence in [
        (("train", "paper", *out, "--set", "training.steps=100000000"), "--force"),
        (("train", "demo", "--out", recorded, *settings("training.seed=9")), "training.seed"),
        (("train", "demo", *out, "--set", "training.seed=" + "1" * 5000), "training.seed: expected a whole number"),
        (("train", "demo", *out, "--set", "objective.name=" + "x" * 9000), "there is no objective 'xxx"),
        (("record", "task", recorded.parent, "--split", "test"), "is not a run: it has no config.json"),
        (("record", "task", recorded, "--split", "extrapolation", "--levels", "1-4"), "above 2"),
        (("sweep", validation, tmp_path), "has no recording 'test'"),
        (("sweep", validation, corrupt), "trajectory.safetensors"),
        (("sweep", validation, validation), "same data"),
        (("sweep", validation, test, "--readout", ESCAPES), "no readout '\\u001b[31m\\u001b]0;owned\\u0007'"),
        (("diagnose", tmp_path / ("x" * 300)), "There is no folder"),
        (("check", test, "--policy", "a\0b"), "NUL"),
        (("check", test, "--policy", "\udcff"), "is not UTF-8"),
        (("check", test, "--policy", tmp_path), "is a folder; give a policy"),
        (("check", test, "--policy", "/dev/zero"), "a device or a pipe"),
        (("check", test, "--policy", test / "manifest.json"), "manifest.json is not a policy"),
        (("answer", recorded, "/dev/zero"), "a device or a pipe"),
        (["train"], "Missing: settings, --out; see loopscope train --help."),
        (["fly"], "There is no 'loopscope fly'; choose one of train, "),
        (["record"], "After loopscope record comes one of task, text, live, benchmark;"),
        (["generate", "x", "--threshold", "z", "--", "--y"], "--threshold: 'z' is not a number;"),
        (["generate", "x", "y", "--loops", "2", "--policy", "z"], "--policy: it excludes --loops; leave one of them"),
        (["fit", "x", "--out", "y", "--kind", "lineer"], "no 'lineer' (did you mean 'linear'?); choose one of"),
        (["record", "task", "x", "--split", "test", "--levels", "4-2"], "'4-2' is neither a number such as 12 nor a"),
        (["train", "demo", "--threads", "1" * 5000], "is not a whole number from 1 to 4,096"),
        (["answer", "x", "-", "--batch-size", "²"], "'²' is not a whole number"),
        (["train", "demo", "--out", "x", ESCAPES], "'\\u001b[31m"),
    ]:
        said = command.refused(*words)
        assert sentence in said, words
        assert len(said) < 600
        assert "\x1b" not in said
    assert not (tmp_path / "run").exists()


def test_names_from_files_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(ESCAPES, [ESCAPES], [[ESCAPES], ["[red]"]])
    print_json({ESCAPES: ESCAPES + "\x9b"})
    print_text(ESCAPES)
    print_note(ESCAPES)
    with track(ESCAPES) as advance:
        advance(1, 1, "")
    out, err = capsys.readouterr()
    assert "[red]" in out
    assert out.count("\\u001b]0;owned\\u0007") == 6
    assert err.count("\\u001b]0;owned\\u0007") == 2
    assert not set(out + err) & set("\x1b\x07\x9b")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert re.fullmatch(r"loopscope \d+\.\d+\.\d+\n", out)
    assert out.split()[1] == version("loopscope")


def test_every_help_has_examples_fits_80_columns_and_says_what_options_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option by itself: not "of the guarantee", nor its default alone; those of `generate` are its own."""
    monkeypatch.setenv("COLUMNS", "80")
    for name, parser in PARSERS.items():
        text = parser.format_help()
        assert re.search(r"^  (loopscope|echo .*) \w+ ", text, re.MULTILINE), name
        assert [line for line in text.splitlines() if len(line) > 80] == [], name
        assert parser.description, name
        assert parser.description[0].isupper(), name
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) or name == "loopscope generate":
                continue
            told = action.help or ""
            assert not re.match(r"(of|in|and|for|at most|default|only)\b|\(", told), (name, action.dest, told)
            assert len(re.sub(r"\(.*?\)", "", told).split()) > 1, (name, action.dest, told)


def test_names_that_are_known_without_torch_are_those_of_the_library() -> None:
    assert (*DTYPES, INT8) == options.PRECISIONS
    assert get_args(CacheMode) == CACHE_MODES
    assert selfcheck.KINDS == CHECK_KINDS


def test_whoever_takes_a_policy_or_a_readout_takes_custom_ones() -> None:
    """The Command of a policy by an unknown readout names this option."""
    for name, parser in PARSERS.items():
        known = {option for action in parser._actions for option in action.option_strings}
        if "--policy" in known:
            assert "--with-readout" in known, name


def test_the_verbs_stand_in_the_order_of_the_stages() -> None:
    found = subparsers(make_parser())
    assert list(found) == list(VERBS)
    said = {name: " ".join(str(parser.description).split()).rstrip(".") for name, parser in found.items()}
    assert said == VERBS


@pytest.mark.parametrize(
    ("words", "heavy"),
    [(["--help"], HEAVY + LIGHT), (["record", "runs/mine"], HEAVY), (["generate", "m", "x", "--cache", "all"], HEAVY)],
)
def test_an_answer_is_quick_where_nothing_heavy_is_needed(words: list[str], heavy: tuple[str, ...]) -> None:
    check = (
        "import sys, loopscope.cli as c\n"
        f"try: c.main({words!r})\n"
        "except SystemExit: pass\n"
        f"sys.exit(any(name in sys.modules for name in {heavy!r}))"
    )
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    assert subprocess.run([sys.executable, "-c", check], **quiet).returncode == 0


def test_a_missing_extra_is_one_sentence(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(package: str) -> Callable[..., None]:
        def missing(*_: Any) -> None:
            raise ModuleNotFoundError(f"No module named '{package}'", name=package)

        return missing

    monkeypatch.setattr("loopscope.cli.train.read_settings", without("torch.nn"))
    said = command.refused("train", "demo", "--out", "nowhere")
    assert said == f"loopscope: This needs torch; install it with: {install_command('torch')}."
    monkeypatch.setattr("loopscope.cli.train.read_settings", without("loopscope.nowhere"))
    with pytest.raises(ModuleNotFoundError):  # a bug of ours
        run("train", "demo", "--out", "nowhere")


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Parses a command whose files need not be there."""
    monkeypatch.setattr(inputs, "require_file", lambda *_: None)
    parser = make_parser()
    return lambda command: parser.parse_args(shlex.split(command, comments=True))


def test_the_examples_of_every_help_are_real(parses: Callable[[str], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are printed: what is broken is one command to a shell, too."""
    monkeypatch.setenv("COLUMNS", "80")
    for name, parser in PARSERS.items():
        whole = parser.format_help().replace(" \\\n", " ")
        assert whole.count("\n  loopscope ") == f"\n{parser.epilog}".count("\n  loopscope ")
        for command in re.findall(r"^  loopscope (.+)$", whole, re.MULTILINE):
            try:
                parses(command)
            except UserError:
                pytest.fail(f"{name} shows an example that does not parse: {command}")


def test_progress_in_a_log_has_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 10_000, 60))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    with track("training") as advance:
        for step in range(1, 5):
            advance(step, 4, "loss 1.0")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training: 2/4, 2 min left. loss 1.0"
    assert lines[-1].startswith("training: 4/4, 0 s left")


def test_work_that_goes_back_is_counted_from_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed study first counts the steps that its last checkpoint did not keep."""
    now = iter(range(0, 10_000, 60))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    with track("study") as advance:
        for step in (600, 500, 600):
            advance(step, 1000, "")
    assert capsys.readouterr().err.splitlines() == ["study: 600/1,000, 4 min left. "]


def test_a_device_without_room_is_a_sentence(
    checkpoint: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(generation, "stream", full)
    err = command.refused("generate", checkpoint, "x")
    assert err.splitlines()[-1].startswith("loopscope: there is not enough memory")
    assert all(option in err for option in ("--batch-tokens", "--batch-size", "--dtype"))


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = [sys.executable, "-m", "loopscope.cli", "diagnose", "example:demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


@pytest.mark.parametrize(
    ("words", "resumes"),
    [(("generate", "demo", "x"), False), (("train", "demo", "--out", "nowhere"), True), (("demo",), True)],
)
def test_only_what_resumes_says_so_when_interrupted(
    words: tuple[str, ...], resumes: bool, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("loopscope.cli.train.read_settings", interrupted)
    monkeypatch.setattr("loopscope.models.checkpoint_folder.find_checkpoint", interrupted)
    monkeypatch.setattr("loopscope.cli.study.expand_study", interrupted)
    assert ("same command" in command(*words, code=130).err) == resumes


def test_a_table_fits_80_columns_and_loses_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS")
    columns = ["readout", *(f"measured quantity {number}" for number in range(12))]
    rows = [["a rather long name of a readout", *(f"{number}.00 [0.00, 0.00]" for number in range(12))]] * 2
    print_table(f"{'title ' * 12}in all 5 %", columns, rows, keys=1)
    print_table("", ["what", ""], [["a guarantee", "words " * 40]])
    print_sentences(f"{'word ' * 15}of 95 %")
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert all(out.count(f"{number}.00 [0.00, 0.00]") >= 2 for number in range(12))
    assert out.count("words") == 40
    assert "…" not in out
    assert "\n5 %\n" in out  # a number stays with its sign
    assert out.endswith("of\n95 %\n")


def test_a_table_cuts_no_name_and_explains_its_terms(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "a-name-of-four-and-forty-letters-and-digits1"
    rows = [[name, "12,000", "a text", "stopper:induction", "3.25"], ["b", "3", "", "oracle", "N/A"]]
    print_table("title", ["run", "steps", "words", "first - second", "several words here"], rows)
    out = capsys.readouterr().out
    lines = out.splitlines()
    first, second = (next(line for line in lines if line.startswith(each)) for each in (f"{name} ", "b "))
    assert first.split()[:2] == [name, "12,000"]
    assert first.index("12,000") + 6 == second.index("3") + 1  # numbers to the right
    below = [line for line in lines if "stopper:induction" in line or " oracle" in line][:2]
    assert below[0].index("stopper:induction") == below[1].index("oracle")  # texts to the left
    text = " ".join(out.split())
    assert "stopper:NAME: a rule learned from all signals together" in text
    assert "oracle: exits at the first right loop" in text
    assert "labels known" not in text
    assert percent(-1e-9) == "0.0 %"


def test_what_is_odd_about_a_recording_is_said_once(tmp_path: Path, command: Command) -> None:
    draws = np.random.default_rng(0)
    for split in ("validation", "test"):
        shares = draws.dirichlet(np.ones(5), (200, 4))
        with pytest.warns(UserWarning, match="as probabilities do"):
            ls.Trajectory(
                logits=shares, labels=draws.integers(0, 5, 200), split=split, provenance={"weights_sha256": "a" * 64}
            ).save(tmp_path / split)
    said = command("diagnose", tmp_path).err
    assert said.count("as probabilities do") == 1
    assert "Warning" not in said


def test_closed_standard_streams_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, split in enumerate(("validation", "test")):
        random_trajectory(seed, rows=60, split=split).save(tmp_path / split)
    with monkeypatch.context() as closed:
        for name in ("stdin", "stdout", "stderr"):
            closed.setattr(sys, name, None)
        codes = [main(words) for words in (["diagnose", str(tmp_path)], ["diagnose", str(tmp_path / "nowhere")])]
        for opened in (sys.stdin, sys.stdout, sys.stderr):
            opened.close()
    assert codes == [0, 2]
