"""Post-hoc gates: their objectives by hand, fits on trajectories whose best exits are known, and writing back."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GOLDEN

import loopscope as ls
from loopscope.artifacts import sha256
from loopscope.engine.replay_agreement import compare_with_replay
from loopscope.engine.requests import task_requests
from loopscope.engine.scheduler import run
from loopscope.learned.attach import attach
from loopscope.learned.fitted_gate import FittedGate
from loopscope.recording.recording_folder import Keep
from loopscope.recording.task_recording import record_task
from loopscope.training.gate_fitting import GateSettings, fit_gate, gate_loss, gate_settings, write_gate
from loopscope.training.objectives import objective_loss
from loopscope.training.run_folder import read_run_settings
from loopscope.training.settings import Objective

LOSSES = torch.tensor([[1.0, 0.2], [0.5, 0.3], [0.5, 0.1]])  # [T, B]
LOGITS = torch.tensor([[0.3, -1.0], [2.0, 0.0], [5.0, -3.0]])


def test_utility_by_hand_and_ponder_as_the_learned_gate_s_own() -> None:
    continue_target = 1 / (1 + np.exp(-50 * (np.array([[0.5, 0.0], [0.0, 0.2]]) - 0.005)))
    for pairing, rows in (("next", LOGITS[:2]), ("ouro", LOGITS[1:])):
        stop = 1 / (1 + np.exp(-rows.numpy().astype(np.float64)))
        expected = -(continue_target * np.log(1 - stop) + (1 - continue_target) * np.log(stop)).mean()
        settings = GateSettings(objective="utility", pairing=pairing)  # type: ignore[arg-type]
        assert gate_loss(settings, LOSSES, LOGITS).item() == pytest.approx(expected, rel=1e-5)
    settings = GateSettings(prior="geometric", geometric_lambda=0.5, beta=0.7)
    own = Objective(name="learned_gate", prior="geometric", geometric_lambda=0.5, beta=0.7)
    assert gate_loss(settings, LOSSES, LOGITS) == objective_loss(own, LOSSES, LOGITS)


def sample_by_pattern(rows: int = 4000, seed: int = 0) -> ls.Trajectory:
    """Half of the examples are right from loop 1 on, half from loop 3 on, and the states say which."""
    rng = np.random.default_rng(seed)
    late = rng.integers(0, 2, rows).astype(bool)
    right = ~late[:, None] | (np.arange(4) >= 2)
    logits = np.where(right, 4.0, -4.0)[:, :, None] * np.array([1.0, 0.0])
    hidden = rng.normal(size=(rows, 4, 5))
    hidden[:, :, 0] = np.where(right, 1.0, -1.0)
    return ls.Trajectory(logits=logits, labels=np.zeros(rows, int), hidden=hidden, split="train" if seed == 0 else None)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("objective", ["ponder", "utility"])
def test_it_finds_exits_that_the_states_tell(kind: str, objective: str) -> None:
    settings = GateSettings(kind=kind, objective=objective, steps=200)  # type: ignore[arg-type]
    gate = fit_gate(sample_by_pattern(), settings)
    calibration, evaluation = (attach(sample_by_pattern(seed=seed), {"fit": gate}) for seed in (1, 2))
    frontier = ls.sweep("gate:fit", calibration, evaluation)
    if objective == "ponder":
        assert frontier.depth_at(1.0) == pytest.approx(2.0, abs=0.05)  # half exit at 1, half at 3
    else:  # nothing is gained from loop 1 to loop 2 by anybody, so its target is to stop there
        assert frontier.depth_at(0.5) == pytest.approx(1.0, abs=0.05)


def test_it_takes_over_the_hosts_prior_from_python_as_from_the_command_line(gated_run: Path, tmp_path: Path) -> None:
    recording = record_task(gated_run, "train", tmp_path / "train", Keep(hidden=True), 200)
    settings = gate_settings(recording, {"steps": 20})
    assert (settings.prior, settings.geometric_lambda, settings.beta) == ("geometric", 0.3, 0.1)
    assert gate_settings(recording, {"beta": 0.5}).beta == 0.5
    assert gate_settings(sample_by_pattern(), {}).prior == "uniform"
    assert np.array_equal(ls.fit_gate(recording, steps=20).weight, fit_gate(recording, settings).weight)
    gate = ls.fit_gate(recording, kind="mlp", objective="utility", steps=5)
    assert (gate.kind, gate.provenance["gate"]["beta"]) == ("mlp", 0.1)
    assert fit_gate(recording, GateSettings(steps=5), seed=3).provenance["gate"]["seed"] == 3
    with pytest.raises(ls.UserError, match="the gate: .*unknown key `knd`"):
        ls.fit_gate(recording, knd="mlp")
    with pytest.raises(ls.UserError, match="objective: there is no 'final' here"):
        ls.fit_gate(recording, objective="final")


def test_the_engine_runs_it_as_the_replay_does(gated_run: Path, tmp_path: Path) -> None:
    recordings = {
        split: record_task(gated_run, split, tmp_path / split, Keep(hidden=True)) for split in ("train", "test")
    }
    gate = fit_gate(recordings["train"], GateSettings(kind="mlp", steps=50))
    test = attach(recordings["test"], {"fit": gate})
    values = np.sort(ls.signal("gate:fit", test)[:, :-1].ravel())
    middle = values[len(values) // 3 : 2 * len(values) // 3]
    widest = int(np.diff(middle).argmax())
    policy = ls.ExitPolicy("gate:fit", float(middle[widest : widest + 2].mean()), gate)
    requests = list(task_requests(read_run_settings(gated_run).task.split("test")))
    agreement = compare_with_replay(run(ls.load_model(gated_run), requests, policy, 16), policy, recordings["test"])
    assert (agreement.differing, agreement.close) == (0, 0)
    assert 1 < agreement.average_loops < 3


def test_it_becomes_ouros_gate(tmp_path: Path) -> None:
    checkpoint = GOLDEN / "ouro-tiny"
    model = ls.load_model(checkpoint)
    tokens = torch.randint(0, model.vocab_size, (64, 7), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        out = model.loops(tokens, positions=torch.full((64,), 6))
    recording = ls.Trajectory(
        logits=out.logits.transpose(0, 1).numpy(),
        labels=tokens[:, 0].numpy(),
        hidden=out.hidden.transpose(0, 1).numpy(),
        provenance={"weights_sha256": sha256(checkpoint / "model.safetensors")},
    )
    gate = fit_gate(recording, GateSettings(steps=30))
    write_gate(gate, checkpoint, tmp_path / "new")
    with torch.inference_mode():
        again = ls.load_model(tmp_path / "new").loops(tokens, positions=torch.full((64,), 6))
    assert again.gate_logits is not None
    assert np.allclose(again.gate_logits.T.numpy(), gate.halt_logits(recording.hidden), atol=1e-4)  # type: ignore[arg-type]
    assert torch.equal(again.logits, out.logits)
    with pytest.raises(ls.UserError, match="has a linear gate, so a fitted mlp gate"):
        write_gate(fit_gate(recording, GateSettings(kind="mlp", steps=2)), checkpoint, tmp_path / "other")
    with pytest.raises(ls.UserError, match="exists and is not a checkpoint"):
        write_gate(gate, checkpoint, tmp_path / "new")
    with pytest.raises(ls.UserError, match="another model"):
        write_gate(FittedGate(gate.weight, gate.bias, provenance={"weights_sha256": "x"}), checkpoint, tmp_path / "b")
