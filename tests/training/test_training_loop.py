"""Killed at any moment, a run ends bit-identical to one that ran through; what is decayed, clipped and restored?"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import GATED, TINY, tiny_settings
from killed_run import kill_after_first_checkpoint
from safetensors.torch import load_file, save_file
from test_run_folder import ALTERED, contents, copied, flip
from torch.optim import Muon as Reference

import loopscope as ls
from loopscope.training import training_loop
from loopscope.training.settings import Training
from loopscope.training.task_run import initial_model, train
from loopscope.training.training_loop import Muon, Optimizers, orthogonalise, schedule, steps_done

LONGER = ["training.steps=60", "training.checkpoint_every=7", "training.log_every=5", "training.validate_every=50"]
RUN = [*TINY, *GATED, *LONGER]


BETWEEN = [*TINY, *LONGER, "model.gate=mlp", 'objective={name="gate_channels", gate_weight=0.7, gate_gradient=0.3}']


@pytest.mark.parametrize("changes", [RUN, BETWEEN], ids=["joint", "between"])
def test_killed_once(changes: list[str], tmp_path: Path) -> None:
    kill_after_first_checkpoint(tmp_path / "cut", changes)
    assert 0 < steps_done(tmp_path / "cut") < 60
    for name in ("cut", "whole"):
        train("demo", tmp_path / name, overrides=changes)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended right after it had saved its state."""
    folder, save = tmp_path_factory.mktemp("interrupted") / "run", training_loop.save_state

    def save_and_end(*given: object) -> None:
        save(*given)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training_loop, "save_state", save_and_end)
        train(tiny_settings(*GATED), folder)
    return folder


@pytest.mark.parametrize(
    ("name", "alter"),
    [
        *ALTERED,
        ("state.safetensors", flip),
        ("state.safetensors", lambda file: flip(file, 60)),
        ("state.safetensors", lambda file: file.write_bytes(b"junk")),
        ("state.safetensors", lambda file: save_file(load_file(file), file, {"step": "4"})),
        ("state.safetensors", lambda file: save_file(load_file(file), file)),
    ],
)
def test_a_run_does_not_resume_from_what_was_altered(
    name: str, alter: Callable[[Path], None], interrupted: Path, tmp_path: Path
) -> None:
    folder = copied(interrupted, tmp_path)
    alter(folder / name)
    with pytest.raises(ls.UserError, match=rf"{name} (was altered|cannot be read)|other settings \(block_size\)"):
        train(tiny_settings(*GATED), folder)


def test_killed_between_hashes_and_weights_it_ends_as_if_nothing_had_been(
    interrupted: Path, gated_run: Path, tmp_path: Path
) -> None:
    folder = copied(interrupted, tmp_path)
    (folder / "hashes.json").write_text('{"files": {"model.safetensors": "of a try that was killed"}, "digest": ""}')
    train(tiny_settings(*GATED), folder)
    written = contents(folder)
    assert written == contents(gated_run)
    assert set(json.loads(written["hashes.json"])["files"]) == {*written} - {"hashes.json"}


def test_killed_before_its_first_step_it_begins_again(gated_run: Path, tmp_path: Path) -> None:
    """Without data and metrics, and without even a whole configuration."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / ".partial-abc").write_text("half a config")
    (tmp_path / "b" / "config.json").write_bytes((gated_run / "config.json").read_bytes())
    for name in ("a", "b"):
        train(tiny_settings(*GATED), tmp_path / name)
        assert contents(tmp_path / name) == contents(gated_run)


def test_the_schedule_warms_up_and_decays_to_its_minimum() -> None:
    settings = Training()
    rates = [settings.learning_rate * schedule(step, settings) for step in (0, 1999, 2000, 21_000, 39_999)]
    assert rates[0] == pytest.approx(5e-4 / 2000)
    assert rates[1] == rates[2] == pytest.approx(5e-4)
    assert rates[3] == pytest.approx((5e-4 + 5e-5) / 2)
    assert rates[4] == pytest.approx(5e-5, rel=1e-3)


@pytest.mark.parametrize("muon", [0.0, 0.01])
def test_optimizers_decay_matrices_only(muon: float) -> None:
    settings = tiny_settings(f"training.muon_learning_rate={muon}")
    model = initial_model(settings)
    optimizers = Optimizers(model, settings.training)
    groups = [group for optimizer, _ in optimizers._all for group in optimizer.param_groups]
    for group in groups:
        assert all((parameter.ndim >= 2) == (group["weight_decay"] == 0.1) for parameter in group["params"])
    assert len({id(parameter) for group in groups for parameter in group["params"]}) == len(list(model.parameters()))
    assert optimizers._all[0][0].param_groups[0]["betas"] == (0.9, 0.98)
    assert [len(group["params"]) for group in groups[2:]] == ([4] if muon else [])  # the block's matrices


def test_gradients_are_clipped() -> None:
    """AdamW's first averages are 0.1 of the gradients that it got."""
    settings = tiny_settings("training.clip_norm=0.001", "training.muon_learning_rate=0")
    model = initial_model(settings)
    optimizers = Optimizers(model, settings.training)
    model.loops(torch.arange(12).view(2, 6) % 8, positions=torch.tensor([5, 3])).logits.square().mean().backward()
    optimizers.step(0)
    averages = [value.norm() for name, value in optimizers.tensors().items() if name.endswith("exp_avg")]
    assert torch.stack(averages).norm().item() == pytest.approx(0.1 * 0.001, rel=0.01)


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
    values = torch.linalg.svdvals(orthogonalise(torch.randn(20, 50, generator=generator)))
    assert 0.6 < values.min() <= values.max() < 1.3
