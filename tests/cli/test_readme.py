"""Do the commands of the README run? In a folder where its runs and its checkpoint are small ones, in its order."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cli.conftest import run, settings
from loopscope.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL = "ByteDance/Ouro-1.4B"
BENCHMARKS = ("--data", str(ROOT / "tests" / "data" / "benchmarks"), "--limit", "16")
LONG = ("bench", "harness", "report", "selfcheck")
"""What takes more than a second or two even here."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("loopscope ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def smaller(words: list[str]) -> list[str]:
    """The same command for what is small: fewer steps and questions, a laxer promise; a study is planned only."""
    words = ["float32" if word == "bfloat16" else word for word in words]
    if "--device" in words:
        words[words.index("--device") + 1] = "cpu"
    match words:
        case ["train", *_]:
            return [*words, *settings()]
        case ["calibrate", *_] | ["record", "live", *_]:
            return [*words, "--max-drop", "0.5", "--confidence", "0.8"]
        case ["record", "text", *_]:
            return [*words, "--context", "16"]
        case ["generate", *_]:
            return [*words, "--max-new-tokens", "3"]
        case ["record", "benchmark", *_] | ["harness", *_]:
            return [*words, *BENCHMARKS]
        case ["selfcheck", *_]:
            return [*words, "--only", "contract", "--only", "replay"]
        case ["bench", "exits", *_]:
            return [*words, "--rounds", "1"]
        case ["gate", "fit", *_]:
            return [*words, "--steps", "5"]
        case ["study", "run", "ouro", *rest]:
            return ["study", "plan", "ouro", *rest, "--model", MODEL, *BENCHMARKS]
        case ["study", "run", *rest]:
            return ["study", "plan", *rest]
        case ["demo", *_]:
            return ["study", "plan", "demo"]
    return words


@pytest.fixture
def folder(recorded: Path, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What a reader of the README has by then; a folder of a checkpoint's name is taken for it, and not the Hub."""
    monkeypatch.chdir(tmp_path)
    for place in ("runs/mine", "runs/demo/fixed-uniform", "runs/demo/fixed-geometric"):
        shutil.copytree(recorded, place)
    shutil.copytree(checkpoint, MODEL)
    Path("mine.jsonl").write_text("".join(f'{{"text": "{n} and {n + 1} are {2 * n + 1}"}}\n' for n in range(40)))
    assert run("record", "task", "runs/mine", "--split", "train", "--hidden") == 0
    assert run("calibrate", "runs/mine", "--max-drop", "0.5", "--confidence", "0.8", "--out", "policy.json") == 0
    Path("examples.txt").write_text("+ 1 0\n* 1 1\n")
    return tmp_path


def run_all(chosen: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    for words in map(smaller, chosen):
        if words[0] == "calibrate":
            Path("policy.json").unlink(missing_ok=True)
        assert main(words) in (0, 1), (words, capsys.readouterr().err)  # 1: a promise that such a model does not keep


def test_its_make_targets_exist() -> None:
    targets = set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_readme_s_commands_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = [words for words in commands() if words[0] not in LONG]
    assert len(quick) > 4
    run_all(quick, capsys)


@pytest.mark.long
def test_the_long_commands_of_the_readme_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_all([words for words in commands() if words[0] in LONG], capsys)


def test_the_readme_s_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 600)
    logits = rng.normal(0, 1, (600, 4, 3)) + 3 * np.arange(4)[:, None] * (np.arange(3) == labels[:, None])[:, None]
    found = blocks("python")
    assert found
    for block in found:
        code = re.sub(r"\b(logits|labels|gate_logits)=\.\.\.", r"\1=\1[half]", block)
        lines = [line.replace("[half]", "[:300]" if "validation" in line else "[300:]") for line in code.splitlines()]
        exec("\n".join(lines), {"logits": logits, "labels": labels, "gate_logits": rng.normal(0, 1, (600, 4))})
