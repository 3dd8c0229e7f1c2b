"""Training on a task: does it learn, does everything follow from settings and seed, is nobody's folder overwritten?"""

import json
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GATED, tiny_settings
from safetensors.torch import load_file
from test_run_folder import contents, interrupt
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import loopscope as ls
from loopscope.analysis.results import model_label
from loopscope.config import plain
from loopscope.training.estimate import check_memory, estimate_time, matmul_rate
from loopscope.training.gate_fitting import host_defaults
from loopscope.training.objectives import LoopLosses, draw_unrolling, objective_loss
from loopscope.training.settings import Objective, read_settings
from loopscope.training.task_run import TaskRun, initial_model, train, training_batches

BETWEEN = ["objective.name=gate_channels", "objective.gate_weight=0.5", "objective.gate_gradient=0.25"]
DECOUPLED = ["objective.name=decoupled_gate", "model.gate=mlp"]
RANDOM = ["objective.name=random_depth", "objective.truncated=1"]
CPU = torch.device("cpu")
CLIPPED = ["training.clip_norm=0.05"]  # every step's gradients are larger


def test_it_learns(tmp_path: Path) -> None:
    settings = tiny_settings("task.max_operations=1", "training.steps=100", "training.batch_size=64", "model.width=32")
    accuracy = train(settings, tmp_path / "run").final["validation_accuracy"]
    assert len(accuracy) == 3
    assert min(accuracy) > 0.85


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(gated_run: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("c", 1)):
        train(tiny_settings(*GATED, f"training.seed={seed}"), tmp_path / name)
    for file in ("model.safetensors", "metrics.jsonl", "config.json", "data.json", "hashes.json"):
        assert (tmp_path / "a" / file).read_bytes() == (gated_run / file).read_bytes()
    assert (tmp_path / "a" / "model.safetensors").read_bytes() != (tmp_path / "c" / "model.safetensors").read_bytes()


def test_a_run_folder_is_a_checkpoint_with_metrics_of_every_loop(gated_run: Path) -> None:
    names = {path.name for path in gated_run.iterdir() if path.is_file()}
    assert names == {"config.json", "data.json", "hashes.json", "metrics.jsonl", "model.safetensors"}
    out = ls.load_model(gated_run).loops(torch.zeros(2, 5, dtype=torch.long))
    assert (out.logits.shape, out.hidden.shape) == ((3, 2, 5, 8), (3, 2, 5, 16))
    assert out.gate_logits.shape == (3, 2, 5)
    entries = [json.loads(line) for line in (gated_run / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [3, 6, 6, 9, 12, 12]
    assert list(entries[0]) == ["step", "loss", "loop_loss", "loop_accuracy", "learning_rate", "gradient_norm"]
    assert set(entries[-1]) == {"step", "validation_loss", "validation_accuracy"}
    assert all(len(entry["loop_loss"]) == 3 for entry in entries if "loop_loss" in entry)


def test_a_finished_run_is_left_alone(gated_run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in gated_run.iterdir()}
    assert train(tiny_settings(*GATED), gated_run).resumed_from == 12
    assert {path: path.stat().st_mtime_ns for path in gated_run.iterdir()} == before


def test_sizes_and_overlap_of_the_splits_are_written_down(tmp_path: Path) -> None:
    task = 'task={name="parity", max_bits=6, validation_examples=50, test_examples=60}'
    sizes = ["training.validation_sample=50", "training.steps=3", "training.batch_size=8", "model.width=16"]
    train(read_settings("demo", [task, *sizes]), tmp_path / "run")
    data = json.loads((tmp_path / "run" / "data.json").read_text())
    assert data == {"examples": {"train": "online", "validation": 50, "test": 60}}
    for modulus, is_large in ((4, True), (3, False)):  # 486 expressions modulo 3
        prepared = TaskRun(tiny_settings(f"task.modulus={modulus}"), tmp_path).prepare()
        shares = prepared["share_seen_in_training"]
        assert shares["validation"]["1"] == 1.0
        assert (shares["test"]["2"] == 0.0) is is_large  # the preset is disjoint where the space is large enough


def test_epochs_visit_every_example_once_in_an_order_of_the_seed() -> None:
    few = ("task.train_examples=50", "training.batch_size=25")
    batch = training_batches(tiny_settings(*few))
    tokens = [np.pad(row, (0, 7 - len(row))).tobytes() for step in range(4) for row in batch(step).tokens]
    assert sorted(tokens[:50]) == sorted(tokens[50:])
    assert tokens[:50] != tokens[50:]
    assert batch(0).labels.tolist() != training_batches(tiny_settings(*few, "training.seed=1"))(0).labels.tolist()
    assert len(training_batches(tiny_settings("task.train_examples=10", "training.batch_size=25"))(0)) == 25


def test_the_paper_s_model_has_its_size() -> None:
    with torch.device("meta"):
        assert sum(value.numel() for value in initial_model(read_settings("paper")).parameters()) == 12_624_896


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    diverging = ["training.learning_rate=1e18", "training.clip_norm=1e18"]
    for number, warmup in enumerate((0, 100)):  # the loss, and before it the weights
        with pytest.raises(ls.UserError, match="no longer finite"):
            train(tiny_settings(*diverging, f"training.warmup_steps={warmup}"), tmp_path / str(number))
        assert not (tmp_path / str(number) / "model.safetensors").exists()


@pytest.mark.parametrize(
    "changes",
    [["objective.name=final"], RANDOM, DECOUPLED, [*BETWEEN, "model.gate=mlp"], ["objective=act", "model.gate=mlp"]],
    ids=["final", "random", "decoupled", "between", "act"],
)
def test_an_objective_validates_every_loop_and_interrupted_ends_bit_identical(
    changes: list[str], tmp_path: Path
) -> None:
    settings = tiny_settings(*changes)
    result = train(settings, tmp_path / "whole")
    assert len(result.final["validation_accuracy"]) == 3
    for entry in result.metrics:
        drawn = draw_unrolling(settings.objective, 3, 0, entry["step"] - 1)
        if "loss" in entry and drawn is not None:
            assert list(entry)[:3] == ["step", "loops", "loss"]
            assert (entry["loops"], entry["loop_loss"]) == (drawn.loops, [entry["loss"]])
    interrupt(TaskRun(settings, tmp_path / "cut"), 9)  # the state of step 8 is saved
    assert train(settings, tmp_path / "cut").resumed_from == 8
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def trunk(folder: Path) -> dict[str, Tensor]:
    weights = load_file(folder / "model.safetensors")
    return {name: value for name, value in weights.items() if not name.startswith("gate.")}


def assert_same_trunk(one: Path, other: Path) -> None:
    ours, theirs = trunk(one), trunk(other)
    assert set(ours) == set(theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize(("gate", "muon"), [("linear", 0.01), ("mlp", 0.0)])
def test_a_decoupled_run_s_trunk_is_the_fixed_prior_s_to_the_bit(gate: str, muon: float, tmp_path: Path) -> None:
    changes = [*CLIPPED, f"training.muon_learning_rate={muon}"]
    fixed = train(tiny_settings(*changes), tmp_path / "fixed")
    settings = tiny_settings(*changes, *DECOUPLED, f"model.gate={gate}")
    found = train(settings, tmp_path / "decoupled")
    assert_same_trunk(found.folder, fixed.folder)
    assert fixed.final["validation_loss"] == found.final["validation_loss"]
    norms = [[entry["gradient_norm"] for entry in run.metrics if "loss" in entry] for run in (fixed, found)]
    assert norms[0] == norms[1]
    assert min(norms[0]) > 0.05
    begun, after = initial_model(settings).state_dict(), load_file(found.folder / "model.safetensors")
    moved = [name for name in after if name.startswith("gate.") and not torch.equal(after[name], begun[name])]
    assert len(moved) == {"linear": 2, "mlp": 4}[gate]


def test_the_corners_train_to_the_bytes_of_their_names_and_all_others_start_as_the_fixed_prior(tmp_path: Path) -> None:
    def trained(name: str, *changes: str) -> Path:
        return train(tiny_settings(*CLIPPED, "model.gate=mlp", *changes), tmp_path / name).folder

    for name, share in (("learned_gate", 1), ("decoupled_gate", 0)):
        shares = [f"objective.gate_weight={share}", f"objective.gate_gradient={share}"]
        corner = trained(f"{name}-corner", BETWEEN[0], *shares)
        assert contents(corner) == contents(trained(name, f"objective.name={name}"))
    between, fixed = (initial_model(tiny_settings(*changes)) for changes in ([*BETWEEN, "model.gate=mlp"], []))
    started = between.state_dict()
    assert all(torch.equal(value, started[name]) for name, value in fixed.state_dict().items())


def with_decoupled_gate(loops: LoopLosses, beta: float = 0.1) -> Tensor:
    """The built-in one, as a function of the user's."""
    fixed, gate = Objective(name="fixed_prior"), Objective(name="learned_gate", beta=beta)
    learned = objective_loss(gate, loops.cross_entropy.detach(), loops.detached_gate_logits)
    return objective_loss(fixed, loops.cross_entropy, None) + learned


def test_a_function_of_the_user_s_can_decouple_its_gate(tmp_path: Path) -> None:
    """Its run begins as every run with a gate does; without a gradient from the gate, the rest goes another's way."""
    settings, ways = tiny_settings(*CLIPPED, "model.gate=linear", "objective=m:f"), (tmp_path / "a", tmp_path / "b")
    for folder, beta in zip(ways, (0.0, 0.7), strict=True):
        train(settings, folder, objective=with_decoupled_gate, options={"beta": beta})
    assert_same_trunk(*ways)
    gates = [load_file(folder / "model.safetensors")["gate.net.weight"] for folder in ways]
    assert not torch.equal(*gates)


def test_an_objective_has_a_label_and_a_fitted_gate_takes_over_its_beta() -> None:
    decoupled, drawn = tiny_settings(*DECOUPLED, "objective.beta=0.2"), tiny_settings(*RANDOM)
    assert model_label({"run": plain(decoupled)}, "x") == "decoupled MLP gate, geometric 0.3, β 0.2"
    assert model_label({"run": plain(drawn)}, "x") == "random depth, geometric 0.3, truncated 1"
    assert host_defaults(decoupled.objective)["beta"] == 0.2
    between = tiny_settings(*BETWEEN, "model.gate=linear")
    label = "linear gate (weight 0.5, gradient 0.25), geometric 0.3, β 0.1"
    assert model_label({"run": plain(between)}, "x") == label
    assert host_defaults(between.objective)["beta"] == 0.1


def test_a_run_too_big_for_the_machine_says_so() -> None:
    endless = read_settings("paper", ["training.steps=40000000"])
    with pytest.raises(ls.UserError, match=r"would take about .* days here"):
        estimate_time(endless, CPU).check()
    estimate_time(endless, CPU, done=40_000_000 - 1).check()
    for override in ("training.batch_size=10000000", "model.width=1000000", "task.train_examples=100000000"):
        with pytest.raises(ls.UserError, match="GiB"):
            check_memory(read_settings("paper", [override, "model.layers=40"]), CPU)
    check_memory(tiny_settings(), CPU)


def test_where_a_product_takes_long_the_rate_is_that_of_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that has no float16 of its own, for instance; here the clock is fast."""

    def computed(dtype: torch.dtype) -> int:
        with FlopCounterMode(display=False) as counter:
            matmul_rate(64, CPU, dtype)
        return counter.get_total_flops()

    large = 2 * 1024 * 64 * 256
    seconds = count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(seconds)))
    assert computed(torch.float32) >= 6 * large  # slow on a busy machine only
    assert computed(torch.float16) < large
