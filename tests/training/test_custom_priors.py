"""Priors of the user's own: the docs' examples train and resume, their source counts, and bad weights are explained."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, tiny_language_run, tiny_settings
from test_run_folder import contents, interrupt

import loopscope as ls
from loopscope.cli import main
from loopscope.training.gate_fitting import gate_settings, host_defaults
from loopscope.training.objectives import LoopLosses, depth_prior, draw_unrolling, geometric_prior, load_objective
from loopscope.training.settings import Objective, with_source
from loopscope.training.task_run import TaskRun, train
from loopscope.training.training_loop import train_run

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "training.md").read_text()
BAD = """
def short(loops, step, steps): return [0.5, 0.5]
def heavy(loops, step, steps): return [0.5] * loops
def negative(loops, step, steps): return [1.5, -0.5, 0.0]
def nan(loops, step, steps): return [float("nan")] * loops
def words(loops, step, steps): return "uniform"
def broken(loops, step, steps): return 1 / 0
def ends(loops, step, steps): return [0.2, 0.3, 0.5] if step < steps - 1 else [0.0, 0.0, 0.0]
def zero(loops, step, steps): return [0.0, 0.5, 0.5]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A module of this test alone, with the docs' examples and some that are no priors."""
    name = "priors_" + re.sub(r"\W", "_", request.node.name)
    (text,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def annealed" in block)
    (tmp_path / f"{name}.py").write_text(text + BAD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return name


def test_the_examples_of_the_docs_are_what_they_say(module: str) -> None:
    def weights(name: str, step: int) -> Any:
        return pytest.approx(depth_prior(Objective(prior=f"{module}:{name}"), 4, step, 100).tolist())

    assert weights("annealed", 0) == [0.25] * 4
    geometric = geometric_prior(0.3, 4).tolist()
    assert weights("annealed", 25) == [0.125 + weight / 2 for weight in geometric]
    assert weights("annealed", 50) == geometric
    assert weights("annealed", 99) == geometric
    assert weights("late", 7) == [1 / 15, 2 / 15, 4 / 15, 8 / 15]


@pytest.mark.parametrize("objective", ["fixed_prior", "gate_channels", "random_depth"])
def test_a_prior_of_the_step_trains_and_resumes_bit_identically(module: str, objective: str, tmp_path: Path) -> None:
    gated = ["model.gate=mlp", "objective.gate_weight=0.5"] if objective == "gate_channels" else []
    changes = [f"objective.name={objective}", f"objective.prior={module}:annealed", *gated]
    settings = tiny_settings(*changes)
    train(settings, tmp_path / "whole")
    interrupt(TaskRun(settings, tmp_path / "cut"), 9)
    assert train(settings, tmp_path / "cut").resumed_from == 8
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    config = json.loads((tmp_path / "whole" / "config.json").read_bytes())["run"]["objective"]
    assert (config["prior"], len(config["prior_sha256"])) == (f"{module}:annealed", 64)
    (tmp_path / f"{module}.py").write_text("# another text\n" + (tmp_path / f"{module}.py").read_text())
    sys.modules.pop(module)
    with pytest.raises(ls.UserError, match=r"other settings \(the source text of the prior\)"):
        train(settings, tmp_path / "whole")


def test_the_step_decides_its_loss_and_its_depths(module: str) -> None:
    objective = with_source(Objective(prior=f"{module}:annealed"))
    losses = torch.tensor([[4.0], [3.0], [2.0], [1.0]])
    minimised = load_objective(objective, 0)
    first, last = (minimised(LoopLosses(losses, None, step, None, 100)).item() for step in (0, 99))
    assert first == pytest.approx(2.5)
    assert last == pytest.approx(float(geometric_prior(0.3, 4) @ losses[:, 0].double()))
    drawn = with_source(Objective(name="random_depth", prior=f"{module}:late"))
    depths = [draw_unrolling(drawn, 4, 0, step, 400) for step in range(400)]
    assert sum(each.loops for each in depths if each) / 400 == pytest.approx((1 + 4 + 12 + 32) / 15, abs=0.15)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("short", "gives [0.5, 0.5] at step 0; it must give 3 weights"),
        ("heavy", "it must give 3 weights, one for each loop, that are not negative and add up to 1."),
        ("negative", "not negative"),
        ("nan", "gives [nan, nan, nan]"),
        ("words", "failed: "),
        ("broken", "failed: ZeroDivisionError: division by zero"),
        ("ends", "gives [0.0, 0.0, 0.0] at step 11"),
        ("missing", "cannot be imported: AttributeError"),
    ],
)
def test_what_is_no_prior_is_said_before_anything_is_written(
    module: str, function: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("fixed_prior", "random_depth"):
        changes = [*TINY, f"objective.name={name}", f"objective.prior={module}:{function}"]
        sets = [word for change in changes for word in ("--set", change)]
        assert main(["train", "demo", "--out", str(tmp_path / "run"), "--threads", "1", *sets]) == 2
        sentence = capsys.readouterr().err.splitlines()[-1]
        assert words in sentence
        assert sentence.endswith(".")
        assert not (tmp_path / "run").exists()


def test_a_gate_needs_a_prior_above_0_and_a_list_the_model_s_loops(module: str, tmp_path: Path) -> None:
    train(tiny_settings(f"objective.prior={module}:zero"), tmp_path / "fixed")
    with pytest.raises(ls.UserError, match="above 0, because of the KL to it, and add up to 1"):
        gated = [f"objective.prior={module}:zero", "model.gate=linear", "objective.name=learned_gate"]
        train(tiny_settings(*gated), tmp_path / "gated")
    with pytest.raises(ls.UserError, match="it must give 3 weights"):
        train(tiny_settings("objective.prior=[0.5, 0.5]"), tmp_path / "short")
    run = tiny_language_run(tmp_path, f"objective={{name='learned_gate', prior='{module}:late'}}", "training.steps=2")
    assert train_run(run, torch.device("cpu")).final["step"] == 2


def test_a_fitted_gate_takes_weights_over_and_no_function(module: str, tmp_path: Path) -> None:
    weights = (0.2, 0.3, 0.5)
    assert host_defaults(Objective(prior=weights)) == {"prior": weights, "geometric_lambda": 0.3}
    assert host_defaults(Objective(name="learned_gate", prior="m:f", beta=0.5)) == {"beta": 0.5}
    assert host_defaults(Objective(name="act", beta=0.5)) == {}
    recording = ls.Trajectory(
        predictions=[[0, 1, 1]],
        labels=[1],
        provenance={"run": {"objective": {"name": "fixed_prior", "prior": weights}}},
    )
    assert gate_settings(recording, {}).prior == weights
    for wrong, words in (("m:f", "one of the priors uniform and geometric, or a list"), ([1, 0, 0], "may be 0")):
        with pytest.raises(ls.UserError, match=words):
            gate_settings(recording, {"prior": wrong})
