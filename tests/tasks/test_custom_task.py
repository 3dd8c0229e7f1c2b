"""Tasks of the user's own: do they train, resume, record and join studies, and is what is wrong said first?"""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from killed_run import kill_after_first_checkpoint, train_words

import loopscope as ls
from loopscope.cli import main
from loopscope.recording.task_recording import record_task
from loopscope.tasks import CustomTask, load_task
from loopscope.training.run_folder import read_run_settings
from loopscope.training.settings import CustomTaskSettings, read_settings

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "tasks.md"
MODULE, STUDY = (
    re.search(rf"```{language}\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]  # type: ignore[index]
    for language in ("python", "toml")
)
SIZES = [
    *("model.width=16", "model.loops=3", "model.block_size=11", "training.steps=12", "training.batch_size=16"),
    *("training.log_every=3", "training.checkpoint_every=4", "training.validate_every=6"),
    *("training.validation_sample=60", "task.validation_examples=120", "task.test_examples=150"),
]
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes the docs' module, with changes, and forgets the earlier one; its name is of this test alone."""
    name = f"tasks_{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:8]}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(ls.__file__).parents[1]))  # the process of a killed run, too
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files change here within one second

    def written(*changes: tuple[str, str]) -> str:
        text = MODULE
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        return f"{name}:Sums"

    yield written
    sys.modules.pop(name, None)


def sums(name: str, *more: str) -> list[str]:
    return [f"task={name}", "task.train_examples=300", "task.options.max_terms=4", *SIZES, *more]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_the_example_of_the_docs_is_short() -> None:
    assert len(MODULE.splitlines()) < 40


def test_killed_and_resumed_it_ends_bit_identical(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = sums(write(), "training.steps=60")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    kill_after_first_checkpoint(cut, changes)
    before = contents(cut)
    write(("% self.modulus", "% 3"))
    assert main(train_words(cut, changes)) == 2
    assert "other settings (the source text of the task); choose another --out" in capsys.readouterr().err
    assert contents(cut) == before
    name = write()
    assert main(train_words(cut, changes)) == main(train_words(whole, changes)) == 0
    assert contents(cut) == contents(whole)
    source = hashlib.sha256(Path(f"{name.partition(':')[0]}.py").read_bytes()).hexdigest()
    task = json.loads((cut / "config.json").read_bytes())["run"]["task"]
    assert (task["name"], task["options"], task["source_sha256"]) == (name, {"max_terms": 4}, source)


def test_nobody_imports_it_because_a_run_names_it(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only who names it as well; then its examples are those of the run, or nothing is recorded."""
    helper = tmp_path / "shift_of_sums.py"
    helper.write_text("SHIFT = 0\n")
    traced = (
        "import numpy as np\n",
        "from pathlib import Path\nPath('imported').touch()\nimport numpy as np\nimport shift_of_sums\n",
    )
    name = write(traced, ("% self.modulus", "% self.modulus + shift_of_sums.SHIFT"))
    run = tmp_path / "run"
    assert main(train_words(run, sums(name, "model.block_size=8"))) == 0
    (tmp_path / "imported").unlink()
    sys.modules.pop(name.partition(":")[0])
    (tmp_path / "examples.txt").write_text("0 1 2\n4 4\n")
    record, answer = (
        ["record", "task", str(run), "--split", "test"],
        ["answer", str(run), "examples.txt", "--threshold", "1"],
    )
    for words in (record, answer, ["bench", "exits", str(run)], [*record, "--with-task", "my_tasks:Sums"]):
        assert main(words) == 2
        assert f"'{name}', which is not run because a file names it; add --with-task {name}" in capsys.readouterr().err
    read_run_settings(run)
    with pytest.raises(ls.UserError, match="custom_tasks="):
        record_task(run, "test", tmp_path / "test")
    assert not (tmp_path / "imported").exists()
    assert main([*record, "--with-task", name]) == 0
    assert (tmp_path / "imported").exists()
    capsys.readouterr()
    assert main([*answer, "--with-task", name]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["example"] for entry in answers] == ["0 1 2", "4 4"]
    harder = record_task(run, "extrapolation", tmp_path / "harder", custom_tasks=[name])
    assert sorted({*np.array(harder.difficulty).tolist()}) == [5, 6]  # as many as fit the block
    helper.write_text("SHIFT = 1 - 1 * 1 + 0 * 7\n")
    for module in ("shift_of_sums", name.partition(":")[0]):
        sys.modules.pop(module)
    record_task(run, "validation", tmp_path / "same", custom_tasks=[name])
    helper.write_text("SHIFT = -1\n")
    sys.modules.pop("shift_of_sums")
    sys.modules.pop(name.partition(":")[0])
    with pytest.raises(ls.UserError, match="must return numbers of symbols"):
        record_task(run, "validation", tmp_path / "other", custom_tasks=[name])


def stop_late(done: int, _total: int, _note: str) -> None:
    if done == 9:
        raise KeyboardInterrupt


def test_a_run_whose_examples_have_changed_is_neither_resumed_nor_recorded(write: Write, tmp_path: Path) -> None:
    helper = tmp_path / "modulus_of_sums.py"
    helper.write_text("MODULUS = 5\n")
    module = write(
        ("import numpy as np\n", "import numpy as np\nimport modulus_of_sums\n"),
        ("% self.modulus", "% modulus_of_sums.MODULUS"),
    )
    changes, run, cut = sums(module), tmp_path / "run", tmp_path / "cut"
    assert main(train_words(run, changes)) == 0
    with pytest.raises(KeyboardInterrupt):
        ls.train("demo", cut, overrides=changes, progress=stop_late)
    helper.write_text("MODULUS = 4\n")
    for name in ("modulus_of_sums", module.partition(":")[0]):
        sys.modules.pop(name, None)
    with pytest.raises(ls.UserError, match="draws or answers otherwise than when the run in .* began"):
        record_task(run, "test", tmp_path / "test", custom_tasks=[module])
    with pytest.raises(ls.UserError, match="draws or answers otherwise"):
        ls.train("demo", cut, overrides=changes)
    assert not (tmp_path / "test").exists()
    assert not (cut / "model.safetensors").exists()


SIGNATURE = "(self, tokens, lengths):"
WRONG = [
    (("class Sums(ls.Task)", "class Sums"), "is no task: it must be a subclass of loopscope.Task"),
    (("def answers", "def answer"), "it lacks answers"),
    (("range(self.modulus)]", "(1, 1)]"), "symbols must be different words without spaces, got ['1', '1']"),
    (("range(1, self.max_terms + 1)", "[1, 2]"), "levels must be a range of whole numbers from 0 up"),
    (("return difficulty + 2", "return 3"), "length must return whole numbers from 3 up"),
    (("return difficulty + 2", "return 0 * difficulty + 5"), "inputs do not get longer beyond the last level"),
    (("return difficulty + 2", "return difficulty + len(np.atleast_1d(difficulty)) + 2"), "of a difficulty alone"),
    (
        ("difficulty.max()), self", "difficulty.max() - 1), self"),
        "must return 200 rows of whole numbers, with 4 symbols",
    ),
    (("self.modulus))", "self.modulus)) / 2"), "it returned shape [200, 4], float64"),
    (("self.modulus))", "self.modulus + 1))"), "numbers that are of no symbol (0..4)"),
    (("sum(axis=1) % self.modulus", "sum(axis=1)"), "must return numbers of symbols (0..4); got 0 to"),
    (("sum(axis=1) % self.modulus", "sum() % 2"), "must return a whole number a row; got int64"),
    (("sum(axis=1) % self.modulus", "mean(axis=1)"), "must return a whole number a row; got shape [200], float64"),
    (("draws.integers(np", "np.random.default_rng().integers(0, np"), "the same draws gave other examples"),
    (("return draws.integers(np", "return ls.Draws(7).integers(np"), "every seed gives the same inputs"),
    (("sum(axis=1) %", "sum(axis=1) * 0 + tokens.shape[1] %"), "on what stands beyond a row's end"),
    (("sum(axis=1) % self", "sum(axis=1).cumsum() % self"), "an answer depends on other rows"),
    (
        ("def answers", f"def difficulties{SIGNATURE}\n        return lengths\n\n    def answers"),
        "difficulties says [3] of",
    ),
    (
        ("return draws.integers(np", "return draws.integer(np"),
        "failed: AttributeError: 'Draws' object has no attribute",
    ),
    (("return draws.integers(np", "raise SystemExit(3)\n        return (np"), "failed: SystemExit: 3"),
    (("modulus: int = 5", "modulus: int"), "task.options of 'tasks_"),
    (("modulus: int = 5", "modulus: int = 5\n    weights: list = []"), "must be numbers, words, true or false"),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_wrong_is_said_before_anything_is_written(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], words: str
) -> None:
    assert main(train_words(tmp_path / "run", sums(write(change)))) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert words in sentence
    assert sentence.endswith(".")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["task.options.max_term=3"], "unknown key `max_term` (did you mean 'max_terms'?)"),
        (["task.options.modulus=many"], "modulus: expected a whole number, got text"),
        (["task.options.test_examples=3"], "test_examples is a setting of every task; set task.test_examples"),
        (["task.modulus=3"], "task: unknown key `modulus`"),
        (["task.options.max_terms=10"], "model.block_size is 11, and the longest examples of"),
        (["task=nowhere_at_all:Sums"], "There is no module 'nowhere_at_all' with a source text for the task"),
        (["task=nowhere"], "there is no 'nowhere' here; choose one of mano, parity"),
        (["task.options.max_terms=[1]"], "task.options"),
    ],
)
def test_settings_that_do_not_fit(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], words: str
) -> None:
    assert main(train_words(tmp_path / "run", [*sums(write()), *changes])) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_settings_name_a_task_and_import_nothing(write: Write, tmp_path: Path) -> None:
    name = write(("import numpy as np\n", "raise ValueError('imported')\n"))
    settings = read_settings("demo", [f"task={name}"])
    assert isinstance(settings, CustomTaskSettings)
    assert settings.task == CustomTask(name=name)
    with pytest.raises(ls.UserError, match="ValueError: imported"):
        load_task(settings.task)


def test_the_commands_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tasks.py").write_text(MODULE)
    timed = STUDY.replace("[[parts]]", '[[parts]]\nlatency = [{ gate = "linear", prior = 0.3 }]')
    (tmp_path / "sums.toml").write_text(timed)
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```sh\n(loopscope train demo --out runs/sums .*?)```", DOCS.read_text(), re.DOTALL)
    words = {"train": SIZES, "record": [], "study": [*SIZES, "task.train_examples=300"]}
    for command in block.strip().splitlines():
        _, verb, *rest = command.split()
        arguments = [verb, *rest, *(word for override in words[verb] for word in ("--set", override))]
        if verb == "train":  # where a module is found without being installed
            process = [sys.executable, "-P", "-m", "loopscope.cli", *arguments]
            done = subprocess.run(process, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        else:
            assert main(arguments) == 0
    sys.modules.pop("my_tasks")
    labels = np.array(ls.Trajectory.load("runs/sums/recordings/validation").required_labels)
    assert (labels.min(), labels.max()) == (0, 4)
    results = json.loads(Path("runs/sums-study/report/results.json").read_bytes())
    names = ["sums-geometric0.3-fixed-s0", "sums-geometric0.3-linear-b0.1-s0"]
    assert [model["name"] for model in results["models"]] == names
    assert [bench["model"] for bench in results["latency"]] == names[1:]
    assert Path("runs/sums-study/report/report.html").is_file()
