"""Does the model of one's own in docs/how-to/your-model.md train, resume, and go all the way to a report?"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from conftest import TINY
from killed_run import kill_after_first_checkpoint

from loopscope.cli import main
from loopscope.models.custom_model import MODELS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "your-model.md").read_text()
SECTION = PAGE[PAGE.index("## Train a custom model") : PAGE.index("## What the methods must do")]
COMMANDS = [shlex.split(line) for line in re.findall(r"^loopscope (.*)$", SECTION, re.MULTILINE)]
SMALL = [change for change in TINY if not change.startswith("model.")]
MODEL = ["model=my_model:LoopedGRU", "model.loops=4"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the example's module, in which commands are typed."""
    shutil.copy(ROOT / "examples" / "my_model.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_model", None)  # of another folder
    with patch.dict(MODELS, clear=True):
        yield tmp_path
    sys.modules.pop("my_model", None)


def setting(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def test_the_page_has_the_example_and_its_commands() -> None:
    example = (ROOT / "examples" / "my_model.py").read_text()
    (shown,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    assert example.endswith(shown)
    assert [words[0] for words in COMMANDS] == [
        *("train", "record", "record", "diagnose", "report", "bench", "study", "record", "answer")
    ]


def test_every_command_of_the_page_works(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables, study = re.findall(r"```toml\n(.*?)```", SECTION, re.DOTALL)
    timed = 'latency = [{ gate = "linear", prior = 0.3 }]\nreference ='
    (here / "my_study.toml").write_text(study.replace('"overview"', '"headline"').replace("reference =", timed))
    (here / "examples.txt").write_text("+ 1 2\n* 0 1\n")
    more = {
        "train": setting(*SMALL),
        "report": ["--product", "headline"],
        "bench": ["--rounds", "1", "--readout", "margin"],
        "study": [*setting(*SMALL), "--workers", "1", "--device", "cpu"],
    }
    for words in COMMANDS:
        assert main([*words, *more.get(words[0], [])]) == 0, capsys.readouterr().err
    found = json.loads((here / "runs/my_study/report/results.json").read_bytes())
    name = "mano-my_model_LoopedGRU-geometric0.3"
    assert [model["name"] for model in found["models"]] == [f"{name}-fixed-s0", f"{name}-linear-b0.1-s0"]
    assert [row["model"] for row in found["latency"]] == [f"{name}-linear-b0.1-s0"]
    assert found["models"][1]["label"] == "linear gate, geometric 0.3, β 0.1, my_model:LoopedGRU"
    assert json.loads((here / "runs/gru/recordings/8-loops/test/manifest.json").read_bytes())["contents"]["loops"] == 8
    (here / "my.toml").write_text(f'task = {{ name = "parity", max_bits = 3 }}\n{tables}')
    few = ["training.steps=2", "training.batch_size=4", "task.validation_examples=9", "task.test_examples=9"]
    assert main(["train", "my.toml", "--out", "runs/table", *setting(*few, "training.validation_sample=9")]) == 0
    assert json.loads((here / "runs/table/config.json").read_bytes())["model"]["options"] == {"width": 64}


def test_killed_and_resumed_it_ends_bit_identical(here: Path) -> None:
    changes = [*SMALL, *MODEL, "training.steps=60", "training.checkpoint_every=7", "training.log_every=1"]
    kill_after_first_checkpoint(here / "cut", changes)
    for name in ("cut", "whole"):
        assert main(["train", "demo", "--out", name, "--threads", "1", *setting(*changes)]) == 0
    files = ("config.json", "data.json", "hashes.json", "metrics.jsonl", "model.safetensors")
    assert all((here / "cut" / file).read_bytes() == (here / "whole" / file).read_bytes() for file in files)
