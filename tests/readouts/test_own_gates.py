"""A model that was trained with ACT exits by its own rule: everywhere its gate is `halting`, and never `gate`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_settings

import loopscope as ls
from loopscope.analysis.difficulty import exit_distribution
from loopscope.analysis.model_analysis import analyse_models, read_recordings
from loopscope.analysis.schema import Results
from loopscope.bench.exit_timing import trained_model
from loopscope.readouts.readout import find_readout
from loopscope.readouts.replay import available_readouts
from loopscope.readouts.signals import HALTED
from loopscope.recording.task_recording import record_task
from loopscope.report.products import OVERVIEW
from loopscope.training.objectives import act_weights
from loopscope.training.task_run import train

ACT = ["objective.name=act", "objective.beta=0.05", "model.gate=linear"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with ACT, recorded."""
    folder = tmp_path_factory.mktemp("act") / "act"
    train(tiny_settings(*ACT), folder)
    for split in ("validation", "test"):
        record_task(folder, split, folder / "recordings" / split)
    return folder


@pytest.fixture(scope="module")
def recording(run: Path) -> ls.Trajectory:
    return ls.Trajectory.load(run / "recordings" / "test")


@pytest.fixture(scope="module")
def results(run: Path) -> Results:
    return analyse_models([read_recordings(run)], None, [0.3])[0]


def test_at_its_own_threshold_it_exits_where_act_halts(recording: ls.Trajectory) -> None:
    assert recording.gate_logits is not None
    weights, cost = act_weights(torch.from_numpy(recording.gate_logits.T.astype(np.float32)) + 1)
    moved = ls.Trajectory(
        predictions=recording.predicted, gate_logits=recording.gate_logits + 1, provenance=recording.provenance
    )
    halted = (weights > 0).sum(0).numpy()
    assert np.array_equal(ls.ExitPolicy("halting", HALTED).exit_loops(moved), halted)
    assert len(set(halted)) > 1
    assert np.array_equal(np.ceil(cost.numpy()) - 1, halted)


def test_its_exits_are_the_weights_of_its_losses(recording: ls.Trajectory) -> None:
    assert recording.gate_logits is not None
    weights, _ = act_weights(torch.from_numpy(recording.gate_logits.T.astype(np.float32)))
    found = exit_distribution(recording)
    whole = np.average(np.array(found.values, dtype=float), axis=0, weights=found.counts)
    assert whole == pytest.approx(weights.mean(1).numpy(), abs=1e-5)


def test_its_gate_is_halting_in_every_analysis(recording: ls.Trajectory, results: Results, run: Path) -> None:
    names = available_readouts(recording)
    assert "halting" in names
    assert "gate" not in names
    with pytest.raises(ls.UserError, match="use 'halting'"):
        ls.ExitPolicy("gate", 0.5).exit_loops(recording)
    (model,) = results.models
    assert model.label == "linear gate by ACT, ponder cost 0.05"
    assert model.diagnosis.readout_gap is None or model.diagnosis.readout_gap.first == "halting"
    assert {each.first for each in model.paired} == {"halting"}
    (headline,) = OVERVIEW.make(results, ["headline"])
    assert headline.table is not None
    assert headline.table.rows[0][3] != "no gate"
    assert [policy.readout for policy in trained_model(run, None).policies] == ["halting"]
    others = ls.Trajectory(predictions=recording.predicted, gate_logits=recording.gate_logits)
    assert "gate" in available_readouts(others)
    assert "halting" not in available_readouts(others)


def test_the_sum_stays_below_one_until_the_last_loop() -> None:
    halting = find_readout("halting")
    assert halting is not None
    half, state = halting.advance(np.zeros(2), None)
    after, _ = halting.advance(np.array([-50.0, 50.0]), state)
    assert half.tolist() == [0.5, 0.5]
    assert after[0] == pytest.approx(0.5)
    assert HALTED < after[1] < 1
