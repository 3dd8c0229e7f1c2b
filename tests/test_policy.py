"""Readouts: does a policy exit where its rule says?"""

from pathlib import Path

import numpy as np
import pytest
from conftest import random_trajectory

import loopscope as ls
from loopscope.readouts.signals import CONVERGENCE


def with_signal(name: str, values: list[list[float]]) -> ls.Trajectory:
    answers = np.zeros(np.shape(values), int)
    return ls.Trajectory(labels=answers[:, 0], predictions=answers, signals={name: np.array(values)})


RISING = [[0.1, 0.5, 0.9], [0.6, 0.2, 0.1], [0.1, 0.2, 0.3], [0.1, 0.7, 0.2]]


@pytest.mark.parametrize("name", ["top1", "margin", "gate", "entropy", *CONVERGENCE])
def test_exits_at_the_first_loop_at_or_beyond_the_threshold(name: str) -> None:
    """A convergence signal never decides at loop 1, also if it was recorded there, however lax the threshold."""
    above = ls.READOUTS[name].exits == "above"
    trajectory = with_signal(name, RISING if above else (1 - np.array(RISING)).tolist())
    expected = [2, 3, 3, 2] if name in CONVERGENCE else [2, 1, 3, 2]
    assert ls.ExitPolicy(readout=name, threshold=0.5).exit_loops(trajectory).tolist() == expected
    laxest = ls.ExitPolicy(name, -np.inf if above else np.inf).exit_loops(random_trajectory())
    assert set(laxest) == ({2} if name in CONVERGENCE else {1})


def test_fixed_depth_and_the_oracle() -> None:
    trajectory = ls.Trajectory(labels=np.zeros(3, int), predictions=np.array([[1, 0, 1], [1, 1, 1], [0, 1, 1]]))
    assert ls.ExitPolicy("fixed", 2).exit_loops(trajectory).tolist() == [2, 2, 2]
    assert ls.ExitPolicy("oracle").exit_loops(trajectory).tolist() == [2, 3, 1]


def test_a_gate_threshold_of_1_means_the_last_loop() -> None:
    """Even where float64 cannot tell the CDF from 1."""
    trajectory = random_trajectory(gate_logits=np.full((200, 4), 60.0))
    assert (ls.ExitPolicy("gate", 1.0).exit_loops(trajectory) == 4).all()
    assert (ls.ExitPolicy("gate", 0.99).exit_loops(trajectory) == 1).all()
    recorded = with_signal("gate", [[1.0, 1.0, 0.5]])
    assert ls.ExitPolicy("gate", 1.0).exit_loops(recorded).tolist() == [3]


@pytest.mark.parametrize(
    ("readout", "threshold", "words"),
    [
        ("mood", 1.0, "no readout 'mood'"),
        ("margin", None, "needs a threshold"),
        ("fixed", 0, "whole number"),
        ("oracle", 1.0, "takes no threshold"),
    ],
)
def test_impossible_policies_are_refused(readout: str, threshold: float | None, words: str) -> None:
    with pytest.raises(ls.UserError, match=words):
        ls.ExitPolicy(readout, threshold)


def test_a_file_of_another_schema_says_so(tmp_path: Path) -> None:
    ls.ExitPolicy("margin", 0.5).save(tmp_path / "policy.json")
    text = (tmp_path / "policy.json").read_text()
    (tmp_path / "policy.json").write_text(text.replace('"schema_version": 8', '"schema_version": 7'))
    with pytest.raises(ls.UserError, match="has the policy schema 7, this LoopScope reads 8; calibrate again"):
        ls.ExitPolicy.load(tmp_path / "policy.json")
