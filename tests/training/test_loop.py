"""Training: does it learn, does everything follow from settings and seed, is nobody's folder overwritten?"""

import json
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GATED, tiny_settings
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

import loopscope as ls
from loopscope.training import Training, check_memory, describe_data, estimate_time, initial_model, read_settings, train
from loopscope.training.estimate import matmul_rate
from loopscope.training.optimizers import Optimizers, schedule
from loopscope.training.task_run import training_batches
from loopscope.writing import only_writer

CPU = torch.device("cpu")


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_learns(tmp_path: Path) -> None:
    settings = tiny_settings("task.max_operations=1", "training.steps=150", "training.batch_size=64", "model.width=32")
    accuracy = train(settings, tmp_path / "run", CPU).final["validation_accuracy"]
    assert len(accuracy) == 3
    assert min(accuracy) > 0.85


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tiny_settings(f"training.seed={seed}"), tmp_path / name, CPU)
    for file in ("model.safetensors", "metrics.jsonl", "config.json", "data.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert (tmp_path / "a" / "model.safetensors").read_bytes() != (tmp_path / "c" / "model.safetensors").read_bytes()


def test_a_run_folder_is_a_checkpoint(gated_run: Path) -> None:
    model = ls.load_model(gated_run)
    assert sorted(path.name for path in gated_run.iterdir() if path.is_file()) == [
        "config.json",
        "data.json",
        "hashes.json",
        "metrics.jsonl",
        "model.safetensors",
    ]
    out = model.loops(torch.zeros(2, 5, dtype=torch.long))
    assert out.logits.shape == (3, 2, 5, 8)
    assert out.hidden.shape == (3, 2, 5, 16)
    assert out.gate_logits.shape == (3, 2, 5)


def test_metrics_say_what_happened_at_every_loop(gated_run: Path) -> None:
    entries = lines(gated_run)
    assert [entry["step"] for entry in entries] == [3, 6, 6, 9, 12, 12]
    assert set(entries[0]) == {"step", "loss", "loop_loss", "loop_accuracy", "learning_rate", "gradient_norm"}
    assert set(entries[-1]) == {"step", "validation_loss", "validation_accuracy"}
    assert all(len(entry["loop_loss"]) == 3 for entry in entries if "loop_loss" in entry)


def test_a_finished_run_is_left_alone(gated_run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in gated_run.iterdir()}
    result = train(tiny_settings(*GATED), gated_run, CPU)
    assert result.resumed_from == 12
    assert {path: path.stat().st_mtime_ns for path in gated_run.iterdir()} == before


def test_another_run_s_folder_is_refused(gated_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ls.UserError, match=r"training\.seed"):
        train(tiny_settings(*GATED, "training.seed=5"), gated_run, CPU)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ls.UserError, match="not a run"):
        train(tiny_settings(), tmp_path, CPU)


def test_an_unfinished_run_is_no_model(tmp_path: Path, gated_run: Path) -> None:
    (tmp_path / "config.json").write_bytes((gated_run / "config.json").read_bytes())
    with pytest.raises(ls.UserError, match="not finished"):
        ls.load_model(tmp_path)


@pytest.mark.parametrize("overrides", [(), GATED, (*GATED, "model.gate=mlp"), ("objective.name=final",)])
def test_every_objective_trains(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    result = train(tiny_settings(*overrides), tmp_path / "run", CPU)
    assert all(np.isfinite(entry["loss"]) for entry in result.metrics if "loss" in entry)


def test_parity_trains_online(tmp_path: Path) -> None:
    settings = read_settings("demo", [*PARITY, "training.steps=3", "training.batch_size=8", "model.width=16"])
    train(settings, tmp_path / "run", CPU)
    data = json.loads((tmp_path / "run" / "data.json").read_text())
    assert data == {"examples": {"train": "online", "validation": 50, "test": 60}}


PARITY = ['task={name="parity", max_bits=6, validation_examples=50, test_examples=60}', "training.validation_sample=50"]


def test_the_overlap_of_the_splits_is_written_down() -> None:
    shares = describe_data(tiny_settings("task.modulus=4"))["share_seen_in_training"]
    assert shares["validation"]["1"] == 1.0
    assert shares["test"]["2"] == 0.0  # the preset is disjoint where the space is large enough
    assert describe_data(tiny_settings())["share_seen_in_training"]["test"]["2"] > 0  # 486 expressions modulo 3


def test_epochs_visit_every_example_once() -> None:
    batch = training_batches(tiny_settings("task.train_examples=50", "training.batch_size=25"))
    tokens = np.concatenate([_padded(batch(step).tokens) for step in range(4)])  # two epochs of 50
    epochs = [{row.tobytes(): 0 for row in half} for half in (tokens[:50], tokens[50:])]
    assert sorted(map(bytes, tokens[:50])) == sorted(map(bytes, tokens[50:]))
    assert [row.tobytes() for row in tokens[:50]] != [row.tobytes() for row in tokens[50:]]
    assert len(epochs[0]) == len(epochs[1])


def _padded(tokens: np.ndarray) -> np.ndarray:
    return np.pad(tokens, ((0, 0), (0, 7 - tokens.shape[1])))


def test_a_batch_may_be_larger_than_the_data() -> None:
    batch = training_batches(tiny_settings("task.train_examples=10", "training.batch_size=25"))
    assert len(batch(0)) == 25


def test_the_schedule_warms_up_and_decays_to_its_minimum() -> None:
    settings = Training()
    rates = [settings.learning_rate * schedule(step, settings) for step in (0, 1999, 2000, 21_000, 39_999)]
    assert rates[0] == pytest.approx(5e-4 / 2000)
    assert rates[1] == rates[2] == pytest.approx(5e-4)
    assert rates[3] == pytest.approx((5e-4 + 5e-5) / 2)
    assert rates[4] == pytest.approx(5e-5, rel=1e-3)


@pytest.mark.parametrize("muon", [0.0, 0.01])
def test_optimizers_decay_matrices_only_and_restore_their_state(muon: float) -> None:
    settings = tiny_settings(f"training.muon_learning_rate={muon}")
    runs = []
    for _ in range(2):
        model = initial_model(settings)
        runs.append((model, Optimizers(model, settings.training)))
    (model, optimizers), (copy, restored) = runs
    for step in range(2):
        _backward(model)
        optimizers.step(step)
    copy.load_state_dict(model.state_dict())
    restored.restore({name: value.clone() for name, value in optimizers.tensors().items()})
    for network, optimizer in runs:
        _backward(network)
        optimizer.step(2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, copy.state_dict()[name]), name
    groups = [group for optimizer, _ in optimizers._all for group in optimizer.param_groups]
    for group in groups:
        assert all((parameter.ndim >= 2) == (group["weight_decay"] == 0.1) for parameter in group["params"])
    assert len({id(parameter) for group in groups for parameter in group["params"]}) == len(list(model.parameters()))
    assert len(optimizers._all) == 1 + (muon > 0)
    assert optimizers._all[0][0].param_groups[0]["betas"] == (0.9, 0.98)
    if muon:
        assert sum(len(group["params"]) for group in optimizers._all[1][0].param_groups) == 4  # the block's matrices


def _backward(model: torch.nn.Module) -> None:
    tokens = torch.arange(12).view(2, 6) % 8
    model.loops(tokens, positions=torch.tensor([5, 3])).logits.square().mean().backward()


def test_the_paper_preset_takes_two_steps(tmp_path: Path) -> None:
    overrides = ["training.steps=2", "training.batch_size=4", "training.validation_sample=8"]
    settings = read_settings("paper", [*overrides, "task.train_examples=100", "task.test_examples=20"])
    result = train(settings, tmp_path / "run", CPU)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert sum(value.numel() for value in weights.values()) == 12_624_896
    assert result.metrics[0]["learning_rate"] == pytest.approx(5e-4 * 2 / 2000)


def test_a_run_too_big_for_the_machine_says_so() -> None:
    endless = read_settings("paper", ["training.steps=40000000"])
    with pytest.raises(ls.UserError, match=r"would take about .* days here"):
        estimate_time(endless, CPU).check()
    estimate_time(endless, CPU, done=40_000_000 - 1).check()
    for override in ("training.batch_size=10000000", "model.width=1000000", "task.train_examples=100000000"):
        with pytest.raises(ls.UserError, match="GiB"):
            check_memory(read_settings("paper", [override, "model.layers=40"]), CPU)
    check_memory(tiny_settings(), CPU)
    estimate_time(tiny_settings(), CPU).check()


def test_where_a_product_takes_long_the_rate_is_that_of_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that has no float16 of its own, for instance; here the clock is fast."""

    def computed(dtype: torch.dtype) -> int:
        with FlopCounterMode(display=False) as counter:
            matmul_rate(64, CPU, dtype)
        return counter.get_total_flops()

    large = 2 * 1024 * 64 * 256
    assert computed(torch.float32) >= 6 * large
    seconds = count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(seconds)))
    assert computed(torch.float32) >= 6 * large  # slow on a busy machine only
    assert computed(torch.float16) < large


def test_a_run_killed_before_its_settings_were_written_begins_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".partial-abc").write_text("half a config")
    train(tiny_settings(), folder, CPU)
    assert not (folder / ".partial-abc").exists()


def test_a_run_killed_before_its_data_were_described_goes_on(tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        train(tiny_settings(), tmp_path / name, CPU)
    for file in ("data.json", "metrics.jsonl", "model.safetensors"):
        (tmp_path / "cut" / file).unlink()
    train(tiny_settings(), tmp_path / "cut", CPU)
    assert {path.name: path.read_bytes() for path in (tmp_path / "cut").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()
    }


def test_broken_files_of_a_run_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(tiny_settings(), folder, CPU)
    metrics = (folder / "metrics.jsonl").read_bytes()
    (folder / "hashes.json").unlink()  # as in a run of an earlier version
    for content, words in ((b"junk\n", "was altered"), (b"", "lost its last lines")):
        (folder / "metrics.jsonl").write_bytes(content)
        with pytest.raises(ls.UserError, match=words):
            _ = train(tiny_settings(), folder, CPU).final
    (folder / "metrics.jsonl").write_bytes(metrics)
    (folder / "model.safetensors").unlink()
    (folder / "state.safetensors").write_bytes(b"junk")
    with pytest.raises(ls.UserError, match="state.safetensors cannot be read"):
        train(tiny_settings(), folder, CPU)


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    train(tiny_settings(), tmp_path / "run", CPU)
    (tmp_path / "run" / "model.safetensors").unlink()
    with only_writer(tmp_path / "run"), pytest.raises(ls.UserError, match="Another process"):
        train(tiny_settings(), tmp_path / "run", CPU)


def test_the_run_s_seed_orders_the_batches() -> None:
    first, other = (training_batches(tiny_settings(f"training.seed={seed}"))(0) for seed in (0, 1))
    assert first.labels.tolist() != other.labels.tolist()


def test_gradients_are_clipped() -> None:
    settings = tiny_settings("training.clip_norm=0.001")
    model = initial_model(settings)
    _backward(model)
    norm = Optimizers(model, settings.training)
    optimizer = norm._all[0][0]
    seen_norms = []
    optimizer.register_step_pre_hook(
        lambda *_: seen_norms.append(
            torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        )
    )
    norm.step(0)
    assert seen_norms[0].item() == pytest.approx(0.001, rel=0.01)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    settings = tiny_settings("training.learning_rate=1e18", "training.warmup_steps=0", "training.clip_norm=1e18")
    with pytest.raises(ls.UserError, match="no longer finite"):
        train(settings, tmp_path / "run", CPU)
