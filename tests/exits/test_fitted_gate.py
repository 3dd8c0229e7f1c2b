"""Fitted gates as readouts: replay, live running, files, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import random_trajectory

import loopscope as ls
from loopscope.exits import FittedGate, attach
from loopscope.exits.exit_state import ExitState
from loopscope.exits.sweep import choose
from loopscope.exits.thresholds import available_readouts
from loopscope.models.gates import Gate


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


@pytest.mark.parametrize("gate", [linear(), mlp()], ids=["linear", "mlp"])
def test_live_decisions_are_the_replay(gate: FittedGate) -> None:
    trajectory = random_trajectory(rows=80, loops=5)
    policy = ls.ExitPolicy("gate:mine", 0.7, gate)
    expected = policy.exit_loops(trajectory)
    assert len(set(expected)) > 2
    exit_state = ExitState(policy, 5)
    assert exit_state.sources() == ("hidden",)
    assert trajectory.hidden is not None
    exit_state.admit(80)
    active, exits = np.arange(80), np.zeros(80, dtype=int)
    for loop in range(1, 6):
        stops = exit_state.stops(np.full(len(active), loop), {"hidden": trajectory.hidden[active, loop - 1]})
        exits[active[stops]] = loop
        exit_state.keep(~stops)
        active = active[~stops]
    assert exits.tolist() == expected.tolist()


def test_its_policy_has_a_file(tmp_path: Path) -> None:
    trajectory = random_trajectory()
    policy = ls.ExitPolicy("gate:mine", 0.6, mlp())
    policy.save(tmp_path / "policy.json")
    again = ls.ExitPolicy.load(tmp_path / "policy.json")
    assert (again.readout, again.threshold) == ("gate:mine", 0.6)
    assert again.exit_loops(trajectory).tolist() == policy.exit_loops(trajectory).tolist()
    next(tmp_path.glob("policy.gate-*.safetensors")).write_bytes(b"no")
    with pytest.raises(ls.UserError, match="missing or was altered"):
        ls.ExitPolicy.load(tmp_path / "policy.json")
    ls.ExitPolicy("margin", 2.0).save(tmp_path / "plain.json")
    assert ls.ExitPolicy.load(tmp_path / "plain.json") == ls.ExitPolicy("margin", 2.0)
    (tmp_path / "plain.json").write_text('{"schema_version": 1, "readout": "margin", "treshold": 2}')
    with pytest.raises(ls.UserError, match="unknown key.*treshold"):
        ls.ExitPolicy.load(tmp_path / "plain.json")


def test_its_folder_is_checked(tmp_path: Path) -> None:
    gate = mlp()
    gate.save(tmp_path / "gate")
    again = FittedGate.load(tmp_path / "gate")
    assert again.kind == "mlp"
    assert np.array_equal(again.weight_1, gate.weight_1)  # type: ignore[arg-type]
    data = bytearray((tmp_path / "gate" / "gate.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "gate" / "gate.safetensors").write_bytes(data)
    with pytest.raises(ls.UserError, match="altered"):
        FittedGate.load(tmp_path / "gate")


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ls.UserError, match="record it with --hidden"):
        attach(random_trajectory(hidden=None), {"a": linear()})
    with pytest.raises(ls.UserError, match="states of width 7"):
        attach(random_trajectory(), {"a": linear(7)})
    with pytest.raises(ls.UserError, match="another model"):
        attach(random_trajectory(provenance={"weights_sha256": "b"}), {"a": linear(weights_sha256="a")})
    with pytest.raises(ls.UserError, match="does not have the signal 'gate:a'"):
        ls.ExitPolicy("gate:a", 0.5).exit_loops(random_trajectory())
    with pytest.raises(ls.UserError, match="must carry that gate"):
        ExitState(ls.ExitPolicy("gate:a", 0.5), 4)
    with pytest.raises(ls.UserError, match="takes no fitted gate"):
        ls.ExitPolicy("margin", 0.5, linear())


def test_it_prints_in_a_line() -> None:
    weights = {"weight": np.zeros(64), "bias": np.zeros(())}
    fitted = FittedGate(**weights, provenance={"split": "train"})
    assert repr(fitted) == "FittedGate(linear, width 64, fitted to the train split)"
    assert repr(FittedGate(**weights)) == "FittedGate(linear, width 64)"
