"""Fitted gates as readouts: replay, live running, files, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import random_trajectory

import loopscope as ls
from loopscope.frontier import choose
from loopscope.learned.attach import attach
from loopscope.learned.fitted_gate import FittedGate
from loopscope.models.transformer import Gate
from loopscope.readouts.replay import available_readouts


def linear(width: int = 6, **provenance: object) -> FittedGate:
    rng = np.random.default_rng(1)
    return FittedGate(rng.normal(size=width).astype(np.float32), np.float32(0.3), provenance=provenance)


def mlp(width: int = 6) -> FittedGate:
    rng = np.random.default_rng(2)
    weights = [rng.normal(size=shape).astype(np.float32) for shape in ((width, width), (width,), (width,))]
    return FittedGate(weights[2], np.float32(-0.2), weights[0], weights[1])


@pytest.mark.parametrize("gate", [linear(), mlp()], ids=["linear", "mlp"])
def test_it_says_what_the_network_of_the_same_weights_says(gate: FittedGate) -> None:
    network = Gate(gate.kind, gate.width)  # type: ignore[arg-type]
    state = network.state_dict()
    for part, name in Gate.tensors(gate.kind).items():  # type: ignore[arg-type]
        state[name] = torch.from_numpy(np.asarray(gate.tensors[part])).reshape(state[name].shape)
    network.load_state_dict(state)
    pooled = np.random.default_rng(0).normal(size=(5, 4, 6)).astype(np.float32)
    with torch.no_grad():
        expected = network(torch.from_numpy(pooled)).numpy()
    assert np.allclose(gate.halt_logits(pooled), expected, atol=1e-5)


def test_it_enters_the_sweep_under_its_name() -> None:
    gates = {"a": linear(), "b": mlp()}
    calibration, evaluation = (attach(random_trajectory(seed), gates) for seed in (0, 1))
    assert available_readouts(calibration, evaluation)[-2:] == ["gate:a", "gate:b"]
    assert "gate:a" not in available_readouts(random_trajectory(0), evaluation)
    frontier = ls.sweep("gate:a", calibration, evaluation, grid="paper")
    assert len(frontier.thresholds) == 100
    assert np.ptp(frontier.average_loops) > 0.5
    own = ls.Trajectory(
        logits=evaluation.logits, labels=evaluation.labels, gate_logits=linear().halt_logits(evaluation.hidden)
    )
    assert np.array_equal(ls.signal("gate", own), ls.signal("gate:a", evaluation))
    assert choose("gate:a", calibration).readout == "gate:a"


def test_it_has_files(tmp_path: Path) -> None:
    trajectory = random_trajectory()
    policy = ls.ExitPolicy("gate:mine", 0.6, mlp())
    policy.save(tmp_path / "policy.json")
    again = ls.ExitPolicy.load(tmp_path / "policy.json")
    assert (again.readout, again.threshold) == ("gate:mine", 0.6)
    assert again.exit_loops(trajectory).tolist() == policy.exit_loops(trajectory).tolist()
    ls.ExitPolicy("margin", 2.0).save(tmp_path / "plain.json")
    assert ls.ExitPolicy.load(tmp_path / "plain.json") == ls.ExitPolicy("margin", 2.0)
    mlp().save(tmp_path / "gate")
    alone = FittedGate.load(tmp_path / "gate")
    assert alone.kind == "mlp"
    assert np.array_equal(alone.weight_1, mlp().weight_1)  # type: ignore[arg-type]
    with pytest.raises(ls.UserError, match="record it with --hidden"):
        attach(random_trajectory(hidden=None), {"a": alone})
