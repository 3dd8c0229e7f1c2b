"""Objectives of the user's own: do they train and resume, does their source count, is what is wrong said first?"""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import TINY, tiny_language_run, tiny_settings
from killed_run import train_words
from test_run_folder import contents, interrupt

import loopscope as ls
from loopscope.cli import main
from loopscope.models.checkpoint_folder import read_checkpoint_config
from loopscope.recording.recording_folder import Keep
from loopscope.recording.task_recording import record_task
from loopscope.training.gate_fitting import gate_settings
from loopscope.training.objectives import LoopLosses, load_objective
from loopscope.training.run_folder import read_run_settings
from loopscope.training.settings import Objective, with_source
from loopscope.training.task_run import TaskRun
from loopscope.training.training_loop import train_run

CPU = torch.device("cpu")
NOISY = """
import torch

def helper():
    return 0.5

def noisy(loops, noise=0.1):
    drawn = noise * torch.rand(loops.cross_entropy.shape[1])
    halts = loops.gate_logits.sigmoid() if loops.gate_logits is not None else 0
    return ((helper() + drawn) * (loops.cross_entropy + halts)).mean()

def one(loops): return 1.0
def by_loop(loops): return loops.cross_entropy.mean(1)
def leaves(loops): raise SystemExit(3)
def broken(loops): return loops.nothing
def infinite(loops): return (loops.cross_entropy / 0).mean()
def detached(loops): return loops.cross_entropy.detach().mean()
def last(loops): return loops.cross_entropy[-1]
def late(loops): return loops.cross_entropy[-1] * (1 if loops.step < 11 else float("nan"))
"""

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module and forgets the earlier one; its name is of this test alone."""
    name = f"losses_{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:8]}"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files change here within one second

    def written(text: str = NOISY) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        return name

    yield written
    sys.modules.pop(name, None)


def test_interrupted_and_resumed_it_ends_bit_identical(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [*TINY, "model.gate=linear", f"objective={write()}:noisy", "objective.options.noise=0.7"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    interrupt(TaskRun(tiny_settings(*changes), cut), 9)
    before = contents(cut)
    write(NOISY.replace("return 0.5", "return 0.6"))  # a helper, not the function itself
    assert main(train_words(cut, changes)) == 2
    assert "other settings (the source text of the objective); choose another --out" in capsys.readouterr().err
    assert contents(cut) == before
    write()
    assert main(train_words(cut, changes)) == main(train_words(whole, changes)) == 0
    assert contents(cut) == contents(whole)


def test_its_numbers_are_drawn_from_seed_and_step_and_from_no_others(write: Write) -> None:
    objective, losses = with_source(Objective(name=f"{write()}:noisy")), torch.ones(3, 2, requires_grad=True)
    before = torch.get_rng_state()
    values = [
        load_objective(objective, seed)(LoopLosses(losses, None, step)).item()
        for seed, step in ((0, 5), (0, 6), (1, 5), (0, 5))
    ]
    assert len(set(values)) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_the_run_names_it_and_nobody_but_training_imports_it(write: Write, tmp_path: Path) -> None:
    name = write(f"from pathlib import Path\nPath({str(tmp_path / 'imported')!r}).touch()\n" + NOISY)
    run = tmp_path / "run"
    assert main(train_words(run, [*TINY, f"objective.name={name}:noisy"])) == 0
    (tmp_path / "imported").unlink()
    source = hashlib.sha256((tmp_path / f"{name}.py").read_bytes()).hexdigest()
    config = json.loads((run / "config.json").read_bytes())
    assert config["run"]["objective"] == {"name": f"{name}:noisy", "source_sha256": source}
    sys.modules.pop(name)
    recording = record_task(run, "train", tmp_path / "train", Keep(hidden=True), 100)
    assert gate_settings(recording, {}).prior == "uniform"
    assert read_run_settings(run).objective.source_sha256 == source
    with_source(read_run_settings(run).objective)
    assert not (tmp_path / "imported").exists()
    (tmp_path / f"{name}.py").unlink()
    record_task(run, "test", tmp_path / "test")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("missing", "cannot be imported: AttributeError: module 'losses_"),
        ("one", "returned float; it must return the loss of the batch"),
        ("by_loop", "returned a tensor of shape [3]"),
        ("leaves", "failed: SystemExit: 3"),
        ("broken", "AttributeError: 'LoopLosses' object has no attribute 'nothing' (losses_"),
        ("infinite", "is not finite"),
        ("detached", "without detach() or item()"),
        ("late", "is not finite"),  # at the last step
        ("last", "got an unexpected keyword argument 'x'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, words: str
) -> None:
    options = ["objective.options.x=1"] if function == "last" else []
    assert main(train_words(tmp_path / "run", [*TINY, f"objective={write()}:{function}", *options])) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert words in sentence
    assert sentence.endswith(".")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nowhere_at_all\n", "ModuleNotFoundError: No module named 'nowhere_at_all' (losses_"),
        ("def noisy(:\n", "cannot be imported: SyntaxError: invalid syntax"),
        ("from loopscope.training.objectives import expected_loss as noisy\n", "it is defined in 'loopscope.training"),
        *((module, f"no module '{module}' with a source text") for module in ("nowhere_at_all.deeper", "math")),
    ],
)
def test_a_module_that_cannot_be_used_is_explained(write: Write, tmp_path: Path, text: str, words: str) -> None:
    name = write(text) if "\n" in text else text
    with pytest.raises(ls.UserError, match=re.escape(words)):
        ls.train(tiny_settings(f"objective.name={name}:noisy"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def last_loops(loops: ls.LoopLosses, weight: float = 1.0) -> torch.Tensor:
    return loops.cross_entropy[-1] + weight * loops.cross_entropy[-2]


def test_from_python_a_function_is_given(tmp_path: Path) -> None:
    given = {"overrides": TINY, "objective": last_loops, "options": {"weight": 0.5}}
    result = ls.train("demo", tmp_path / "task", **given)
    assert [entry["step"] for entry in result.metrics] == [3, 6, 6, 9, 12, 12]
    entry = result.metrics[0]
    assert entry["loss"] == pytest.approx(entry["loop_loss"][-1] + 0.5 * entry["loop_loss"][-2], rel=1e-5)
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    recorded = {"name": f"{__name__}:last_loops", "options": {"weight": 0.5}, "source_sha256": source}
    assert read_checkpoint_config(result.folder).run["objective"] == recorded
    assert ls.train("demo", result.folder, **given).resumed_from
    with pytest.raises(ls.UserError, match="objective.options.weight"):
        ls.train(tiny_settings(), result.folder, objective=last_loops, options={"weight": 0.6})
    for wrong in (lambda loops: loops.cross_entropy[-1], "nothing", None):  # options alone have no function
        with pytest.raises(ls.UserError, match=r"no objective '.*'; choose one of final"):
            ls.train(tiny_settings(), tmp_path / "other", objective=wrong, options={"weight": 1})
    run = tiny_language_run(tmp_path, f"objective={__name__}:last_loops", "training.steps=3")
    entry = train_run(run, CPU).metrics[0]
    assert entry["loss"] == pytest.approx(sum(entry["loop_loss"][-2:]), rel=1e-5)
    assert json.loads((run.folder / "config.json").read_bytes())["run"]["objective"]["source_sha256"] == source


def test_the_example_of_the_docs_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "training.md").read_text()
    *_, module, call = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"^loopscope (train .*my_losses.*)$", page, re.MULTILINE)
    (tmp_path / "my_losses.py").write_text(module)
    monkeypatch.chdir(tmp_path)  # where a module is found without being installed
    changes = [word for override in TINY for word in ("--set", override)]
    words = [sys.executable, "-P", "-m", "loopscope.cli", *command.split(), *changes]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(tmp_path)
    exec(f"import loopscope as ls, my_losses\n{call.replace(')', f', overrides={TINY!r})')}", {})  # the same run
    sys.modules.pop("my_losses")
    objective = json.loads((tmp_path / "runs/improving/config.json").read_bytes())["run"]["objective"]
    assert objective["options"] == {"penalty": 0.2}
