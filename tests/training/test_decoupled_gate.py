"""Decoupled gates: does the gate leave the trajectory alone, to the bit, and learn what a joint one would there?"""

from pathlib import Path

import pytest
import torch
from conftest import TINY, tiny_language_run, tiny_settings
from killed_run import kill_after_first_checkpoint
from safetensors.torch import load_file
from torch import Tensor

from loopscope.analysis.labels import model_label
from loopscope.config import plain
from loopscope.errors import UserError
from loopscope.objectives import LoopLosses, Objective
from loopscope.training import initial_model, train
from loopscope.training.custom_objectives import load_objective
from loopscope.training.gate_fitting import host_defaults
from loopscope.training.loop import TrainingRun, train_run
from loopscope.training.task_run import answer_losses, training_batches

CPU = torch.device("cpu")
DECOUPLED = ["objective.name=decoupled_gate", "model.gate=mlp"]
CLIPPED = ["training.clip_norm=0.05"]  # every step's gradients are larger


def with_decoupled_gate(loops: LoopLosses, beta: float = 0.1) -> Tensor:
    """The built-in one, as a function of the user's."""
    assert loops.detached_gate_logits is not None
    fixed, gate = Objective(name="fixed_prior"), Objective(name="learned_gate", beta=beta)
    return fixed.loss(loops.cross_entropy, None) + gate.loss(loops.cross_entropy.detach(), loops.detached_gate_logits)


def gradients(objective: Objective, *overrides: str, detached: bool = False) -> dict[str, Tensor]:
    """Of the first batch, on the decoupled run's first model."""
    settings = tiny_settings(*DECOUPLED, *overrides)
    model = initial_model(settings)
    losses, _, gate_logits, apart = answer_losses(model, training_batches(settings)(0), CPU)
    if detached:
        losses, gate_logits = losses.detach(), apart
    load_objective(objective, 0)(LoopLosses(losses, gate_logits, 0, apart)).backward()  # type: ignore[no-untyped-call]
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("prior", ["uniform", "geometric"])
def test_the_trunk_has_the_fixed_prior_s_gradients_and_the_gate_the_joint_one_s(prior: str) -> None:
    made = {name: Objective(name=name, prior=prior, beta=0.3) for name in ("fixed_prior", "learned_gate")}  # type: ignore[arg-type]
    found = gradients(Objective(name="decoupled_gate", prior=prior, beta=0.3))  # type: ignore[arg-type]
    fixed, gate = gradients(made["fixed_prior"]), gradients(made["learned_gate"], detached=True)
    assert all(name.startswith("gate.") for name in gate)
    assert set(found) == set(fixed) | set(gate)
    for name, value in {**fixed, **gate}.items():
        assert value.abs().max() > 0
        assert torch.equal(found[name], value), name


def trunk(folder: Path) -> dict[str, Tensor]:
    weights = load_file(folder / "model.safetensors")
    return {name: value for name, value in weights.items() if not name.startswith(("gate.", "model.early_exit_gate."))}


def assert_same_trunk(one: Path, other: Path) -> None:
    ours, theirs = trunk(one), trunk(other)
    assert set(ours) == set(theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("gate", ["linear", "mlp"])
@pytest.mark.parametrize("optimizer", ["training.muon_learning_rate=0.01", "training.muon_learning_rate=0"])
def test_a_run_s_trunk_is_the_fixed_prior_s_to_the_bit(gate: str, optimizer: str, tmp_path: Path) -> None:
    changes = [*CLIPPED, optimizer]
    fixed = train(tiny_settings(*changes), tmp_path / "fixed")
    found = train(tiny_settings(*changes, *DECOUPLED, f"model.gate={gate}"), tmp_path / "decoupled")
    assert_same_trunk(found.folder, fixed.folder)
    assert fixed.final["validation_loss"] == found.final["validation_loss"]
    norms = [[entry["gradient_norm"] for entry in run.metrics if "loss" in entry] for run in (fixed, found)]
    assert norms[0] == norms[1]
    assert min(norms[0]) > 0.05
    begun = initial_model(tiny_settings(*changes, *DECOUPLED, f"model.gate={gate}")).state_dict()
    after = load_file(found.folder / "model.safetensors")
    moved = [name for name in after if name.startswith("gate.") and not torch.equal(after[name], begun[name])]
    assert len(moved) == {"linear": 2, "mlp": 4}[gate]


def test_on_text_too(tmp_path: Path) -> None:
    runs: dict[str, TrainingRun] = {}
    for name in ("fixed_prior", "decoupled_gate"):
        (tmp_path / name).mkdir()
        changes = (f"objective.name={name}", "objective.beta=0.1", *CLIPPED)
        runs[name] = tiny_language_run(tmp_path / name, *changes)
        train_run(runs[name], CPU)
    one, other = (run.folder for run in runs.values())
    assert_same_trunk(one, other)
    gates = [load_file(folder / "model.safetensors")["model.early_exit_gate.weight"] for folder in (one, other)]
    assert not torch.equal(*gates)


def test_a_function_of_the_user_s_can_have_the_same(tmp_path: Path) -> None:
    """Its run begins as every run with a gate does; without a gradient from the gate, the rest goes another's way."""
    changes = [*TINY, *CLIPPED, "model.gate=linear"]
    ways = {
        beta: train(
            "demo", tmp_path / str(beta), overrides=changes, objective=with_decoupled_gate, options={"beta": beta}
        ).folder
        for beta in (0.0, 0.7)
    }
    assert_same_trunk(*ways.values())
    gates = [load_file(folder / "model.safetensors")["gate.net.weight"] for folder in ways.values()]
    assert not torch.equal(*gates)


def test_a_model_without_a_gate_is_refused() -> None:
    with pytest.raises(UserError, match=r"learned_gate and decoupled_gate need model.gate = 'linear' or 'mlp'"):
        tiny_settings("objective.name=decoupled_gate")


def test_it_has_a_name_of_its_own_and_a_fitted_gate_takes_over_its_beta() -> None:
    settings = tiny_settings(*DECOUPLED, "objective.beta=0.2")
    assert model_label({"run": plain(settings)}, "x") == "decoupled MLP gate, geometric 0.3, β 0.2"
    assert host_defaults(settings.objective)["beta"] == 0.2


def test_killed_and_resumed_it_ends_bit_identical(tmp_path: Path) -> None:
    changes = [*TINY, "training.steps=100", "training.checkpoint_every=7", *DECOUPLED]
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    kill_after_first_checkpoint(cut, changes)
    assert train("demo", cut, overrides=changes).resumed_from > 0
    train("demo", whole, overrides=changes)
    ours, theirs = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (cut, whole))
    assert ours == theirs
