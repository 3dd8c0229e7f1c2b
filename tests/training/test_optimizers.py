"""Optimizers: what is decayed, clipped and restored; is Muon's update PyTorch's, up to the precision of its bf16?"""

import pytest
import torch
from conftest import tiny_settings
from torch.optim import Muon as Reference

from loopscope.training.settings import Training
from loopscope.training.task_run import initial_model
from loopscope.training.training_loop import Muon, Optimizers, orthogonalised, schedule


def test_the_schedule_warms_up_and_decays_to_its_minimum() -> None:
    settings = Training()
    rates = [settings.learning_rate * schedule(step, settings) for step in (0, 1999, 2000, 21_000, 39_999)]
    assert rates[0] == pytest.approx(5e-4 / 2000)
    assert rates[1] == rates[2] == pytest.approx(5e-4)
    assert rates[3] == pytest.approx((5e-4 + 5e-5) / 2)
    assert rates[4] == pytest.approx(5e-5, rel=1e-3)


def backward(model: torch.nn.Module) -> None:
    tokens = torch.arange(12).view(2, 6) % 8
    model.loops(tokens, positions=torch.tensor([5, 3])).logits.square().mean().backward()


@pytest.mark.parametrize("muon", [0.0, 0.01])
def test_optimizers_decay_matrices_only_and_restore_their_state(muon: float) -> None:
    settings = tiny_settings(f"training.muon_learning_rate={muon}")
    runs = []
    for _ in range(2):
        model = initial_model(settings)
        runs.append((model, Optimizers(model, settings.training)))
    (model, optimizers), (copy, restored) = runs
    for step in range(2):
        backward(model)
        optimizers.step(step)
    copy.load_state_dict(model.state_dict())
    restored.restore({name: value.clone() for name, value in optimizers.tensors().items()})
    for network, optimizer in runs:
        backward(network)
        optimizer.step(2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, copy.state_dict()[name]), name
    groups = [group for optimizer, _ in optimizers._all for group in optimizer.param_groups]
    for group in groups:
        assert all((parameter.ndim >= 2) == (group["weight_decay"] == 0.1) for parameter in group["params"])
    assert len({id(parameter) for group in groups for parameter in group["params"]}) == len(list(model.parameters()))
    assert optimizers._all[0][0].param_groups[0]["betas"] == (0.9, 0.98)
    assert [len(group["params"]) for group in groups[2:]] == ([4] if muon else [])  # the block's matrices


def test_gradients_are_clipped() -> None:
    settings = tiny_settings("training.clip_norm=0.001")
    model = initial_model(settings)
    backward(model)
    optimizers, norms = Optimizers(model, settings.training), []
    gradients = [parameter for parameter in model.parameters() if parameter.grad is not None]
    optimizers._all[0][0].register_step_pre_hook(
        lambda *_: norms.append(torch.stack([parameter.grad.norm() for parameter in gradients]).norm())  # type: ignore[union-attr]
    )
    optimizers.step(0)
    assert norms[0].item() == pytest.approx(0.001, rel=0.01)


@pytest.mark.parametrize("shape", [(12, 12), (30, 10), (8, 24)])
def test_muon_follows_pytorch_s(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [Muon([ours], lr=0.1, weight_decay=0.2), Reference([theirs], lr=0.1, weight_decay=0.2)]
    for _ in range(4):
        gradient = torch.randn(shape, generator=generator)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (ours - start).norm()
    assert moved > 0.1
    assert (ours - theirs).norm() < 0.02 * moved
    values = torch.linalg.svdvals(orthogonalised(torch.randn(20, 50, generator=generator)))
    assert 0.6 < values.min() <= values.max() < 1.3
