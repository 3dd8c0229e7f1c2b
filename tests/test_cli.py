"""The command line: the whole way from a preset to a table, and one sentence with exit code 2 for whatever is wrong."""

import html
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import GATED, TINY

from loopscope.cli import main

README = Path(__file__).parents[1] / "README.md"


def settings(*overrides: str) -> list[str]:
    return [word for override in (*TINY, *overrides) for word in ("--set", override)]


def run(*words: object) -> int:
    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a gate, trained and recorded through the command line."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert run("train", "demo", "--out", folder, *settings()) == 0
    for split in ("validation", "test"):
        assert run("record", folder, "--split", split) == 0
    return folder


def test_train_shows_loss_and_accuracy_of_every_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "demo", "--out", tmp_path / "run", *settings(*GATED)) == 0
    out, err = capsys.readouterr()
    assert all(word in out for word in ("loop", "loss", "accuracy"))
    assert "12/12" in err
    assert run("train", "demo", "--out", tmp_path / "run", "--json", *settings(*GATED)) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["resumed_from"] == 12
    assert len(result["validation_accuracy"]) == len(result["validation_loss"]) == 3


def test_record_and_evaluate(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recordings = recorded / "recordings"
    assert run("record", recorded, "--split", "test", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["examples"], summary["loops"]) == (150, 3)
    assert run("evaluate", recordings / "validation", recordings / "test") == 0
    table = capsys.readouterr().out
    assert all(name in table for name in ("fixed", "margin", "hidden_cosine", "oracle", "D@95"))
    assert "gate" not in table
    assert run("evaluate", recordings / "validation", recordings / "test", "--json", "--at", "0.4") == 0
    result = json.loads(capsys.readouterr().out)
    fixed = result["readouts"][0]
    assert fixed["readout"] == "fixed"
    assert fixed["accuracy"] == pytest.approx(summary["accuracy"])
    assert set(fixed["depth_at"]) == {"0.4"}


def test_bad_input_is_one_sentence_and_exit_code_2(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validation, test = (recorded / "recordings" / split for split in ("validation", "test"))
    corrupt = tmp_path / "corrupt"
    corrupt.mkdir()
    for file in test.iterdir():
        (corrupt / file.name).write_bytes(file.read_bytes()[: -3 if file.suffix == ".safetensors" else None])
    out = ("--out", tmp_path / "run")
    for words, sentence in [
        (("train", "demo", *out, "--set", "task.moduls=3"), "unknown key `moduls`"),
        (("train", "demo", *out, "--set", "task.modulus=many"), "task.modulus"),
        (("train", "demo", *out, "--set", "task.modulus=1"), "task.modulus"),
        (("train", "demo", *out, "--set", "training.steps=-5"), "training.steps"),
        (("train", "demo", *out, "--device", "abacus"), "'abacus' is not available"),
        (("train", "nowhere.toml", *out), "neither a preset"),
        (("train", "paper", *out, "--set", "training.steps=100000000"), "--force"),
        (("train", "demo", "--out", recorded, *settings("training.seed=9")), "training.seed"),
        (("train", "demo", "--out", recorded / "config.json", *settings()), "not a run"),
        (("record", tmp_path / "nowhere", "--split", "test"), "There is no folder"),
        (("record", tmp_path, "--split", "test"), "run configuration"),
        (("record", recorded, "--split", "dev"), "no split 'dev'"),
        (("record", recorded, "--split", "test", "--examples", "7"), "another recording"),
        (("record", recorded, "--split", "extrapolation", "--levels", "1-4"), "above 2"),
        (("evaluate", validation, tmp_path / "nowhere"), "There is no folder"),
        (("evaluate", validation, recorded), "no manifest.json"),
        (("evaluate", validation, corrupt), "trajectory.safetensors"),
        (("evaluate", validation, test, "--readout", "gate"), "has no gate"),
        (("evaluate", validation, test, "--readout", "mood"), "no readout 'mood'"),
        (("evaluate", validation, test, "--at", "95"), "between 0 and 1"),
        (("evaluate", test, validation), "test split"),
        (("evaluate", validation, validation), "same data"),
    ]:
        assert run(*words) == 2, words
        captured = capsys.readouterr()
        assert captured.out == ""
        last = captured.err.splitlines()[-1]
        assert sentence in last, (words, last)
        assert last.startswith("loopscope: ")
        assert last.endswith(".")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words",
    [["train"], ["fly"], ["record", "x", "--split", "test", "--levels", "4-2"], ["train", "demo", "--threads", "0"]],
)
def test_wrong_usage_is_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [[], ["train"], ["record"], ["evaluate"]])
def test_every_help_has_examples(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*verb, "--help"])
    assert stop.value.code == 0
    assert re.search(r"^  loopscope \w+ ", capsys.readouterr().out, re.MULTILINE)


def test_help_is_quick_because_it_loads_nothing_heavy() -> None:
    check = (
        "import sys, loopscope.cli as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'rich', 'msgspec')))"
    )
    assert subprocess.run([sys.executable, "-c", check], stdout=subprocess.DEVNULL).returncode == 0


def test_work_on_recordings_loads_no_network() -> None:
    check = "import sys, loopscope as ls; ls.sweep, ls.Trajectory, ls.ExitPolicy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_the_readme_s_commands_are_real(capsys: pytest.CaptureFixture[str]) -> None:
    """Every `loopscope` command of the README parses, and every make target exists."""
    text = README.read_text()
    makefile = (README.parent / "Makefile").read_text()
    targets = set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE))
    assert {"demo", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    commands = re.findall(r"^loopscope (.+?)(?:\s+#.*)?$", text, re.MULTILINE)
    assert commands
    from loopscope.cli import _parser

    for command in commands:
        _parser().parse_args(shlex.split(command))


def test_progress_in_a_log_has_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from loopscope.progress import track

    now = iter(range(0, 10_000, 60))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    with track("training") as advance:
        for step in range(1, 5):
            advance(step, 4, "loss 1.0")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training: 2/4, 2 min left. loss 1.0"
    assert lines[-1].startswith("training: 4/4, 0 s left")


def test_a_report_opens_and_says_how_to_make_it_again(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)))  # as if there were none
    out = tmp_path / "a study run's"
    assert run("report", recorded, "--out", out, "--at", 0.5, "--open") == 0
    assert opened == [(out / "report.html").resolve().as_uri()]
    assert "No browser could be started here" in capsys.readouterr().err
    page = html.unescape((out / "report.html").read_text())
    (command,) = set(re.findall(r"<code>(loopscope report .* --product depths)</code>", page))
    assert run(*shlex.split(command)[1:]) == 0
    assert "Depth to accuracy" in capsys.readouterr().out
    assert run("report", recorded, "--out", out, "--product", "depths", "--open") == 2
    assert "leave one of them out" in capsys.readouterr().err
