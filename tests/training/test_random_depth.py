"""Random depth: are depths drawn from the prior, are only so many loops run, where does the gradient end?"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_language_run, tiny_settings
from safetensors.torch import load_file

from loopscope.analysis.labels import model_label
from loopscope.config import plain
from loopscope.errors import UserError
from loopscope.models import LoopedTransformer
from loopscope.objectives import Objective, Unrolling
from loopscope.training import RunSettings, initial_model, train
from loopscope.training.loop import train_run
from loopscope.training.task_run import TaskRun, answer_losses, training_batches

CPU = torch.device("cpu")
RANDOM = "objective.name=random_depth"


def depths(objective: Objective, seed: int, steps: int) -> list[int]:
    drawn = [objective.unrolling(6, seed, step) for step in range(steps)]
    return [each.loops for each in drawn if each is not None]


@pytest.mark.parametrize("prior", ["uniform", "geometric"])
def test_depths_are_drawn_from_the_prior_by_seed_and_step(prior: str) -> None:
    objective = Objective(name="random_depth", prior=prior)  # type: ignore[arg-type]
    drawn, steps = depths(objective, 0, 2000), 2000
    assert drawn == depths(objective, 0, steps)
    assert drawn != depths(objective, 1, steps)
    shares = np.array([Counter(drawn)[loop] / steps for loop in range(1, 7)])
    pi = objective.depth_prior(6).numpy()
    assert (np.abs(shares - pi) < 4 * np.sqrt(pi * (1 - pi) / steps)).all()
    assert objective.expected_loops(6) == pytest.approx(np.mean(drawn), abs=0.2)


def applied(settings: RunSettings, unrolling: Unrolling | None) -> int:
    """How often the block is applied to a batch, there and back."""
    model = initial_model(settings)
    calls: list[int] = []
    norm = model.block[0].attention_norm
    assert isinstance(norm, torch.nn.Module)
    norm.register_forward_hook(lambda *_: calls.append(0))
    answer_losses(model, training_batches(settings)(0), CPU, unrolling)
    return len(calls)


def test_only_the_loops_that_are_drawn_are_run() -> None:
    settings = tiny_settings(RANDOM)
    assert [applied(settings, Unrolling(loops, None)) for loops in (1, 2, 3)] == [1, 2, 3]
    assert applied(settings, None) == 3


@pytest.mark.parametrize("loops", [1, 2, 3])
def test_the_loss_is_that_of_the_last_loop(loops: int) -> None:
    settings = tiny_settings(RANDOM)
    model, batch = initial_model(settings), training_batches(settings)(0)
    whole, last = answer_losses(model, batch, CPU), answer_losses(model, batch, CPU, Unrolling(loops, None))
    assert torch.allclose(last.cross_entropy[0], whole.cross_entropy[loops - 1], atol=1e-5)
    assert last.gate_logits is None
    assert settings.objective.loss(last.cross_entropy, None) == last.cross_entropy.mean()


def gradients(truncated: int | None) -> dict[str, torch.Tensor]:
    settings = tiny_settings(RANDOM)
    model = initial_model(settings)
    losses = answer_losses(model, training_batches(settings)(0), CPU, Unrolling(3, truncated)).cross_entropy
    losses.mean().backward()  # type: ignore[no-untyped-call]
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def test_a_truncated_gradient_ends_before_the_first_loops() -> None:
    """That of the last loop alone, by hand: its input is a constant."""
    assert all(torch.equal(value, gradients(3)[name]) for name, value in gradients(None).items())
    settings = tiny_settings(RANDOM)
    model, batch = initial_model(settings), training_batches(settings)(0)
    tokens, lengths = torch.from_numpy(batch.tokens), torch.from_numpy(batch.lengths)
    with torch.no_grad():
        *_, state = model.unroll(model.begin(tokens, lengths), 2)
    logits = model.predict(model.pooled(model.step(state), lengths - 1))
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch.labels)).backward()  # type: ignore[no-untyped-call]
    found = gradients(1)
    for name, value in model.named_parameters():
        assert value.grad is not None
        assert torch.allclose(found[name], value.grad, atol=1e-6), name
    assert not torch.allclose(found["block.0.mlp_in.weight"], gradients(2)["block.0.mlp_in.weight"], atol=1e-6)


@pytest.mark.parametrize("more", [(), ("objective.truncated=1",)])
def test_a_task_s_run_goes_on_to_the_same_bytes_and_validates_every_loop(more: tuple[str, ...], tmp_path: Path) -> None:
    settings = tiny_settings(RANDOM, *more)
    whole = train(settings, tmp_path / "whole")
    assert len(whole.final["validation_accuracy"]) == 3
    logged = [entry for entry in whole.metrics if "loss" in entry]
    expected = [settings.objective.unrolling(3, 0, entry["step"] - 1) for entry in logged]
    assert [entry["loops"] for entry in logged] == [each.loops for each in expected if each is not None]
    assert all(entry["loop_loss"] == [entry["loss"]] for entry in logged)

    def stop(done: int, _total: int, _note: str) -> None:
        if done == 9:  # the state of step 8 is saved
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        train_run(TaskRun(settings, tmp_path / "cut"), CPU, stop)
    assert train(settings, tmp_path / "cut").resumed_from == 8
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("more", [(), ("objective.truncated=1",)])
def test_on_text_too(more: tuple[str, ...], tmp_path: Path) -> None:
    run = tiny_language_run(tmp_path, RANDOM, *more)
    begun = {name: value.clone() for name, value in run.initial_model().state_dict().items()}
    result = train_run(run, CPU)
    assert len(result.final["validation_loss"]) == 3
    after = load_file(run.folder / "model.safetensors")
    still = {name for name, value in after.items() if torch.equal(value, begun[name])}
    assert still == {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}


def test_what_cannot_be_is_explained() -> None:
    for change, told in (
        ("objective.truncated=2", "truncated is of the objective 'random_depth'"),
        ("model.gate=linear", "model.gate = 'none'"),
    ):
        with pytest.raises(UserError, match=told):
            tiny_settings(*([RANDOM] if "gate" in change else []), change)
    with pytest.raises(UserError, match="truncated"):
        tiny_settings(RANDOM, "objective.truncated=0")


def test_it_has_a_name_of_its_own() -> None:
    run = {"run": plain(tiny_settings(RANDOM, "objective.truncated=2"))}
    assert model_label(run, "x") == "random depth, geometric 0.3, truncated 2"
    assert "truncated" not in plain(tiny_settings())["objective"]  # what was trained before keeps its address
    assert isinstance(initial_model(tiny_settings(RANDOM)), LoopedTransformer)
