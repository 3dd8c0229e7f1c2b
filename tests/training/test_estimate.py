"""Is a run refused that fits, or started that does not? Sizes are counted on a CPU, devices are pretended."""

from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest
import torch
from conftest import tiny_settings
from pretended_device import pretended_device

import loopscope as ls
from loopscope.training.estimate import (
    _batch_states,
    check_memory,
    estimate_time,
    step_flops,
    transformer_training_bytes,
)
from loopscope.training.settings import RunSettings, read_settings
from loopscope.training.task_run import AnswerLosses, initial_model

CUDA = torch.device("cuda", 0)
GIB = 1 << 30


def kept_for_gradients(settings: RunSettings, rows: int, bf16: bool) -> int:
    """The bytes of all tensors that a pass keeps for its gradients, its weights left out."""
    model, batch = initial_model(settings), settings.task.batch(0, 0, rows).by_length()
    model.gradient_checkpointing = bool(settings.training.checkpointing)
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, Any] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, so that no other is put in its place
        return tensor

    precision = torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), precision:
        losses = AnswerLosses(model)(batch, torch.device("cpu"))
    assert losses.cross_entropy.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("preset", ["paper", "paper-parity"])
def test_the_memory_of_a_step_is_what_its_pass_keeps(preset: str, bf16: bool) -> None:
    settings = read_settings(preset, ["model.width=128", "model.layers=3", "model.loops=4"])
    states = _batch_states(settings, 64)
    sizes = (settings.model, settings.task.vocab_size, settings.block_size, states, settings.task.positions)
    _, of_loop = transformer_training_bytes(*sizes, bf16=bf16)
    counted = kept_for_gradients(settings, 64, bf16)
    assert counted < 4 * of_loop < 1.3 * counted


def test_what_fits_a_gpu_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(free: int, preset: str, *overrides: str) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GIB, 80 * GIB))
        check_memory(read_settings(preset, overrides), CUDA)

    with pretended_device():
        check(12, "paper-parity")
        check(7, "paper")
        for overrides in (["training.bf16=false"], ["training.batch_size=4096"], ["model.layers=12"]):
            with pytest.raises(ls.UserError, match="needs about .* GiB, this CUDA has 12 GiB"):
                check(12, "paper-parity", *overrides)
            check(12, "paper-parity", *overrides, "training.accumulate=4")
            check(12, "paper-parity", *overrides, "training.checkpointing=true")
        monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 4096}.__getitem__)
        check(12, "paper-parity")
        with pytest.raises(ls.UserError, match="this CPU has 4 GiB"):  # where the data lie, and not on the GPU
            check(12, "paper", "task.train_examples=100000000")


def test_a_gpu_is_timed_by_real_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, ticks = tiny_settings("training.bf16=false"), count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    with pretended_device():
        expected = estimate_time(settings, CUDA, done=2)
        drawn = tiny_settings("training.bf16=false", "objective.name=random_depth", "objective.prior=uniform")
        of_drawn = estimate_time(drawn, CUDA, done=2)
    assert expected.seconds == pytest.approx(10 / 5)  # a second by this clock, for five steps
    assert "cuda:0 trains it at" in expected.speed
    assert of_drawn.seconds == pytest.approx(expected.seconds * 2 / 3)  # of 1 to 3 loops
    assert step_flops(drawn) == pytest.approx(step_flops(settings) * 2 / 3)
